"""``python -m scripts.run``: one training run on this machine, start to summary, with Docker Compose.

Preflight, policy and env up, train, stop the policy, evaluate base and final adapter, summary, everything down.
The stack itself is compose.yaml; this adds the order in time and the view. Ctrl-C stops cleanly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scripts import preflight, progress, summary
from services.common import recipe, run_dir, signals
from services.common.errors import NotReadyError, RecipeError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "opencode-rl"
console = Console(stderr=True)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM while a compose command ran."""


class Stack:
    """``docker compose`` with this run's files and environment."""

    def __init__(self, variant: str, environment: dict[str, str], stop: signals.StopFlag) -> None:
        files = "compose.yaml:compose.cpu.yaml" if variant == "cpu" else "compose.yaml"
        self._environment = {"COMPOSE_FILE": files, **os.environ, **environment}
        self._stop = stop

    def __call__(self, *arguments: str, check: bool = True, quiet: bool = True, always: bool = False) -> int:
        """Run a compose command. In its own session: Ctrl-C reaches this process only, which ends the command.

        Args: check: raise when it fails. quiet: show nothing. always: not even Ctrl-C ends it (clean-up).
        Raises: Interrupted. subprocess.CalledProcessError: with what it said.
        """
        process = subprocess.Popen(
            ["docker", "compose", *arguments],
            cwd=ROOT, env=self._environment, start_new_session=True,
            stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.PIPE if quiet else None, text=True,
        )  # fmt: skip
        while True:
            try:
                _out, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if self._stop.is_set() and not always:
                    process.terminate()
                    process.communicate()
                    raise Interrupted from None
        if check and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, arguments, stderr=errors)
        return process.returncode

    def exit_code(self, service: str) -> int | None:
        """Exit code of the service's container; None while it runs."""
        out = subprocess.run(
            ["docker", "compose", "ps", "--all", "--format", "{{.State}} {{.ExitCode}}", service],
            cwd=ROOT, env=self._environment, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        return int(out[1]) if len(out) == 2 and out[0] == "exited" else None


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
    keep: Annotated[bool, typer.Option(help="leave the stack running at the end")] = False,
) -> None:
    """Train the recipe that RECIPE names and evaluate the result."""
    run_main(lambda: _run(variant, evaluate, keep))


def _run(variant: str, evaluate: bool, keep: bool) -> int:
    if variant not in ("cpu", "cuda"):
        raise RecipeError(f"VARIANT is {variant!r}; allowed: cpu, cuda")
    cfg = recipe.from_environment()
    name = os.environ.get("RUN_NAME") or f"{cfg.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs_dir = Path(os.environ.get("RUNS_DIR") or ROOT / "runs").resolve()
    tasks_dir = Path(os.environ.get("TASKS_DIR") or ROOT / "data/tasks").resolve()
    preflight.check(
        cfg,
        variant=variant,
        tag=os.environ.get("TAG") or variant,
        runs_dir=runs_dir,
        tasks_dir=tasks_dir,
        models_dir=Path(os.environ.get("MODELS_DIR") or ROOT / "data/models").resolve(),
        port=int(os.environ.get("ENV_PORT") or 8100),
    )
    this = RunDir(runs_dir / name)
    if this.result.exists():
        raise RecipeError(f"run {name} has ended already ({this.path}); choose another RUN_NAME")
    environment = {
        "RUN_NAME": name,
        "RUNS_DIR": str(runs_dir),
        "TASKS_DIR": str(tasks_dir),
        "RECIPE": str(Path(os.environ["RECIPE"]).resolve()),
        "GIT_REVISION": _git_revision(),
    }
    timings = Timings(this.path / "timings.json")
    with signals.stop_event() as stop:
        stack = Stack(variant, environment, stop)
        try:
            code = _phases(cfg, stack, this, timings, stop, evaluate)
        except Interrupted:
            code = 128 + signal.SIGINT
        except subprocess.CalledProcessError as error:
            console.print(f"[red]docker compose {' '.join(error.cmd)} failed:[/red]\n{error.stderr}")
            _show_logs(stack)
            code = NotReadyError.exit_code
        finally:
            if not keep:
                with timings.phase("down", "Stopping the stack"):
                    stack("--profile", "*", "down", "--remove-orphans", check=False, always=True)
    summary.show(this, cfg)
    return code


def _phases(cfg: Recipe, stack: Stack, this: RunDir, timings: Timings, stop: signals.StopFlag, evaluate: bool) -> int:
    console.print(f"Run [bold]{this.path.name}[/bold], recipe {os.environ['RECIPE']}, in {this.path}")
    with timings.phase("start", "Starting policy and env"):
        stack("up", "--detach", "--wait", "policy", "env")
    with timings.phase("train", "Training"):
        stack("up", "--detach", "trainer")
        progress.follow(this, cfg, ended=lambda: stop.is_set() or stack.exit_code("trainer") is not None)
        if stop.is_set():
            console.print("[yellow]Stopping: the step ends, the adapter is saved[/yellow]")
            stack("stop", "trainer", check=False, always=True)
        code = stack.exit_code("trainer")
    if code:
        _show_logs(stack)
    if stop.is_set() or code or not evaluate:
        return code or 0
    with timings.phase("eval_start", "Starting the evaluation's policy server"):
        stack("stop", "policy", "watchdog")
        stack("up", "--detach", "--wait", "policy-eval")
    with timings.phase("eval", "Evaluating base and final adapter"):
        return stack("run", "--rm", "--no-deps", "evaluator", "python", "-m", "services.evaluator", "final",
                     check=False, quiet=False)  # fmt: skip


def _show_logs(stack: Stack) -> None:
    console.print("[red]The last log lines of every service:[/red]")
    stack("--profile", "*", "logs", "--tail", "25", check=False, quiet=False, always=True)


def _git_revision() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(typer.run(run))
