"""The supervising parent, with a small script in place of the training process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.run_dir import RunDir
from services.trainer import __main__ as supervisor

ROOT = Path(__file__).resolve().parents[3]

CHILD = """
import os, signal, sys, time
mode = os.environ["CHILD_MODE"]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if mode == "fail":
    sys.exit(7)
if mode != "finish":
    open(os.environ["CHILD_STARTED"], "w").close()
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Start the supervisor with a fake ``services.trainer.train`` in front of the real one."""
    recipe = tmp_path / "recipe.toml"
    text = (ROOT / "data/recipes/smoke.toml").read_text()
    recipe.write_text(text.replace("grace_s = 30", "grace_s = 1"))
    fake = tmp_path / "sitecustomize.py"
    fake.write_text(
        "import subprocess, sys\n"
        "real = subprocess.Popen\n"
        f"subprocess.Popen = lambda args, **kw: real([sys.executable, '-c', {CHILD!r}] "
        "if 'services.trainer.train' in args else args, **kw)\n"
    )
    processes = []

    def run(mode: str) -> tuple[subprocess.Popen, RunDir]:
        started = tmp_path / "started"
        env = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "RECIPE": str(recipe),
            "RUNS_DIR": str(tmp_path / "runs"),
            "CHILD_MODE": mode,
            "CHILD_STARTED": str(started),
        }
        process = subprocess.Popen([sys.executable, "-m", "services.trainer"], env=env)
        processes.append(process)
        if mode in ("polite", "stubborn"):
            deadline = time.monotonic() + 20
            while not started.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return process, RunDir(tmp_path / "runs" / "smoke")

    yield run
    for process in processes:
        process.kill()


def result(run: RunDir) -> dict:
    return json.loads(run.result.read_text())


def test_result_says_done_when_training_finishes(start) -> None:
    process, run = start("finish")
    assert process.wait(20) == 0
    assert (result(run)["exit_code"], result(run)["reason"]) == (0, "done")


def test_exit_code_of_the_training_process_is_passed_on(start) -> None:
    process, run = start("fail")
    assert process.wait(20) == 7
    assert result(run)["exit_code"] == 7


@pytest.mark.parametrize("mode", ["polite", "stubborn"])
def test_stop_request_of_the_watchdog_ends_training_with_its_reason(start, mode: str) -> None:
    process, run = start(mode)
    run.stop_request.write_text(json.dumps({"reason": "no optimizer step for 1800 s", "at": "now"}))
    assert process.wait(20) == 4
    assert result(run)["reason"] == "no optimizer step for 1800 s"
    assert list(run.incidents.glob("*/trainer-stacks.txt")), "the stacks were not dumped before the kill"


def test_sigterm_reaches_the_training_process(start) -> None:
    process, run = start("polite")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert result(run)["reason"] == "stopped by SIGTERM"


def test_a_stop_request_left_by_an_earlier_attempt_is_not_obeyed(start, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "smoke")
    run.path.mkdir(parents=True)
    run.stop_request.write_text(json.dumps({"reason": "old"}))
    process, run = start("finish")
    assert process.wait(20) == 0


def test_verdict_names_the_signal_that_killed_training() -> None:
    assert supervisor._verdict(-signal.SIGKILL, None) == (1, "the training process was killed by SIGKILL")
