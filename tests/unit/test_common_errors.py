"""Exit codes, and the stop flag that signals set."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.common import errors, signals

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("StackError", 1),
        ("RecipeError", 2),
        ("NotReadyError", 3),
        ("StoppedError", 4),
        ("MachineError", 5),
        ("GaveUpError", 6),
    ],
)
def test_an_expected_error_is_its_message_and_its_exit_code(error: str, code: int) -> None:
    program = (
        "from services.common import errors\n"
        f"def main(): raise errors.{error}('found 3; allowed: 4')\n"
        "errors.run_main(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, f"{error}: found 3; allowed: 4\n")


def test_a_bug_keeps_its_traceback_and_is_exit_code_1() -> None:
    program = "from services.common import errors\nerrors.run_main(lambda: 1 // 0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_every_kind_of_error_has_an_exit_code_of_its_own() -> None:
    own = [kind for kind in errors.StackError.__subclasses__() if kind.__module__ == errors.__name__]
    kinds = [errors.StackError, *own]
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with signals.stop_event() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(5)
        os.kill(os.getpid(), number)  # a second one changes nothing
    assert signal.getsignal(number) is before
    assert threading.current_thread() is threading.main_thread()


def test_a_process_can_end_with_its_parent_however_that_ended() -> None:
    child = (
        "import os, time; from services.common import signals; signals.die_with_parent(); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")
