"""What the supervisor sends arrives in trackio's own storage, once, and a resumed run goes on in the same one."""

from pathlib import Path

import pytest

from services.common import recipe, run_dir
from services.common.run_dir import RunDir
from services.trainer import tracker

ROOT = Path(__file__).resolve().parents[3]
CFG = recipe.load(ROOT / "data/recipes/smoke.toml")


def stored(run: RunDir) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs(tracker.PROJECT, run.path.name)
    return [(line["step"], line["reward"]) for line in lines]


def test_steps_arrive_once_over_two_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CFG.trainer.report_to == "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / run_dir.TRACKIO))
    run = RunDir(tmp_path / "run")
    for steps in ((1, 2), (2, 3)):  # the second attempt trains step 2 again
        with tracker.follow(run, CFG):
            for step in steps:
                run_dir.append_line(run.metrics, {"step": step, "time_s": 0.0, "reward": step / 4})
    assert stored(run) == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_is_in_the_image_and_has_the_same_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cfg = CFG.model_copy(update={"trainer": CFG.trainer.model_copy(update={"report_to": "wandb"})})
    run = RunDir(tmp_path / "run")
    with tracker.follow(run, cfg):
        run_dir.append_line(run.metrics, {"step": 1, "time_s": 0.0, "reward": 0.5})
    assert run_dir.read_json(run.path / tracker.STATE) == {"step": 1}
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
