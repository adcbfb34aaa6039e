"""Heartbeats and the probes of the containers' health checks."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.common import health, run_dir
from services.common.health import Pulse, read_heartbeats
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "test")


def _until(condition: Any, limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_service_that_begins_says_so_and_one_that_ends_says_so_too(run: RunDir) -> None:
    with Pulse("trainer", run):
        assert read_heartbeats(run)["trainer"].phase == "starting"
    beat = read_heartbeats(run)["trainer"]
    assert (beat.service, beat.phase, beat.step, beat.pid) == ("trainer", "done", 0, os.getpid())


def test_a_service_that_ends_with_an_error_says_failed(run: RunDir) -> None:
    with pytest.raises(OSError, match="boom"), Pulse("trainer", run):
        raise OSError("boom")
    assert read_heartbeats(run)["trainer"].phase == "failed"


def test_a_living_service_renews_its_heartbeat_without_getting_further(run: RunDir) -> None:
    with Pulse("env", run, interval_s=0.01) as pulse:
        pulse.set("serving", step=3, inflight=2)
        first = read_heartbeats(run)["env"]
        _until(lambda: read_heartbeats(run)["env"].time_s > first.time_s)
        later = read_heartbeats(run)["env"]
    assert (later.phase, later.step, later.detail) == ("serving", 3, {"inflight": 2})
    assert later.phase_since_s == first.phase_since_s


def test_a_new_phase_or_step_is_progress_and_a_new_detail_is_not(run: RunDir) -> None:
    with Pulse("trainer", run, interval_s=60) as pulse:
        since = []
        for change in ({"phase": "rollout"}, {"step": 1}, {"detail_only": 5}, {"phase": "rollout", "step": 1}):
            time.sleep(0.002)
            pulse.set(**change)
            since.append(read_heartbeats(run)["trainer"].phase_since_s)
    assert since[0] < since[1] == since[2] == since[3]


def test_details_are_kept_until_they_are_replaced(run: RunDir) -> None:
    with Pulse("env", run, interval_s=60) as pulse:
        pulse.set(inflight=1, done=0)
        pulse.set(inflight=2)
        assert read_heartbeats(run)["env"].detail == {"inflight": 2, "done": 0}


def test_an_unknown_phase_is_refused_with_the_known_ones(run: RunDir) -> None:
    with Pulse("env", run) as pulse, pytest.raises(ValueError, match="'resting' is unknown; allowed: starting, "):
        pulse.set("resting")


def test_many_threads_may_report_at_once(run: RunDir) -> None:
    with Pulse("evaluator", run, interval_s=0.001) as pulse:
        threads = [
            threading.Thread(target=lambda n=n: [pulse.set(**{f"t{n}": i}) for i in range(50)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_heartbeats(run)["evaluator"].detail == {f"t{n}": 49 for n in range(4)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_that_could_not_be_written_once_is_renewed_later(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = run_dir.write_json, []

    def full_for_a_moment(path: Path, value: Any) -> None:
        if threading.current_thread().name == "heartbeat" and len(failures) < 3:
            failures.append(path)
            raise OSError(28, "No space left on device")
        real(path, value)

    with Pulse("trainer", run, interval_s=0.01):
        first = read_heartbeats(run)["trainer"]
        monkeypatch.setattr(health.run_dir, "write_json", full_for_a_moment)
        _until(lambda: len(failures) == 3)
        _until(lambda: read_heartbeats(run)["trainer"].time_s > first.time_s)


def test_a_heartbeat_that_cannot_be_written_does_not_end_its_service(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_path: Path, _value: Any) -> None:
        raise OSError(28, "No space left on device")

    with Pulse("env", run) as pulse, monkeypatch.context() as on_a_full_disk:
        on_a_full_disk.setattr(health.run_dir, "write_json", full)
        pulse.set("serving", rollouts=1)
    assert "heartbeat could not be written" in caplog.text
    assert read_heartbeats(run)["env"].detail == {"rollouts": 1}


def test_files_being_written_are_no_heartbeats(run: RunDir) -> None:
    assert read_heartbeats(run) == {}
    with Pulse("env", run):
        (run.heartbeats / ".env.half").write_text("{")
        assert set(read_heartbeats(run)) == {"env"}


def _probe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.common.health", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_heartbeat_probe_works_with_what_compose_gives_a_container(run: RunDir) -> None:
    """compose.yaml sets RUNS_DIR, RECIPE and RUN_NAME, and no more."""
    given = {"RUNS_DIR": str(run.path.parent), "RUN_NAME": "test", "RECIPE": str(ROOT / "data/recipes/smoke.toml")}
    assert _probe("heartbeat", "trainer", **given).returncode == 1  # none yet
    with Pulse("trainer", run):
        fresh = _probe("heartbeat", "trainer", "60", **given)
        assert fresh.returncode == 0, fresh.stderr
        assert _probe("heartbeat", "trainer", "0", **given).returncode == 1  # too old


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        pass


def test_the_http_probe_is_well_only_with_a_200() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert _probe("http", f"{url}/200").returncode == 0
        for path in ("204", "404", "503"):
            assert _probe("http", f"{url}/{path}").returncode == 1, path
    finally:
        server.shutdown()
        server.server_close()
    refused = _probe("http", f"{url}/200")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr


@pytest.mark.parametrize("arguments", [[], ["http"], ["heartbeat"], ["pulse", "env"]])
def test_wrong_usage_of_the_probe_is_exit_code_2(arguments: list[str]) -> None:
    result = _probe(*arguments)
    assert result.returncode == 2 and result.stderr.startswith("usage:")


def test_the_last_beat_of_a_service_that_failed_says_why_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted_token")
    run = RunDir(tmp_path)
    with pytest.raises(RuntimeError), health.Pulse("trainer", run):
        raise RuntimeError("the Hub refuses hf_planted_token " + "x" * 900)
    beat = health.read_heartbeats(run)["trainer"]
    assert beat.phase == "failed"
    assert beat.detail["error"].startswith("RuntimeError: the Hub refuses [secret]")
    assert len(beat.detail["error"]) <= health.MAX_ERROR
