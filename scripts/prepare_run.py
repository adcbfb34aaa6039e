"""``python -m scripts.prepare_run``: bring what RECIPE needs to this machine and lock it. ``make prepare``.

The model's commit and weights, the task suites pinned and fetched, the image that they are made for. What was resolved
is written to a lock file beside the recipe, which every service reads; no tracked file is changed. What is there is
kept, so that a second call needs no Hub.
Exit codes: 0 all is there, 2 recipe, sources or tasks are wrong, 3 the Hub does not answer, 5 the disk does not fit.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.markup import escape

from scripts import prepare_tasks
from scripts.doctor.data import hub_snapshot, weight_files
from scripts.stack import folder, hf_cache
from services.common import recipe
from services.common.errors import RecipeError, StackError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import write_text
from services.common.tasks import load_pin
from services.hub.__main__ import WEIGHT_FILES
from services.hub.client import connect, messages, patiently
from services.hub.tasks.fetch import CACHE_DIR, fetch_one, sandbox_settings

SOURCES = "sources.toml"
FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)", re.MULTILINE | re.IGNORECASE)
out = Console(highlight=False, soft_wrap=True)


class Source(BaseModel):
    """Where a suite comes from: what ``prepare_tasks pin`` is told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str
    revision: str
    """Commit of the dataset."""
    take: dict[str, int] = {}
    """Difficulty -> number of tasks; empty: all."""
    seed: int = 0
    disjoint_from: tuple[str, ...] = ()


def main(
    path: Annotated[Path, typer.Option("--recipe", envvar="RECIPE", help="recipe to prepare for")],
) -> None:
    """Resolve, download, pin, fetch and lock everything that the recipe names."""
    run_main(lambda: prepare(path, folder("TASKS_DIR", "data/tasks"), hf_cache(), CACHE_DIR))


def prepare(path: Path, tasks_dir: Path, cache: Path, downloads: Path) -> int:
    """Raises: RecipeError, NotReadyError, MachineError: with the list of what is still lacking."""
    forget_other_model(path)
    cfg = recipe.load(path)
    for line in lacking(cfg, tasks_dir, cache):
        out.print(escape(f"lacking: {line}"))
    try:
        revision = bring_model(cfg, cache)
        for name in suites(cfg, tasks_dir):
            bring_suite(name, path, tasks_dir, downloads)
    except StackError as error:
        still = "\n  ".join(["still lacking:", *lacking(cfg, tasks_dir, cache)])
        raise type(error)(f"{error}\n  {still}") from None
    lock = recipe.lock_path(path)
    write_text(lock, lock_text(path, cfg, revision, tasks_dir))
    out.print(escape(f"{lock}: the run has all it needs; next: make images, make doctor"))
    return 0


def written(path: Path) -> dict[str, Any]:
    """The recipe as its file says, without what is locked; {} for one that ``recipe.load`` will refuse."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def forget_other_model(path: Path) -> None:
    """A lock that was made for the recipe's former model is made anew."""
    lock, model = recipe.lock_path(path), written(path).get("model", {}).get("id")
    text = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    if "LOCKED_MODEL=" in text and f"LOCKED_MODEL={model}@" not in text:
        lock.unlink()


def lacking(cfg: Recipe, tasks_dir: Path, cache: Path) -> Iterator[str]:
    """What is not on this machine, a line each."""
    if cfg.model.source == "hub":
        if cfg.model.revision is None:
            yield f"the commit of model {cfg.model.id}, and its weights"
        elif not has_weights(cfg.model.id, cfg.model.revision, cache):
            yield f"the weights of model {cfg.model.id} at {cfg.model.revision}, in {cache}"
    for name in suites(cfg, tasks_dir):
        if not (tasks_dir / f"{name}.json").is_file():
            yield f"pin file {name}.json and the tasks that it names, in {tasks_dir}"
        elif not (tasks_dir / name).is_dir():
            yield f"the tasks of suite {name}, in {tasks_dir}"


def suites(cfg: Recipe, tasks_dir: Path) -> list[str]:
    """The recipe's suites, one that another must share nothing with first."""
    names = {suite.partition("/")[0] for suite in (cfg.tasks.train, cfg.tasks.heldout)}
    known = sources(tasks_dir)
    return sorted(names, key=lambda name: (len(known[name].disjoint_from) if name in known else 0, name))


def sources(tasks_dir: Path) -> dict[str, Source]:
    """Raises: RecipeError: the file has another form."""
    path = tasks_dir / SOURCES
    if not path.is_file():
        return {}
    try:
        return {name: Source.model_validate(value) for name, value in tomllib.loads(path.read_text("utf-8")).items()}
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise RecipeError(f"{path} is refused: {error}") from None


def has_weights(model: str, revision: str, cache: Path) -> bool:
    snapshot = hub_snapshot(cache, model, revision)
    names = ("config.json", *weight_files(snapshot))
    return all((snapshot / name).exists() for name in names)


def bring_model(cfg: Recipe, cache: Path) -> str | None:
    """The model's commit, its weights in the cache; None for a local model, which is here or is not."""
    model = cfg.model
    if model.source == "local":
        return None
    if model.revision is not None and has_weights(model.id, model.revision, cache):
        return model.revision
    api = connect()
    with messages(model.id, api.endpoint, again="what was downloaded is kept"):
        revision = model.revision or str(patiently(api.model_info)(model.id).sha)
        patiently(api.snapshot_download)(
            model.id, revision=revision, allow_patterns=list(WEIGHT_FILES), cache_dir=str(cache / "hub")
        )
    out.print(escape(f"{model.id} at {revision}: in {cache}"))
    return revision


def bring_suite(name: str, path: Path, tasks_dir: Path, downloads: Path) -> None:
    """Pin it, unless it is; fetch it, unless it is here as pinned."""
    pin_path = tasks_dir / f"{name}.json"
    if not pin_path.is_file():
        if name not in (known := sources(tasks_dir)):
            if (tasks_dir / name).is_dir():
                return  # made by hand, and pinned by nobody
            raise RecipeError(
                f"suite {name} is not in {tasks_dir}, and {SOURCES} there does not say where it comes from; known: "
                f"{', '.join(known) or 'none'}"
            )
        source = known[name]
        prepare_tasks.pin(
            name, repo=source.repo, revision=source.revision, take=[f"{tier}={n}" for tier, n in source.take.items()],
            seed=source.seed, disjoint_from=list(source.disjoint_from), notebook_key="notebook_id",
            question_key="question", grader_sha256=None, folder="tasks", tasks_dir=tasks_dir, cache_dir=downloads,
        )  # fmt: skip
    pinned = load_pin(pin_path)
    if pinned.source.kind == "shipped":
        return
    settings = sandbox_settings(path, None, None, None, ())
    fetch_one(pin_path, pinned, tasks_dir / name, settings, cache_dir=downloads, show=prepare_tasks.SHOW)


def lock_text(path: Path, cfg: Recipe, revision: str | None, tasks_dir: Path) -> str:
    """Lines ``NAME=value``: Compose hands them to every service, and `make images` reads them."""
    lines = {"LOCKED_MODEL": f"{cfg.model.id}@{revision}"} if revision else {}
    if "sandbox_base" not in written(path).get("env", {}) and (base := sandbox_base(cfg, tasks_dir)):
        lines["LOCKED_SANDBOX_BASE"] = base
    pins: list[Any] = [
        (name, load_pin(tasks_dir / f"{name}.json").source)
        for name in suites(cfg, tasks_dir)
        if (tasks_dir / f"{name}.json").is_file()
    ]
    if tasks := [f"{name}={source.repo}@{source.revision}" for name, source in pins if source.kind == "hub"]:
        lines["LOCKED_TASKS"] = ",".join(tasks)
    head = f"# Made by `make prepare RECIPE={path}`: what the recipe leaves open, resolved. Read beside it.\n"
    return head + "".join(f"{name}={value}\n" for name, value in lines.items())


def sandbox_base(cfg: Recipe, tasks_dir: Path) -> str | None:
    """The image that the tasks' own Dockerfiles start from; None: they have none.

    Raises: RecipeError: they start from several.
    """
    found = set()
    for suite in (cfg.tasks.train, cfg.tasks.heldout):
        for dockerfile in sorted((tasks_dir / suite).glob("*/environment/Dockerfile")):
            found.update(FROM.findall(dockerfile.read_text(encoding="utf-8"))[-1:])
    if len(found) > 1:
        raise RecipeError(
            f"the tasks' Dockerfiles start from {len(found)} images ({', '.join(sorted(found)[:5])}), and a run has "
            "one sandbox image: set env.sandbox_base to the one that serves all"
        )
    return next(iter(found), None)


if __name__ == "__main__":
    os.environ.pop("HF_HUB_OFFLINE", None)
    typer.run(main)
