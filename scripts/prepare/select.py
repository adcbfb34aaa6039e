"""Choose the tasks of a pin file from a dataset, in a way that gives the same list again."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import RecipeError
from services.common.tasks import (
    TASK_NAME,
    PinnedTask,
    Task,
    TaskProblem,
    listing,
    load_task,
    pin_task,
    repeated_instructions,
    text_sha256,
)

RULE = (
    "Per difficulty, tasks sorted by SHA-256 of '<seed> <difficulty> <name>', those left out that share a notebook, "
    "question or instruction with the pin files in disjoint_from or repeat an instruction; the first N; then all "
    "sorted by SHA-256 of '<seed> <name>'."
)
RULE_ALL = "All tasks, sorted by name."


@dataclass(frozen=True)
class Candidate:
    """A task that may be pinned."""

    task: Task
    notebook: str | None
    question: str | None

    def pinned(self) -> PinnedTask:
        return pin_task(self.task, notebook=self.notebook, question=self.question)


def candidate(folder: Path, notebook_key: str | None, question_key: str | None) -> Candidate:
    """Load a published task. Raises: TaskProblem: it cannot be used, or lacks a metadata key that was asked for."""
    if not re.fullmatch(TASK_NAME, folder.name):
        raise TaskProblem("its name has other characters than letters, digits, dot, - and _")
    task = load_task(folder, published=True)
    values = []
    for key in (notebook_key, question_key):
        if key and key not in task.metadata:
            keys = ", ".join(sorted(task.metadata)) or "none"
            raise TaskProblem(f"task.toml has no metadata {key!r}; it has: {keys}")
        values.append(str(task.metadata[key]) if key else None)
    return Candidate(task, *values)


def select(
    candidates: Iterable[Candidate],
    take: Mapping[str, int],
    seed: int,
    others: Iterable[PinnedTask] = (),
    report: Callable[[str], None] = lambda _: None,
) -> list[Candidate]:
    """Apply ``RULE``, or take all where ``take`` is empty.

    Raises: RecipeError: a difficulty has too few tasks left; with all wanted: two share an instruction, or one shares
        something with ``others``.
    """
    foreign = _keys_of_pinned(others)
    pool = sorted(candidates, key=lambda one: one.task.name)
    if not take:
        return _all(pool, foreign)
    chosen: list[Candidate] = []
    for difficulty, count in take.items():
        ranked = sorted(pool, key=lambda one: _rank(f"{seed} {one.task.difficulty} {one.task.name}"))
        fitting = [one for one in ranked if one.task.difficulty == difficulty]
        usable = _disjoint(fitting, count, foreign, {one.task.key for one in chosen}, report)
        if len(usable) < count:
            sizes = Counter(one.task.difficulty for one in pool)
            raise RecipeError(
                f"{count} {difficulty} tasks were asked for and {len(usable)} can be taken of {len(fitting)}; "
                f"the dataset has: {', '.join(f'{name} {size}' for name, size in sorted(sizes.items()))}"
            )
        chosen += usable
    return sorted(chosen, key=lambda one: _rank(f"{seed} {one.task.name}"))


def _all(pool: list[Candidate], foreign: set[tuple[str, str]]) -> list[Candidate]:
    if repeated := repeated_instructions(one.task for one in pool):
        raise RecipeError(listing("tasks that a rollout could not tell apart:", repeated))
    if shared := [one.task.name for one in pool if _keys(one) & foreign]:
        raise RecipeError(listing("tasks that share a notebook, question or instruction with another set:", shared))
    return pool


def _disjoint(
    ranked: list[Candidate],
    count: int,
    foreign: set[tuple[str, str]],
    known: set[str],
    report: Callable[[str], None],
) -> list[Candidate]:
    """The first ``count`` of ``ranked`` that share nothing with ``foreign`` and no instruction with each other."""
    usable: list[Candidate] = []
    for one in ranked:
        if len(usable) == count:
            break
        if _keys(one) & foreign or one.task.key in known:
            report(f"{one.task.name}: left out, it is not disjoint")
            continue
        known.add(one.task.key)
        usable.append(one)
    return usable


def _rank(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _keys(one: Candidate) -> set[tuple[str, str]]:
    keys = {("instruction", one.task.instruction_sha256)}
    if one.notebook:
        keys.add(("notebook", one.notebook))
    if one.question:
        keys.add(("question", text_sha256(one.question)))
    return keys


def _keys_of_pinned(tasks: Iterable[PinnedTask]) -> set[tuple[str, str]]:
    return {
        (what, value)
        for task in tasks
        for what, value in (
            ("instruction", task.instruction_sha256),
            ("notebook", task.notebook),
            ("question", task.question_sha256),
        )
        if value
    }
