"""What makes a checkpoint whole, which ones rotation keeps, and what a resume takes from one: files only, no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common import health, recipe, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir
from services.trainer import checkpoint, resume
from services.trainer.resume import Cursor
from tests.fakes.run import beat

START = Cursor()
CFG = recipe.load(Path(__file__).resolve().parents[3] / "data/recipes/smoke.toml")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def save(run: RunDir, step: int, cursor: Cursor = START, *, ready: bool = True, version: int = 1) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in checkpoint.PIECES:
        (folder / name).write_text(f"{name} of {step}")
    resume.write_state(folder, cursor, version, [], cfg=CFG)
    if ready:
        checkpoint.complete(folder)
    return folder


def steps(run: RunDir) -> list[int]:
    return [found.step for found in run.complete_checkpoints()]


def test_ready_comes_only_when_every_piece_is_there(run: RunDir) -> None:
    folder = save(run, 2, ready=False)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no optimizer.pt \(optimizer state\)"):
        checkpoint.complete(folder)
    assert steps(run) == []


def test_rotation_keeps_the_newest_and_the_best(run: RunDir) -> None:
    for step in range(1, 7):
        save(run, step)
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-2"})
    assert checkpoint.rotate(run, 2) == [1, 3, 4]
    assert steps(run) == [2, 5, 6]


def test_rotation_spares_one_that_is_in_use_until_it_is_not(run: RunDir) -> None:
    folders = [save(run, step) for step in (1, 2, 3)]
    with run_dir.in_use(folders[0]):
        assert checkpoint.rotate(run, 1) == [2]
    assert checkpoint.rotate(run, 1) == [1]


def test_rotation_spares_the_one_that_is_being_evaluated(run: RunDir) -> None:
    for step in (1, 2, 3):
        save(run, step)
    beat(run, "evaluator", "evaluating", 1)
    assert health.read_heartbeats(run)["evaluator"].step == 1
    assert checkpoint.rotate(run, 1) == [2]


def test_an_incomplete_checkpoint_is_no_part_of_rotation_and_not_kept_for_a_resume(run: RunDir) -> None:
    save(run, 1)
    cut = save(run, 2, ready=False)
    assert checkpoint.rotate(run, 1) == []
    assert resume.begin(run, CFG).step == 1
    assert not cut.exists()


def test_a_run_without_a_checkpoint_starts_from_the_beginning_and_its_steps_are_undone(run: RunDir) -> None:
    for step in (1, 2):
        run_dir.append_line(run.metrics, {"step": step})
        run_dir.append_line(run.trained, {"step": step})
    run_dir.append_line(run.path / "policy_versions.jsonl", {"version": 3, "served_s": 1.0})
    start = resume.begin(run, CFG)
    assert (start.step, start.cursor, start.served_version) == (0, Cursor(), 3)
    assert run.metrics.read_text() == "" and run.trained.read_text() == ""
    kept = run_dir.read_lines(run.metrics.with_name("metrics.rolled_back.jsonl"))
    assert [line["step"] for line in kept] == [1, 2]


def test_metrics_after_the_checkpoint_are_set_aside_and_those_before_it_stay_as_they_are(run: RunDir) -> None:
    for step in range(1, 6):
        run_dir.append_line(run.metrics, {"step": step, "loss": step / 3})
    before = run.metrics.read_bytes().splitlines()
    save(run, 3, Cursor(7, (4,)), version=4)
    start = resume.begin(run, CFG)
    assert run.metrics.read_bytes().splitlines() == before[:3]
    assert start.cursor == Cursor(7, (4,))
    assert (start.saved_version, start.served_version) == (4, 4)
    resume.begin(run, CFG)
    assert len(run_dir.read_lines(run.metrics.with_name("metrics.rolled_back.jsonl"))) == 2


def test_the_hub_is_asked_only_where_the_folder_has_nothing(run: RunDir) -> None:
    asked = []

    def fetch(found: RunDir) -> run_dir.Checkpoint | None:
        asked.append(found)
        save(found, 4)
        return found.complete_checkpoints()[-1]

    assert resume.begin(run, CFG, fetch).step == 4
    assert resume.begin(run, CFG, fetch).step == 4
    assert asked == [run]


def test_positions_start_with_those_that_were_not_finished() -> None:
    walk = Cursor(7, (2, 5)).positions()
    assert [next(walk) for _ in range(5)] == [2, 5, 7, 8, 9]


def test_a_checkpoint_of_another_version_of_the_project_is_refused(run: RunDir) -> None:
    folder = save(run, 2, ready=False)
    run_dir.write_json(folder / resume.ROLLOUT_STATE, {"prompt_index": 3, "model_version": 2})
    checkpoint.complete(folder)
    with pytest.raises(RecipeError, match="without a cursor"):
        resume.begin(run, CFG)


def test_ready_of_another_version_is_refused(run: RunDir) -> None:
    folder = save(run, 2)
    (folder / run_dir.READY).write_text("2026-11-29T12:00:00Z\n")
    with pytest.raises(RecipeError, match="READY that is not the list of its pieces"):
        resume.begin(run, CFG)


def test_what_may_change_between_attempts(run: RunDir) -> None:
    save(run, 2)
    path = Path(__file__).resolve().parents[3] / "data/recipes/smoke.toml"
    assert resume.begin(run, recipe.load(path, {"trainer.learning_rate": 1e-5, "trainer.max_steps": 9})).step == 2
    with pytest.raises(RecipeError, match="seed was 1, is 2"):
        resume.begin(run, recipe.load(path, {"run.seed": 2}))


def test_a_state_is_readable_for_trl_and_for_people(run: RunDir) -> None:
    folder = save(run, 2, Cursor(9, (4, 6)), version=3)
    state = json.loads((folder / resume.ROLLOUT_STATE).read_text())
    assert (state["prompt_index"], state["model_version"]) == (4, 3)
