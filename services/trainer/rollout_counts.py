"""What came of the rollouts so far, for ``metrics.jsonl``: by cause, by group, and how fast."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.common import run_dir
from services.common.causes import Cause
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.tail import Tail
from services.trainer import reward
from services.trainer.rollout_log import INDEX

RATE_WINDOW = 64
"""Rollouts over which the rate is taken."""


@dataclass
class _Outcome:
    """What the reward is computed from: ``services.trainer.reward.Outcome``."""

    env_reward: float | None
    tool_call_count: int


class RolloutCounts:
    """Counts the lines of ``rollouts/index.jsonl`` since the run's first attempt; each is read once."""

    def __init__(self, run: RunDir, cfg: Recipe) -> None:
        self._cfg = cfg
        self._tail = Tail(run.rollouts / INDEX)
        self._trained = Tail(run.trained)
        # Every cause from the start: a column that first appears with its first failure is easy to miss.
        causes = (f"rollouts/unscorable/{cause}" for cause in Cause)
        totals = ("rollouts/done", "rollouts/unscorable", "rollouts/cap_hits", "rollouts/budget_stops")
        groups = ("groups/done", "groups/zero_variance")
        self._counts = Counter(dict.fromkeys([*totals, *causes, *groups], 0))
        self._open_groups: dict[tuple[int, int], list[float | None]] = {}
        # The index has whole seconds.
        starts = (line for line in run_dir.read_lines(run.attempts) if line["event"] == "started")
        self._attempts_s = [int(line["time_s"]) for line in starts]
        self._ended_s: deque[float] = deque(maxlen=RATE_WINDOW)

    def metrics(self) -> dict[str, float]:
        """Counts since the run began, and ``rollouts/per_hour`` over the last ones.

        ``rollouts/unscorable/<cause>`` and ``rollouts/breach/<name>``, the capture gate's findings, fatal or not,
        count rollouts; so do ``rollouts/cap_hits`` (a turn ended at the output cap) and ``rollouts/budget_stops`` (the
        agent asked for more model calls than it has). ``groups/zero_variance``: all scored rewards are equal, so that
        the group trains nothing.
        """
        for line in self._tail.new_lines():
            self._count(line)
        for line in self._trained.new_lines():
            # Scored, and then too old to train on: their groups are made again.
            self._counts[f"rollouts/unscorable/{Cause.STALENESS}"] += sum(g["rollouts"] for g in line["stale"])
        rate = {"rollouts/per_hour": per_hour} if (per_hour := self._per_hour()) is not None else {}
        return {**{name: float(count) for name, count in sorted(self._counts.items())}, **rate}

    def _count(self, line: dict[str, Any]) -> None:
        self._counts["rollouts/done"] += 1
        if not line["scored"]:
            self._counts["rollouts/unscorable"] += 1
            self._counts[f"rollouts/unscorable/{line['cause']}"] += 1
        self._counts.update(f"rollouts/breach/{name}" for name in set(line["breaches"]))
        self._counts["rollouts/cap_hits"] += line.get("cap_hits", 0) > 0
        self._counts["rollouts/budget_stops"] += line.get("budget_stops", 0) > 0
        self._ended_s.append(datetime.fromisoformat(line["at"]).timestamp())
        self._count_group(line)

    def _count_group(self, line: dict[str, Any]) -> None:
        if line["group"] is None:
            return
        # A group that a death has cut is made again by the next attempt.
        attempt = bisect.bisect_right(self._attempts_s, self._ended_s[-1])
        group = (attempt, line["group"])
        rewards = self._open_groups.setdefault(group, [])
        rewards.append(self._trained_reward(line) if line["scored"] else None)
        if len(rewards) < self._cfg.rollout.num_generations:
            return
        del self._open_groups[group]
        scored = {reward for reward in rewards if reward is not None}
        self._counts["groups/done"] += 1
        self._counts["groups/zero_variance"] += len(scored) == 1

    def _trained_reward(self, line: dict[str, Any]) -> float | None:
        return reward.score(
            _Outcome(line["reward"], line["tool_calls"]),
            bonus=self._cfg.reward.tool_efficiency_bonus,
            max_tool_calls=self._cfg.rollout.max_tool_calling_iterations,
        )

    def _per_hour(self) -> float | None:
        """None until two rollouts have ended at different seconds."""
        if len(self._ended_s) < 2 or (seconds := max(self._ended_s) - min(self._ended_s)) <= 0:
            return None
        return (len(self._ended_s) - 1) * 3600.0 / seconds
