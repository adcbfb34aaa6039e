"""Which group is made next, which one is trained next, and what became of each: whole groups, never beyond the limit.

The trainer's process decides, because it alone knows the policy version and what has been trained. It hands the worker
*tickets*, one per group to make, and gets scored groups back.

* **Admission.** At most ``max_open_groups`` groups are open: ticketed and not yet trained or given up. By default that
  is ``(max_staleness + 1) * groups_per_step``: each step uses up ``groups_per_step`` of them, so the last of the open
  groups is at most ``max_staleness`` steps old when its turn comes.
* **Order.** The group that would be too old first is trained first, and a step is held back while it would make a
  group too old that is still being made. Waiting costs no version: in steady state nothing is thrown away, however
  long a rollout takes, so what is trained is as long as what is sampled.
* **Too old all the same** (after a death, or with more open groups than that): the whole group is dropped, said so,
  and made again; each pass through the tasks trains every task once.

The age of a row is that of its calls: policy versions between sampling and training, mean over its sampled tokens; a
group is as old as its oldest row.
Nothing here reads a clock or knows torch.
"""

from __future__ import annotations

import math
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.recipe import Recipe
from services.trainer.groups import ScoredGroup
from services.trainer.resume import Cursor


@dataclass(frozen=True)
class Ticket:
    """One group for the worker to make."""

    number: int
    """Tickets of a worker are numbered from 0, without gaps."""
    position: int


@dataclass(frozen=True)
class RolloutEnded:
    """A rollout of a group that is still being made has ended."""

    ticket: int
    version: float
    """``groups.oldest_version`` of its rows."""


DRAIN_POLL_S = 0.2


class Channel(Protocol):
    """Both directions between trainer and worker: multiprocessing queues, or plain ones in a test."""

    tickets: Any

    def get(self, timeout: float | None = None) -> ScoredGroup | RolloutEnded: ...
    def qsize(self) -> int: ...


@dataclass(frozen=True)
class Limits:
    """Keys of the recipe's sections ``rollout`` and ``trainer``."""

    groups_per_step: int
    max_staleness: int
    max_open_groups: int
    min_group_size: int
    max_group_tries: int
    refill_silent_groups: int = 0


def limits(cfg: Recipe) -> Limits:
    return Limits(
        groups_per_step=cfg.trainer.groups_per_step,
        max_staleness=cfg.rollout.max_staleness,
        max_open_groups=cfg.max_open_groups,
        min_group_size=cfg.rollout.min_group_size,
        max_group_tries=cfg.rollout.max_group_tries,
        refill_silent_groups=cfg.rollout.refill_silent_groups,
    )


@dataclass(frozen=True)
class Dropped:
    """A group that was thrown away for its age, and will be made again."""

    position: int
    age: float
    tokens: int
    rollouts: int


@dataclass(frozen=True)
class StepAccount:
    """What became of the groups that were settled by one optimizer step, as ``trained.jsonl`` has it."""

    groups: list[int] = field(default_factory=list)
    """Positions of those that were trained."""
    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    silent: int = 0
    """Of those, how many had equal rewards and so no gradient."""
    refilled: list[int] = field(default_factory=list)
    """Silent groups that were passed over, another one being trained in their place."""
    stale: list[Dropped] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Groups that were given up: too few of their rollouts could be scored, ``max_group_tries`` times."""


@dataclass
class _Open:
    """A group that the worker is making."""

    ticket: Ticket
    version: int
    """When its ticket was written."""
    ended: list[float] = field(default_factory=list)
    """Versions of its rollouts that have ended."""

    def oldest(self, version: int) -> float:
        """Version of its oldest rollout, were those that still run to end now: half of their calls are newer than the
        middle between their start and now."""
        return min([*self.ended, (self.version + version) / 2])


class GroupScheduler:
    """See the module. One for each attempt of a run; a new one goes on from a checkpoint's cursor and pending groups.

    Args:
        channel: to and from the worker. cursor: where the walk through the tasks goes on.
        pending: groups that were scored before a resume and not trained.
    """

    def __init__(self, channel: Channel, limits: Limits, cursor: Cursor, pending: Iterable[ScoredGroup] = ()) -> None:
        self._channel = channel
        self._limits = limits
        self._fresh = cursor.next
        self._again = deque(cursor.again)
        self._open: dict[int, _Open] = {}
        self._ready: list[ScoredGroup] = list(pending)
        self._taken: list[ScoredGroup] = []
        self._tries: Counter[int] = Counter()
        self._next_ticket = 0
        self._refilled: list[ScoredGroup] = []
        self._stale: list[Dropped] = []
        self._dropped: list[int] = list(cursor.dropped)

    # --- Making groups ----------------------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Write tickets for as many groups as may be open. Args: version: of the policy that is served."""
        while len(self._open) + len(self._ready) + len(self._taken) < self._limits.max_open_groups:
            ticket = Ticket(self._next_ticket, self._next_position())
            self._next_ticket += 1
            self._open[ticket.number] = _Open(ticket, version)
            self._channel.tickets.put(ticket)

    def _next_position(self) -> int:
        if self._again:
            return self._again.popleft()
        self._fresh += 1
        return self._fresh - 1

    def receive(self, timeout_s: float | None) -> bool:
        """Take one message of the worker's. Returns: whether there was one in time."""
        try:
            message = self._channel.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if isinstance(message, RolloutEnded):
            if (group := self._open.get(message.ticket)) is not None:
                group.ended.append(message.version)
        else:
            self._scored(message)
        return True

    def _scored(self, group: ScoredGroup) -> None:
        self._open.pop(group.ticket)
        if len(group.rollouts) >= self._limits.min_group_size:
            self._ready.append(group)
            return
        self._tries[group.position] += 1
        if self._tries[group.position] < self._limits.max_group_tries:
            self._again.append(group.position)
        else:
            self._dropped.append(group.position)

    # --- Training groups --------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[ScoredGroup]:
        """The groups of the next step, or none while there are too few or a step has to wait.

        Args: version: of the policy that is served now, which the step will replace.
        """
        self._drop_stale(version)
        self._refill_silent()
        self._ready.sort(key=ScoredGroup.oldest)
        wanted = self._limits.groups_per_step
        if len(self._ready) < wanted or self._must_wait(version):
            return []
        self._taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        return self._taken

    def _drop_stale(self, version: int) -> None:
        for group in [group for group in self._ready if version - group.oldest() > self._limits.max_staleness]:
            self._ready.remove(group)
            self._again.append(group.position)
            age = version - group.oldest()
            self._stale.append(Dropped(group.position, round(age, 3), group.tokens, len(group.rollouts)))

    def _refill_silent(self) -> None:
        for group in [group for group in self._ready if group.silent]:
            if len(self._refilled) >= self._limits.refill_silent_groups:
                return
            self._ready.remove(group)
            self._refilled.append(group)

    def _must_wait(self, version: int) -> bool:
        """Whether a group that is still being made would be too old by its turn, were a step made now.

        The groups that are left take turns in the order of their age; the one with i before it is trained
        ``1 + i // groups_per_step`` versions later. Only what is being made can gain by waiting, and not what has just
        begun: more of those than the limit has room for are the choice of ``max_open_groups``.
        """
        size, furthest = self._limits.groups_per_step, max(self._limits.max_staleness - 1, 0)
        left = [(self._last_version(group.oldest()), False) for group in self._ready[size:]]
        left += [(self._last_version(group.oldest(version)), True) for group in self._open.values()]
        turns = enumerate(sorted(left))
        return any(running and last < version + 1 + min(before // size, furthest) for before, (last, running) in turns)

    def _last_version(self, oldest: float) -> int:
        """Last policy version at which a group with this oldest rollout may still be trained."""
        return math.floor(oldest + self._limits.max_staleness)

    def step_ended(self) -> StepAccount:
        """The optimizer has stepped: what it trained on is settled."""
        taken, self._taken = self._taken, []
        refilled, self._refilled = self._refilled, []
        stale, self._stale = self._stale, []
        dropped, self._dropped = self._dropped, []
        return StepAccount(
            groups=[group.position for group in taken],
            rollouts=sum(len(group.rollouts) for group in taken),
            rows=sum(len(rollout.rows) for group in taken for rollout in group.rollouts),
            tokens=sum(group.tokens for group in taken),
            silent=sum(group.silent for group in taken),
            refilled=[group.position for group in refilled],
            stale=stale,
            dropped=dropped,
        )

    # --- For a checkpoint -------------------------------------------------------------------------------------------

    def position(self) -> tuple[Cursor, Sequence[ScoredGroup]]:
        """Where the walk stands, and the groups that are scored and not trained; takes what lies in the queue."""
        self._read(self._channel.qsize())
        again = [*self._again, *(group.ticket.position for group in self._open.values())]
        cursor = Cursor(self._fresh, tuple(sorted(again)), tuple(self._dropped))
        return cursor, [*self._refilled, *self._taken, *self._ready]

    def drain(self, alive: Callable[[], bool], timeout_s: float) -> bool:
        """Take what the worker still sends until it has ended. Returns: whether it ended by itself in time."""
        while timeout_s > 0 and alive():
            if not self.receive(timeout_s=DRAIN_POLL_S):
                timeout_s -= DRAIN_POLL_S
        return not alive()

    def worker_ended(self, *, whole: bool) -> None:
        """The worker is gone and its queue is not read again. Args: whether all that it sent arrived in one piece."""
        if whole:
            while self.receive(timeout_s=DRAIN_POLL_S):
                pass
        self._channel = _Closed()

    def _read(self, messages: int) -> None:
        """What lies there now and no more: a worker that was held up by a full queue goes on as it is emptied."""
        for _ in range(messages):
            if not self.receive(timeout_s=DRAIN_POLL_S):
                return


class _Closed:
    """A channel without a worker behind it."""

    def __init__(self) -> None:
        self.tickets: Any = queue.Queue()

    def get(self, timeout: float | None = None) -> ScoredGroup | RolloutEnded:
        raise queue.Empty

    def qsize(self) -> int:
        return 0
