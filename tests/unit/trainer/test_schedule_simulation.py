"""Simulated runs of the real scheduler: what it throws away, what it trains, and how that was under TRL's own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from scripts.bench_schedule import Outcome, ScheduledRun, Setting, StampedRun, from_index, lognormal, table
from services.trainer.resume import Cursor

EPOCH = 400
STEPS = EPOCH + 20
"""An epoch and what is open at its end."""
LIMIT = Setting.max_staleness


@functools.cache
def now(cv: float = 0.6, rows: int = 1, seed: int = 0) -> tuple[Outcome, ScheduledRun]:
    run = ScheduledRun(Setting(steps=STEPS, rows_per_rollout=rows), lognormal(cv_rollout=cv, seed=seed))
    return run.run(), run


@functools.cache
def before(cv: float = 0.6, rows: int = 1, max_staleness: int = LIMIT) -> Outcome:
    setting = Setting(steps=STEPS, rows_per_rollout=rows, max_staleness=max_staleness)
    return StampedRun(setting, lognormal(cv_rollout=cv)).run()


CASES = pytest.mark.parametrize(
    ("cv", "rows", "seed"), [(0.6, 1, 0), (0.6, 1, 1), (1.0, 1, 0), (0.6, 2, 0), (0.6, 4, 0)]
)


@CASES
def test_hardly_anything_is_thrown_away_and_what_is_trained_is_as_long_as_what_is_sampled(
    cv: float, rows: int, seed: int
) -> None:
    outcome, _ = now(cv, rows, seed)
    assert outcome.dropped_share <= 0.15
    assert outcome.length_ratio >= 0.97


@pytest.mark.parametrize(("cv", "seed"), [(0.6, 0), (0.6, 1), (1.0, 0)])
def test_with_one_row_per_rollout_nothing_is_thrown_away(cv: float, seed: int) -> None:
    outcome, _ = now(cv, 1, seed)
    assert not outcome.dropped_s


@CASES
def test_each_task_of_an_epoch_is_trained_once_with_all_its_rows(cv: float, rows: int, seed: int) -> None:
    outcome, _ = now(cv, rows, seed)
    assert {position: outcome.trained[position] for position in range(EPOCH)} == dict.fromkeys(range(EPOCH), 8 * rows)


@CASES
def test_no_row_is_trained_beyond_the_limit(cv: float, rows: int, seed: int) -> None:
    outcome, _ = now(cv, rows, seed)
    assert 0 <= min(outcome.ages) <= max(outcome.ages) <= LIMIT


@CASES
def test_all_that_was_asked_for_is_trained_or_said_to_be_made_again(cv: float, rows: int, seed: int) -> None:
    outcome, run = now(cv, rows, seed)
    cursor, pending = run.scheduler.position()
    left = [*cursor.again, *(group.position for group in pending)]
    assert sorted([*outcome.trained, *left]) == list(range(cursor.next))
    assert len(left) <= Setting().limits().max_open_groups


@pytest.mark.parametrize("cv", [0.6, 1.0])
def test_trl_s_own_scheduling_fails_these_bounds(cv: float) -> None:
    """The control: the simulation can tell."""
    outcome = before(cv)
    assert outcome.dropped_share > 0.3
    assert outcome.length_ratio < 0.9
    assert any(outcome.trained[position] == 0 for position in range(EPOCH))
    assert max(outcome.stamp_ages) == LIMIT + 1, "one batch is fetched ahead"


def test_rows_of_forked_rollouts_took_each_other_s_places() -> None:
    outcomes = [before(rows=rows) for rows in (1, 2, 4)]
    tasks = [len(outcome.trained) for outcome in outcomes]
    assert tasks[0] > tasks[1] > tasks[2]
    assert {len(now(rows=rows)[0].trained) for rows in (1, 2, 4)} == {STEPS}


def test_a_trained_second_costs_fewer_sandbox_seconds() -> None:
    scheduled, _ = now()
    assert scheduled.sandbox_s_per_step < 0.75 * before().sandbox_s_per_step
    assert scheduled.pace >= before().pace


def test_many_steps_have_tokens_of_the_very_policy_that_they_change() -> None:
    outcome, _ = now()
    assert outcome.fresh_share >= 0.4


@pytest.mark.parametrize("groups_per_step", [1, 3])
def test_a_step_of_several_groups_is_scheduled_as_well(groups_per_step: int) -> None:
    setting = Setting(steps=120, groups_per_step=groups_per_step, slots=32 * groups_per_step)
    outcome = ScheduledRun(setting, lognormal()).run()
    assert outcome.dropped_share <= 0.15
    assert max(outcome.ages) <= LIMIT
    assert len(outcome.trained) == 120 * groups_per_step


def test_without_staleness_each_step_trains_what_its_own_policy_sampled() -> None:
    outcome = ScheduledRun(Setting(steps=60, max_staleness=0), lognormal()).run()
    assert set(outcome.ages) == {0}
    assert outcome.fresh_share == 1


def test_a_run_s_own_durations_are_taken_by_task(tmp_path: Path) -> None:
    index = tmp_path / "index.jsonl"
    lines = [
        {"task": "a", "scored": True, "wall_s": 10.0, "agent_s": 4.0},
        {"task": "b", "scored": True, "wall_s": 70.0, "agent_s": 60.0},
        {"task": "b", "scored": True, "wall_s": 90.0, "agent_s": 60.0},
        {"task": "c", "scored": False, "wall_s": 1.0},
    ]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    durations = from_index(index, num_generations=20)
    assert set(durations(0)) == {10.0}
    assert set(durations(1)) == {70.0, 90.0}
    assert set(durations(2)) == {10.0}
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl has no line of a scored rollout"):
        from_index(tmp_path / "empty.jsonl")


def test_the_table_has_a_line_for_each_way_of_each_variant() -> None:
    lines = list(table({"small": Setting(steps=60)}, lambda seed: lognormal(seed=seed), [0]))
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["small: TRL", "small: this stack"]
    assert len({line.count("|") for line in lines}) == 1


def test_a_simulated_run_goes_on_from_the_beginning() -> None:
    run = ScheduledRun(Setting(steps=1), lognormal())
    assert run.scheduler.position() == (Cursor(), [])
