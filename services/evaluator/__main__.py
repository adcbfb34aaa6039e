"""``python -m services.evaluator watch | final | eval --checkpoint 300|best|final|base``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.common import health, log, metrics, recipe, signals
from services.common.errors import RecipeError, run_main
from services.common.run_dir import RunDir
from services.evaluator.app import Announce, Evaluator, Peers, StoppedEarlyError
from services.evaluator.cells import Cell, Outcome
from services.evaluator.checkpoints import Source
from services.evaluator.results import split_names

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def watch(
    from_hub: Annotated[
        bool, typer.Option("--hub", help="follow the Hub repository ADAPTER_REPO, not the run's folder")
    ] = False,
) -> None:
    """Evaluate every checkpoint of the run as it appears, until training has ended."""
    from services.evaluator import watch as following

    def work(evaluator: Evaluator) -> int:
        return following.watch(evaluator, _hub_source(evaluator) if from_hub else None)

    run_main(lambda: _with_evaluator(work))


def _hub_source(evaluator: Evaluator) -> Source:
    """Raises: RecipeError: ADAPTER_REPO is not set, or names no repository."""
    from services.hub import adapters as hub

    repo = os.environ.get("ADAPTER_REPO", "")
    if not repo:
        raise RecipeError("ADAPTER_REPO is not set; it names the Hub repository that the trainer pushes to")
    reference = hub.Reference.parse(f"{hub.PREFIX}{repo}")
    into = evaluator.run.eval / hub.MIRROR
    return hub.HubSource(hub.AdapterRepo(reference.repo), into, evaluator.cfg.trainer.max_steps)


@app.command()
def final() -> None:
    """Base and final adapter on all held-out tasks."""
    from services.evaluator import final as single

    console = Console()
    run_main(lambda: _with_evaluator(lambda evaluator: single.final(evaluator, console), console=console))


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Option(help="a step, best, final, base, or hub:owner/name@rev")] = "final",
    n: Annotated[int | None, typer.Option(min=1, help="first N held-out tasks; default: evaluator.watch_tasks")] = None,
    tasks: Annotated[str, typer.Option(help="names of held-out tasks, separated by commas")] = "",
    greedy: Annotated[bool, typer.Option(help="temperature 0 instead of the recipe's")] = False,
) -> None:
    """Base and any checkpoint on chosen held-out tasks."""
    from services.evaluator import final as single

    names = split_names(tasks)
    console = Console()
    run_main(
        lambda: _with_evaluator(
            lambda evaluator: single.one(evaluator, checkpoint, n, names, console), console=console, greedy=greedy
        )
    )


def _with_evaluator(work: Callable[[Evaluator], int], *, console: Console | None = None, greedy: bool = False) -> int:
    """Args: console: given for a command that a person waits for; JSON lines then go to the log file alone."""
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    tasks_dir = os.environ.get("TASKS_DIR", "")
    if not run.path.is_dir():
        raise RecipeError(f"run {cfg.run.name} is not in {run.path.parent}; set RUN_NAME to one that is")
    if not tasks_dir:
        raise RecipeError("TASKS_DIR is not set; compose.yaml gives it to the evaluator")
    log.setup("evaluator", run.path)
    announce: Announce | None = None
    if console is not None:
        _log_to_file_only()
        announce = _printer(console)
    with signals.stop_event() as stop, health.Pulse("evaluator", run) as pulse, metrics.serve("evaluator", run):
        evaluator = Evaluator(
            cfg, run, Peers.from_environment(), Path(tasks_dir), pulse, stop,
            greedy=greedy, images=json.loads(os.environ.get("IMAGE_IDS") or "null"), announce=announce,
        )  # fmt: skip
        try:
            return work(evaluator)
        except StoppedEarlyError:
            return 128 + signal.SIGTERM
        finally:
            evaluator.close()


def _log_to_file_only() -> None:
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if not isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)


def _printer(console: Console) -> Announce:
    def announce(cell: Cell, outcome: Outcome, done: int, total: int) -> None:
        verdict = f"not scored ({outcome.cause})" if not outcome.scored else "passed" if outcome.passed else "failed"
        console.print(
            f"{done}/{total} {cell.arm.label} {cell.task}: {verdict}, {outcome.wall_s:.0f} s", highlight=False
        )

    return announce


if __name__ == "__main__":
    app()
    sys.exit(0)
