"""A set-up on which every check that needs no container is ok: the shipped smoke recipe, tasks and model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.doctor.setup import Setup
from services.common import recipe

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ROOT / "data/recipes/smoke.toml"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    good = Setup(
        cfg=recipe.load(SMOKE),
        recipe_path=SMOKE,
        variant="cpu",
        tag="cpu",
        registry="local",
        runs_dir=tmp_path / "runs",
        tasks_dir=ROOT / "data/tasks",
        models_dir=ROOT / "data/models",
        hf_cache=tmp_path / "hf",
        env_port=0,
        environment={},
    )
    vars(good)["engine"] = None  # no test here talks to an engine
    return good


@pytest.fixture
def broken(setup: Setup) -> Callable[..., Setup]:
    """The good set-up with keys of the recipe (``rollout__max_inflight=3``) or fields of the set-up changed."""

    def change(**changes: Any) -> Setup:
        keys = {name.replace("__", "."): changes.pop(name) for name in list(changes) if "__" in name}
        if keys:
            changes["cfg"] = recipe.load(SMOKE, keys)
        found = dataclasses.replace(setup, **changes)
        vars(found)["engine"] = None
        return found

    return change


@pytest.fixture
def facts() -> dict[str, Any]:
    """What the trainer image's probe printed for the smoke recipe: recorded."""
    return dict(json.loads((Path(__file__).parent / "trainer_facts.json").read_text()))
