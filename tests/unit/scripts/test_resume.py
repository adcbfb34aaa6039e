"""Taking up a run that ended: what `make resume` does before anything starts."""

import os
import tomllib
from pathlib import Path

import pytest

from scripts import run as scripts_run
from services.common import recipe, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir
from services.trainer.supervise import Attempts, Verdict

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that was given up after its resumes; today's recipe says something else."""
    for name in ("RECIPE", "RUN_NAME"):
        monkeypatch.setenv(name, "other")
    run = RunDir(tmp_path / "long")
    cfg = recipe.load(ROOT / "data/recipes/smoke.toml", {"run.name": "long", "trainer.max_steps": 77})
    run_dir.write_json(run.manifest, {"recipe": cfg.model_dump(mode="json")})
    attempts = Attempts(run)
    for _ in range(4):
        attempts.record_start(None)
        attempts.record_end(Verdict(1, "killed", resume=True), 3)
    run_dir.write_json(run.stop_request, {"reason": "stall", "resume": True})
    run_dir.write_json(run.result, {"exit_code": 6, "reason": "killed", "step": 3})
    return run


def test_a_run_is_taken_up_with_its_own_recipe_and_a_fresh_count(ended: RunDir) -> None:
    scripts_run.take_up(ended)
    assert os.environ["RUN_NAME"] == "long"
    assert recipe.load(Path(os.environ["RECIPE"])).trainer.max_steps == 77
    assert not ended.result.exists() and not ended.stop_request.exists()
    assert Attempts(ended).resumes() == 0
    (line,) = [line for line in run_dir.read_lines(ended.attempts) if line["event"] == "resumed by a person"]
    assert line["before"]["exit_code"] == 6


def test_the_recipe_of_a_resumed_run_lies_in_its_folder_where_a_restarted_container_finds_it(ended: RunDir) -> None:
    scripts_run.take_up(ended)
    assert Path(os.environ["RECIPE"]).parent == ended.path
    assert tomllib.loads((ended.path / "recipe.toml").read_text())["run"]["name"] == "long"


def test_a_run_that_is_done_is_not_taken_up(ended: RunDir) -> None:
    run_dir.write_json(ended.result, {"exit_code": 0, "reason": "done", "step": 77})
    with pytest.raises(RecipeError, match="run long is done: all of its 77 steps"):
        scripts_run.take_up(ended)
    assert ended.result.exists()


def test_a_run_that_was_killed_without_a_result_is_taken_up_too(ended: RunDir) -> None:
    ended.result.unlink()
    scripts_run.take_up(ended)
    assert Attempts(ended).resumes() == 0
