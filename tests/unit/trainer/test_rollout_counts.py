from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common import recipe, run_dir
from services.common.causes import Cause
from services.common.run_dir import RunDir
from services.trainer.rollout_counts import RolloutCounts
from services.trainer.rollout_log import INDEX

ROOT = Path(__file__).resolve().parents[3]
CFG = recipe.load(ROOT / "data/recipes/smoke.toml")  # groups of 4, bonus 0.1 over 6 calls


def ended(run: RunDir, cause: Cause | None = None, *breaches: str, **more: Any) -> None:
    line: dict[str, Any] = {
        "scored": cause is None, "cause": cause, "breaches": breaches, "group": None, "task": "first-a", "reward": 1.0,
        "tool_calls": 1, "at": "2026-11-29T12:00:00Z",
    }  # fmt: skip
    run_dir.append_line(run.rollouts / INDEX, line | more)


def test_every_cause_is_a_column_before_the_first_rollout(tmp_path: Path) -> None:
    found = RolloutCounts(RunDir(tmp_path), CFG).metrics()
    totals = {"rollouts/done", "rollouts/unscorable", "rollouts/cap_hits", "rollouts/budget_stops"}
    groups = {"groups/done", "groups/zero_variance"}
    assert set(found) == totals | groups | {f"rollouts/unscorable/{cause}" for cause in Cause}
    assert set(found.values()) == {0.0}


def test_rollouts_are_counted_by_cause_and_breach_and_each_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    counts = RolloutCounts(run, CFG)
    ended(run, cap_hits=2)
    ended(run, None, "cut_by_length", "cut_by_length")
    ended(run, Cause.CAPTURE, "logprob_misalign", "cut_by_length")
    counts.metrics()
    ended(run, Cause.POLICY, budget_stops=3)
    found = {name: count for name, count in counts.metrics().items() if count}
    assert found == {
        "rollouts/done": 4, "rollouts/unscorable": 2, "rollouts/unscorable/capture": 1, "rollouts/unscorable/policy": 1,
        "rollouts/breach/cut_by_length": 2, "rollouts/breach/logprob_misalign": 1, "rollouts/cap_hits": 1,
        "rollouts/budget_stops": 1,
    }  # fmt: skip


def test_rollouts_of_groups_that_were_dropped_for_their_age_are_counted_as_staleness(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    counts = RolloutCounts(run, CFG)
    for step, sizes in ((1, []), (2, [4, 3]), (3, [4])):
        stale = [{"position": step, "age": 5.0, "tokens": 100, "rollouts": size} for size in sizes]
        run_dir.append_line(run.trained, {"step": step, "groups": [], "stale": stale, "dropped": []})
    assert counts.metrics()["rollouts/unscorable/staleness"] == 11
    assert counts.metrics()["rollouts/unscorable"] == 0  # they were scored


def test_a_group_whose_rewards_are_equal_is_counted_once_it_is_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    counts = RolloutCounts(run, CFG)
    for group, rollouts in {
        1: [(0.0, 1), (0.0, 5), (0.0, 2), (0.0, 3)],  # all wrong: 0 whatever it cost
        2: [(1.0, 2), (1.0, 2), (1.0, 2), (1.0, 2)],  # all correct with equal cost
        3: [(1.0, 2), (1.0, 2), (1.0, 2), (1.0, 3)],  # all correct; the bonus tells them apart
        4: [(1.0, 2), (0.0, 2), (1.0, 2)],  # not whole
    }.items():
        for reward, tool_calls in rollouts:
            ended(run, group=group, reward=reward, tool_calls=tool_calls)
    found = counts.metrics()
    assert (found["groups/done"], found["groups/zero_variance"]) == (3, 2)
    ended(run, Cause.POLICY, group=4, reward=None)
    found = counts.metrics()
    assert (found["groups/done"], found["groups/zero_variance"]) == (4, 2)


def test_the_rate_is_that_of_the_last_rollouts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    counts = RolloutCounts(run, CFG)
    ended(run, at="2026-11-29T12:00:00Z")
    assert "rollouts/per_hour" not in counts.metrics()
    for minute in (1, 2, 3):
        ended(run, at=f"2026-11-29T12:0{minute}:00Z")
    assert counts.metrics()["rollouts/per_hour"] == 60.0


def test_a_group_that_a_death_has_cut_is_not_mixed_with_the_one_that_is_made_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for started_s in (1_800_000_000, 1_800_000_100):
        run_dir.append_line(run.attempts, {"event": "started", "time_s": started_s + 0.5})
    for second, reward in [(10, 0.0)] * 2 + [(110, 1.0)] * 4:
        at = datetime.fromtimestamp(1_800_000_000 + second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended(run, group=7, reward=reward, at=at)
    found = RolloutCounts(run, CFG).metrics()
    assert (found["groups/done"], found["groups/zero_variance"]) == (1, 1)
