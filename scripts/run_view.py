"""One look at a run directory, for the scripts that show it: parsed files, no judgement, no printing."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import health, run_dir
from services.common.errors import RecipeError
from services.common.health import Heartbeat
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parent.parent

SPARKS = "▁▂▃▄▅▆▇█"
RATE_STEPS = 20
"""Steps over which the rate is taken."""
Metrics = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True)
class RunView:
    """What a run has written so far. Every part may be empty: runs are looked at in any state."""

    run: RunDir
    beats: Mapping[str, Heartbeat]
    metrics: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    """Lines of rollouts/index.jsonl: one a training rollout."""
    open_sandboxes: int
    result: Mapping[str, Any] | None
    stop: Mapping[str, Any] | None
    evaluation: Mapping[str, Any] | None
    """eval/final_results.json."""
    curve: Mapping[str, Any] | None
    """eval/summary.json."""
    timings: Mapping[str, float]
    """Wall seconds by phase, of the script that ran it."""
    incidents: list[str]
    costs: Mapping[str, Any] | None
    """costs.json: dollars, GPU hours, sandbox minutes so far."""
    max_steps: int | None
    """trainer.max_steps of the manifest's recipe; None before env wrote it."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        done = [self.beats["trainer"].step] if "trainer" in self.beats else []
        return max([*done, *(int(line["step"]) for line in self.metrics[-1:])], default=0)

    @property
    def inflight(self) -> int | None:
        """Rollouts that the env server is running now; None before it reported."""
        env = self.beats.get("env")
        return None if env is None else env.detail.get("inflight")

    @property
    def flying(self) -> list[Mapping[str, Any]]:
        """``task`` and ``since_s`` of each of them, oldest first."""
        env = self.beats.get("env")
        return [] if env is None else list(env.detail.get("rollouts", ()))

    def steps_per_hour(self) -> float | None:
        """Over the last ``RATE_STEPS`` steps; None until two are done."""
        times = values(self.metrics[-RATE_STEPS:], "time_s")
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (len(times) - 1) * 3600.0 / (times[-1] - times[0])

    def eta_s(self) -> float | None:
        """Seconds to the last step at that rate; None when it is not known."""
        rate = self.steps_per_hour()
        if rate is None or self.max_steps is None or self.result is not None:
            return None
        return max(0, self.max_steps - self.step) * 3600.0 / rate

    def last_incident(self) -> str | None:
        """Name of the newest bundle, with the reason that the watchdog wrote into it."""
        if not self.incidents:
            return None
        name = max(self.incidents, key=lambda found: (self.run.incidents / found).stat().st_mtime)
        decision = run_dir.read_json(self.run.incidents / name / "decision.json") or {}
        return f"{name}: {decision['reason']}" if "reason" in decision else name

    def unscorable(self) -> dict[str, int]:
        """Cause -> number of training rollouts, most frequent first."""
        causes = Counter(str(line["cause"]) for line in self.rollouts if not line["scored"])
        return dict(causes.most_common())

    @property
    def scored(self) -> int:
        return sum(bool(line["scored"]) for line in self.rollouts)


def load(run: RunDir) -> RunView:
    manifest = run_dir.read_json(run.manifest)
    projects: dict[str, str] = {line["project"]: line["event"] for line in run_dir.read_lines(run.ledger)}
    return RunView(
        run=run,
        beats=health.read_heartbeats(run),
        metrics=run_dir.read_lines(run.metrics),
        rollouts=run_dir.read_lines(run.rollouts / "index.jsonl"),
        open_sandboxes=sum(event != "closed" for event in projects.values()),
        result=run_dir.read_json(run.result),
        stop=run_dir.read_request(run.stop_request),
        evaluation=run_dir.read_json(run.eval / "final_results.json"),
        curve=run_dir.read_json(run.eval / "summary.json"),
        timings=run_dir.read_json(run.path / "timings.json") or {},
        incidents=sorted(path.name for path in run.incidents.glob("[!.]*")),
        costs=run_dir.read_json(run.path / "costs.json"),
        max_steps=manifest["recipe"]["trainer"]["max_steps"] if manifest else None,
    )


def find_run(name: str | None = None) -> RunDir:
    """The named run, or the one that wrote last, below RUNS_DIR.

    Raises: RecipeError: there is none; the message lists those there are.
    """
    runs_dir = Path(os.environ.get("RUNS_DIR") or ROOT / "runs").resolve()
    name = name or os.environ.get("RUN_NAME") or None
    if name is not None:
        if (runs_dir / name).is_dir():
            return RunDir(runs_dir / name)
        have = ", ".join(sorted(path.name for path in runs_dir.glob("[!.]*/"))) or "none"
        raise RecipeError(f"run {name} is not in {runs_dir}; there: {have}")
    runs = [RunDir(path) for path in runs_dir.glob("[!.]*/")]
    if not runs:
        raise RecipeError(f"there is no run in {runs_dir}; `make smoke` makes one")
    return max(runs, key=_last_written_s)


def _last_written_s(run: RunDir) -> float:
    """When a service last gave a sign of life; who looks at a run (a page of traces) must not make it the newest."""
    beats = [path.stat().st_mtime for path in run.heartbeats.glob("[a-z]*")]
    return max(beats) if beats else run.path.stat().st_mtime


def values(lines: Iterable[Metrics], key: str) -> list[float]:
    """The finite numbers of a metric, in order."""
    found = (line.get(key) for line in lines)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def mean(numbers: Iterable[float]) -> float | None:
    listed = list(numbers)
    return math.fsum(listed) / len(listed) if listed else None


def shown(value: float | None, digits: int = 3, unit: str = "") -> str:
    """A number for a table; ``-`` for none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def duration(seconds: float) -> str:
    """``0:01:08``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def sparkline(numbers: Iterable[float], width: int = 40) -> str:
    """One character a value, lowest to highest of them; more values than ``width`` are averaged in groups."""
    listed = list(numbers)
    if not listed:
        return ""
    count = min(width, len(listed))
    edges = [index * len(listed) // count for index in range(count + 1)]
    means = [math.fsum(listed[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    lowest, highest = min(means), max(means)
    scale = (len(SPARKS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(SPARKS[round((value - lowest) * scale)] for value in means)
