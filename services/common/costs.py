"""What a run costs: pure functions of seconds and prices, and the file that keeps a run's seconds.

A machine costs from the moment at which it was there (``MACHINE_SINCE_S``, which a Job sets; else the start of the
process that counts) until now; a run that went on after a restart has several such spans. A sandbox costs between the
two lines of the ledger that open and close it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.recipe import Costs
from services.common.run_dir import RunDir
from services.common.tail import Tail

HOUR_S = 3600.0
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SAME_SPAN_S = 1.0
"""Two starts closer than this are one."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has used so far."""

    machine_s: float
    gpu_hours: float
    sandbox_minutes: float
    usd: float
    """Dollars, of the machine and of all sandboxes."""

    def per_step(self, steps: int) -> float | None:
        """Dollars an optimizer step; None before the first one."""
        return self.usd / steps if steps > 0 else None


def spent(prices: Costs, machine_s: float, sandbox_s: float) -> Spent:
    """Args: machine_s: seconds of the machine that trains. sandbox_s: seconds of all sandboxes, added up."""
    usd = (machine_s * prices.trainer_usd_per_hour + sandbox_s * prices.sandbox_usd_per_hour) / HOUR_S
    return Spent(machine_s, machine_s * prices.gpus / HOUR_S, sandbox_s / 60.0, usd)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run may cost: the machine all the time, and as many sandboxes as may be open at a time."""

    usd_per_hour: float
    usd: float
    hours: float


def estimate(prices: Costs, sandboxes: int, timeout_s: float) -> Estimate:
    """An upper bound, unless prices change.

    Args: sandboxes: at a time. timeout_s: after which the Job is ended, whatever it does.
    """
    usd_per_hour = prices.trainer_usd_per_hour + sandboxes * prices.sandbox_usd_per_hour
    hours = timeout_s / HOUR_S
    return Estimate(usd_per_hour, usd_per_hour * hours, hours)


def seconds(duration: str) -> int:
    """``72h`` -> 259200. The recipe's validation leaves digits and one of s, m, h, d."""
    return int(duration[:-1]) * UNITS_S[duration[-1]]


class SandboxSeconds:
    """Adds up the ledger's lines as they come. Sandboxes that are open count until now."""

    def __init__(self) -> None:
        self._opened: dict[str, float] = {}
        self._closed_s = 0.0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            at = datetime.fromisoformat(line["at"]).timestamp()
            if line["event"] == "intent":
                self._opened[line["project"]] = at
            elif line["event"] == "closed" and (since := self._opened.pop(line["project"], None)) is not None:
                self._closed_s += max(0.0, at - since)

    def until(self, now_s: float) -> float:
        return self._closed_s + sum(max(0.0, now_s - since) for since in self._opened.values())


class Meter:
    """The costs of one run, kept in ``runs/<run>/costs.json`` so that a restart goes on counting.

    One process of a run counts: the trainer. Others read the file.
    """

    def __init__(self, run: RunDir, prices: Costs, clock: Callable[[], float] = time.time) -> None:
        self._prices = prices
        self._clock = clock
        self._path = path(run)
        self._ledger = Tail(run.ledger)
        self._sandboxes = SandboxSeconds()
        since_s = float(os.environ.get("MACHINE_SINCE_S") or clock())
        kept = (run_dir.read_json(self._path) or {}).get("machines", [])
        self._spans: list[list[float]] = [span for span in kept if abs(span[0] - since_s) > SAME_SPAN_S]
        self._since_s = since_s

    def update(self, steps: int) -> Spent:
        """Count up to now, and write it down. Args: steps: optimizer steps of the run so far."""
        now_s = self._clock()
        self._sandboxes.add(self._ledger.new_lines())
        spans = [*self._spans, [self._since_s, now_s]]
        found = spent(self._prices, sum(until - since for since, until in spans), self._sandboxes.until(now_s))
        run_dir.write_json(
            self._path, {"machines": spans, "steps": steps, **asdict(found), "usd_per_step": found.per_step(steps)}
        )
        return found


def path(run: RunDir) -> Path:
    return run.path / "costs.json"
