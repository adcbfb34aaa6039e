"""What came of the rollouts so far, by cause, for ``metrics.jsonl``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.common.causes import Cause
from services.common.run_dir import RunDir
from services.common.tail import Tail
from services.trainer.rollout_log import INDEX


class RolloutCounts:
    """Counts the lines of ``rollouts/index.jsonl`` since the run's first attempt; each is read once."""

    def __init__(self, run: RunDir) -> None:
        self._tail = Tail(run.rollouts / INDEX)
        # Every cause from the start: a column that first appears with its first failure is easy to miss.
        causes = (f"rollouts/unscorable/{cause}" for cause in Cause)
        self._counts = Counter(dict.fromkeys(["rollouts/done", "rollouts/unscorable", *causes], 0))

    def metrics(self) -> dict[str, float]:
        """``rollouts/done``, ``rollouts/unscorable``, ``rollouts/unscorable/<cause>`` and
        ``rollouts/breach/<name>``, the capture gate's findings, fatal or not; rollouts in all of them."""
        for line in self._tail.new_lines():
            self._count(line)
        return {name: float(count) for name, count in sorted(self._counts.items())}

    def _count(self, line: dict[str, Any]) -> None:
        self._counts["rollouts/done"] += 1
        if not line["scored"]:
            self._counts["rollouts/unscorable"] += 1
            self._counts[f"rollouts/unscorable/{line['cause']}"] += 1
        self._counts.update(f"rollouts/breach/{name}" for name in set(line["breaches"]))
