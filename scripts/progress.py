"""``python -m scripts.progress``: follow a training run until it ends.

On a terminal one bar; elsewhere one line a step, one a change of phase, and one a minute while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from scripts import run_view
from scripts.run_view import RunView, shown
from services.common import recipe
from services.common.errors import run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir

REFRESH_S = 1.0
ENDED_EVERY_S = 3.0
"""Asking whether the container has ended costs a process; while training goes on it is asked this often."""
QUIET_S = 60.0
WAITING = "waiting for the policy"
REWARD, RATIO, SYNC_S = "reward", "ratio", "perf/weight_sync_s"


def follow(
    run: RunDir,
    cfg: Recipe,
    *,
    ended: Callable[[], bool],
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show the run's progress until ``ended`` says so."""
    console = console or Console(stderr=True)
    show = Bar if console.is_terminal else Lines
    with show(console, cfg.trainer.max_steps, clock) as display:
        next_s = clock()
        while True:
            view = run_view.load(run)
            display.update(view)
            now_s = clock()
            if now_s >= next_s or view.result is not None:
                if ended():
                    display.update(run_view.load(run))
                    return
                next_s = now_s + ENDED_EVERY_S
            sleep(REFRESH_S)


class Lines:
    """For logs and pipes: whole lines, nothing twice."""

    def __init__(self, console: Console, max_steps: int, clock: Callable[[], float]) -> None:
        self._console = console
        self._max_steps = max_steps
        self._clock = clock
        self._shown_lines = 0
        self._phase = ""
        self._last_s = clock()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def update(self, view: RunView) -> None:
        for line in view.metrics[self._shown_lines :]:
            self._print(f"step {line['step']}/{self._max_steps}: {describe_step(line)}, {describe_rollouts(view)}")
        self._shown_lines = len(view.metrics)
        phase = phase_of(view)
        # Phases of a step follow each other within seconds; only those around the steps are worth a line.
        if phase != self._phase and phase not in ("rollout", "training", "sync", "saving"):
            self._print(f"trainer: {phase}")
        self._phase = phase
        if self._clock() - self._last_s >= QUIET_S:
            self._print(f"trainer: {phase} at step {view.step}, {describe_rollouts(view)}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last_s = self._clock()


class Bar:
    """For terminals: a bar that moves, and under it a line with the numbers."""

    def __init__(self, console: Console, max_steps: int, _clock: Callable[[], float]) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task: TaskID = self._progress.add_task(WAITING, total=max_steps)
        self._numbers = Text()
        self._live = Live(Group(self._progress, self._numbers), console=console)

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def update(self, view: RunView) -> None:
        self._progress.update(self._task, completed=view.step, description=phase_of(view))
        step = describe_step(view.metrics[-1]) + "; " if view.metrics else ""
        self._numbers.plain = step + describe_rollouts(view)


def phase_of(view: RunView) -> str:
    return view.beats["trainer"].phase if "trainer" in view.beats else WAITING


def describe_step(line: run_view.Metrics) -> str:
    """Reward, ratio and sync time of one step."""
    found = {key: next(iter(run_view.values([line], key)), None) for key in (REWARD, RATIO, SYNC_S)}
    return f"reward {shown(found[REWARD])}, ratio {shown(found[RATIO], 4)}, sync {shown(found[SYNC_S], 2, ' s')}"


def describe_rollouts(view: RunView) -> str:
    """In flight, scored, unscorable."""
    flying = "" if view.inflight is None else f"{view.inflight} in flight, "
    return f"rollouts: {flying}{view.scored} scored, {len(view.rollouts) - view.scored} unscorable"


def main(run: Annotated[str | None, typer.Option(help="name of the run; default: the newest")] = None) -> None:
    """Follow a run until its result is written."""

    def work() -> int:
        found = run_view.find_run(run)
        follow(found, recipe.from_environment(), ended=found.result.exists)
        return 0

    run_main(work)


if __name__ == "__main__":
    typer.run(main)
