"""Checkpoint pushes with the real client against tests/hub, under each fault that the Hub was seen to make."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.recipe import Push
from services.common.run_dir import CONFIG, READY, WEIGHTS, RunDir, append_line, read_lines
from services.hub import commits, pushes
from services.hub.__main__ import mirror
from services.hub.adapters import Reference, resolve
from services.hub.client import UNAVAILABLE, connect
from services.hub.pushes import BackgroundPushes, Pusher
from tests.hub.server import Fault, LocalHub

REPO = "local/adapter"
COMMIT = "/commit/main"
LIMITS = Push(retry_for_s=30, flush_s=10)
ROOT = Path(__file__).resolve().parents[3]
Save = Callable[..., Path]


@pytest.fixture
def pusher(server: LocalHub, run: RunDir, waits: list[float]) -> Pusher:
    return Pusher(connect(), REPO, run, LIMITS, waits.append)


def titles(server: LocalHub) -> list[str]:
    return [commit.title for commit in server.repo(REPO).history("main")][:-1]


def files(server: LocalHub) -> dict[str, bytes]:
    return {path: data for path, data in server.repo(REPO).at("main").files.items() if path != ".gitattributes"}


def test_a_checkpoint_is_one_commit_with_all_its_files(server: LocalHub, pusher: Pusher, save: Save) -> None:
    save(2)
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]
    assert sorted(files(server)) == [
        f"checkpoint-2/{name}" for name in (READY, CONFIG, WEIGHTS, "optimizer.pt", "rollout_state.json")
    ]
    assert pusher.backlog() == []
    # What the evaluator finds is what was pushed.
    assert resolve(Reference(REPO)).step == 2


def test_costs_and_metrics_so_far_are_in_the_checkpoint_s_commit(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    run.metrics.write_text('{"step": 2}\n')
    run.trained.write_text('{"step": 2}\n')
    (run.path / "costs.json").write_text("{}")
    save(2)
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]
    assert set(files(server)) >= {"costs.json", "metrics.jsonl", "trained.jsonl", f"checkpoint-2/{READY}"}


def test_metrics_that_grow_during_a_push_make_no_second_commit(
    server: LocalHub, run: RunDir, save: Save, waits: list[float]
) -> None:
    run.metrics.write_text('{"step": 2}\n')
    save(2)

    def train_on(seconds: float) -> None:
        waits.append(seconds)
        append_line(run.metrics, {"step": 3})

    server.fail(Fault("POST", COMMIT, status=500, after_effect=True))
    pusher = Pusher(connect(), REPO, run, LIMITS, train_on)
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]
    assert files(server)["metrics.jsonl"] == b'{"step": 2}\n' and len(read_lines(run.metrics)) == 2


def test_an_incomplete_folder_is_never_pushed(server: LocalHub, pusher: Pusher, save: Save) -> None:
    save(2, ready=False)
    assert pusher.backlog() == []


def test_another_writer_s_commit_is_built_upon(server: LocalHub, pusher: Pusher, save: Save) -> None:
    save(2)
    server.commit(REPO, {"eval/summary.json": b"{}"}, title="the evaluator")
    server.fail(Fault("POST", COMMIT, status=412))
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke", "the evaluator"]


def test_a_parent_that_became_old_on_the_way_is_renewed(
    server: LocalHub, pusher: Pusher, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(2)
    server.commit(REPO, {"a": b"1"})
    real, raced = server.commit, []

    def race(repo_id: str, new: dict[str, bytes], **kwargs: object) -> str:
        if not raced:
            raced.append(real(REPO, {"b": b"2"}, title="the other writer"))
        return real(repo_id, new, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "commit", race)
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke", "the other writer", "a commit"]
    assert set(files(server)) >= {"a", "b", f"checkpoint-2/{WEIGHTS}"}


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_commit_that_landed_although_the_hub_failed_is_not_made_twice(
    server: LocalHub, pusher: Pusher, save: Save, status: int
) -> None:
    save(2)
    server.fail(Fault("POST", COMMIT, status=status, after_effect=True))
    made = pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]
    assert made == server.repo(REPO).at("main").oid


def test_a_hub_that_fails_for_a_while_gets_the_commit_once(server: LocalHub, pusher: Pusher, save: Save) -> None:
    save(2)
    server.fail(
        Fault("POST", "/repos/create", status=503, times=2),
        Fault("POST", COMMIT, status=500, times=2),
        Fault("GET", f"/api/models/{REPO}$", status=503, times=1),
    )
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]


def test_the_hub_s_retry_after_is_kept(server: LocalHub, pusher: Pusher, save: Save, waits: list[float]) -> None:
    save(2)
    server.commit(REPO, {"a": b"1"})
    server.fail(Fault("POST", COMMIT, status=429, headers={"Retry-After": "17"}))
    pusher.push(pusher.backlog()[0])
    assert any(17 <= wait <= 18 for wait in waits)
    assert titles(server) == ["checkpoint-2 of smoke", "a commit"]


@pytest.mark.parametrize(
    ("header", "expected"), [("17", 17.0), ("-3", 0.0), ("soon", None), ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0)]
)
def test_retry_after_is_seconds_or_a_date(header: str, expected: float | None) -> None:
    error = Exception()
    error.response = type("Response", (), {"headers": {"Retry-After": header}})  # type: ignore[attr-defined]
    assert commits.retry_after_s(error) == expected
    assert commits.retry_after_s(Exception()) is None


def test_a_refusal_is_not_tried_again(server: LocalHub, pusher: Pusher, save: Save) -> None:
    save(2)
    server.fail(Fault("POST", COMMIT, status=403, times=99))
    with pytest.raises(UNAVAILABLE, match="403"):
        pusher.push(pusher.backlog()[0])
    assert [request.status for request in server.requests if request.path.endswith(COMMIT)] == [403]
    assert [checkpoint.step for checkpoint in pusher.backlog()] == [2]


def test_a_hub_that_stays_away_ends_the_try_and_not_the_backlog(
    server: LocalHub, run: RunDir, save: Save, waits: list[float]
) -> None:
    save(2)
    pusher = Pusher(connect(), REPO, run, Push(retry_for_s=0.01), waits.append)
    server.fail(Fault("GET", f"/api/models/{REPO}$", status=500, times=999))
    with pytest.raises(UNAVAILABLE, match="500"):
        pusher.push(pusher.backlog()[0])
    server.heal()
    pusher.push(pusher.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]


def test_a_push_cut_in_the_middle_is_finished_by_the_next_process(
    server: LocalHub, run: RunDir, save: Save, waits: list[float]
) -> None:
    save(2)
    # Its commit landed, and it was killed before it could write that down.
    Pusher(connect(), REPO, run, LIMITS).push(run.complete_checkpoints()[0])
    (run.path / pushes.LOG).unlink()
    second = Pusher(connect(), REPO, run, LIMITS)
    assert [checkpoint.step for checkpoint in second.backlog()] == [2]
    second.push(second.backlog()[0])
    assert titles(server) == ["checkpoint-2 of smoke"]
    assert Pusher(connect(), REPO, run, LIMITS).backlog() == []
    assert [checkpoint.step for checkpoint in Pusher(connect(), "local/other", run, LIMITS).backlog()] == [2]


def test_a_step_that_was_trained_again_is_pushed_again(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    save(2)
    pusher.push(pusher.backlog()[0])
    folder = save(2, b"2")
    os.utime(folder / READY, ns=(1, 1))
    pusher.push(pusher.backlog()[0])
    assert files(server)[f"checkpoint-2/{WEIGHTS}"] == WEIGHTS.encode() + b"2"
    assert [line["step"] for line in read_lines(run.path / pushes.LOG)] == [2, 2]


def test_rotation_leaves_a_checkpoint_that_is_being_pushed(
    server: LocalHub, pusher: Pusher, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(2)
    locked = []

    def look(*_args: object, **_kwargs: object) -> str:
        with (folder / READY).open("rb") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)
        return "0" * 40

    monkeypatch.setattr(pushes, "commit", look)
    pusher.push(pusher.backlog()[0])
    assert locked == [True]


def test_the_end_of_a_run_puts_the_newest_adapter_at_the_top_and_its_records_beside(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    assert pusher.push_records() is None and pusher.push_final_adapter() is None
    save(2)
    save(4, b"4")
    run.eval.mkdir()
    (run.eval / "summary.json").write_text("{}")
    (run.eval / "mirror").mkdir()
    (run.eval / "mirror" / "big.json").write_text("{}")
    run.result.write_text(json.dumps({"exit_code": 0}))
    pusher.push_final_adapter()
    pusher.push_records()
    assert sorted(files(server)) == [CONFIG, WEIGHTS, "eval/summary.json", "result.json"]
    assert files(server)[WEIGHTS] == WEIGHTS.encode() + b"4"


# --- In the background --------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    ended = threading.Event()
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        ended.wait(0.02)  # not time.sleep, which the fixture takes away


def test_a_save_is_pushed_without_waiting_and_the_metrics_say_so(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    background = BackgroundPushes(pusher, run, retry_every_s=60)
    assert background.metrics()["push/backlog"] == 0
    save(2)
    background.wake()
    until(lambda: background.metrics()["push/backlog"] == 0)
    until(lambda: background.metrics()["push/last_step"] == 2)
    assert background.metrics()["push/failures"] == 0
    assert background.close(10)
    assert titles(server) == ["checkpoint-2 of smoke"]


def test_a_run_that_goes_on_takes_the_result_of_before_away(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    """Who follows the repository must not take the run for ended, neither now nor at a later checkpoint."""
    server.commit(REPO, {"result.json": b'{"exit_code": 4}'}, title="ended")
    server.fail(Fault("POST", COMMIT, status=403, times=1))
    background = BackgroundPushes(pusher, run, retry_every_s=0.05)
    until(lambda: "result.json" not in files(server))
    save(2)
    background.wake()
    until(lambda: background.metrics()["push/last_step"] == 2)
    assert background.close(10)
    assert titles(server) == ["checkpoint-2 of smoke", "The run goes on", "ended"]


def test_a_failure_is_counted_and_its_turn_comes_again(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    server.fail(Fault("POST", COMMIT, status=403, times=1))
    save(2)
    background = BackgroundPushes(pusher, run, retry_every_s=0.05)
    until(lambda: background.metrics()["push/last_step"] == 2)
    assert background.metrics()["push/failures"] == 1
    assert background.close(10)


def test_a_bug_in_a_push_ends_neither_the_thread_nor_the_caller(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pusher.push
    failed = []

    def broken(checkpoint: object) -> str:
        if not failed:
            failed.append(checkpoint)
            raise KeyError("a bug")
        return real(checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(pusher, "push", broken)
    save(2)
    background = BackgroundPushes(pusher, run, retry_every_s=0.05)
    until(lambda: background.metrics()["push/last_step"] == 2)
    assert background.metrics()["push/failures"] == 1
    assert background.close(10)


def test_close_pushes_what_is_left(server: LocalHub, pusher: Pusher, save: Save, run: RunDir) -> None:
    background = BackgroundPushes(pusher, run, retry_every_s=600)
    until(lambda: not background._wake.is_set())
    save(2)
    save(4)
    assert background.close(20)
    assert titles(server) == ["checkpoint-4 of smoke", "checkpoint-2 of smoke"]


def test_close_gives_up_in_time_on_a_hub_that_is_away(
    run: RunDir, save: Save, server: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    save(2)
    pusher = Pusher(connect(), REPO, run, Push(retry_for_s=60))  # it really waits between its tries
    server.fail(Fault(times=999, status=503))
    background = BackgroundPushes(pusher, run)
    began_s = time.monotonic()
    assert not background.close(0.5)
    assert time.monotonic() - began_s < 5
    assert "checkpoints are not on the Hub" in caplog.messages


def test_a_second_process_leaves_the_writing_to_the_first(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    save(2)
    with pushes.writer(run) as first, pushes.writer(run) as second:
        assert (first, second) == (True, False)
        background = BackgroundPushes(pusher, run, retry_every_s=600)
        assert not background.close(10)
    with pushes.writer(run) as later:
        assert later


def test_a_checkpoint_that_vanishes_is_one_failure(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = save(2)
    found = pusher.backlog()
    shutil.rmtree(gone)
    monkeypatch.setattr(pusher, "backlog", lambda: found if not asked else [])
    asked: list[int] = []
    background = BackgroundPushes(pusher, run, retry_every_s=600)
    until(lambda: background.metrics()["push/failures"] == 1)
    asked.append(1)
    assert background.close(10)


# --- A run that ended ---------------------------------------------------------------------------------------------


def test_the_result_is_pushed_although_a_checkpoint_cannot_be_and_the_first_error_counts(
    server: LocalHub, pusher: Pusher, save: Save, run: RunDir
) -> None:
    save(2)
    run.result.write_text(json.dumps({"exit_code": 4}))
    server.fail(Fault("POST", COMMIT, status=403, times=1))
    with pytest.raises(UNAVAILABLE, match="403"):
        mirror(pusher, run, False)
    assert titles(server) == ["Records of smoke"] and "result.json" in files(server)
    server.fail(Fault("POST", COMMIT, status=403, times=1), Fault("POST", COMMIT, status=401, times=1))
    run.result.write_text(json.dumps({"exit_code": 6}))
    with pytest.raises(UNAVAILABLE, match="403"):
        mirror(pusher, run, False)


# --- From the command line ----------------------------------------------------------------------------------------


def test_push_by_command_mirrors_a_run_that_ended_even_where_the_hub_is_offline_for_weights(
    server: LocalHub, run: RunDir, save: Save, tmp_path: Path
) -> None:
    save(2)
    run.result.write_text(json.dumps({"exit_code": 0}))
    environment = {
        **os.environ, **server.environment(), "RECIPE": str(ROOT / "data/recipes/smoke.toml"),
        "RUNS_DIR": str(tmp_path), "ADAPTER_REPO": REPO, "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "services.hub", "push"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert titles(server) == ["Records of smoke", "Adapter of checkpoint-2", "checkpoint-2 of smoke"]
    del environment["ADAPTER_REPO"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "ADAPTER_REPO is not set" in done.stderr
