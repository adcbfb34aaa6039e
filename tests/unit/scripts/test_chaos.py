"""The books of a run under kills, and which faults a call makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.chaos import account, table
from scripts.chaos.__main__ import chosen
from scripts.chaos.faults import ALL, PHASES, VICTIMS
from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def trained(
    run: RunDir, step: int, *groups: int, dropped: tuple[int, ...] = (), refilled: tuple[int, ...] = ()
) -> None:
    run_dir.append_line(run.metrics, {"step": step})
    line = {"step": step, "groups": groups, "stale": [], "dropped": dropped, "refilled": refilled}
    run_dir.append_line(run.trained, line)


def saved(run: RunDir, step: int, following: int, again: list[int], pending: list[int]) -> None:
    folder = run.checkpoints / f"checkpoint-{step}"
    state = {"cursor": {"next": following, "again": again, "dropped": []}, "pending_positions": pending}
    run_dir.write_json(folder / "rollout_state.json", state)
    run_dir.write_text(folder / run_dir.READY, "{}")


def test_a_run_whose_every_group_is_trained_or_waits_is_clean(run: RunDir) -> None:
    trained(run, 1, 0)
    trained(run, 2, 2)
    saved(run, 2, 5, [1], [3, 4])
    assert account.of(run).clean


def test_a_group_that_was_trained_twice_is_a_replay(run: RunDir) -> None:
    trained(run, 1, 0)
    trained(run, 2, 0)
    saved(run, 2, 1, [], [])
    assert account.of(run).replayed == [0]


def test_a_position_that_is_neither_trained_nor_waits_is_lost(run: RunDir) -> None:
    trained(run, 1, 0)
    saved(run, 1, 2, [], [])
    assert account.of(run).lost == [1]


def test_a_silent_group_that_another_one_replaced_is_not_lost(run: RunDir) -> None:
    trained(run, 1, 1, refilled=(0,))
    saved(run, 1, 2, [], [])
    assert account.of(run).clean


def test_a_group_that_was_given_up_is_told_apart_from_a_lost_one(run: RunDir) -> None:
    trained(run, 1, 0, dropped=(1,))
    saved(run, 1, 2, [], [])
    found = account.of(run)
    assert (found.lost, found.dropped) == ([], [1])


def test_steps_twice_and_versions_that_go_back_are_problems(run: RunDir) -> None:
    trained(run, 1, 0)
    trained(run, 1, 1)
    for version in (1, 3, 2):
        run_dir.append_line(run.path / "policy_versions.jsonl", {"version": version, "begins_s": 1.0})
    run_dir.write_json(run.path / "base_weights.json", {"changed": ["w1"]})
    problems = " ".join(account.of(run).problems)
    for part in ("metrics.jsonl has steps [1, 1]", "trained.jsonl", "[1, 3, 2]", "base weights changed"):
        assert part in problems


def test_every_part_is_killed_in_every_phase_and_the_policy_frozen_in_a_sync() -> None:
    names = {fault.name for fault in ALL}
    assert {f"kill:{victim}:{phase}" for victim in VICTIMS for phase in PHASES} | {"stop:policy:sync"} == names
    assert len(names) == 29


def test_faults_are_chosen_by_name_victim_or_phase() -> None:
    assert [fault.name for fault in chosen("kill:env:sync")] == ["kill:env:sync"]
    assert len(chosen("policy")) == 5
    assert len(chosen("policy,sync")) == 5 + 8 - 2
    assert len(chosen("")) == 29
    with pytest.raises(RecipeError, match="'nobody' names no fault; allowed: kill:policy:rollout"):
        chosen("nobody")


def test_all_is_well_only_if_every_fault_and_every_run_is(tmp_path: Path) -> None:
    outcome = {"recovered": True, "named_s": None}
    good = {"exit_code": 0, "base_unchanged": True, **dict.fromkeys(table.FAULTLESS, 0)}
    assert table.all_well({"outcomes": {"a": outcome}, "runs": {"r": good}})
    assert not table.all_well({"outcomes": {"a": {**outcome, "recovered": False}}, "runs": {"r": good}})
    assert not table.all_well({"outcomes": {"a": {**outcome, "named_s": 61}}, "runs": {"r": good}})
    for key, bad in {"exit_code": 6, "base_unchanged": False, "lost": [1], "containers_left": 1}.items():
        assert not table.all_well({"outcomes": {"a": outcome}, "runs": {"r": {**good, key: bad}}}), key
