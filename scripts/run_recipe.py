"""The recipe that a run was made with: the file of today may say something else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tomlkit

from services.common import recipe, run_dir
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir


def of(run: RunDir) -> Recipe:
    """From the run's manifest; of a run without one, the recipe that RECIPE names, under the run's name.

    Raises: RecipeError: the recipe does not fit this version of the project, or there is none.
    """
    manifest = run_dir.read_json(run.manifest)
    if manifest is None:
        try:
            found = recipe.from_environment()
        except RecipeError as error:
            raise RecipeError(f"run {run.path.name} has no manifest.json, so RECIPE is read: {error}") from None
        return found.model_copy(update={"run": found.run.model_copy(update={"name": run.path.name})})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "recipe.toml"
        path.write_text(tomlkit.dumps(_without_none(manifest["recipe"])), encoding="utf-8")
        try:
            return recipe.load(path)
        except RecipeError as error:
            reason = str(error).replace(str(path), str(run.manifest))
            raise RecipeError(f"run {run.path.name} was made with another version of the project: {reason}") from None


def to_toml(cfg: Recipe) -> str:
    """Every key with its value, defaults included."""
    return tomlkit.dumps(_without_none(cfg.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    """TOML has no null; the model has None as the default of all that may be None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
