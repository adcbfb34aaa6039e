"""``services.hub.tasks``: what a Job does before it starts, against a local Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import RecipeError
from services.common.tasks import HubSource, PinFile, dump_pin, load_suite, load_task, pin_task
from services.hub.tasks.fetch import fetch_absent
from tests.hub.dataset import published, published_task
from tests.hub.server import LocalHub

ROOT = Path(__file__).resolve().parents[3]
SMOKE = (ROOT / "data/recipes/smoke.toml").read_text(encoding="utf-8")


@pytest.fixture
def tasks_dir(server: LocalHub, tmp_path: Path) -> Path:
    """Pin files of two suites of a dataset, and neither of them fetched."""
    tasks_dir = tmp_path / "tasks"
    revision = server.commit("made/tasks", published(range(4)), repo_type="dataset")
    source = HubSource(repo="made/tasks", revision=revision, folder="tasks")
    for name, numbers in {"train": (0, 1), "test": (2, 3)}.items():
        pinned = []
        for number in numbers:
            folder = tmp_path / f"published/t{number:04}"
            for path, content in published_task(number).items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
            pinned.append(pin_task(load_task(folder, published=True)))
        tasks_dir.mkdir(exist_ok=True)
        (tasks_dir / f"{name}.json").write_text(dump_pin(PinFile(source=source, tasks=tuple(pinned))))
    return tasks_dir


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(SMOKE.replace('"smoke/train"', '"train"').replace('"smoke/heldout"', '"test"'))
    return path


def test_the_recipes_suites_are_fetched_where_they_are_absent(
    recipe: Path, tasks_dir: Path, server: LocalHub, tmp_path: Path
) -> None:
    fetch_absent(recipe, tasks_dir, tmp_path / "cache")
    assert [task.name for task in load_suite(tasks_dir, "train")] == ["t0000", "t0001"]
    assert [task.name for task in load_suite(tasks_dir, "test")] == ["t0002", "t0003"]
    server.requests.clear()
    fetch_absent(recipe, tasks_dir, tmp_path / "cache")
    assert server.requests == []


def test_a_suite_without_a_pin_file_is_refused_by_the_command_with_exit_code_2(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pin file .*test\.json does not exist"):
        fetch_absent(recipe, tmp_path)
    environment = {"RECIPE": str(recipe), "TASKS_DIR": str(tmp_path), "PATH": "/usr/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "services.hub", "tasks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "test.json does not exist" in done.stderr
