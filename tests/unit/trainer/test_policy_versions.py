"""Which policy sampled a turn, from the times of syncs and of OpenCode's calls."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.common import run_dir
from services.common.run_dir import RunDir
from services.trainer.policy_versions import FILE, MAX_LOG_BYTES, Span, VersionLog, call_spans

T0 = 1_800_000_000.0


def synced(run: RunDir, version: int, begins_s: float, served_s: float | None) -> None:
    run_dir.append_line(run.path / FILE, {"version": version, "begins_s": T0 + begins_s})
    if served_s is not None:
        run_dir.append_line(run.path / FILE, {"version": version, "served_s": T0 + served_s})


@pytest.mark.parametrize(
    ("asked_s", "answered_s", "versions"),
    [
        (-9, -5, (0, 0)),
        (-9, 0.5, (0, 1)),
        (2, 9, (1, 1)),
        (2, 10.5, (1, 2)),
        (10.5, 10.8, (1, 2)),
        (12, 13, (2, 2)),
        (2, 30, (1, 3)),
        (21, 25, (2, 3)),
    ],
)
def test_a_turn_is_of_the_versions_that_were_served_between_question_and_answer(
    tmp_path: Path, asked_s: float, answered_s: float, versions: tuple[int, int]
) -> None:
    run = RunDir(tmp_path)
    synced(run, 1, 0, 1)
    synced(run, 2, 10, 11)
    synced(run, 3, 20, None)  # under way, or broken off
    assert VersionLog(run).of([(T0 + asked_s, T0 + answered_s)]) == [versions]


def test_a_resumed_run_counts_again_and_the_order_of_time_holds(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    synced(run, 1, 0, 1)
    synced(run, 2, 10, 11)
    synced(run, 1, 100, 101)
    assert VersionLog(run).of([(T0 + 50, T0 + 60), (T0 + 150, T0 + 160)]) == [(2, 2), (1, 1)]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    log = VersionLog(RunDir(tmp_path))
    now = datetime.now(UTC).timestamp()
    log.begins(1)
    log.served(1)
    assert log.of([(now - 20, now - 10), (now + 10, now + 20)]) == [(0, 0), (1, 1)]


def trial(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "agent").mkdir(parents=True)
    started = datetime.fromtimestamp(T0, UTC).isoformat()
    run_dir.write_json(folder / "result.json", {"agent_execution": {"started_at": started}})
    (folder / "agent" / "opencode.txt").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def event(kind: str, at_s: float) -> dict[str, Any]:
    return {"type": kind, "timestamp": round((T0 + at_s) * 1000), "part": {}}


TWO_TURNS = [
    event("step_start", 4), event("tool_use", 5), event("step_finish", 6), event("step_start", 8),
    event("text", 8), event("step_finish", 9),
]  # fmt: skip


def test_a_call_is_asked_when_the_step_before_it_ended_and_answered_when_its_own_starts(tmp_path: Path) -> None:
    expected: list[Span] = [(T0, T0 + 4), (T0 + 6, T0 + 8)]
    assert call_spans(trial(tmp_path / "trial", *TWO_TURNS), 2) == expected


@pytest.mark.parametrize("num_calls", [1, 3])
def test_a_log_of_another_number_of_calls_tells_nothing(tmp_path: Path, num_calls: int) -> None:
    assert call_spans(trial(tmp_path / "trial", *TWO_TURNS), num_calls) is None


def test_a_trial_without_result_or_log_tells_nothing(tmp_path: Path) -> None:
    assert call_spans(tmp_path / "missing", 2) is None
    folder = trial(tmp_path / "trial", *TWO_TURNS)
    (folder / "agent" / "opencode.txt").unlink()
    assert call_spans(folder, 2) is None


def test_what_a_hostile_agent_leaves_in_the_log_s_place_is_not_read(tmp_path: Path) -> None:
    folder = trial(tmp_path / "trial", *TWO_TURNS)
    log = folder / "agent" / "opencode.txt"
    real = folder / "elsewhere"
    log.rename(real)
    log.symlink_to(real)
    assert call_spans(folder, 2) is None
    log.unlink()
    os.mkfifo(log)  # a reader would wait for ever
    assert call_spans(folder, 2) is None
    log.unlink()
    with log.open("wb") as stream:
        stream.truncate(MAX_LOG_BYTES + 1)
    assert call_spans(folder, 2) is None


def test_events_without_a_time_are_passed_over(tmp_path: Path) -> None:
    odd = [{"type": "step_start", "timestamp": "soon"}, {"type": "step_finish"}]
    assert call_spans(trial(tmp_path / "trial", *odd, *TWO_TURNS), 2) is not None
