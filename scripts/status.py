"""``python -m scripts.status``: what a run is doing, live; ``--once`` for one look, ``--json`` for a program."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from scripts import run_view
from scripts.progress import describe_rollouts, describe_step
from scripts.run_view import RunView
from services.common.errors import run_main
from services.common.health import Heartbeat

REFRESH_S = 2.0
STALE_S = 60.0
"""A heartbeat comes every few seconds; one older than this is shown as missing."""
ENDED = ("done", "failed")


def as_json(view: RunView, now_s: float) -> dict[str, Any]:
    """The same as the table, for programs."""
    return {
        "run": view.run.path.name,
        "path": str(view.run.path),
        "step": view.step,
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
        "rollouts": {"scored": view.scored, "unscorable": view.unscorable(), "inflight": view.inflight},
        "open_sandboxes": view.open_sandboxes,
        "best": view.curve["best"] if view.curve else None,
        "incidents": view.incidents,
        "stop": view.stop,
        "result": view.result,
    }


def is_alive(beat: Heartbeat, now_s: float) -> bool:
    """Whether the process renews its heartbeat; one that has ended need not."""
    return beat.phase in ENDED or now_s - beat.time_s <= STALE_S


def render(view: RunView, now_s: float) -> Group:
    services = Table(title=f"run {view.run.path.name}, step {view.step}", title_justify="left")
    for name in ("service", "phase", "step", "in phase", "heartbeat", "detail"):
        services.add_column(name, justify="right" if name in ("step", "in phase") else "left")
    for name, beat in sorted(view.beats.items()):
        age = f"{now_s - beat.time_s:.0f} s ago"
        services.add_row(
            name, beat.phase, str(beat.step), _duration(now_s - beat.phase_since_s),
            age if is_alive(beat, now_s) else f"[red]none since {age}[/red]",
            ", ".join(f"{key} {value}" for key, value in beat.detail.items() if not isinstance(value, dict)),
        )  # fmt: skip
    lines = [f"{describe_rollouts(view)}; {view.open_sandboxes} sandboxes open"]
    if causes := view.unscorable():
        lines.append("unscorable: " + ", ".join(f"{cause} {count}" for cause, count in causes.items()))
    if view.metrics:
        lines.append(f"step {view.metrics[-1]['step']}: {describe_step(view.metrics[-1])}")
    if view.curve and view.curve["best"]:
        lines.append(f"best on held-out tasks: {view.curve['best']}")
    lines += [f"[red]incident: {view.run.incidents / name}[/red]" for name in view.incidents]
    if view.stop:
        lines.append(f"[yellow]stop requested: {view.stop['reason']}[/yellow]")
    if view.result:
        lines.append(f"ended with exit code {view.result['exit_code']}: {view.result['reason']}")
    return Group(services, *lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


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
        print(json.dumps(as_json(run_view.load(run), time.time()), indent=2, default=str))
        return 0
    console = Console()
    view = run_view.load(run)
    if once or not console.is_terminal:
        console.print(render(view, time.time()))
        return 0
    try:
        with Live(render(view, time.time()), console=console, auto_refresh=False) as live:
            while view.result is None:
                time.sleep(REFRESH_S)
                view = run_view.load(run)
                live.update(render(view, time.time()), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    typer.run(main)
