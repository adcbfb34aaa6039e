"""``python -m scripts.run``: one training run on this machine, start to summary, with Docker Compose.

Preflight, policy and env up, train, stop the policy, evaluate base and final adapter, summary, everything down.
The stack itself is compose.yaml; this adds the order in time and the view. Ctrl-C stops cleanly.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scripts import progress, run_recipe, run_view, summary
from scripts.doctor import report
from scripts.doctor.setup import Setup
from scripts.stack import (
    Stack,
    alone,
    check_variant,
    console,
    folder,
    git_revision,
    make_mounted_folders,
    refuse_beside,
)
from services.common import recipe, run_dir, signals
from services.common.errors import RecipeError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.trainer.supervise import Attempts

POLL_S = 3.0
LIVE = ("trainer", "evaluator", "policy-eval")
"""Services of which one runs while a run trains or is evaluated; a policy or env left over alone is taken over."""


class Watch(StrEnum):
    """Whether and when each checkpoint is evaluated, not only the last."""

    NO = ""
    BESIDE = "1"
    AFTER = "after"


class Timings:
    """Wall seconds of each phase, written to the run as they end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        start = time.monotonic()
        console.print(f"[bold]{title}[/bold]")
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 2)
            run_dir.write_json(self._path, self.seconds)


def run(
    variant: Annotated[str, typer.Option(help="cpu or cuda: which images, with or without GPUs")] = "cpu",
    evaluate: Annotated[bool, typer.Option(help="evaluate base and final adapter after training")] = True,
    watch: Annotated[
        Watch, typer.Option(envvar="WATCH", help="evaluate every checkpoint: 1 while training goes on, or after it")
    ] = Watch.NO,
    keep: Annotated[bool, typer.Option(help="leave the stack running at the end")] = False,
    resume: Annotated[
        bool, typer.Option(help="go on with the newest run, or with RUN_NAME, from its newest checkpoint")
    ] = False,
) -> None:
    """Train the recipe that RECIPE names and evaluate the result."""
    run_main(lambda: _run(variant, evaluate, watch, keep, resume))


@alone()
def _run(variant: str, evaluate: bool, watch: Watch, keep: bool, resume: bool) -> int:
    check_variant(variant)
    runs_dir = folder("RUNS_DIR", "runs")
    refuse_beside_a_run(variant)
    if resume:
        this = run_view.find_run()
        check_watch(run_recipe.of(this), watch)
        take_up(this)
    cfg = recipe.from_environment()
    if not resume:
        check_watch(cfg, watch)
    name = os.environ.get("RUN_NAME") or f"{cfg.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tasks_dir = folder("TASKS_DIR", "data/tasks")
    make_mounted_folders()
    report.require(Setup.from_environment(variant))
    this = RunDir(runs_dir / name)
    if this.result.exists():
        raise RecipeError(
            f"run {name} has ended already ({this.path}); go on with it by `make resume RUN_NAME={name}`, or choose "
            "another RUN_NAME"
        )
    environment = {
        "RUN_NAME": name,
        "RUNS_DIR": str(runs_dir),
        "TASKS_DIR": str(tasks_dir),
        "RECIPE": str(Path(os.environ["RECIPE"]).resolve()),
        "GIT_REVISION": git_revision(),
    }
    timings = Timings(this.path / "timings.json")
    with signals.stop_event() as stop:
        stack = Stack(variant, environment, stop)
        try:
            code = stack.guarded(lambda: _phases(cfg, stack, this, timings, stop, evaluate, watch))
        finally:
            if not keep:
                with timings.phase("down", "Stopping the stack"):
                    stack.down()
    summary.show(this, cfg)
    return code


def refuse_beside_a_run(variant: str) -> None:
    """Raises: MachineError: a run of this project trains or is evaluated; a second would recreate its containers, and
    take them down at its end."""
    try:
        running = Stack(variant, {}, signals.StopFlag()).running()
    except (OSError, subprocess.CalledProcessError):
        return  # no Docker or no Compose: the doctor says so, with what to do
    refuse_beside([name for name in running if name in LIVE])


def check_watch(cfg: Recipe, watch: Watch) -> None:
    """Raises: RecipeError: every checkpoint is to be evaluated after training, and rotation deletes some before."""
    made, kept = math.ceil(cfg.trainer.max_steps / cfg.trainer.save_steps), cfg.trainer.keep_checkpoints
    if made <= kept:
        return
    numbers = (
        f"trainer.max_steps = {cfg.trainer.max_steps} and trainer.save_steps = {cfg.trainer.save_steps} make {made} "
        f"checkpoints, and trainer.keep_checkpoints keeps the newest {kept}"
    )
    if watch == Watch.AFTER:
        raise RecipeError(
            f"WATCH=after evaluates every checkpoint, but {numbers}; set trainer.keep_checkpoints = {made}, or use "
            "WATCH=1, which evaluates them as they appear"
        )
    if watch == Watch.BESIDE:
        console.print(f"[yellow]{numbers}: a watcher that falls behind by more misses those that are gone[/yellow]")


def take_up(this: RunDir) -> None:
    """Make a run that has ended, or was killed, ready to be started again, with the recipe that it was made with.

    Raises: RecipeError: all its steps are trained, or its recipe is of another version of the project.
    """
    cfg = run_recipe.of(this)
    ended = run_dir.read_json(this.result)
    if ended is not None and ended["exit_code"] == 0:
        raise RecipeError(f"run {this.path.name} is done: all of its {ended['step']} steps are trained")
    # In the run's folder, so that a container that Compose starts again still finds it.
    recipe_path = this.path / "recipe.toml"
    run_dir.write_text(recipe_path, run_recipe.to_toml(cfg))
    os.environ |= {"RECIPE": str(recipe_path), "RUN_NAME": this.path.name}
    Attempts(this).record_person(ended)
    # result.json last: as long as it is there, the run counts as ended.
    this.stop_request.unlink(missing_ok=True)
    this.result.unlink(missing_ok=True)
    newest = this.complete_checkpoints()[-1:]
    console.print(f"Resuming run {this.path.name} from {newest[0].path.name if newest else 'its start'}")


def _phases(
    cfg: Recipe, stack: Stack, this: RunDir, timings: Timings, stop: signals.StopFlag, evaluate: bool, watch: Watch
) -> int:
    console.print(f"Run [bold]{this.path.name}[/bold], recipe {os.environ['RECIPE']}, in {this.path}")
    servers = ["policy", "env", *(["policy-eval"] if watch == Watch.BESIDE else [])]
    with timings.phase("start", f"Starting {', '.join(servers)}"):
        stack("up", "--detach", "--wait", "--wait-timeout", f"{cfg.watchdog.start_limit_s:.0f}", *servers)
    with timings.phase("train", "Training"):
        stack("up", "--detach", "trainer", *(["evaluator"] if watch == Watch.BESIDE else []))
        progress.follow(this, cfg, ended=lambda: stop.is_set() or stack.exit_code("trainer") is not None)
        if stop.is_set():
            console.print("[yellow]Stopping: the step ends, the adapter is saved[/yellow]")
            stack("stop", "trainer", check=False, always=True)
        code = stack.exit_code("trainer")
    if code and not stop.is_set():
        stack.show_logs()
    if stop.is_set() or code or not evaluate:
        return code or 0
    with timings.phase("eval_start", "Starting the evaluation's policy server"):
        stack("stop", "policy", "watchdog")
        stack("up", "--detach", "--wait", "policy-eval")
    with timings.phase("eval", "Evaluating base and final adapter"):
        _wait_for_watcher(stack, stop)
        if watch == Watch.AFTER and (code := stack.evaluator("watch")):
            return code
        return stack.evaluator("final")


def _wait_for_watcher(stack: Stack, stop: signals.StopFlag) -> None:
    """It ends by itself after the last checkpoint; what it has computed, the final evaluation does not again."""
    while "evaluator" in stack.running() and not stop.wait(POLL_S):
        pass


if __name__ == "__main__":
    typer.run(run)
