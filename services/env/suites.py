"""The run's task suites as splits of OpenEnv's Task API: checked, in the pinned order, with whole instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openenv.harbor.models import HarborTaskRef

from services.common.recipe import Recipe
from services.common.tasks import Task, check_disjoint, load_suite


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
    """Raises: RecipeError: a suite is missing, broken or changed, or the two share a task."""
    train = load_suite(tasks_dir, cfg.tasks.train)
    heldout = load_suite(tasks_dir, cfg.tasks.heldout)
    check_disjoint(train, heldout)
    return SuiteProvider({cfg.tasks.train: train, cfg.tasks.heldout: heldout})
