"""Pass@1, its interval, and the paired comparison of two arms over the same tasks.

The unit is the task, never the attempt: attempts at one task are not independent. With one attempt each, the
paired test is McNemar's; with more, it is the sign test over tasks that McNemar's is a case of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def pass_at_1(rates: Sequence[float]) -> float | None:
    """Mean share of passed attempts over the tasks, in [0, 1]; None without a task."""
    return math.fsum(rates) / len(rates) if rates else None


def wilson_interval(rate: float, num_tasks: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval, without continuity correction, of a proportion.

    Args: rate: observed share in [0, 1]; need not be a whole count. num_tasks: >= 1.
    Raises: ValueError: out of range; the message gives both.
    Source: Wilson 1927; Newcombe 1998, Statistics in Medicine 17, method 3. With several attempts a task, tasks as
    the unit make it wide rather than narrow.
    """
    if num_tasks < 1 or not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate} and num_tasks {num_tasks}; allowed: 0 <= rate <= 1 and num_tasks >= 1")
    shrink = 1 + z * z / num_tasks
    centre = (rate + z * z / (2 * num_tasks)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / num_tasks + z * z / (4 * num_tasks * num_tasks))
    # Rounding would leave the bounds a hair beyond the rate, or beyond 0 and 1.
    return (max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def mcnemar_exact_p(only_first: int, only_second: int) -> float:
    """Two-sided exact (conditional) p of McNemar's test: a sign test on the discordant pairs.

    Args: pairs that only one of the two passed.  Returns: p in (0, 1]; 1.0 without a discordant pair.
    Raises: ValueError: a negative count; the message gives both.
    Source: McNemar 1947; Fagerland, Lydersen and Laake 2013, BMC Medical Research Methodology 13:91.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts are {only_first} and {only_second}; neither may be negative")
    n, k = only_first + only_second, min(only_first, only_second)
    # Whole numbers until the last division: exact for any n.
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, float(2 * tail / 2**n))


@dataclass(frozen=True, slots=True)
class Paired:
    """How two arms did on the tasks that both have a result for."""

    both: int
    """Tied, with a pass (with one attempt: both passed)."""
    only_first: int
    """The first arm did better (with one attempt: only it passed)."""
    only_second: int
    neither: int
    """Tied, without a pass."""
    p_value: float
    """Of the difference, two-sided, exact."""

    @property
    def num_tasks(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither


def compare(first: Mapping[str, float], second: Mapping[str, float]) -> Paired:
    """Pair two arms by task.

    Args: task -> share of passed attempts; tasks that only one arm has are left out.
    """
    both = only_first = only_second = neither = 0
    for task in first.keys() & second.keys():
        a, b = first[task], second[task]
        if a > b:
            only_first += 1
        elif b > a:
            only_second += 1
        elif a > 0:
            both += 1
        else:
            neither += 1
    return Paired(both, only_first, only_second, neither, mcnemar_exact_p(only_first, only_second))


@dataclass(frozen=True, slots=True)
class Collapse:
    """A checkpoint that fell far below an earlier one."""

    step: int
    best_step: int
    drop: float
    """Pass@1 of the best minus that of this one, on the tasks both have."""
    p_value: float


def collapses(curve: Mapping[int, Mapping[str, float]], min_drop: float, alpha: float = 0.05) -> list[Collapse]:
    """Checkpoints that fell by more than ``min_drop`` below the best one before them, with p < ``alpha``.

    Args: curve: step -> task -> share of passed attempts.
    """
    found = []
    best_step: int | None = None
    for step in sorted(curve):
        rate = pass_at_1(list(curve[step].values()))
        if rate is None:
            continue
        if best_step is None:
            best_step = step
            continue
        best = curve[best_step]
        shared = best.keys() & curve[step].keys()
        if shared:
            drop = math.fsum(best[task] - curve[step][task] for task in shared) / len(shared)
            p_value = compare(best, curve[step]).p_value
            if drop > min_drop and p_value < alpha:
                found.append(Collapse(step, best_step, drop, p_value))
        if rate > (pass_at_1(list(best.values())) or 0.0):
            best_step = step
    return found
