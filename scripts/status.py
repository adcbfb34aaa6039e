"""``python -m scripts.status``: what a run is doing, live; ``--once`` for one look, ``--json`` for a program."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from scripts import run_view
from scripts.progress import REWARD, describe_rollouts, describe_step
from scripts.run_view import RunView, duration, shown, sparkline, values
from services.common.errors import run_main
from services.common.health import Heartbeat

REFRESH_S = 2.0
STALE_S = 60.0
"""A heartbeat comes every few seconds; one older than this is shown as missing."""
ENDED = ("done", "failed")
GPU_FIELDS = ("index", "name", "utilization.gpu", "memory.used", "memory.total")


def as_json(view: RunView, gpus: Sequence[dict[str, Any]], now_s: float) -> dict[str, Any]:
    """The same as the table, for programs."""
    return {
        "run": view.run.path.name,
        "path": str(view.run.path),
        "step": view.step,
        "max_steps": view.max_steps,
        "steps_per_hour": view.steps_per_hour(),
        "eta_s": view.eta_s(),
        "services": {
            name: {
                "phase": beat.phase,
                "step": beat.step,
                "age_s": round(now_s - beat.time_s, 1),
                "in_phase_s": round(now_s - beat.phase_since_s, 1),
                "alive": is_alive(beat, now_s),
                **beat.detail,
            }
            for name, beat in sorted(view.beats.items())
        },
        "metrics": view.metrics[-1] if view.metrics else None,
        "rewards": values(view.metrics, REWARD),
        "rollouts": {"scored": view.scored, "unscorable": view.unscorable(), "inflight": view.inflight},
        "in_flight": [{"task": flying["task"], "age_s": round(now_s - flying["since_s"], 1)} for flying in view.flying],
        "open_sandboxes": view.open_sandboxes,
        "gpus": list(gpus),
        "costs": view.costs,
        "best": view.curve["best"] if view.curve else None,
        "incidents": view.incidents,
        "last_incident": view.last_incident(),
        "stop": view.stop,
        "result": view.result,
    }


def is_alive(beat: Heartbeat, now_s: float) -> bool:
    """Whether the process renews its heartbeat; one that has ended need not."""
    return beat.phase in ENDED or now_s - beat.time_s <= STALE_S


def ask_gpus() -> list[dict[str, Any]]:
    """The GPUs of this machine as nvidia-smi sees them; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [parse_gpu(line) for line in found.splitlines() if line.strip()]


def parse_gpu(line: str) -> dict[str, Any]:
    """One line of nvidia-smi; a field that it does not know ("[N/A]") is None."""
    index, name, *numbers = (part.strip() for part in line.split(","))
    used = [int(number) if number.isdigit() else None for number in numbers]
    return {
        "index": int(index),
        "name": name,
        **dict(zip(("busy_percent", "used_mib", "total_mib"), used, strict=True)),
    }


# --- The table ------------------------------------------------------------------------------------------------------


def render(view: RunView, gpus: Sequence[dict[str, Any]], now_s: float) -> Group:
    services = Table(title=headline(view), title_justify="left")
    for name in ("service", "phase", "step", "in phase", "heartbeat", "detail"):
        services.add_column(name, justify="right" if name in ("step", "in phase") else "left")
    for name, beat in sorted(view.beats.items()):
        age = f"{now_s - beat.time_s:.0f} s ago"
        services.add_row(
            name, beat.phase, str(beat.step), duration(now_s - beat.phase_since_s),
            age if is_alive(beat, now_s) else f"[red]none since {age}[/red]",
            ", ".join(f"{key} {value}" for key, value in beat.detail.items() if not isinstance(value, dict | list)),
        )  # fmt: skip
    return Group(services, *numbers(view, gpus, now_s), *events(view))


def headline(view: RunView) -> str:
    of_steps = f" of {view.max_steps}" if view.max_steps else ""
    rate, eta_s = view.steps_per_hour(), view.eta_s()
    pace = f", {rate:.0f} steps an hour" if rate is not None else ""
    left = f", {duration(eta_s)} to go" if eta_s is not None else ""
    return f"run {view.run.path.name}, step {view.step}{of_steps}{pace}{left}"


def numbers(view: RunView, gpus: Sequence[dict[str, Any]], now_s: float) -> Iterator[str]:
    if rewards := values(view.metrics, REWARD):
        yield f"reward {sparkline(rewards)} {min(rewards):.3f} to {max(rewards):.3f}, last {rewards[-1]:.3f}"
    yield f"{describe_rollouts(view)}; {view.open_sandboxes} sandboxes open"
    if view.flying:
        ages = (f"{escape(item['task'])} {duration(now_s - item['since_s'])}" for item in view.flying[:8])
        more = f" and {len(view.flying) - 8} more" if len(view.flying) > 8 else ""
        yield f"in flight: {', '.join(ages)}{more}"
    if causes := view.unscorable():
        yield "unscorable: " + ", ".join(f"{cause} {count}" for cause, count in causes.items())
    if groups := describe_groups(view):
        yield groups
    if view.metrics:
        yield f"step {view.metrics[-1]['step']}: {describe_step(view.metrics[-1])}"
    for gpu in gpus:
        memory = f"{(gpu['used_mib'] or 0) / 1024:.0f} of {(gpu['total_mib'] or 0) / 1024:.0f} GB"
        yield f"GPU {gpu['index']} ({gpu['name']}): {shown(gpu['busy_percent'], 0, ' %')} busy, {memory}"
    if view.costs:
        per_step = view.costs.get("usd_per_step")
        yield (
            f"cost: {view.costs['usd']:.2f} dollars, {shown(per_step, 3)} a step; "
            f"{view.costs['gpu_hours']:.2f} GPU hours, {view.costs['sandbox_minutes']:.0f} sandbox minutes"
        )


def describe_groups(view: RunView) -> str:
    """How many groups taught nothing, and how many were too old; empty before the first group."""
    last = view.metrics[-1] if view.metrics else {}
    if not (done := int(last.get("groups/done", 0))):
        return ""
    silent = int(last["groups/zero_variance"])
    stale = int(sum(values(view.metrics, "groups/dropped_stale_total")))
    return f"groups: {done} made, {silent} with equal rewards ({silent / done:.0%}), {stale} too old and made again"


def events(view: RunView) -> Iterator[str]:
    if view.curve and view.curve["best"]:
        yield f"best on held-out tasks: {view.curve['best']}"
    if incident := view.last_incident():
        yield f"[red]{len(view.incidents)} incidents, last {escape(incident)}[/red]"
    if view.stop:
        yield f"[yellow]stop requested: {escape(str(view.stop['reason']))}[/yellow]"
    if view.result:
        yield f"ended with exit code {view.result['exit_code']}: {escape(view.result['reason'])}"


def main(
    run: Annotated[str | None, typer.Option(help="name of the run; default: RUN_NAME, or the newest")] = None,
    once: Annotated[bool, typer.Option(help="print one look and end")] = False,
    as_text: Annotated[bool, typer.Option("--json", help="print one look as JSON and end")] = False,
) -> None:
    """Show what a run is doing, until it has ended."""
    run_main(lambda: _show(run, once, as_text))


def _show(name: str | None, once: bool, as_text: bool) -> int:
    run = run_view.find_run(name)
    if as_text:
        print(json.dumps(as_json(run_view.load(run), ask_gpus(), time.time()), indent=2, default=str))
        return 0
    console = Console()
    view = run_view.load(run)
    if once or not console.is_terminal:
        console.print(render(view, ask_gpus(), time.time()))
        return 0
    try:
        with Live(render(view, ask_gpus(), time.time()), console=console, auto_refresh=False) as live:
            while view.result is None:
                time.sleep(REFRESH_S)
                view = run_view.load(run)
                live.update(render(view, ask_gpus(), time.time()), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    typer.run(main)
