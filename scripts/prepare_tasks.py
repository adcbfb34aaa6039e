"""Prepare Harbor tasks for a run: ``python -m scripts.prepare_tasks pin | fetch | show | verify | stats``.

A pin file (``data/tasks/<name>.json``) says which tasks a suite has, in which order, and what they contain; this
program makes pin files, downloads what they name, checks every hash, and writes ``data/tasks/<name>/`` for the run.
Exit codes: 0 done, 2 the tasks or the command are wrong, 3 the Hub does not answer, 5 the disk does not fit.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.prepare import materialise, select, verify
from services.common import recipe as recipes
from services.common.errors import RecipeError, run_main
from services.common.run_dir import write_text
from services.common.tasks import (
    SANDBOX_IMAGE,
    HubSource,
    PinFile,
    PinnedTask,
    Selection,
    TaskProblem,
    dump_pin,
    listing,
    load_pin,
    load_task,
)
from services.hub import datasets
from services.hub.client import connect, messages
from services.hub.files import RemoteFile

TASKS_DIR = Path(__file__).resolve().parents[1] / "data" / "tasks"
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opencode-rl" / "tasks"

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
out = Console(highlight=False, soft_wrap=True)
TasksDir = Annotated[Path, typer.Option(help="Folder of pin files and suites.")]
CacheDir = Annotated[Path, typer.Option(help="Downloads, kept for the next time.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Downloads at a time.")]


# --- pin ----------------------------------------------------------------------------------------------------------


@app.command()
def pin(
    name: Annotated[str, typer.Argument(help="Name of the pin file to write, such as train.")],
    repo: Annotated[str, typer.Option(help="Dataset on the Hub, owner/name.")],
    revision: Annotated[str, typer.Option(help="Commit; a short one is resolved through the list of commits.")],
    take: Annotated[list[str] | None, typer.Option(help="difficulty=N, repeated; none: all tasks.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice and the order.")] = 0,
    disjoint_from: Annotated[list[str] | None, typer.Option(help="Pin files to share nothing with.")] = None,
    notebook_key: Annotated[str, typer.Option(help="Metadata key of a task's notebook; empty: none.")] = "notebook_id",
    question_key: Annotated[str, typer.Option(help="Metadata key of a task's question; empty: none.")] = "question",
    grader_sha256: Annotated[list[str] | None, typer.Option(help="Allowed hash of tests/grader.py, repeated.")] = None,
    folder: Annotated[str, typer.Option(help="Folder of the dataset that holds the tasks.")] = "tasks",
    tasks_dir: TasksDir = TASKS_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    workers: Workers = 16,
) -> None:
    """Choose tasks of a dataset and write the pin file that fixes them."""
    wanted = parse_take(take or [])
    check_form("--grader-sha256", grader_sha256 or [], r"[0-9a-f]{64}", "64 lower-case hexadecimal digits")
    check_form("--repo", [repo], r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", "owner/name")
    check_form("--folder", [folder], r"[a-z0-9][a-z0-9_-]*", "one lower-case folder name")
    target = pin_path(tasks_dir, name)
    others = [task for other in disjoint_from or [] for task in load_pin(pin_path(tasks_dir, other)).tasks]
    api = connect()
    source = HubSource(repo=repo, revision=datasets.resolve_revision(api, repo, revision), folder=folder)
    remote = datasets.RemoteTasks(api, source, cache_dir)
    files = remote.files()
    if not files:
        raise RecipeError(f"{repo} has no task in {folder}/ at {source.revision}")
    download(remote, [file for name in files for file in files[name] if is_description(file.path)], workers)
    candidates, unusable = [], []
    for task in files:
        try:
            candidates.append(select.candidate(remote.folder / task, notebook_key, question_key))
        except TaskProblem as problem:
            unusable.append(f"{task}: {problem}")
    if unusable and (not wanted or len(unusable) == len(files)):
        raise RecipeError(listing(f"tasks of {repo} that cannot be pinned:", unusable))
    chosen = select.select(candidates, wanted, seed, others, report=lambda line: out.print(escape(line)))
    download(remote, [file for one in chosen for file in files[one.task.name]], workers)
    pinned = PinFile(
        source=source,
        selection=Selection(
            seed=seed,
            rule=select.RULE if wanted else select.RULE_ALL,
            take=wanted,
            disjoint_from=tuple(disjoint_from or []),
        ),
        grader_sha256=tuple(grader_sha256 or []),
        tasks=tuple(one.pinned() for one in chosen),
    )
    if problems := verify.verify_source(remote.folder, pinned, published=True, extra_is_a_problem=False):
        raise RecipeError(listing("the chosen tasks cannot be pinned:", problems))
    write_text(target, dump_pin(pinned))
    for line in unusable:
        out.print(escape(f"left out: {line}"))
    out.print(f"{target}: {len(pinned.tasks)} tasks of {repo} at {source.revision}")


def check_form(option: str, values: list[str], pattern: str, allowed: str) -> None:
    """Raises: RecipeError: a value of the option has another form."""
    for value in values:
        if not re.fullmatch(pattern, value):
            raise RecipeError(f"{option} {value!r} is not understood; give {allowed}")


def parse_take(take: list[str]) -> dict[str, int]:
    """``["medium=400"]`` -> ``{"medium": 400}``. Raises: RecipeError: another form."""
    wanted = {}
    for entry in take:
        difficulty, _, count = entry.partition("=")
        if not difficulty or not count.isdigit() or int(count) == 0:
            raise RecipeError(f"--take {entry!r} is not understood; give difficulty=N, such as medium=400")
        wanted[difficulty.lower()] = int(count)
    return wanted


def is_description(path: str) -> bool:
    """Whether a file is needed to choose a task: the rest is only downloaded for those that were chosen."""
    return path.endswith(("/task.toml", "/instruction.md", "/tests/test.sh"))


# --- fetch --------------------------------------------------------------------------------------------------------


@app.command()
def fetch(
    pins: Annotated[list[str], typer.Argument(help="Pin files, or their names: train test.")],
    recipe: Annotated[Path | None, typer.Option(help="Recipe that names the sandbox image and its limits.")] = None,
    image: Annotated[str | None, typer.Option(help="Sandbox image, instead of the recipe's.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Of a sandbox, instead of the recipe's.")] = None,
    memory_mb: Annotated[int | None, typer.Option(min=1, help="Of a sandbox, instead of the recipe's.")] = None,
    allow_variable: Annotated[list[str] | None, typer.Option(help="Host variable that tasks may read.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder whose tasks were changed.")] = False,
    destination: Annotated[Path | None, typer.Option("--out", help="Folder to write to; default: tasks-dir.")] = None,
    tasks_dir: TasksDir = TASKS_DIR,
    cache_dir: CacheDir = CACHE_DIR,
    workers: Workers = 8,
) -> None:
    """Download what is pinned, check every hash, and write it for a run. Doing it again changes nothing."""
    settings = sandbox_settings(recipe, image, cpus, memory_mb, tuple(allow_variable or []))
    for entry in pins:
        path = pin_path(tasks_dir, entry)
        fetch_one(path, load_pin(path), (destination or path.parent) / path.stem, settings, cache_dir, workers, force)


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
    cache_dir: Path,
    workers: int,
    force: bool,
) -> None:
    if pinned.source.kind == "shipped" and folder.resolve() == path.with_suffix("").resolve():
        raise RecipeError(f"{path.stem} ships with the project and lies in place; give --out to prepare a copy of it")
    with materialise.exclusive(folder):
        if is_up_to_date(folder, pinned, settings, force):
            out.print(f"{folder}: up to date, {len(pinned.tasks)} tasks")
            return
        source = path.with_suffix("") if pinned.source.kind == "shipped" else cached(pinned, cache_dir, workers)
        with progress("checking", len(pinned.tasks)) as advance:
            problems = verify.verify_source(
                source, pinned, published=True, extra_is_a_problem=pinned.source.kind == "shipped", advance=advance
            )
        if problems:
            raise RecipeError(listing(f"{source} is not what {path} pins; nothing was written:", problems))
        with progress("writing", len(pinned.tasks)) as advance:
            dropped = materialise.materialise(source, folder, pinned, settings, advance=advance)
        if folder.parent.resolve() != path.parent.resolve():
            write_text(folder.parent / path.name, dump_pin(pinned))
    for what, count in sorted(dropped.items()):
        out.print(escape(f"{count} tasks: {what}"))
    out.print(f"{folder}: {len(pinned.tasks)} tasks, image {settings.image}")


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


def cached(pinned: PinFile, cache_dir: Path, workers: int) -> Path:
    """Bring the pinned tasks into the cache. Returns: the folder that holds them."""
    assert isinstance(pinned.source, HubSource)
    remote = datasets.RemoteTasks(connect(), pinned.source, cache_dir)
    files = remote.files()
    if absent := [task.name for task in pinned.tasks if task.name not in files]:
        raise RecipeError(
            listing(f"{pinned.source.repo} at {pinned.source.revision} does not have these pinned tasks:", absent)
        )
    download(remote, [file for task in pinned.tasks for file in files[task.name]], workers)
    return remote.folder


def download(remote: datasets.RemoteTasks, files: list[RemoteFile], workers: int) -> None:
    missing = remote.missing(files)
    if missing:
        with progress("downloading", len(missing)) as advance:
            remote.download(missing, workers=workers, advance=advance)


# --- verify, show, stats ------------------------------------------------------------------------------------------


@app.command("verify")
def verify_command(
    pins: Annotated[list[str] | None, typer.Argument(help="Pin files, or their names; default: all there are.")] = None,
    tasks_dir: TasksDir = TASKS_DIR,
) -> None:
    """Check every hash of the tasks on disk, and that no two sets share a task."""
    paths = pin_paths(tasks_dir, pins)
    loaded = {path.stem: load_pin(path) for path in paths}
    reports = []
    with progress("checking", sum(len(each.tasks) for each in loaded.values())) as advance:
        for path in paths:
            reports.append(verify.verify_pin(path.parent, path.stem, loaded[path.stem], advance))
    table = Table("pin file", "state", "tasks", "problems")
    for report in reports:
        table.add_row(report.name, report.state, str(report.num_tasks), str(len(report.problems)))
    out.print(table)
    problems = [f"{report.name}/{line}" for report in reports for line in report.problems]
    if pins:
        problems += [f"{report.name}: not fetched" for report in reports if report.state == "not fetched"]
    for first, second in combinations(split_sets(loaded), 2):
        problems += [f"{first[0]} and {second[0]} overlap: {line}" for line in verify.overlaps(first[1], second[1])]
    if problems:
        raise RecipeError(listing("tasks are not as pinned:", problems))


def split_sets(pins: dict[str, PinFile]) -> list[tuple[str, tuple[PinnedTask, ...]]]:
    """Each set of tasks by its suite name: ``smoke/train``, ``test``."""
    sets = []
    for name, pinned in pins.items():
        for split in dict.fromkeys(task.split for task in pinned.tasks):
            sets.append((f"{name}/{split}" if split else name, pinned.in_split(split)))
    return sets


@app.command()
def show(
    pin: Annotated[str, typer.Argument(help="Pin file, or its name.")],
    task: Annotated[str | None, typer.Argument(help="Name or number of a task; none: list them.")] = None,
    tasks_dir: TasksDir = TASKS_DIR,
) -> None:
    """List the tasks of a pin file, or show one of them."""
    path = pin_path(tasks_dir, pin)
    pinned = load_pin(path)
    if task is None:
        table = Table("", "task", "difficulty", "instruction SHA-256")
        for number, each in enumerate(pinned.tasks):
            table.add_row(str(number), each.path, each.difficulty, each.instruction_sha256[:12])
        out.print(table)
        return
    chosen = find_task(pinned, task)
    folder = path.with_suffix("") / chosen.path
    try:
        loaded = load_task(folder)
    except TaskProblem as problem:
        raise RecipeError(f"{folder}: {problem}; run `prepare_tasks fetch {path.stem}`") from None
    out.print(Panel(escape(loaded.instruction.strip()), title=chosen.path))
    solution = loaded.reference_solution()
    for label, value in (
        ("difficulty", loaded.difficulty),
        ("image", loaded.docker_image),
        ("instruction SHA-256", loaded.instruction_sha256),
        ("files SHA-256", chosen.files_sha256),
        ("reference solution", solution or "none"),
        ("folder", str(folder)),
    ):
        out.print(f"{label}: {escape(value)}")


def find_task(pinned: PinFile, wanted: str) -> PinnedTask:
    """A task by its number, name or path. Raises: RecipeError: there is none, or more than one."""
    if wanted.isdigit() and int(wanted) < len(pinned.tasks):
        return pinned.tasks[int(wanted)]
    found = [task for task in pinned.tasks if wanted in (task.name, task.path)]
    if len(found) != 1:
        what = "no task" if not found else "more than one task"
        raise RecipeError(f"there is {what} {wanted!r}; give a name, split/name, or 0 to {len(pinned.tasks) - 1}")
    return found[0]


@app.command()
def stats(
    pins: Annotated[list[str] | None, typer.Argument(help="Pin files, or their names; default: all there are.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Count tokens with the tokenizer of this recipe's model.")] = None,
    tasks_dir: TasksDir = TASKS_DIR,
    models_dir: Annotated[Path, typer.Option(help="Folder of local models.")] = TASKS_DIR.parent / "models",
) -> None:
    """Count tasks by difficulty, and how long their instructions are."""
    unit, length = ("tokens", token_counter(recipe, models_dir)) if recipe else ("characters", len)
    table = Table("suite", "difficulty", "tasks", f"{unit}: shortest", "median", "longest")
    for path in pin_paths(tasks_dir, pins):
        for suite, tasks in split_sets({path.stem: load_pin(path)}):
            for difficulty, count in sorted(Counter(task.difficulty for task in tasks).items()):
                lengths = [
                    length((path.with_suffix("") / task.path / "instruction.md").read_text(encoding="utf-8").strip())
                    for task in tasks
                    if task.difficulty == difficulty and (path.with_suffix("") / task.path).is_dir()
                ]
                table.add_row(suite, difficulty, str(count), *summary(lengths))
    out.print(table)


def summary(lengths: list[int]) -> list[str]:
    """Shortest, median and longest; dashes where no task was fetched."""
    if not lengths:
        return ["-", "-", "-"]
    return [str(min(lengths)), f"{statistics.median(lengths):g}", str(max(lengths))]


def token_counter(recipe: Path, models_dir: Path) -> Callable[[str], int]:
    """A function that counts tokens as the recipe's model does, special tokens left out."""
    from tokenizers import Tokenizer  # only here: the other commands do not need it

    model = recipes.load(recipe).model
    if model.source == "local":
        path = models_dir / model.id / "tokenizer.json"
    else:
        api = connect()
        with messages(model.id, api.endpoint):
            path = Path(api.hf_hub_download(model.id, "tokenizer.json", revision=model.revision))
    if not path.is_file():
        raise RecipeError(f"{path} is missing; the recipe's model {model.id} has no tokenizer there")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


# --- shared -------------------------------------------------------------------------------------------------------


def pin_path(tasks_dir: Path, name: str) -> Path:
    """``train`` -> ``tasks_dir/train.json``; a path to a JSON file is taken as it is."""
    if name.endswith(".json"):
        return Path(name)
    if not name.replace("-", "").replace("_", "").isalnum() or name != name.lower():
        raise RecipeError(f"{name!r} is no name of a pin file; allowed: lower-case letters, digits, - and _")
    return tasks_dir / f"{name}.json"


def pin_paths(tasks_dir: Path, names: list[str] | None) -> list[Path]:
    paths = [pin_path(tasks_dir, name) for name in names] if names else sorted(tasks_dir.glob("*.json"))
    if not paths:
        raise RecipeError(f"there is no pin file in {tasks_dir}; make one with `prepare_tasks pin`")
    return paths


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, nothing elsewhere; yields what to call after each item."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def main() -> int:
    disable_progress_bars()  # one bar of ours instead of one a file
    app()
    return 0


if __name__ == "__main__":
    run_main(main)
