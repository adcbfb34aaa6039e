"""What travels from the rollout worker to an optimizer step: whole scored groups, with the version of every call.

A group is ``num_generations`` rollouts of one task; a rollout is one or more rows, more where its history forked. All
rows of a group are trained in one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One sampled turn of a rollout, of whose tokens some are trained."""

    start: int
    """Tokens before its output: the length of its prompt."""
    output_ids: Sequence[int]
    version: int
    """Lowest policy version that can have sampled it; a call during a weight sync is of two."""

    @property
    def stop(self) -> int:
        return self.start + len(self.output_ids)


@dataclass
class Row:
    """One training row: all token ids of a conversation that was never rewritten."""

    input_ids: list[int]
    completion_mask: list[int]
    """1: sampled by the policy and trained. 0: context."""
    old_log_probs: list[float]
    versions: list[int]
    """Policy version of each token; that of context means nothing."""

    @property
    def trained_tokens(self) -> int:
        return sum(self.completion_mask)


@dataclass
class Rollout:
    """One scored rollout."""

    rows: list[Row]
    reward: float
    advantage: float
    version: float
    """``oldest_version`` of its rows."""
    truncated: bool = False
    """A limit ended it or one of its calls: output cap, context, model calls or time."""
    tool_calls: int = 0
    tool_failures: int = 0

    @property
    def trained_tokens(self) -> int:
        return sum(row.trained_tokens for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)


@dataclass
class ScoredGroup:
    """A group whose rollouts have all ended; the worker puts it on the queue in one piece.

    ``rollouts`` has those that could be scored. Of one that could not, nothing is known but that it was made.
    """

    ticket: int
    position: int
    """Place of its task on the walk through the training tasks."""
    rollouts: list[Rollout]
    enqueued_at: float = field(default=0.0, compare=False)
    """Set by TRL's loop."""

    @property
    def tokens(self) -> int:
        return sum(rollout.tokens for rollout in self.rollouts)

    @property
    def silent(self) -> bool:
        """All rewards are equal, so that no rollout has an advantage."""
        return not any(rollout.advantage for rollout in self.rollouts)

    def oldest(self) -> float:
        """Version of its oldest rollout; a group is as old as that."""
        return min(rollout.version for rollout in self.rollouts)

    def counted_on(self, versions: int) -> ScoredGroup:
        """The same group where every version is called ``versions`` higher."""
        moved = [
            dataclasses.replace(
                rollout,
                version=rollout.version + versions,
                rows=[dataclasses.replace(row, versions=[v + versions for v in row.versions]) for row in rollout.rows],
            )
            for rollout in self.rollouts
        ]
        return dataclasses.replace(self, rollouts=moved)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ScoredGroup:
        rollouts = [
            Rollout(**{**rollout, "rows": [Row(**row) for row in rollout["rows"]]}) for rollout in value["rollouts"]
        ]
        return cls(**{**value, "rollouts": rollouts})


def oldest_version(rows: Iterable[Row]) -> float:
    """Mean policy version of the sampled tokens of the oldest row: a row is as old as its calls.

    Raises: ValueError: no rows, or one without a sampled token; such a rollout is unscorable and in no group.
    """
    return min(_mean_version(row) for row in rows)


def _mean_version(row: Row) -> float:
    sampled = [version for version, mask in zip(row.versions, row.completion_mask, strict=True) if mask]
    if not sampled:
        raise ValueError("no token of the row was sampled, so it has no age")
    return sum(sampled) / len(sampled)


def rows_with_versions(sequences: Sequence[Any], calls: Sequence[Call], unknown: int) -> list[Row]:
    """TRL's training sequences of one rollout as rows.

    A call belongs to the first row that trains its output where its prompt ends, behind the calls that it has already;
    the calls of a row, and the rows, are in order.

    Args: sequences: ``TrainingSequence`` of TRL. unknown: version of a sampled token that no call accounts for.
    """
    rows = [
        Row(
            list(sequence.input_ids),
            list(sequence.completion_mask),
            list(sequence.old_log_probs),
            [unknown] * len(sequence.input_ids),
        )
        for sequence in sequences
    ]
    at, ends = 0, [0] * len(rows)
    for call in calls:
        for index in range(at, len(rows)):
            if call.start >= ends[index] and _trains(rows[index], call):
                at, ends[index] = index, call.stop
                rows[index].versions[call.start : call.stop] = [call.version] * len(call.output_ids)
                break
    return rows


def _trains(row: Row, call: Call) -> bool:
    """Whether the row has the call's output in its place, and not as the context of a later call alone."""
    span = slice(call.start, call.stop)
    return any(row.completion_mask[span]) and row.input_ids[span] == list(call.output_ids)
