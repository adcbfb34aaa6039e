"""``python -m scripts.eval``: base against one checkpoint of a run, on this machine, with Docker Compose.

Finds the run and the checkpoint before anything starts, brings up policy-eval and env with the run's own recipe, lets
the evaluator run what is missing, prints the table, takes all down. What was computed before is not run again.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import docker
import typer

from scripts import run_recipe, run_view
from scripts.doctor import report
from scripts.doctor.setup import Setup
from scripts.stack import Stack, alone, check_variant, console, folder, make_mounted_folders, refuse_beside
from services.common import run_dir, signals
from services.common import tasks as suites
from services.common.errors import MachineError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.evaluator import checkpoints
from services.evaluator.cells import BASE, IMAGES
from services.evaluator.results import choose, split_names
from services.hub import adapters as hub


def main(
    checkpoint: Annotated[
        str, typer.Option(envvar="CKPT", help="a step, best, final, base, or hub:owner/name@revision[:step]")
    ] = "final",
    n: Annotated[int | None, typer.Option(envvar="N", min=1, help="first N held-out tasks")] = None,
    tasks: Annotated[str, typer.Option(envvar="TASKS", help="names of held-out tasks, separated by commas")] = "",
    greedy: Annotated[bool, typer.Option(envvar="GREEDY", help="temperature 0 instead of the recipe's")] = False,
    run: Annotated[str | None, typer.Option(help="name of the run; default: RUN_NAME, or the newest")] = None,
    variant: Annotated[str, typer.Option(envvar="VARIANT", help="cpu or cuda")] = "cpu",
    keep: Annotated[bool, typer.Option(help="leave the servers running at the end")] = False,
) -> None:
    """Compare the base and a checkpoint of a run on held-out tasks."""
    run_main(lambda: _evaluate(checkpoint, n, tasks, greedy, run_view.find_run(run), variant, keep))


@alone()
def _evaluate(name: str, n: int | None, tasks: str, greedy: bool, run: RunDir, variant: str, keep: bool) -> int:
    check_variant(variant)
    with tempfile.TemporaryDirectory() as scratch, signals.stop_event() as stop:
        cfg = run_recipe.of(run)
        path = Path(scratch) / "recipe.toml"
        run_dir.write_text(path, run_recipe.to_toml(cfg))
        name = find(run, name)
        check_tasks(cfg, tasks)
        stack = Stack(
            variant,
            {
                "RECIPE": str(path),
                "RUN_NAME": run.path.name,
                "RUNS_DIR": str(run.path.parent),
                "TASKS_DIR": str(folder("TASKS_DIR", "data/tasks")),
            },
            stop,
        )
        images = _preflight(cfg, run, stack, variant)
        console.print(f"Run [bold]{run.path.name}[/bold]: base against [bold]{name}[/bold]")

        def work() -> int:
            console.print("[bold]Starting policy-eval, env[/bold]")
            stack("up", "--detach", "--wait", "policy-eval", "env")
            return stack.evaluator(
                "eval", "--checkpoint", name,
                *(["--n", str(n)] if n else []), *(["--tasks", tasks] if tasks else []),
                *(["--greedy"] if greedy else []),
                IMAGE_IDS=json.dumps(images),
            )  # fmt: skip

        try:
            return stack.guarded(work)
        finally:
            if not keep:
                console.print("[bold]Stopping the stack[/bold]")
                stack.down()


def find(run: RunDir, name: str) -> str:
    """The name under which the evaluator finds the same checkpoint; one on the Hub is brought here first.

    The container then needs neither the Hub nor a token.
    Raises: RecipeError: there is no such checkpoint; the message lists those that exist.
    """
    if name == BASE:
        return name
    if not name.startswith(hub.PREFIX):
        return checkpoints.find(run, name).path.name
    exact = hub.resolve(hub.Reference.parse(name))
    try:
        hub.fetch(exact, run.eval / hub.DOWNLOADS)
    except PermissionError as error:
        raise MachineError(f"{error.filename} belongs to another user; {run_dir.TAKE_OVER}") from None
    return str(exact)


def check_tasks(cfg: Recipe, names: str) -> None:
    """Raises: RecipeError: a task that the held-out suite lacks; the message lists those it has."""
    suite = suites.load_suite(folder("TASKS_DIR", "data/tasks"), cfg.tasks.heldout, limit=cfg.evaluator.final_tasks)
    choose(cfg.tasks.heldout, suite, names=split_names(names))


def _preflight(cfg: Recipe, run: RunDir, stack: Stack, variant: str) -> dict[str, str]:
    """Raise what stands in the way; return the ids of the images that a result depends on."""
    refuse_beside(stack.running())
    tag = os.environ.get("TAG") or variant
    make_mounted_folders()
    report.require(Setup.of(cfg, variant, run.manifest))
    return image_ids(cfg, f"{os.environ.get('REGISTRY', 'local')}/opencode-rl-{{}}:{tag}")


def image_ids(cfg: Recipe, pattern: str) -> dict[str, str]:
    """Name -> id, as in a run's manifest. Args: pattern: reference of an image, with {} for its name."""
    references = {name: pattern.format(name) for name in IMAGES if name != "sandbox"}
    if cfg.env.backend == "docker":  # elsewhere the image is not on this machine, and its name must do
        references["sandbox"] = cfg.env.sandbox_image or pattern.format("sandbox")
    client = docker.from_env()
    return {name: str(client.images.get(reference).id) for name, reference in references.items()}


if __name__ == "__main__":
    typer.run(main)
