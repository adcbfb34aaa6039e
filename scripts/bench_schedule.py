"""``python -m scripts.bench_schedule [--index FILE]``: what scheduling costs and gives, simulated; no GPU, no sandbox.

Time is virtual. What decides is the real ``GroupScheduler``; rollout slots and a trainer that takes ``train_s`` per
step stand around it. Beside it a model of TRL's own scheduling, which this stack used before: the policy version is
stamped when the first rollout of a group starts, the limit is looked at when a row is fetched, a step is a fixed number
of rows, one row is fetched ahead, and what is too old is not made again.

Durations are lognormal, or drawn from those of a run: ``--index runs/<run>/rollouts/index.jsonl``.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import math
import queue
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from services.common import run_dir
from services.trainer.groups import Rollout, Row, ScoredGroup, oldest_version
from services.trainer.resume import Cursor
from services.trainer.scheduler import GroupScheduler, Limits, RolloutEnded, Ticket

CALLS = 12
"""Model calls of a rollout, spread evenly over its duration; each samples one token here."""
FIRST_STEPS = 50
"""Steps at the start whose time is not counted: all slots begin at once."""


@dataclass(frozen=True)
class Setting:
    """The machine and the recipe of a simulated run."""

    slots: int = 32
    num_generations: int = 8
    max_staleness: int = 4
    groups_per_step: int = 1
    max_open_groups: int | None = None
    """None: the recipe's default."""
    rows_per_rollout: int = 1
    """More than 1: its history was rewritten so often."""
    train_s: float = 10.0
    steps: int = 450

    def limits(self) -> Limits:
        open_groups = self.max_open_groups or (self.max_staleness + 1) * self.groups_per_step
        return Limits(self.groups_per_step, self.max_staleness, open_groups, min_group_size=2, max_group_tries=3)


# --- Durations ----------------------------------------------------------------------------------------------------

Durations = Callable[[int], list[float]]
"""Position -> seconds of each rollout of a group that is made there; other ones whenever it is made again."""


def lognormal(
    num_generations: int = 8,
    *,
    mean_s: float = 150.0,
    cv_task: float = 0.4,
    cv_rollout: float = 0.6,
    cap_s: float = 900.0,
    seed: int = 0,
) -> Durations:
    """Rollouts around their task's mean. Args: cv_task, cv_rollout: standard deviation over mean, of tasks and of the
    rollouts of one task."""
    rng = random.Random(seed)
    means: dict[int, float] = {}

    def draw(mean: float, cv: float) -> float:
        spread = math.log(1 + cv * cv)
        return mean * math.exp(rng.gauss(-spread / 2, math.sqrt(spread)))

    def group(position: int) -> list[float]:
        mean = means.setdefault(position, draw(mean_s, cv_task))
        return [min(draw(mean, cv_rollout), cap_s) for _ in range(num_generations)]

    return group


def from_index(path: Path, num_generations: int = 8, *, seed: int = 0) -> Durations:
    """Durations of a run's rollouts: those of a group are drawn from what one task took.

    Raises: ValueError: the file has none.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    for line in run_dir.read_lines(path):
        if line.get("scored") and (taken_s := line.get("wall_s") or line.get("agent_s")):
            by_task[line["task"]].append(float(taken_s))
    if not by_task:
        raise ValueError(f"{path} has no line of a scored rollout with wall_s or agent_s; give a run's index.jsonl")
    rng, tasks = random.Random(seed), sorted(by_task)

    def group(position: int) -> list[float]:
        return rng.choices(by_task[tasks[position % len(tasks)]], k=num_generations)

    return group


# --- What is measured ---------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a simulated run came to. Rollouts count by their rows: half of a rollout's rows are half a rollout."""

    step_ends_s: list[float] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    """Duration of the rollout of each row that was trained."""
    dropped_s: list[float] = field(default_factory=list)
    """Of each row that was thrown away for its age."""
    sampled_s: list[float] = field(default_factory=list)
    """Of each row of a group that was scored."""
    trained: Counter[int] = field(default_factory=Counter)
    """Position -> rows."""
    ages: list[float] = field(default_factory=list)
    """Of each trained row, as the recipe's limit counts it: by its calls."""
    stamp_ages: list[int] = field(default_factory=list)
    """Of each trained row, by the version when its group's first rollout started. TRL's alone."""
    fresh_steps: int = 0
    """Steps with a token that the very policy sampled that the step then changed."""
    busy_s: float = 0.0
    """Seconds of all slots."""
    rows_per_rollout: int = 1

    @property
    def step_s(self) -> float:
        return (self.step_ends_s[-1] - self.step_ends_s[FIRST_STEPS]) / (len(self.step_ends_s) - 1 - FIRST_STEPS)

    @property
    def dropped_share(self) -> float:
        return len(self.dropped_s) / (len(self.dropped_s) + len(self.trained_s))

    @property
    def length_ratio(self) -> float:
        """Mean duration of what was trained over that of all that was sampled."""
        return fmean(self.trained_s) / fmean(self.sampled_s)

    @property
    def sandbox_s_per_step(self) -> float:
        return self.busy_s / len(self.step_ends_s)

    @property
    def pace(self) -> float:
        """Seconds of trained rollouts per second."""
        return sum(self.trained_s) / self.rows_per_rollout / self.step_ends_s[-1]

    @property
    def fresh_share(self) -> float:
        return self.fresh_steps / len(self.step_ends_s)

    def step(self, rows: Iterable[tuple[int, float, Row]], version: int) -> None:
        """Count what a step trains. Args: rows: position, duration of the rollout, row. version: at its begin."""
        fresh = False
        for position, taken_s, row in rows:
            self.trained[position] += 1
            self.trained_s.append(taken_s)
            self.ages.append(version - oldest_version([row]))
            fresh = fresh or version in row.versions
        self.fresh_steps += fresh


class _Clock:
    """Virtual time, what will happen in it, and which policy version was served when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._served_s = [0.0]

    @property
    def version(self) -> int:
        """The first version that is served is 1."""
        return len(self._served_s)

    def synced(self) -> None:
        self._served_s.append(self.now_s)

    def version_at(self, time_s: float) -> int:
        return bisect.bisect_right(self._served_s, time_s)

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happens))

    def advance(self) -> None:
        """Let the next thing happen."""
        self.now_s, _, happens = heapq.heappop(self._events)
        happens()


def _rows(clock: _Clock, began_s: float, count: int) -> list[Row]:
    """Rows of a rollout that ends now: a token per call, and a row per part of its history."""
    taken_s = clock.now_s - began_s
    versions = [clock.version_at(began_s + taken_s * call / CALLS) for call in range(CALLS)]
    cuts = [round(CALLS * part / count) for part in range(count + 1)]
    parts = [versions[start:stop] for start, stop in itertools.pairwise(cuts)]
    return [Row([0] * len(part), [1] * len(part), [0.0] * len(part), part) for part in parts]


class _Slots:
    """Rollout slots in TRL's order: all rollouts of a group, then those of the next; a free one never waits for its
    neighbours.

    Args: next_group: the next one to make; None: there is none now. ended: called when a rollout has ended.
    """

    def __init__(
        self,
        clock: _Clock,
        slots: int,
        next_group: Callable[[], tuple[Any, list[float]] | None],
        ended: Callable[[Any, float, float], None],
    ) -> None:
        self._clock, self._free, self._next_group, self._ended = clock, slots, next_group, ended
        self._group: Any = None
        self._left: list[float] = []
        self.busy_s = 0.0

    def fill(self) -> None:
        while self._free:
            if not self._left:
                if (made := self._next_group()) is None:
                    return
                self._group, self._left = made[0], list(reversed(made[1]))
            self._start(self._group, self._left.pop())

    def _start(self, group: Any, taken_s: float) -> None:
        self._free -= 1
        began_s = self._clock.now_s
        self._clock.after(taken_s, lambda: self._end(group, began_s, taken_s))

    def _end(self, group: Any, began_s: float, taken_s: float) -> None:
        self._free += 1
        self.busy_s += taken_s
        self._ended(group, began_s, taken_s)


# --- This stack: the real scheduler ---------------------------------------------------------------------------------


class PlainChannel:
    """``scheduler.Channel`` within one process."""

    def __init__(self) -> None:
        self.tickets: queue.Queue[Ticket] = queue.Queue()
        self.messages: queue.Queue[ScoredGroup | RolloutEnded] = queue.Queue()

    def get(self, timeout: float | None = None) -> ScoredGroup | RolloutEnded:
        return self.messages.get_nowait()

    def qsize(self) -> int:
        return self.messages.qsize()


class ScheduledRun:
    """A run that ``GroupScheduler`` decides."""

    def __init__(self, setting: Setting, durations: Durations) -> None:
        self._setting, self._durations = setting, durations
        self._clock, self._channel = _Clock(), PlainChannel()
        self._slots = _Slots(self._clock, setting.slots, self._next_ticket, self._rollout_ended)
        self.scheduler = GroupScheduler(self._channel, setting.limits(), Cursor())
        self.outcome = Outcome(rows_per_rollout=setting.rows_per_rollout)
        self._made: dict[int, list[tuple[Rollout, float]]] = defaultdict(list)
        """By ticket."""
        self._positions: dict[int, int] = {}
        """Likewise."""
        self._training = False

    def run(self) -> Outcome:
        self.scheduler.admit(self._clock.version)
        while len(self.outcome.step_ends_s) < self._setting.steps:
            if not self._training:
                self._next_step()
            self._slots.fill()
            self._clock.advance()
        self.outcome.busy_s = self._slots.busy_s
        return self.outcome

    # --- Worker

    def _next_ticket(self) -> tuple[Ticket, list[float]] | None:
        try:
            ticket = self._channel.tickets.get_nowait()
        except queue.Empty:
            return None
        self._positions[ticket.number] = ticket.position
        return ticket, self._durations(ticket.position)

    def _rollout_ended(self, ticket: Ticket, began_s: float, taken_s: float) -> None:
        rows = _rows(self._clock, began_s, self._setting.rows_per_rollout)
        version = oldest_version(rows)
        made = self._made[ticket.number]
        # Rewards differ, so that no group is silent.
        made.append((Rollout(rows, float(len(made)), len(made) - 0.5, version), taken_s))
        self._channel.messages.put(RolloutEnded(ticket.number, version))
        if len(made) == self._setting.num_generations:
            self.outcome.sampled_s += [taken_s for rollout, taken_s in made for _ in rollout.rows]
            self._channel.messages.put(ScoredGroup(ticket.number, ticket.position, [rollout for rollout, _ in made]))

    # --- Trainer: as grpo._Steps asks, and in the order of grpo._Accounts and the sync

    def _next_step(self) -> None:
        version = self._clock.version
        while not (groups := self.scheduler.take(version)):
            self.scheduler.admit(version)
            if not self.scheduler.receive(0):
                return
        rows = [(group.position, taken_s, row) for group in groups
                for rollout, taken_s in self._made.pop(group.ticket) for row in rollout.rows]  # fmt: skip
        self.outcome.step(rows, version)
        self._training = True
        self._clock.after(self._setting.train_s, self._step_ended)

    def _step_ended(self) -> None:
        for dropped in self.scheduler.step_ended().stale:
            self._count_dropped(dropped.position)
        self._training = False
        self.outcome.step_ends_s.append(self._clock.now_s)
        self._clock.synced()
        self.scheduler.admit(self._clock.version)

    def _count_dropped(self, position: int) -> None:
        ticket = min(number for number in self._made if self._positions[number] == position)
        self.outcome.dropped_s += [taken_s for rollout, taken_s in self._made.pop(ticket) for _ in rollout.rows]


# --- Before: TRL's own ----------------------------------------------------------------------------------------------


@dataclass
class _StampedGroup:
    position: int
    version: int
    """When its first rollout started."""
    made: list[tuple[list[Row], float]] = field(default_factory=list)


@dataclass
class _StampedRow:
    group: _StampedGroup
    row: Row
    taken_s: float


class StampedRun:
    """A model of TRL's worker, data set, ``FixedCountBatcher`` and of the one batch that accelerate reads ahead."""

    AHEAD = 1

    def __init__(self, setting: Setting, durations: Durations) -> None:
        self._setting, self._durations = setting, durations
        self._clock = _Clock()
        self._slots = _Slots(self._clock, setting.slots, self._next_group, self._rollout_ended)
        self.outcome = Outcome(rows_per_rollout=setting.rows_per_rollout)
        self._positions = itertools.count()
        self._scored: deque[_StampedRow] = deque()
        self._fetched: list[_StampedRow] = []
        self._training = False

    def run(self) -> Outcome:
        while len(self.outcome.step_ends_s) < self._setting.steps:
            if not self._training:
                self._next_step()
            self._slots.fill()
            self._clock.advance()
        self.outcome.busy_s = self._slots.busy_s
        return self.outcome

    def _next_group(self) -> tuple[_StampedGroup, list[float]]:
        group = _StampedGroup(next(self._positions), self._clock.version)
        return group, self._durations(group.position)

    def _rollout_ended(self, group: _StampedGroup, began_s: float, taken_s: float) -> None:
        group.made.append((_rows(self._clock, began_s, self._setting.rows_per_rollout), taken_s))
        if len(group.made) == self._setting.num_generations:
            rows = [_StampedRow(group, row, taken_s) for rows, taken_s in group.made for row in rows]
            self.outcome.sampled_s += [row.taken_s for row in rows]
            self._scored += rows

    def _next_step(self) -> None:
        size = self._setting.groups_per_step * self._setting.num_generations
        while self._scored and len(self._fetched) < size + self.AHEAD:
            self._fetch(self._scored.popleft())
        if len(self._fetched) < size + self.AHEAD:
            return
        step, self._fetched = self._fetched[:size], self._fetched[size:]
        version = self._clock.version
        self.outcome.stamp_ages += [version - row.group.version for row in step]
        self.outcome.step([(row.group.position, row.taken_s, row.row) for row in step], version)
        self._training = True
        self._clock.after(self._setting.train_s, self._step_ended)

    def _fetch(self, row: _StampedRow) -> None:
        if self._clock.version - row.group.version > self._setting.max_staleness:
            self.outcome.dropped_s.append(row.taken_s)
        else:
            self._fetched.append(row)

    def _step_ended(self) -> None:
        self._training = False
        self.outcome.step_ends_s.append(self._clock.now_s)
        self._clock.synced()


# --- The table ------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[Outcome], float]] = {
    "s per step": lambda outcome: outcome.step_s,
    "dropped, %": lambda outcome: 100 * outcome.dropped_share,
    "length, trained / sampled": lambda outcome: outcome.length_ratio,
    "tasks touched": lambda outcome: len(outcome.trained),
    "sandbox-s per step": lambda outcome: outcome.sandbox_s_per_step,
    "pace, trained s per s": lambda outcome: outcome.pace,
    "age, mean": lambda outcome: fmean(outcome.ages),
    "age, max": lambda outcome: max(outcome.ages),
    "age by stamp, max": lambda outcome: max(outcome.stamp_ages, default=math.nan),
    "steps with fresh tokens, %": lambda outcome: 100 * outcome.fresh_share,
}
FORMATS = ("{:.1f}", "{:.1f}", "{:.3f}", "{:.0f}", "{:,.0f}", "{:.1f}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}")
VARIANTS = {
    "1 row per rollout, limit 4": Setting(),
    "1 row per rollout, limit 5": Setting(max_staleness=5),
    "2 rows per rollout, limit 4": Setting(rows_per_rollout=2),
    "4 rows per rollout, limit 4": Setting(rows_per_rollout=4),
}


def table(variants: dict[str, Setting], durations: Callable[[int], Durations], seeds: Sequence[int]) -> Iterator[str]:
    """Lines of a Markdown table: of each variant TRL's scheduling and this stack's, mean over seeds."""
    yield "| | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name, setting in variants.items():
        for who, run in (("TRL", StampedRun), ("this stack", ScheduledRun)):
            outcomes = [run(setting, durations(seed)).run() for seed in seeds]
            means = [fmean(value(outcome) for outcome in outcomes) for value in COLUMNS.values()]
            cells = ["" if math.isnan(mean) else cell.format(mean) for cell, mean in zip(FORMATS, means, strict=True)]
            yield f"| {name}: {who} | " + " | ".join(cells) + " |"


def _lognormal(cv_rollout: float) -> Callable[[int], Durations]:
    return lambda seed: lognormal(cv_rollout=cv_rollout, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, help="rollouts/index.jsonl of a run, for its durations")
    parser.add_argument("--slots", type=int, default=Setting.slots, help="rollout.max_inflight")
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--seeds", type=int, default=5, help="simulated runs of each row")
    parser.add_argument("--open-groups", type=int, help="rollout.max_open_groups")
    args = parser.parse_args()
    variants = {
        name: replace(setting, slots=args.slots, steps=args.steps, max_open_groups=args.open_groups)
        for name, setting in VARIANTS.items()
    }
    sources: dict[str, Callable[[int], Durations]]
    if args.index:
        sources = {f"durations of {args.index}": lambda seed: from_index(args.index, seed=seed)}
    else:
        sources = {f"mean 150 s, cv of tasks 0.4, of rollouts {cv:g}": _lognormal(cv) for cv in (0.6, 1.0)}
    for title, durations in sources.items():
        print(f"\n{title}; {args.slots} slots, {args.steps} steps, mean of {args.seeds} seeds\n")
        for line in table(variants, durations, range(args.seeds)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
