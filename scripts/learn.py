"""``python -m scripts.learn``: does the loop learn? ``make learn``.

Trains ``data/recipes/learn.toml`` once for each seed with ``scripts.run``, evaluates its checkpoints on held-out tasks,
and shows what rose, what it cost, and one task before and after. ``CONTROL=`` trains without the learning signal
instead: then nothing may rise (``no-sync``: the run must be stopped).
Exit codes: 0 all as expected, 1 not, else that of the run that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scripts import run_recipe, run_view
from scripts.stack import ROOT, folder
from scripts.summary import STEP_PARTS
from scripts.traces.text import printable
from services.common import recipe, run_dir
from services.common.errors import RecipeError, StoppedError, run_main
from services.common.run_dir import RunDir

RECIPE = ROOT / "data" / "recipes" / "learn.toml"
CONTROLS: dict[str, dict[str, Any]] = {
    "shuffled-rewards": {"control.shuffle_rewards": True, "evaluator.attempts": 1},
    "no-learning-rate": {"trainer.learning_rate": 0.0, "trainer.max_steps": 5, "evaluator.attempts": 1},
    "no-sync": {"control.drop_syncs": True},
}
"""Name -> what it sets over the recipe. What never changes needs fewer steps and looks."""
STARTS_BELOW, RISES_TO = 0.4, 0.85
"""Held-out pass@1 of the base, and of the last checkpoint."""
SIGNIFICANT = 0.05
"""A control's last checkpoint differs from the base only by chance: McNemar p above this."""
console = Console(width=140)


def main(
    seeds: Annotated[str, typer.Option(envvar="SEEDS", help="one run each, e.g. 1,2,3")] = "1",
    control: Annotated[str, typer.Option(envvar="CONTROL", help=f"empty, or one of {', '.join(CONTROLS)}")] = "",
) -> None:
    """Train until held-out pass@1 has risen, once for each seed."""
    run_main(lambda: _main(seeds, control))


def _main(seeds: str, control: str) -> int:
    if control and control not in CONTROLS:
        raise RecipeError(f"CONTROL is {control!r}; allowed: {', '.join(CONTROLS)}, or nothing")
    outcomes = []
    for seed in parse_seeds(seeds):
        run, code = train(seed, control)
        if code == StoppedError.exit_code and control == "no-sync":
            outcomes.append(Outcome(run, seed, control, stopped=True))
        elif code:
            return code
        else:
            outcomes.append(Outcome(run, seed, control))
    console.print(table(outcomes))
    if not control:
        console.print(before_and_after(outcomes[-1].run), markup=False, highlight=False)
    return 0 if all(outcome.as_expected() for outcome in outcomes) else 1


def parse_seeds(text: str) -> list[int]:
    """Raises: RecipeError: not whole numbers, or none."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"SEEDS is {text!r}; it must be whole numbers such as 1,2,3") from None


def train(seed: int, control: str) -> tuple[RunDir, int]:
    """One run, in processes of its own. Returns: its folder and exit code."""
    cfg = recipe.load(RECIPE, {"run.seed": seed, **CONTROLS.get(control, {})})
    run = RunDir(folder("RUNS_DIR", "runs") / f"learn-{control or 'seed'}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    run.path.mkdir(parents=True)
    path = run.path / "recipe.toml"
    run_dir.write_text(path, run_recipe.to_toml(cfg))
    environment = {**os.environ, "RECIPE": str(path), "RUN_NAME": run.path.name, "WATCH": "after"}
    return run, subprocess.run([sys.executable, "-m", "scripts.run"], cwd=ROOT, env=environment, check=False).returncode


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    run: RunDir
    seed: int
    control: str
    stopped: bool = False
    """By the canary, before it could be evaluated."""

    @property
    def curve(self) -> list[float]:
        """Held-out pass@1: of the base, then of each checkpoint."""
        summary = run_view.load(self.run).curve
        if summary is None:
            return []
        return [summary["base"]["pass_at_1"], *(point["pass_at_1"] for point in summary["checkpoints"])]

    def as_expected(self) -> bool:
        if self.control == "no-sync":
            return self.stopped
        if self.control:
            pairs = (run_view.load(self.run).evaluation or {}).get("paired") or {}
            return bool(pairs) and pairs["mcnemar_exact_p"] > SIGNIFICANT
        return bool(self.curve) and self.curve[0] <= STARTS_BELOW and self.curve[-1] >= RISES_TO

    def verdict(self) -> str:
        if self.stopped:
            return "stopped by the canary"
        return "as expected" if self.as_expected() else "NOT AS EXPECTED"


def table(outcomes: list[Outcome]) -> Table:
    found = Table(title="Held-out pass@1: base, then each checkpoint", title_justify="left")
    for name in ("run", "seed", "pass@1", "last, 95 %", "McNemar p", "reward", "minutes", "rollouts/min",
                 "a step's time", ""):  # fmt: skip
        found.add_column(name)
    for outcome in outcomes:
        view = run_view.load(outcome.run)
        rewards = run_view.values(view.metrics, "reward")
        last = (view.curve or {}).get("checkpoints", [])[-1:]
        minutes = sum(view.timings.values()) / 60
        rate = len(view.rollouts) / (view.timings.get("train", 0.0) / 60 or float("inf"))
        found.add_row(
            outcome.control or "learn",
            str(outcome.seed),
            " > ".join(f"{value:.2f}" for value in outcome.curve) or "-",
            " to ".join(f"{value:.2f}" for point in last for value in point["interval_95"]) or "-",
            "".join(f"{point['mcnemar_exact_p']:.1g}" for point in last) or "-",
            f"{rewards[0]:.2f} > {rewards[-1]:.2f}" if rewards else "-",
            f"{minutes:.1f}",
            f"{rate:.1f}",
            _step_shares(view.metrics),
            outcome.verdict(),
        )
    return found


def _step_shares(metrics: list[dict[str, Any]]) -> str:
    """Where a step's time goes, in percent."""
    seconds = {name: sum(run_view.values(metrics, key)) for name, key in STEP_PARTS.items()}
    whole = sum(seconds.values()) or float("inf")
    return ", ".join(f"{name} {value / whole:.0%}" for name, value in seconds.items() if value / whole >= 0.005)


def before_and_after(run: RunDir) -> str:
    """One held-out task that the base failed and the last checkpoint passed: what the agent ran each time."""
    cells = run_dir.read_lines(run.eval / "cells.jsonl")
    last = max((cell["label"] for cell in cells if cell["label"] != "base"), key=_step, default=None)
    by_task: dict[str, dict[str, Any]] = {}
    for cell in cells:
        by_task.setdefault(cell["task"], {})[cell["label"]] = cell
    for task, arms in sorted(by_task.items()):
        if last in arms and "base" in arms and arms[last]["reward"] == 1 and arms["base"]["reward"] == 0:
            return "\n".join(
                [f"Task {task}, before and after"]
                + [line for label in ("base", last) for line in [f"{label}:", *transcript(run, arms[label]["trial"])]]
            )
    return "No held-out task was failed before and passed after."


def _step(label: str) -> int:
    return int(label.rpartition("-")[2])


def transcript(run: RunDir, trial: str) -> list[str]:
    """What OpenCode logged of a rollout: commands with their output, and texts; nothing of it controls the terminal."""
    lines = []
    for event in run_dir.read_lines(run.trials / trial / "agent" / "opencode.txt"):
        part = event.get("part", {})
        if event["type"] == "tool_use":
            state = part["state"]
            asked = state["input"]
            lines += [f"$ {asked.get('command', asked)}", f"  {state.get('output', '')}"]
        elif event["type"] == "text":
            lines.append(part["text"])
    return [f"  {printable(line)}".rstrip() for line in lines]


if __name__ == "__main__":
    typer.run(main)
