"""The run's task suites as splits of OpenEnv's Task API: checked, in the pinned order, with whole instructions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from openenv.harbor.models import HarborTaskRef

from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.common.tasks import (
    COMPOSE_FILE,
    Task,
    TaskProblem,
    check_disjoint,
    check_image,
    compose_services,
    listing,
    load_suite,
)


class SuiteProvider:
    """OpenEnv's TaskProvider over checked suites; a split is named as in the recipe.

    OpenEnv's own sorts by folder, takes any folder for a task, and cuts instructions at 4,000 characters.
    """

    def __init__(self, suites: dict[str, tuple[Task, ...]]) -> None:
        self._suites = suites

    def suites(self) -> tuple[tuple[Task, ...], ...]:
        """All suites, in the order in which they were given: training, held out."""
        return tuple(self._suites.values())

    def list_splits(self) -> list[dict[str, Any]]:
        return [{"name": name, "num_tasks": len(tasks)} for name, tasks in self._suites.items()]

    def num_tasks(self, split: str) -> int:
        return len(self._tasks(split))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return self._reference(split, index)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self._reference(split, index) for index in range(len(self._tasks(split)))[start:stop]]

    def task_dir(self, split: str, index: int) -> Path:
        """Raises: IndexError: there is no such task; the message gives both numbers."""
        tasks = self._tasks(split)
        if not 0 <= index < len(tasks):
            raise IndexError(f"task index {index} out of range ({len(tasks)} tasks in {split!r})")
        return tasks[index].folder

    def task_name(self, split: str, index: int) -> str:
        """For people; a task that is not there has a name too."""
        tasks = self._suites.get(split, ())
        return tasks[index].name if 0 <= index < len(tasks) else f"{split}[{index}]"

    def _tasks(self, split: str) -> tuple[Task, ...]:
        if split not in self._suites:
            raise ValueError(f"unknown split {split!r}; served splits are {sorted(self._suites)}")
        return self._suites[split]

    def _reference(self, split: str, index: int) -> dict[str, Any]:
        folder = self.task_dir(split, index)
        task = self._suites[split][index]
        reference = HarborTaskRef(
            index=index, task_id=str(folder), task_name=task.name, dataset=split, instruction=task.instruction.strip()
        )
        return dict(reference.model_dump())


def load(cfg: Recipe, tasks_dir: Path) -> SuiteProvider:
    """Raises: RecipeError: a suite is missing, broken, changed, unsafe to run or made for another image than the run's,
    or the two share a task."""
    train = load_suite(tasks_dir, cfg.tasks.train)
    heldout = load_suite(tasks_dir, cfg.tasks.heldout)
    check_disjoint(train, heldout)
    check_image((*train, *heldout), cfg.sandbox_image())
    check_compose_files([*train, *heldout])
    return SuiteProvider({cfg.tasks.train: train, cfg.tasks.heldout: heldout})


def check_compose_files(tasks: Iterable[Task]) -> None:
    """What `prepare_tasks` refuses, asked of every task that is served: some were put here by hand.

    Raises: RecipeError: the tasks whose compose file could reach the host or other containers.
    """
    problems = []
    for task in tasks:
        path = task.folder / COMPOSE_FILE
        if path.is_file() and (problem := _compose_problem(path.read_text(encoding="utf-8"))):
            problems.append(f"{task.name}: {problem}")
    if problems:
        raise RecipeError(listing("these tasks are not safe to run:", problems))


@functools.cache  # thousands of tasks share one text
def _compose_problem(text: str) -> str | None:
    try:
        parsed = yaml.safe_load(text)
        services = compose_services(parsed)
    except yaml.YAMLError as error:
        return f"{COMPOSE_FILE} is not valid YAML: {str(error).splitlines()[0]}"
    except TaskProblem as problem:
        return str(problem)
    # `prepare_tasks` writes this network itself. The run's overlay names it, and puts main on it and on no other.
    joined = [name for service, body in services.items() if service != "main" for name in _networks(body)]
    if foreign := sorted({*map(str, joined), *map(str, parsed.get("networks") or {})} - {"sandbox"}):
        return f"{COMPOSE_FILE} has network {', '.join(foreign)}; allowed: sandbox, for each service"
    return None


def _networks(service: dict[str, Any] | None) -> Iterable[Any]:
    return (service or {}).get("networks") or ["default"]
