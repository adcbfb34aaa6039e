"""Which samples of which groups are trained: exact books, so that a resume repeats no task and loses none.

TRL remembers the groups that its data loader has fetched. That is one batch too early (the loader fetches ahead), it
never hears of a group that had nothing to train on, and a group that ended before an older one is repeated. Here every
sample is followed from the worker's queue to the optimizer step that used it, and the worker also says when a group
ended with nothing.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from services.trainer.resume import Cursor

INDEX = "group/index"
SIZE = "group/size"
"""Keys in a sample's ``metrics``: its number in its group, and how many samples the group has in all."""
SERIAL = "serial"
WHOLE_GROUP_S = 60.0
"""The worker puts the samples of a group on the queue in one go; a rest that does not come is a broken worker."""

logger = logging.getLogger("trainer")

Key = tuple[int, int, int]
"""A sample: position of its group, its number in the group, and how many samples the group has."""


@dataclass(frozen=True)
class Trained:
    """What came of the samples that left the queue up to one optimizer step."""

    samples: list[Key] = field(default_factory=list)
    stale: list[Key] = field(default_factory=list)
    """Taken from the queue and dropped by TRL: sampled by a policy too old to train on."""
    dropped: list[int] = field(default_factory=list)
    """Positions of groups that ended with nothing to train on."""


def ended_with_nothing(position: int) -> RolloutSample:
    """What the worker puts on the queue for a group without a sample; no trainer sees it."""
    return RolloutSample(
        prompt=[], completion=[], input_ids=[], completion_mask=[], old_log_probs=[], advantage=0.0, model_version=0,
        group_id=position, metrics={SIZE: 0},
    )  # fmt: skip


def numbered(samples: Sequence[RolloutSample]) -> Sequence[RolloutSample]:
    """Write into the samples of one whole group who they are."""
    for index, sample in enumerate(samples):
        sample.metrics |= {INDEX: index, SIZE: len(samples)}
    return samples


class GroupBook:
    """The worker's queue as the trainer sees it, and the account of what came of each sample.

    Args:
        rollout_queue: the worker's. cursor: where its walk through the tasks began.
        pending: samples from before a resume, handed out before those of the queue.
    """

    def __init__(self, rollout_queue: Any, cursor: Cursor, pending: Iterable[RolloutSample] = ()) -> None:
        self._queue = rollout_queue
        self._cursor = cursor
        self._held: deque[RolloutSample] = deque(pending)
        self._out: deque[tuple[int, RolloutSample]] = deque()
        """Handed out and not settled, by serial number."""
        self._serial = 0
        self._received: Counter[int] = Counter()
        """Position -> samples that came of a group that is not whole yet."""
        self._done: set[int] = set()
        """Positions at or after the cursor's whose group is whole: each of its samples is trained, out or held."""
        self._dropped = list(cursor.dropped)
        self._rows: deque[list[int]] = deque()
        """Serials in each micro-batch that was collated and not trained."""
        self._in_step: set[int] = set()
        self._touched: set[int] = set()
        """Positions of which a sample is trained."""

    # --- The worker's queue, for TRL's data set ---------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> RolloutSample:
        """The oldest sample. Raises: queue.Empty: none came in time."""
        if not self._held:
            self.receive(timeout)
        if not self._held:
            raise queue.Empty  # nothing, or the end of a group without samples; TRL asks again
        sample = self._held.popleft()
        self._serial += 1
        self._out.append((self._serial, sample))
        metrics = {key: value for key, value in sample.metrics.items() if key not in (INDEX, SIZE)}
        return replace(sample, metrics={**metrics, SERIAL: self._serial})

    def receive(self, timeout: float | None) -> bool:
        """Take one sample from the worker's queue and hold it. Returns: whether there was one in time."""
        try:
            self._receive(self._queue.get(timeout=timeout))
        except queue.Empty:
            return False
        return True

    def detach(self) -> None:
        """The worker is gone: its queue holds no whole sample any more, and is not read again."""
        self._queue = queue.Queue()

    def qsize(self) -> int:
        return len(self._held) + int(self._queue.qsize())

    def _receive(self, sample: RolloutSample) -> None:
        position, size = sample.group_id, int(sample.metrics[SIZE])
        if size == 0:
            self._done.add(position)
            self._dropped.append(position)
            return
        self._held.append(sample)
        self._received[position] += 1
        if self._received[position] == size:
            del self._received[position]
            self._done.add(position)

    # --- From the data loader to the optimizer ----------------------------------------------------------------------

    def collator(self, collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``collate``, which also notes which samples a micro-batch holds."""

        def noting(examples: list[Any]) -> Any:
            (rows,) = examples
            self._rows.append([int(sample["metrics"].pop(SERIAL)) for row in rows for sample in row])
            return collate(examples)

        return noting

    def trained_row(self) -> None:
        """The oldest micro-batch went through forward and backward."""
        self._in_step.update(self._rows.popleft())

    def step_ended(self) -> Trained:
        """The optimizer has stepped: what it trained on is settled."""
        trained: list[Any] = []
        stale: list[Any] = []
        last = max(self._in_step, default=0)
        while self._out and self._out[0][0] <= last:
            serial, sample = self._out.popleft()
            # The loader keeps the order of the queue: one that was passed over was dropped for its age.
            (trained if serial in self._in_step else stale).append(_key(sample))
        self._in_step.clear()
        self._touched.update(position for position, *_ in trained)
        dropped, self._dropped = self._dropped, []
        return Trained(trained, stale, dropped)

    # --- For a checkpoint -------------------------------------------------------------------------------------------

    def position(self, alive: Callable[[], bool] = lambda: True) -> tuple[Cursor, list[RolloutSample]]:
        """Where the walk stands, and the samples that are not trained yet, oldest first; empties the worker's queue.

        Args: alive: whether the worker can still send the rest of a group that came in part.
        Raises: RuntimeError: the rest of a group did not come.
        """
        self._take_whole_groups(alive)
        pending = [sample for _, sample in self._out] + list(self._held)
        # The worker is gone, and took the rest of a group with it: the group is made again, unless a part is trained.
        cut = set(self._received)
        if lost := sorted(cut & self._touched):
            logger.error("a part of these groups is lost with the worker", extra={"positions": lost})
        pending = [sample for sample in pending if sample.group_id not in cut - self._touched]
        self._done |= cut & self._touched
        end = max(self._done, default=self._cursor.next - 1) + 1
        end = max(end, self._cursor.next)
        started = {*self._cursor.again, *range(self._cursor.next, end)}
        return Cursor(end, tuple(sorted(started - self._done)), tuple(self._dropped)), pending

    def _take_whole_groups(self, alive: Callable[[], bool]) -> None:
        until = time.monotonic() + WHOLE_GROUP_S
        # What lies there now, and no more: a worker that was held up by a full queue goes on as it is emptied.
        waiting = int(self._queue.qsize())
        while waiting > 0 or (self._received and alive()):
            waiting -= 1
            if not self.receive(timeout=0.2) and self._received and time.monotonic() > until:
                raise RuntimeError(
                    f"the rest of group {min(self._received)} did not come in {WHOLE_GROUP_S:g} s; no checkpoint "
                    "can say which tasks are done"
                )


def _key(sample: RolloutSample) -> Key:
    return sample.group_id, int(sample.metrics[INDEX]), int(sample.metrics[SIZE])
