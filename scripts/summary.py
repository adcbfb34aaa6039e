"""``python -m scripts.summary``: what came of a run, as tables; ``--json`` for a program."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scripts import run_view
from scripts.progress import RATIO, REWARD, SYNC_S
from scripts.run_view import RunView, mean, shown, values
from services.common import run_dir
from services.common.errors import run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir

RATIO_AT_0 = "ratio/staleness_0"
PHASES = ("start", "train", "eval_start", "eval", "down")
"""Of ``scripts.run``, in the order in which they happen; the file has them by name."""
STEP_PARTS = {
    "waiting for rollouts": "perf/rollout_wait_s",
    "forward and backward": "perf/fwd_bwd_s",
    "optimizer": "perf/optimizer_s",
    "weight sync": SYNC_S,
}
"""Where a step's time goes -> TRL's metric."""


def build(view: RunView) -> dict[str, Any]:
    """All that the tables show; numbers that were not measured are None."""
    syncs = values(view.metrics, SYNC_S)
    rewards = values(view.metrics, REWARD)
    scored = [line for line in view.rollouts if line["scored"]]
    return {
        "run": view.run.path.name,
        "result": view.result,
        "stop": view.stop,
        "steps": view.step,
        "rollouts": {
            "total": len(view.rollouts),
            "scored": len(scored),
            "correct": sum((line["reward"] or 0) >= 1 for line in scored),
            "agent_timeouts": sum(bool(line.get("agent_timeout")) for line in scored),
            "unscorable": view.unscorable(),
            "mean_turns": mean(line["turns"] for line in scored),
            "mean_tool_calls": mean(line["tool_calls"] for line in scored),
            "mean_wall_s": mean(line["wall_s"] for line in scored),
        },
        "reward": {"first": rewards[0] if rewards else None, "last": rewards[-1] if rewards else None,
                   "mean": mean(rewards)},
        "ratio": {
            "at_staleness_0": _spread(values(view.metrics, RATIO_AT_0)),
            "all": _spread(values(view.metrics, RATIO)),
        },
        "sync": {"count": len(syncs), "mean_s": mean(syncs), "max_s": max(syncs, default=None)},
        "step_s": {name: mean(values(view.metrics, key)) for name, key in STEP_PARTS.items()},
        "wall_s": dict(view.timings),
        "costs": view.costs,
        "sandbox_overhead_s": sandbox_overhead(view.run),
        "evaluation": view.evaluation,
        "best": view.curve["best"] if view.curve else None,
        "collapse_alarms": view.curve["collapse_alarms"] if view.curve else [],
        "incidents": view.incidents,
        "files": {name: str(path) for name, path in _files(view.run).items() if path.exists()},
    }  # fmt: skip


def _spread(numbers: list[float]) -> dict[str, Any]:
    return {
        "steps": len(numbers),
        "mean": mean(numbers),
        "min": min(numbers, default=None),
        "max": max(numbers, default=None),
    }


def _files(run: RunDir) -> dict[str, Any]:
    checkpoints = run.complete_checkpoints()
    adapter = {"adapter": checkpoints[-1].path / "adapter_model.safetensors"} if checkpoints else {}
    return {
        **adapter,
        "evaluation": run.eval / "final_results.json",
        "learning curve": run.eval / "curve.png",
        "metrics": run.metrics,
        "rollouts": run.rollouts,
        "logs": run.path,
    }


def sandbox_overhead(run: RunDir) -> dict[str, float]:
    """Seconds of a rollout that are not the agent's own: median and worst of all, and medians of its parts.

    From the times in Harbor's own trial results; empty when no rollout came to its end.
    """
    parts: dict[str, list[float]] = {}
    for path in run.trials.glob("*/result.json"):
        for name, seconds in _trial_parts(run_dir.read_json(path) or {}).items():
            parts.setdefault(name, []).append(seconds)
    if not parts:
        return {}
    whole = parts.pop("whole")
    medians = {name: statistics.median(found) for name, found in parts.items()}
    return {"median": statistics.median(whole), "worst": max(whole), **medians}


def _trial_parts(trial: dict[str, Any]) -> dict[str, float]:
    """Empty for a trial that did not run its agent to an end."""
    agent, verifier = trial.get("agent_execution") or {}, trial.get("verifier") or {}
    marks = [trial.get("started_at"), agent.get("started_at"), agent.get("finished_at"), trial.get("finished_at")]
    if None in marks:
        return {}
    begin, agent_begin, agent_end, end = (datetime.fromisoformat(str(mark)) for mark in marks)
    parts = {"before the agent": (agent_begin - begin).total_seconds()}
    after = (end - agent_end).total_seconds()
    parts["whole"] = parts["before the agent"] + after
    if verifier.get("started_at") and verifier.get("finished_at"):
        graded = datetime.fromisoformat(str(verifier["finished_at"]))
        parts["verifier"] = (graded - datetime.fromisoformat(str(verifier["started_at"]))).total_seconds()
        parts["after the verifier"] = (end - graded).total_seconds()
    return parts


# --- Tables -------------------------------------------------------------------------------------------------------


def show(run: RunDir, cfg: Recipe | None = None, console: Console | None = None) -> None:
    """Print the summary of a run in any state.

    Args: cfg: the recipe, for the bounds beside the numbers.
    """
    console = console or Console()
    if not run.path.is_dir():
        console.print(f"Run {run.path.name} wrote nothing.")
        return
    found = build(run_view.load(run))
    console.print(training_table(found, cfg))
    if found["wall_s"]:
        console.print(time_table(found))
    if found["evaluation"]:
        console.print(evaluation_table(found["evaluation"]))
    for line in closing_lines(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table("what", title=title, title_justify="left")
    table.add_column("measured", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def training_table(found: dict[str, Any], cfg: Recipe | None) -> Table:
    rollouts, reward, sync = found["rollouts"], found["reward"], found["sync"]
    limit = f" of {cfg.trainer.max_steps}" if cfg else ""
    bounds = f" (bounds {cfg.trainer.ratio_bounds[0]} - {cfg.trainer.ratio_bounds[1]})" if cfg else ""
    return _two_columns(
        f"Run {found['run']}",
        [
            ("optimizer steps", f"{found['steps']}{limit}"),
            ("rollouts scored", f"{rollouts['scored']} of {rollouts['total']}"),
            ("  answered correctly", str(rollouts["correct"])),
            ("  agent out of time, graded", str(rollouts["agent_timeouts"])),
            *((f"  unscorable: {cause}", str(count)) for cause, count in rollouts["unscorable"].items()),
            ("turns a rollout", shown(rollouts["mean_turns"], 1)),
            ("tool calls a rollout", shown(rollouts["mean_tool_calls"], 1)),
            ("reward: mean, first, last step", ", ".join(shown(reward[key]) for key in ("mean", "first", "last"))),
            (f"importance ratio at staleness 0{bounds}", _shown_spread(found["ratio"]["at_staleness_0"])),
            ("importance ratio, all steps", _shown_spread(found["ratio"]["all"])),
            ("weight sync: mean, longest", f"{shown(sync['mean_s'], 2, ' s')}, {shown(sync['max_s'], 2, ' s')}"),
            *cost_row(found["costs"]),
        ],
    )  # fmt: skip


def cost_row(costs: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Nothing for a run that cost nothing, as on a machine of one's own."""
    if not costs or not costs["usd"]:
        return []
    return [("dollars: all, a step", f"{costs['usd']:.2f}, {shown(costs.get('usd_per_step'))}")]


def _shown_spread(spread: dict[str, Any]) -> str:
    if not spread["steps"]:
        return "no such step"
    return f"{spread['mean']:.4f} ({spread['min']:.4f} - {spread['max']:.4f}, {spread['steps']} steps)"


def time_table(found: dict[str, Any]) -> Table:
    wall: dict[str, float] = found["wall_s"]
    in_order = sorted(wall, key=lambda phase: (PHASES.index(phase) if phase in PHASES else len(PHASES), phase))
    rows = [(phase.replace("_", " "), f"{wall[phase]:.0f} s") for phase in in_order]
    rows.append(("all", f"{math.fsum(wall.values()):.0f} s"))
    rows += [
        (f"a step: {name}", f"{seconds:.2f} s") for name, seconds in found["step_s"].items() if seconds is not None
    ]
    rows += [(f"sandbox overhead: {name}", f"{seconds:.2f} s") for name, seconds in found["sandbox_overhead_s"].items()]
    return _two_columns("Wall time", rows)


def evaluation_table(value: dict[str, Any]) -> Table:
    """Base and adapter side by side, from final_results.json."""
    table = Table(title=f"Held-out tasks, {value['suite']}", title_justify="left")
    for name in ("", "pass@1", "95 % interval", "passed", "tool calls", "tokens"):
        table.add_column(name, justify="right" if name else "left")
    for arm in (value["base"], value.get("adapter")):
        if arm is None:
            continue
        interval = "-" if arm["interval_95"] is None else "{:.3f} - {:.3f}".format(*arm["interval_95"])
        table.add_row(
            arm["label"], shown(arm["pass_at_1"]), interval, f"{arm['passed']} of {arm['rollouts']}",
            shown(arm["mean_tool_calls"], 1), shown(arm["mean_completion_tokens"], 0),
        )  # fmt: skip
    return table


def closing_lines(found: dict[str, Any]) -> list[str]:
    """What no table holds: pairs, failures, alarms, how it ended, where things lie."""
    lines = []
    value = found["evaluation"] or {}
    if pairs := value.get("paired"):
        lines.append(
            f"Of {pairs['tasks']} tasks: {pairs['both']} both, {pairs['only_base']} only base, "
            f"{pairs['only_adapter']} only adapter, {pairs['neither']} neither; "
            f"exact McNemar p = {pairs['mcnemar_exact_p']:.3f}"
        )
    if failures := value.get("infrastructure_failures"):
        lines.append(f"{len(failures)} evaluation rollouts failed for another reason than the agent's answer")
    lines += [
        f"Collapse: checkpoint-{alarm['step']} is {alarm['drop']:.3f} below checkpoint-{alarm['best_step']}"
        for alarm in found["collapse_alarms"]
    ]
    lines += [f"Incident: {name}" for name in found["incidents"]]
    if found["result"] is None:
        lines.append("Training has not ended.")
    else:
        lines.append(f"Training ended with exit code {found['result']['exit_code']}: {found['result']['reason']}")
    lines += [f"{name}: {path}" for name, path in found["files"].items()]
    return lines


def main(
    run: Annotated[str | None, typer.Option(help="name of the run; default: RUN_NAME, or the newest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON")] = False,
) -> None:
    """Print what came of a run."""

    def work() -> int:
        found = run_view.find_run(run)
        if as_json:
            print(json.dumps(build(run_view.load(found)), indent=2, default=str))
        else:
            show(found)
        return 0

    run_main(work)


if __name__ == "__main__":
    typer.run(main)
