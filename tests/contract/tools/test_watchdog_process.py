"""``python -m services.watchdog`` as compose starts it, on a run directory that a FAKE trainer writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common import health, run_dir
from services.common.health import Pulse
from services.common.run_dir import RunDir
from tests.fakes.policy_eval import FakePolicyEval

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "smoke")
    run.prepare()
    return run


@pytest.fixture
def peer() -> Iterator[FakePolicyEval]:
    """FAKE policy and env in one: both have a /health."""
    fake = FakePolicyEval()
    yield fake
    fake.close()


@pytest.fixture
def watchdog(tmp_path: Path, run: RunDir, peer: FakePolicyEval) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    text = (ROOT / "data/recipes/smoke.toml").read_text()
    assert "stall_s = 600" in text and "grace_s = 30" in text
    text = text.replace("grace_s = 30", "grace_s = 1")
    started = []

    def start(stall_s: int = 120, **changes: str) -> subprocess.Popen[str]:
        (tmp_path / "recipe.toml").write_text(text.replace("stall_s = 600", f"stall_s = {stall_s}\npoll_s = 0.2"))
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "RECIPE": str(tmp_path / "recipe.toml"), "RUN_NAME": "smoke",
            "RUNS_DIR": str(run.path.parent), "POLICY_URL": peer.url, "ENV_URL": peer.url,
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "services.watchdog"],
            cwd=ROOT, env=environment | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _until(condition: Callable[[], Any], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def _watching(run: RunDir) -> bool:
    beat = health.read_heartbeats(run).get("watchdog")
    return beat is not None and beat.phase == "watching"


def test_a_silent_trainer_is_stopped_with_a_reason_and_a_bundle(
    watchdog: Callable[..., subprocess.Popen[str]], run: RunDir
) -> None:
    process = watchdog(stall_s=2)
    _until(lambda: _watching(run))
    with Pulse("trainer", run, interval_s=0.2) as pulse:
        pulse.set("rollout", step=3)
        _until(run.stop_request.exists)
        stop = json.loads(run.stop_request.read_text())
        assert "after step 3" in stop["reason"] and stop["by"] == "watchdog"
        # The supervisor's part.
        run_dir.write_json(run.result, {"exit_code": 4, "reason": stop["reason"], "step": 3})
        out, err = process.communicate(timeout=60)
    # A run that has ended needs no watchdog: with another code Compose would start it again.
    assert process.returncode == 0, err
    (bundle,) = run.incidents.iterdir()
    assert stop["resume"] is True and stop["incident"] == bundle.name
    assert {"decision.json", "observations.json", "policy-health.txt", "env-state.txt", "watchdog.log.tail"} <= {
        path.name for path in bundle.iterdir()
    }
    assert any(json.loads(line)["level"] == "error" for line in out.splitlines())


def test_a_run_that_ends_well_ends_the_watchdog_with_0(
    watchdog: Callable[..., subprocess.Popen[str]], run: RunDir
) -> None:
    process = watchdog()
    _until(lambda: _watching(run))
    with Pulse("trainer", run, interval_s=0.2) as pulse:
        for step in range(1, 12):
            pulse.set("rollout", step=step)
            time.sleep(0.3)
    run_dir.write_json(run.result, {"exit_code": 0, "reason": "done", "step": 11})
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not run.stop_request.exists() and list(run.incidents.iterdir()) == []
    assert health.read_heartbeats(run)["watchdog"].phase == "done"


def test_sigterm_ends_it_at_once(watchdog: Callable[..., subprocess.Popen[str]], run: RunDir) -> None:
    process = watchdog()
    _until(lambda: _watching(run))
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err


def test_a_missing_url_is_one_message_and_exit_code_2(watchdog: Callable[..., subprocess.Popen[str]]) -> None:
    process = watchdog(POLICY_URL="")
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "POLICY_URL not set" in err and "Traceback" not in err
