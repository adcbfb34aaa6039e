"""TRL's rollout loop, narrowed in three places: which task comes next, how a rollout is scored, what a group becomes.

It runs in the worker's own process. The trainer says which groups to make (``scheduler.Ticket``); TRL's loop runs the
sessions, and gives each finished group to ``_score_group``, which sends it back in one piece with the policy version of
every token.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any, Protocol

from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from services.common import signals
from services.trainer import control, objective, one_line
from services.trainer.groups import Call, Rollout, Row, ScoredGroup, oldest_version, rows_with_versions
from services.trainer.scheduler import RolloutEnded, Ticket

POLL_S = 0.05
"""Between two looks for a ticket."""


class Captured(Protocol):
    """What a session knows of its rollout that TRL does not ask for."""

    calls: list[Call]
    version: int
    """When it began; of a call whose version is not known."""
    truncated: bool


class RolloutLoop(_HarnessRolloutLoop):
    """TRL's loop, which makes the groups that the trainer has written tickets for.

    Args:
        advantage: the recipe's ``algorithm.advantage``.
        shuffle_rewards: the recipe's ``control.shuffle_rewards``.
    """

    def __init__(self, *, advantage: objective.AdvantageScale, shuffle_rewards: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A killed trainer must not leave a worker behind that goes on making rollouts for nobody.
        signals.die_with_parent()
        one_line.install()
        self._advantage = advantage
        self._shuffle_rewards = shuffle_rewards
        self._tickets: list[Ticket] = []
        self._rows: dict[str, tuple[list[Row], bool]] = {}
        """By rollout id: rows of a rollout that has ended, and whether a limit cut it."""

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Numbers of tickets, ``num_generations`` times each. TRL asks before there is one: ``_generate_one`` waits."""
        number = 0
        while True:
            for _ in range(self.num_generations):
                yield number, {"prompt": []}
            number += 1

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        ticket = await self._ticket(group_id)
        if ticket is None:
            return self._EMPTY_ROLLOUT
        row = self.dataset[ticket.position % len(self.dataset)]
        result = await super()._generate_one(row["prompt"], tool_dict, tools, group_id=ticket.position)
        if rows := self._rows_of(result[2]):
            self.rollout_buffer.put_nowait(RolloutEnded(group_id, oldest_version(rows)))
        return result

    async def _ticket(self, number: int) -> Ticket | None:
        """Returns: None if the worker is stopped before the ticket comes."""
        while len(self._tickets) <= number:
            if self._stop_event.is_set():
                return None
            try:
                self._tickets.append(self.rollout_buffer.tickets.get_nowait())
            except queue.Empty:
                await asyncio.sleep(POLL_S)
        return self._tickets[number]

    def _rows_of(self, sequences: list[Any]) -> list[Row]:
        """Rows of one rollout that has just ended, kept until its group is scored."""
        if not sequences:
            return []
        rollout_id = sequences[0].rollout_id
        captured: Captured = self._factory.captured.pop(rollout_id)
        rows = rows_with_versions(sequences, captured.calls, unknown=captured.version)
        self._rows[rollout_id] = rows, captured.truncated
        return rows

    async def _score_group(self, group: RolloutGroup) -> list[ScoredGroup]:
        if self._stop_event.is_set() and not all(group.completions_sequences):
            # A stop has closed the slow ones, or their ticket never came: those that were quick are no group.
            return []
        ticket = self._tickets[group.group_id]
        ended = [self._rows.pop(sequences[0].rollout_id, None) if sequences else None
                 for sequences in group.completions_sequences]  # fmt: skip
        rewards = [reward if rows is not None else None
                   for reward, rows in zip(group.rollout_rewards, ended, strict=True)]  # fmt: skip
        if self._shuffle_rewards:
            rewards = control.shuffled(rewards, ticket.position)
        advantages = objective.advantages(rewards, self._advantage)
        calls = zip(group.tool_call_counts, group.tool_failure_counts, strict=True)
        rollouts = [
            Rollout(rows[0], reward, advantage, oldest_version(rows[0]), rows[1], tool_calls, failures)
            for rows, reward, advantage, (tool_calls, failures) in zip(ended, rewards, advantages, calls, strict=True)
            if rows is not None and reward is not None
        ]
        return [ScoredGroup(ticket.number, ticket.position, rollouts)]
