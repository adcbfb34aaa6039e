"""Compare tasks on disk with the pin file that names them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from services.common.tasks import (
    PinFile,
    PinnedTask,
    Task,
    TaskProblem,
    files_sha256,
    load_task,
    repeated_instructions,
    task_folders,
)
from services.hub.tasks.materialise import Prepared, changes, pin_sha256

GRADER = "tests/grader.py"


@dataclass(frozen=True)
class Report:
    """What was found for one pin file."""

    name: str
    state: str
    """``shipped``, ``prepared`` or ``not fetched``."""
    num_tasks: int
    problems: tuple[str, ...]


def verify_source(
    folder: Path, pin: PinFile, *, published: bool, extra_is_a_problem: bool, advance: Callable[[], None] = lambda: None
) -> list[str]:
    """Every hash of every pinned task below ``folder``. Returns: one line for each thing wrong; none: all is as pinned.

    Args: published: as the dataset has them, before images are set. extra_is_a_problem: a task that is not pinned may
        not lie there; False for a cache of downloads, which may serve several pins.
    """
    problems: list[str] = []
    tasks: list[Task] = []
    for pinned in pin.tasks:
        try:
            task = load_task(folder / pinned.path, published=published)
            tasks.append(task)
            check_hashes(task.folder, task.instruction_sha256, pinned, pin.grader_sha256)
        except TaskProblem as problem:
            problems.append(f"{pinned.path}: {problem}")
        advance()
    if extra_is_a_problem:
        pinned_paths = {pinned.path for pinned in pin.tasks}
        problems += [f"{path}: extra, it is not pinned" for path in task_paths(folder, pin) if path not in pinned_paths]
    return problems + repeated_instructions(tasks)


def check_hashes(folder: Path, instruction_sha256: str, pinned: PinnedTask, graders: tuple[str, ...]) -> None:
    """Raises: TaskProblem: the first hash that differs, with both values."""
    if instruction_sha256 != pinned.instruction_sha256:
        raise TaskProblem(
            f"instruction.md is changed: it has SHA-256 {instruction_sha256}, pinned is {pinned.instruction_sha256}"
        )
    if graders:
        grader = folder / GRADER
        found = hashlib.sha256(grader.read_bytes()).hexdigest() if grader.is_file() else "no such file"
        if found not in graders:
            raise TaskProblem(f"{GRADER} is changed: it has SHA-256 {found}, allowed: {', '.join(graders)}")
    if (found := files_sha256(folder)) != pinned.files_sha256:
        raise TaskProblem(f"its files are changed: together they have SHA-256 {found}, pinned is {pinned.files_sha256}")


def task_paths(folder: Path, pin: PinFile) -> list[str]:
    """Paths of all task folders below a suite's folder, in the pin file's layout."""
    if pin.tasks[0].split is None:
        return task_folders(folder)
    return [f"{split}/{name}" for split in task_folders(folder) for name in task_folders(folder / split)]


def verify_pin(tasks_dir: Path, name: str, pin: PinFile, advance: Callable[[], None] = lambda: None) -> Report:
    """Check what lies in ``tasks_dir/name`` against ``pin``."""
    folder = tasks_dir / name
    if not folder.is_dir():
        gone = ("the folder of this shipped suite is missing",) if pin.source.kind == "shipped" else ()
        return Report(name, "not fetched", len(pin.tasks), gone)
    prepared = Prepared.read(folder)
    if prepared is None:
        if pin.source.kind == "hub":
            problem = f"{folder} was not made by `prepare_tasks fetch`; move it away"
            return Report(name, "unknown", len(pin.tasks), (problem,))
        problems = verify_source(folder, pin, published=False, extra_is_a_problem=True, advance=advance)
        return Report(name, "shipped", len(pin.tasks), tuple(problems))
    lines = changes(folder, pin, prepared)
    if prepared.pin_sha256 != pin_sha256(pin):
        lines.insert(0, "it was prepared from another pin file; run `prepare_tasks fetch` again")
    for pinned in pin.tasks:
        try:
            task = load_task(folder / pinned.path, allowed=prepared.settings.allowed)
            if task.instruction_sha256 != pinned.instruction_sha256:
                raise TaskProblem("instruction.md is not the pinned one")
        except TaskProblem as problem:
            lines.append(f"{pinned.path}: {problem}")
        advance()
    return Report(name, "prepared", len(pin.tasks), tuple(dict.fromkeys(lines)))


def overlaps(first: Iterable[PinnedTask], second: Iterable[PinnedTask]) -> list[str]:
    """What two sets share that must not be shared between training and test: instructions, questions, notebooks."""
    lines = []
    second = list(second)
    for what in ("instruction_sha256", "question_sha256", "notebook"):
        known = {getattr(task, what): task.path for task in second if getattr(task, what)}
        label = what.removesuffix("_sha256")
        lines += [
            f"{task.path} and {known[value]}: the same {label}"
            for task in first
            if (value := getattr(task, what)) in known
        ]
    return lines
