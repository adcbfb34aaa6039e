"""vLLM's output, heartbeat and end, with a short program in its place."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services.common import health
from services.common.run_dir import RunDir
from services.policy import attend

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def umask_as_before() -> Iterator[None]:
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def run_of(folder: Path) -> RunDir:
    run = RunDir(folder / "run")
    run.heartbeats.mkdir(parents=True)
    return run


def program(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


def ours(child: str, run: RunDir, url: str) -> subprocess.Popen[bytes]:
    """A process of ours that attends to a program."""
    text = (
        "import os, sys; from pathlib import Path; from services.common.run_dir import RunDir\n"
        "from services.policy.attend import attend\n"
        f"command = [sys.executable, '-u', '-c', {child!r}]\n"
        f"sys.exit(attend(command, os.environ, 'policy', RunDir(Path({str(run.path)!r})), {url!r}))"
    )
    return subprocess.Popen(program(text), cwd=ROOT, stdout=subprocess.DEVNULL)


def test_what_it_says_is_in_the_run_and_on_our_own_output(tmp_path: Path, capfdbinary: pytest.CaptureFixture) -> None:
    run = run_of(tmp_path)
    said = program("import sys; print('on out'); print('on err', file=sys.stderr); print('no line end', end='')")
    attend.attend(said, os.environ, "policy", run, NOWHERE)
    text = b"on out\non err\nno line end"
    assert (run.path / "policy.log").read_bytes() == text
    assert capfdbinary.readouterr().out.endswith(text)


def test_what_was_said_before_the_run_had_a_folder_comes_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    said = program(f"import os; print('early'); os.makedirs({str(run.path)!r}); print('late')")
    attend.attend(said, os.environ, "policy", run, NOWHERE)
    assert (run.path / "policy.log").read_text() == "early\nlate\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [("", attend.ENDED), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
    ids=["says 0 after its engine died", "a failure", "killed"],
)
def test_an_end_that_nobody_asked_for_has_a_code_and_is_in_the_heartbeat(text: str, code: int, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert attend.attend(program(f"import time; time.sleep(0.5)\n{text}"), os.environ, "policy", run, NOWHERE) == code
    beat = health.read_heartbeats(run)["policy"]
    assert beat.phase == "failed" and "vLLM ended" in beat.detail["error"]


def test_it_serves_from_its_first_answer_on_and_a_stop_is_passed_on(tmp_path: Path) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    Thread(target=server.serve_forever, daemon=True).start()
    run = run_of(tmp_path)
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('stopping'), sys.exit(0)))\n"
        "print('up'); time.sleep(60)"
    )
    process = ours(child, run, f"http://127.0.0.1:{server.server_port}")
    _until(lambda: (beat := health.read_heartbeats(run).get("policy")) is not None and beat.phase == "serving")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    server.shutdown()
    assert health.read_heartbeats(run)["policy"].phase == "done"
    assert (run.path / "policy.log").read_text() == "up\nstopping\n"


def test_it_does_not_outlive_us(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    child = "import json, os, time; print(json.dumps(os.getpid())); time.sleep(60)"
    process = ours(child, run, NOWHERE)
    log = run.path / "policy.log"
    _until(lambda: log.is_file() and log.read_text().strip() != "")
    pid = json.loads(log.read_text())
    process.kill()
    process.wait()
    _until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def _until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
