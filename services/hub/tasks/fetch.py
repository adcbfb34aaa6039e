"""Bring pinned suites to where a run reads them: download, check every hash, write aside, rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from services.common import recipe as recipes
from services.common.errors import RecipeError
from services.common.run_dir import write_text
from services.common.tasks import SANDBOX_IMAGE, HubSource, PinFile, dump_pin, listing, load_pin
from services.hub import datasets
from services.hub.client import connect
from services.hub.files import RemoteFile
from services.hub.tasks import materialise, verify

CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opencode-rl" / "tasks"
WORKERS = 8
"""Downloads at a time."""


@contextmanager
def _no_progress(_what: str, _total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


@dataclass(frozen=True)
class Show:
    """How progress is told to a person."""

    say: Callable[[str], None]
    progress: Callable[[str, int], AbstractContextManager[Callable[[], None]]]
    """(what is done, number of items) -> what to call after each item."""


PLAIN = Show(say=lambda line: print(line, flush=True), progress=_no_progress)


def fetch_absent(recipe_path: Path, tasks_dir: Path, cache_dir: Path = CACHE_DIR) -> None:
    """Fetch the recipe's suites that are not in ``tasks_dir`` yet. Raises: as ``fetch_one``."""
    disable_progress_bars()  # a bar for every file would fill a log
    tasks = recipes.load(recipe_path).tasks
    for name in sorted({suite.split("/")[0] for suite in (tasks.train, tasks.heldout)}):
        if not (tasks_dir / name).is_dir():
            path = tasks_dir / f"{name}.json"
            settings = sandbox_settings(recipe_path, None, None, None, ())
            fetch_one(path, load_pin(path), tasks_dir / name, settings, cache_dir=cache_dir)


def sandbox_settings(
    recipe: Path | None, image: str | None, cpus: int | None, memory_mb: int | None, variables: tuple[str, ...]
) -> materialise.Settings:
    """The recipe's sandbox, with what the command line says instead. Raises: RecipeError: no image is named."""
    values: dict[str, object] = {}
    if recipe is not None:
        env = recipes.load(recipe).env
        if env.sandbox_cpus != int(env.sandbox_cpus):
            raise RecipeError(f"env.sandbox_cpus is {env.sandbox_cpus}; Harbor's tasks take whole CPUs only")
        values = {"image": env.sandbox_image or SANDBOX_IMAGE, "cpus": int(env.sandbox_cpus)}
        values |= {"memory_mb": env.sandbox_memory_mb, "pids": env.sandbox_pids}
    given = {"image": image, "cpus": cpus, "memory_mb": memory_mb}
    values |= {key: value for key, value in given.items() if value is not None}
    if "image" not in values:
        raise RecipeError("no sandbox image is named; give --recipe FILE or --image NAME")
    return materialise.Settings.model_validate(values | {"allowed_variables": variables})


def fetch_one(
    path: Path,
    pinned: PinFile,
    folder: Path,
    settings: materialise.Settings,
    *,
    cache_dir: Path = CACHE_DIR,
    workers: int = WORKERS,
    force: bool = False,
    show: Show = PLAIN,
) -> None:
    """Make ``folder`` the tasks that ``path`` pins. Doing it again changes nothing.

    Args: cache_dir: downloads, kept for the next time. force: replace a folder whose tasks were changed.
    Raises: RecipeError: the tasks are not as pinned. NotReadyError: the Hub is away. MachineError: disk.
    """
    if pinned.source.kind == "shipped" and folder.resolve() == path.with_suffix("").resolve():
        raise RecipeError(f"{path.stem} ships with the project and lies in place; give --out to prepare a copy of it")
    with materialise.exclusive(folder):
        if is_up_to_date(folder, pinned, settings, force):
            show.say(f"{folder}: up to date, {len(pinned.tasks)} tasks")
            return
        source = path.with_suffix("") if pinned.source.kind == "shipped" else cached(pinned, cache_dir, workers, show)
        with show.progress("checking", len(pinned.tasks)) as advance:
            problems = verify.verify_source(
                source, pinned, published=True, extra_is_a_problem=pinned.source.kind == "shipped", advance=advance
            )
        if problems:
            raise RecipeError(listing(f"{source} is not what {path} pins; nothing was written:", problems))
        with show.progress("writing", len(pinned.tasks)) as advance:
            dropped = materialise.materialise(source, folder, pinned, settings, advance=advance)
        if folder.parent.resolve() != path.parent.resolve():
            write_text(folder.parent / path.name, dump_pin(pinned))
    for what, count in sorted(dropped.items()):
        show.say(f"{count} tasks: {what}")
    show.say(f"{folder}: {len(pinned.tasks)} tasks, image {settings.image}")


def is_up_to_date(folder: Path, pinned: PinFile, settings: materialise.Settings, force: bool) -> bool:
    """Whether nothing is to be done. Raises: RecipeError: what lies there was changed, or is not ours."""
    if not folder.exists() or force:
        return False
    prepared = materialise.Prepared.read(folder)
    if prepared is None:
        raise RecipeError(f"{folder} was not made by `prepare_tasks fetch`; move it away, or use --force to replace it")
    if changed := materialise.changes(folder, pinned, prepared):
        raise RecipeError(listing(f"{folder} was changed since it was prepared; --force replaces it:", changed))
    return prepared.pin_sha256 == materialise.pin_sha256(pinned) and prepared.settings == settings


def cached(pinned: PinFile, cache_dir: Path, workers: int, show: Show) -> Path:
    """Bring the pinned tasks into the cache. Returns: the folder that holds them."""
    assert isinstance(pinned.source, HubSource)
    remote = datasets.RemoteTasks(connect(), pinned.source, cache_dir)
    files = remote.files()
    if absent := [task.name for task in pinned.tasks if task.name not in files]:
        raise RecipeError(
            listing(f"{pinned.source.repo} at {pinned.source.revision} does not have these pinned tasks:", absent)
        )
    download(remote, [file for task in pinned.tasks for file in files[task.name]], workers, show)
    return remote.folder


def download(remote: datasets.RemoteTasks, files: list[RemoteFile], workers: int, show: Show) -> None:
    """Bring what is missing into the cache."""
    missing = remote.missing(files)
    if missing:
        with show.progress("downloading", len(missing)) as advance:
            remote.download(missing, workers=workers, advance=advance)
