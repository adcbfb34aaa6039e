from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.causes import Cause
from services.common.run_dir import RunDir
from services.trainer.rollout_counts import RolloutCounts
from services.trainer.rollout_log import INDEX


def ended(run: RunDir, cause: Cause | None = None, *breaches: str) -> None:
    line: dict[str, Any] = {"scored": cause is None, "cause": cause, "breaches": breaches}
    run_dir.append_line(run.rollouts / INDEX, line)


def test_every_cause_is_a_column_before_the_first_rollout(tmp_path: Path) -> None:
    found = RolloutCounts(RunDir(tmp_path)).metrics()
    assert set(found) == {"rollouts/done", "rollouts/unscorable", *(f"rollouts/unscorable/{cause}" for cause in Cause)}
    assert set(found.values()) == {0.0}


def test_rollouts_are_counted_by_cause_and_breach_and_each_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    counts = RolloutCounts(run)
    ended(run)
    ended(run, None, "cut_by_length", "cut_by_length")
    ended(run, Cause.CAPTURE, "logprob_misalign", "cut_by_length")
    counts.metrics()
    ended(run, Cause.POLICY)
    found = {name: count for name, count in counts.metrics().items() if count}
    assert found == {
        "rollouts/done": 4, "rollouts/unscorable": 2, "rollouts/unscorable/capture": 1, "rollouts/unscorable/policy": 1,
        "rollouts/breach/cut_by_length": 2, "rollouts/breach/logprob_misalign": 1,
    }  # fmt: skip
