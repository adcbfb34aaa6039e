"""Resume points: only the newest is there, and a kill at any moment leaves none that looks complete and is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.common import run_dir
from services.common.run_dir import READY, RunDir
from services.trainer import checkpoint, resume_points


def save(run: RunDir, step: int, *, without: str | None = None) -> Path:
    """The pieces of a checkpoint, and no READY."""
    folder = run.resume_points / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in checkpoint.PIECES:
        if name != without:
            (folder / name).write_bytes(f"{name} of {step}".encode())
    return folder


def steps(run: RunDir) -> list[int]:
    """Of the folders there, complete or not."""
    return sorted(int(folder.name.removeprefix("checkpoint-")) for folder in run.resume_points.glob("checkpoint-*"))


def complete_steps(run: RunDir) -> list[int]:
    return [found.step for found in run_dir.iter_checkpoints(run.resume_points)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_the_newest_is_complete_and_the_others_are_gone(run: RunDir) -> None:
    for step in (10, 20):
        save(run, step)
        resume_points.keep_only(run, step)
        assert (steps(run), complete_steps(run)) == ([step], [step])
    (found,) = run_dir.iter_checkpoints(run.resume_points)
    checkpoint.check(found)


def test_none_is_left_once_a_checkpoint_is_newer(run: RunDir) -> None:
    save(run, 10)
    resume_points.keep_only(run, 10)
    resume_points.keep_only(run, None)
    assert steps(run) == []


def test_a_run_without_resume_points_has_none_to_delete(run: RunDir) -> None:
    resume_points.keep_only(run, None)
    resume_points.discard_incomplete(run)
    assert not run.resume_points.exists()


@pytest.mark.parametrize("name", checkpoint.PIECES)
def test_one_that_lacks_a_piece_is_not_complete_and_the_one_before_it_stays(run: RunDir, name: str) -> None:
    save(run, 10)
    resume_points.keep_only(run, 10)
    save(run, 20, without=name)
    with pytest.raises(FileNotFoundError, match=name):
        resume_points.keep_only(run, 20)
    assert complete_steps(run) == [10]


def test_a_save_that_was_cut_short_is_deleted_and_the_complete_one_stays(run: RunDir) -> None:
    save(run, 10)
    resume_points.keep_only(run, 10)
    save(run, 20, without="optimizer.pt")
    resume_points.discard_incomplete(run)
    assert (steps(run), complete_steps(run)) == ([10], [10])


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_complete(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10)
    resume_points.keep_only(run, 10)
    save(run, 20)

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt(folder)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            resume_points.keep_only(run, 20)
    assert complete_steps(run) == [20]
    assert not (run.resume_points / "checkpoint-10" / READY).exists()
    resume_points.discard_incomplete(run)
    assert steps(run) == [20]


def test_checkpoints_of_the_run_are_left_alone(run: RunDir) -> None:
    kept = run.checkpoints / "checkpoint-5"
    kept.mkdir(parents=True)
    save(run, 10)
    resume_points.keep_only(run, 10)
    resume_points.keep_only(run, None)
    resume_points.discard_incomplete(run)
    assert kept.exists()
