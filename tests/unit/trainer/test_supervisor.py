"""The supervising parent, with a small script in place of the training process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common import run_dir
from services.common.recipe import Watchdog as Limits
from services.common.run_dir import RunDir
from services.trainer import supervise
from services.trainer.__main__ import POLL_S
from services.trainer.supervise import Attempts, Verdict

ROOT = Path(__file__).resolve().parents[3]

LIMIT_S = 60
"""For what takes a second or two."""
CHILD = """
import os, signal, sys, time
mode = os.environ["CHILD_MODE"]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if mode == "fail":
    sys.exit(7)
if mode == "recover":
    # The first two attempts get as far as a policy, and are then killed as a machine without memory does it.
    run = os.path.join(os.environ["RUNS_DIR"], "smoke")
    open(os.path.join(run, "policy_versions.jsonl"), "a").write('{"version": 1}')
    attempts = open(os.path.join(run, "attempts.jsonl")).read().count('"started"')
    if attempts < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)
if mode == "orphan":
    import subprocess
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(os.environ["CHILD_STARTED"], "w").write(str(left.pid))
    os._exit(0)
if mode != "finish":
    open(os.environ["CHILD_STARTED"], "w").close()
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Start the supervisor with a fake ``services.trainer.train`` in front of the real one."""
    recipe = tmp_path / "recipe.toml"
    text = (ROOT / "data/recipes/smoke.toml").read_text()
    recipe.write_text(text.replace("grace_s = 30", "grace_s = 1\nresume_backoff_s = 0.1"))
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
        started.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-m", "services.trainer"], env=env)
        processes.append(process)
        if mode in ("polite", "stubborn"):
            deadline = time.monotonic() + LIMIT_S
            while not started.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return process, RunDir(tmp_path / "runs" / "smoke")

    yield run
    for process in processes:
        process.kill()


def result(run: RunDir) -> dict:
    return json.loads(run.result.read_text())


def test_result_says_done_when_training_finishes(start) -> None:
    process, run = start("finish")
    assert process.wait(LIMIT_S) == 0
    assert (result(run)["exit_code"], result(run)["reason"]) == (0, "done")


def test_exit_code_of_the_training_process_is_passed_on(start) -> None:
    process, run = start("fail")
    assert process.wait(LIMIT_S) == 7
    assert result(run)["exit_code"] == 7


@pytest.mark.parametrize("mode", ["polite", "stubborn"])
def test_stop_request_of_the_watchdog_ends_training_with_its_reason(start, mode: str) -> None:
    process, run = start(mode)
    run.stop_request.write_text(json.dumps({"reason": "no optimizer step for 1800 s", "at": "now"}))
    assert process.wait(LIMIT_S) == 4
    assert result(run)["reason"] == "no optimizer step for 1800 s"
    assert run.stop_request.exists(), "of a run that was stopped for good, the request is evidence"
    assert list(run.incidents.glob("*/trainer-stacks.txt")), "the stacks were not dumped before the kill"


def test_a_stop_request_is_obeyed_once_it_is_whole(start) -> None:
    """A person writes it with an editor, or with ``echo``."""
    process, run = start("polite")
    run.stop_request.write_text("")
    time.sleep(3 * POLL_S)
    run.stop_request.write_text('{"reason": "wri')
    time.sleep(3 * POLL_S)
    assert process.poll() is None
    run.stop_request.write_text('{"reason": "written by hand"}')
    assert process.wait(LIMIT_S) == 4
    assert result(run)["reason"] == "written by hand"


@pytest.mark.parametrize("text", ["{}", '{"resume": false}'])
def test_a_stop_request_needs_no_reason(start, text: str) -> None:
    process, run = start("polite")
    run.stop_request.write_text(text)
    assert process.wait(LIMIT_S) == 4
    assert result(run)["reason"] == "asked for by hand"


def test_a_stop_for_good_that_comes_while_a_resume_is_obeyed_is_obeyed_too(start) -> None:
    process, run = start("stubborn")
    run_dir.write_json(run.stop_request, {"reason": "stall", "by": "watchdog", "resume": True})
    until = time.monotonic() + LIMIT_S
    while not list(run.incidents.glob("*")):  # it is being obeyed
        assert time.monotonic() < until
        time.sleep(0.01)
    run_dir.write_json(run.stop_request, {"reason": "enough"})
    assert process.wait(LIMIT_S) == 4
    assert result(run)["reason"] == "enough"
    assert events(run).count("started") == 1


def test_sigterm_reaches_the_training_process(start) -> None:
    process, run = start("polite")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert result(run)["reason"] == "stopped by SIGTERM"


def test_a_stop_request_left_by_an_earlier_attempt_is_not_obeyed(start, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "smoke")
    run.path.mkdir(parents=True)
    run.stop_request.write_text(json.dumps({"reason": "old"}))
    process, run = start("finish")
    assert process.wait(LIMIT_S) == 0


def events(run: RunDir) -> list[str]:
    return [line["event"] for line in run_dir.read_lines(run.attempts)]


def test_killed_training_is_started_again_and_finishes(start) -> None:
    process, run = start("recover")
    assert process.wait(LIMIT_S) == 0
    assert result(run) | {"at": ""} == {"exit_code": 0, "reason": "done", "step": 0, "resumes": 2, "at": ""}
    assert events(run) == ["started", "ended"] * 3
    reasons = [line["reason"] for line in run_dir.read_lines(run.attempts) if line["event"] == "ended"]
    assert reasons == ["the training process was killed by SIGKILL"] * 2 + ["done"]


def test_a_run_is_resumed_as_often_as_the_recipe_says_and_then_given_up(start) -> None:
    process, run = start("stubborn")
    for number in range(4):
        until = time.monotonic() + LIMIT_S
        while events(run).count("started") <= number and time.monotonic() < until:
            time.sleep(0.05)
        run_dir.write_json(run.stop_request, {"reason": f"stall {number}", "by": "watchdog", "resume": True})
        while run.stop_request.exists() and not run.result.exists() and time.monotonic() < until:
            time.sleep(0.05)
    assert process.wait(LIMIT_S) == 6
    assert result(run)["reason"] == "stall 3; it was the end of attempt 4, and watchdog.max_resumes is 3"


def test_a_run_that_has_ended_is_not_started_again(start) -> None:
    process, run = start("fail")
    assert process.wait(LIMIT_S) == 7
    again, _ = start("finish")
    assert again.wait(LIMIT_S) == 7
    assert events(run) == ["started", "ended"]


def test_a_supervisor_that_was_killed_is_followed_by_one_that_goes_on(start) -> None:
    process, run = start("polite")
    process.kill()
    process.wait()
    again, _ = start("finish")
    assert again.wait(LIMIT_S) == 0
    assert (result(run)["exit_code"], result(run)["resumes"]) == (0, 1)
    ends = [line["reason"] for line in run_dir.read_lines(run.attempts) if line["event"] == "ended"]
    assert ends == ["the trainer's container was killed", "done"]


def test_a_stop_for_good_holds_although_the_supervisor_is_killed_before_it_obeys(start) -> None:
    process, run = start("polite")
    process.kill()
    process.wait()
    run_dir.write_json(run.stop_request, {"reason": "too many unscorable", "resume": False})
    again, _ = start("finish")
    assert again.wait(LIMIT_S) == 4
    assert result(run)["reason"] == "too many unscorable"


def test_training_does_not_outlive_its_supervisor_and_leaves_nothing_of_its_own(start, tmp_path: Path) -> None:
    process, _ = start("orphan")
    assert process.wait(LIMIT_S) == 0
    left = int((tmp_path / "started").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(20 * LIMIT_S):
            os.kill(left, 0)
            time.sleep(0.05)


def test_a_person_who_resumes_starts_the_count_again(tmp_path: Path) -> None:
    attempts = Attempts(RunDir(tmp_path))
    for _ in range(4):
        attempts.record_start(None)
        attempts.record_end(Verdict(1, "killed", resume=True), 2)
    assert attempts.resumes() == 3 and not attempts.open()
    attempts.record_person({"exit_code": 6})
    assert attempts.resumes() == 0 and not attempts.open()
    attempts.record_start("checkpoint-2")
    assert attempts.resumes() == 0 and attempts.open()


@pytest.mark.parametrize(
    ("code", "asked", "began", "expected"),
    [
        (0, None, True, Verdict(0, "done")),
        (-9, None, False, Verdict(1, "the training process was killed by SIGKILL", resume=True)),
        (1, None, True, Verdict(1, "the training process ended with exit code 1", resume=True)),
        (1, None, False, Verdict(1, "the training process ended with exit code 1")),
        (3, None, True, Verdict(3, "the training process ended with exit code 3", resume=True)),
        (2, None, True, Verdict(2, "the training process ended with exit code 2")),
        (4, None, True, Verdict(4, "the training process ended with exit code 4")),
        (5, None, True, Verdict(5, "the training process ended with exit code 5")),
        (0, {"reason": "stall", "resume": True}, True, Verdict(4, "stall", resume=True)),
        (-9, {"reason": "enough"}, True, Verdict(4, "enough")),
        (0, supervise.BY_SIGNAL, True, Verdict(143, "stopped by SIGTERM")),
    ],
)
def test_what_becomes_of_a_run(code: int, asked: dict | None, began: bool, expected: Verdict) -> None:
    assert supervise.judge(code, asked, began=began) == expected


def test_the_last_words_of_a_training_process_are_in_the_verdict() -> None:
    found = supervise.judge(3, None, began=True, error="WeightSyncError: policy is away")
    assert found.reason == "the training process ended with exit code 3: WeightSyncError: policy is away"


def test_the_wait_before_a_resume_doubles_up_to_a_limit() -> None:
    limits = Limits(resume_backoff_s=10, max_backoff_s=60)
    assert [supervise.backoff_s(resumes, limits) for resumes in range(5)] == [10, 20, 40, 60, 60]


def test_without_resumes_a_run_ends_with_its_own_exit_code() -> None:
    assert supervise.bounded(Verdict(1, "killed", resume=True), 0, Limits(max_resumes=0)) == Verdict(1, "killed")
