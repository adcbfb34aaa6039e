"""What is made of the grades of an idle sandbox and of a solved one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.doctor import report, sandbox
from scripts.doctor.setup import Setup
from tests.unit.doctor.test_machine import fails

Broken = Callable[..., Setup]


def facts(**changes: dict[str, Any]) -> dict[str, Any]:
    good = {"nothing": {"rewards": {"reward": 0.0}, "error": ""}, "solution": {"rewards": {"reward": 1.0}, "error": ""}}
    return {**good, "task": "first-a", **changes}


def test_a_suite_that_grades_both_rightly_is_ok(setup: Setup) -> None:
    assert sandbox.grading(setup, facts()).state == "ok"
    without = {name: value for name, value in facts().items() if name != "solution"}
    assert "no reference solution" in sandbox.grading(setup, without).found
    keys = {"rewards": {"correctness": 0.0, "reward": 0.0}, "error": ""}
    assert sandbox.grading(setup, facts(nothing=keys)).state == "ok"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nothing": {"rewards": {"reward": 1.0}, "error": ""}}, ("doing nothing earns 1", "must earn 0")),
        ({"solution": {"rewards": {"reward": 0.5}, "error": ""}}, ("reference solution earns 0.5", "must earn 1")),
        ({"nothing": {"rewards": {}, "error": ""}}, ("doing nothing was not graded", "wrote no reward")),
        (
            {"nothing": {"rewards": {}, "error": "HealthcheckError: no route to host"}},
            ("no route to host", "env.healthcheck_internet = true", "env.sandbox_base"),
        ),
    ],
)
def test_anything_else_is_refused_with_what_to_do(
    changes: dict[str, Any], words: tuple[str, ...], setup: Setup
) -> None:
    fails(sandbox.grading(setup, facts(**changes)), 2, *words)


def test_a_start_looks_at_suites_that_do_not_ship_with_the_project(broken: Broken, tmp_path: Path) -> None:
    shipped = broken()
    assert sandbox.before_a_run in report.START
    assert "ships with the project" in sandbox.before_a_run(shipped).found
    own = tmp_path / "tasks"
    shutil.copytree(shipped.tasks_dir / "smoke", own / "smoke")  # the same tasks, and nobody has pinned them
    assert sandbox.before_a_run(broken(tasks_dir=own)).found == "no Docker engine answers", "it would have looked"
