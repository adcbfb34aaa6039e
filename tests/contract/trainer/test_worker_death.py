"""A rollout worker that dies ends the training process at once, with the reason; nothing waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common import run_dir
from services.common.run_dir import RunDir

TIMEOUT_S = 240.0


@pytest.fixture
def attempt(tmp_path: Path) -> tuple[RunDir, subprocess.Popen[bytes]]:
    """A training process after its first step."""
    run = RunDir(tmp_path / "run")
    run.prepare()
    with (tmp_path / "output.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.trainer.resume_driver", str(run.path), "--slow"],
            stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    until = time.monotonic() + TIMEOUT_S
    while not run_dir.read_lines(run.trained):
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "output.txt").read_text()[-4000:]
        time.sleep(0.05)
    return run, process


def test_a_worker_that_is_killed_ends_training_with_its_exit_code_and_is_not_waited_for(
    attempt: tuple[RunDir, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    _, process = attempt
    # The child runs multiprocessing's spawn_main; its threads wait for the stop event when it dies.
    os.kill(worker_of(process.pid), signal.SIGKILL)
    assert process.wait(60) == 1
    assert "the rollout worker's process ended with exit code -9" in (tmp_path / "output.txt").read_text()


def worker_of(pid: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"spawn_main" in command:
            return int(folder.name)
    raise AssertionError("the training process has no worker")
