"""TRL's rollout loop, narrowed in two places: which task comes next, and what becomes of a group.

It runs in the worker's own process. TRL walks from a start index and forgets groups that ended out of order; here the
walk follows a ``Cursor``. TRL trains a group however few of its rollouts can be scored; here one with too few is made
again, and after some tries dropped and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from services.common import signals
from services.trainer import control, one_line
from services.trainer.groups import ended_with_nothing, numbered
from services.trainer.resume import Cursor


class RolloutLoop(_HarnessRolloutLoop):
    """TRL's loop with this run's walk through the tasks; a group's id is its position on it.

    Args:
        cursor: where the walk goes on.
        min_group_size: rollouts of a group that must be scored; fewer say nothing about each other.
        max_group_tries: how often a group with fewer is made before it is dropped.
        shuffle_rewards: the recipe's ``control.shuffle_rewards``.
    """

    def __init__(
        self,
        *,
        cursor: Cursor,
        min_group_size: int,
        max_group_tries: int,
        shuffle_rewards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # A killed trainer must not leave a worker behind that goes on making rollouts for nobody.
        signals.die_with_parent()
        one_line.install()
        self._fresh = cursor.positions()
        self._again: deque[int] = deque()
        self._shuffle_rewards = shuffle_rewards
        self._min_group_size = min_group_size
        self._max_group_tries = max_group_tries
        self._tries: Counter[int] = Counter()

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while True:
            position = self._again.popleft() if self._again else next(self._fresh)
            row = self.dataset[position % len(self.dataset)]
            for _ in range(self.num_generations):
                yield position, row

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        usable = sum(reward is not None for reward in group.rollout_rewards)
        if usable < self._min_group_size:
            return self._too_few(group.group_id)
        self._tries.pop(group.group_id, None)
        if self._shuffle_rewards:
            group.rollout_rewards = control.shuffled(group.rollout_rewards, group.group_id)
        samples = await super()._score_group(group)
        return list(numbered(samples)) or [ended_with_nothing(group.group_id)]

    def _too_few(self, position: int) -> list[RolloutSample]:
        self._tries[position] += 1
        if self._tries[position] < self._max_group_tries:
            self._again.append(position)
            self._push_metrics({"groups/retried_total": 1.0})
            return []
        del self._tries[position]
        self._push_metrics({"groups/dropped_total": 1.0})
        return [ended_with_nothing(position)]
