"""A small run with suites, checkpoints and peers, all real files; FAKE rollouts and a FAKE policy-eval."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common import health, recipe, run_dir
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.common.signals import StopFlag
from services.common.tasks import load_suite
from services.evaluator import curve, rollout
from services.evaluator.app import Evaluator, Peers
from tests.fakes.evaluation import FakeEnv, result, write_adapter
from tests.fakes.policy_eval import FakePolicyEval

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cfg() -> Recipe:
    return recipe.load(
        ROOT / "data/recipes/smoke.toml",
        {
            "model.revision": "sha256:" + "0" * 64,
            "evaluator.watch_tasks": 3,
            "evaluator.final_tasks": 4,
            "evaluator.infrastructure_retries": 1,
            "watchdog.poll_s": 0.05,
            "watchdog.start_limit_s": 0.5,
        },
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "test")
    run.prepare()
    return run


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    """The shipped smoke suites, to be changed at will."""
    copy = tmp_path / "tasks"
    copy.mkdir()
    shutil.copytree(ROOT / "data/tasks/smoke", copy / "smoke")
    shutil.copy(ROOT / "data/tasks/smoke.json", copy)
    return copy


@pytest.fixture
def policy_eval() -> Iterator[FakePolicyEval]:
    fake = FakePolicyEval()
    yield fake
    fake.close()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=5) as client:
        yield client


@pytest.fixture
def add_checkpoint(run: RunDir, cfg: Recipe) -> Callable[..., Checkpoint]:
    def add(step: int, *, fill: int | None = None, ready: bool = True) -> Checkpoint:
        folder = run.checkpoints / f"checkpoint-{step}"
        write_adapter(folder, cfg, fill=step % 200 + 1 if fill is None else fill)
        if ready:
            run_dir.write_text(folder / run_dir.READY, "now\n")
        return Checkpoint(step, folder)

    return add


@pytest.fixture
def env(tasks_dir: Path) -> FakeEnv:
    return FakeEnv(list(load_suite(tasks_dir, "smoke/heldout")), lambda *_: result())


@pytest.fixture
def make_evaluator(
    cfg: Recipe, run: RunDir, tasks_dir: Path, policy_eval: FakePolicyEval, env: FakeEnv, monkeypatch: Any
) -> Iterator[Callable[..., Evaluator]]:
    """An evaluator as a freshly started process would have it. The picture, a second each, is an empty file."""
    monkeypatch.setattr(curve, "draw", lambda _summary, _metrics, path: path.touch())
    monkeypatch.setattr(rollout, "Runner", _impatient(rollout.Runner))
    opened = []

    def make(**options: Any) -> Evaluator:
        pulse = health.Pulse("evaluator", run)
        pulse.__enter__()
        opened.append(pulse)
        options.setdefault("stop", StopFlag())
        return Evaluator(
            options.pop("cfg", cfg), run, Peers(policy_eval.url, policy_eval.url), tasks_dir, pulse,
            connect=env.connect, **options,
        )  # fmt: skip

    yield make
    for pulse in opened:
        pulse.__exit__(None, None, None)


def _impatient(runner: type[rollout.Runner]) -> Callable[..., rollout.Runner]:
    return lambda **values: dataclasses.replace(runner(**values), wait_s=0.0)
