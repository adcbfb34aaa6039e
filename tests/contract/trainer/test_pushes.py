"""The trainer's callbacks for pushes and costs, with the huggingface_hub and transformers of the trainer's image."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from transformers import TrainerControl, TrainerState

from services.common import health, recipe, run_dir
from services.common.errors import StoppedError
from services.common.recipe import Costs, Recipe
from services.common.run_dir import CONFIG, READY, WEIGHTS, RunDir
from services.trainer.pushes import CheckpointPushes
from services.trainer.spending import Spending
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[3]
REPO = "local/adapter"
ARGS: Any = SimpleNamespace()
PRICES = Costs(trainer_usd_per_hour=3600.0, gpus=2, ceiling_usd=5.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as started:
        for name, value in {**started.environment(), "ADAPTER_REPO": REPO}.items():
            monkeypatch.setenv(name, value)
        yield started
    huggingface_hub.close_session()


@pytest.fixture
def cfg() -> Recipe:
    return recipe.load(ROOT / "data/recipes/smoke.toml", {"push.flush_s": 20, "push.retry_for_s": 20})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "smoke")
    made.prepare()
    return made


def save(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir()
    for name in (WEIGHTS, CONFIG, "optimizer.pt", READY):
        run_dir.write_text(folder / name, f"{name} {step}")


def at(step: int) -> TrainerState:
    return TrainerState(global_step=step, max_steps=4)


def titles(server: LocalHub) -> list[str]:
    return [commit.title for commit in server.repo(REPO).history("main")][:-1]


def test_every_save_is_on_the_hub_after_the_flush_whatever_the_hub_did(
    server: LocalHub, cfg: Recipe, run: RunDir
) -> None:
    server.fail(
        Fault("POST", "/commit/main", status=500, after_effect=True, delay_s=3),
        Fault("POST", "/commit/main", status=412),
        Fault("POST", "/commit/main", status=429, headers={"Retry-After": "1"}),
    )
    pushes = CheckpointPushes(cfg, run)
    with health.Pulse("trainer", run) as pulse:
        for step in (2, 4):
            save(run, step)
            began_s = time.monotonic()
            pushes.on_save(ARGS, at(step), TrainerControl())
            assert time.monotonic() - began_s < 1.5
        pushes.flush(pulse)
        assert health.read_heartbeats(run)["trainer"].phase == "pushing"
    assert titles(server) == ["checkpoint-4 of smoke", "checkpoint-2 of smoke"]
    metrics = pushes.metrics()
    assert (metrics["push/backlog"], metrics["push/last_step"], metrics["push/failures"]) == (0, 4, 0)


def test_without_a_repository_nothing_is_asked_of_the_hub(
    server: LocalHub, cfg: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADAPTER_REPO")
    pushes = CheckpointPushes(cfg, run)
    save(run, 2)
    pushes.on_save(ARGS, at(2), TrainerControl())
    with health.Pulse("trainer", run) as pulse:
        pushes.flush(pulse)
    assert pushes.metrics() == {} and server.requests == []


def test_the_step_that_passes_the_ceiling_ends_the_run_after_it_is_counted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setenv("MACHINE_SINCE_S", "1000")
    spending = Spending(PRICES, run)
    monkeypatch.setattr(spending._meter, "_clock", lambda: now[0])
    for step, now_s in ((1, 1002.0), (2, 1004.0)):
        now[0] = now_s
        spending.on_step_end(ARGS, at(step), TrainerControl())
        spending.on_log(ARGS, at(step), TrainerControl())
    assert spending.metrics() == {
        "costs/gpu_hours": 4 * 2 / 3600, "costs/sandbox_minutes": 0.0, "costs/usd": 4.0, "costs/usd_per_step": 2.0,
    }  # fmt: skip
    now[0] = 1005.0
    spending.on_step_end(ARGS, at(3), TrainerControl())
    with pytest.raises(StoppedError, match=r"has cost 5\.00 dollars at step 3; costs\.ceiling_usd is 5") as stopped:
        spending.on_log(ARGS, at(3), TrainerControl())
    assert stopped.value.exit_code == 4
    assert (run_dir.read_json(run.path / "costs.json") or {})["steps"] == 3
