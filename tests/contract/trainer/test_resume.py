"""A run that is killed and goes on ends exactly as one that was left alone: TRL's real trainer, worker and files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.common import recipe, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir
from services.trainer import checkpoint as checkpoints
from services.trainer import resume
from tests.contract.trainer.resume_driver import GENERATIONS, ROOT, SAVE_STEPS, STEPS

TIMEOUT_S = 240.0


class Attempt:
    """The training process of a run, in a process group of its own, as the supervisor starts it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        run.prepare()
        self._log = (run.path / "output.txt").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.trainer.resume_driver", str(run.path)],
            stdout=self._log, stderr=self._log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def finish(self) -> None:
        assert self._process.wait(TIMEOUT_S) == 0, (self.run.path / "output.txt").read_text()[-4000:]

    def kill_after_step(self, step: int) -> None:
        """SIGKILL to all of it, soon after that step was trained."""
        until = time.monotonic() + TIMEOUT_S
        while not any(line["step"] >= step for line in run_dir.read_lines(self.run.trained)):
            assert self._process.poll() is None, (self.run.path / "output.txt").read_text()[-4000:]
            assert time.monotonic() < until
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunDir]]:
    """``whole``: left alone. ``killed``: killed after a random step, and started again."""
    folder = tmp_path_factory.mktemp("runs")
    whole, killed = RunDir(folder / "whole"), RunDir(folder / "killed")
    first, other = Attempt(killed), Attempt(whole)
    try:
        first.kill_after_step(random.randint(1, STEPS - 4))  # not so late that nothing is left to resume
        newest = resume.newest(killed)
        print(f"newest checkpoint: {newest}")
        killed_at = len(run_dir.read_lines(killed.trained))
        print(f"killed after step {killed_at}")
        Attempt(killed).finish()
        other.finish()
    finally:
        for attempt in (first, other):
            if attempt._process.poll() is None:
                attempt.kill()
    yield {"whole": whole, "killed": killed}


def trained(run: RunDir) -> dict[int, tuple[list[int], int]]:
    """By step: the groups, and how many rollouts they had."""
    return {line["step"]: (line["groups"], line["rollouts"]) for line in run_dir.read_lines(run.trained)}


def last(run: RunDir) -> Path:
    return run.complete_checkpoints()[-1].path


def test_every_step_trained_the_samples_that_the_whole_run_trained(runs: dict[str, RunDir]) -> None:
    assert list(trained(runs["killed"])) == list(range(1, STEPS + 1))
    assert trained(runs["killed"]) == trained(runs["whole"])


def test_no_group_is_trained_twice_and_no_task_is_lost(runs: dict[str, RunDir]) -> None:
    lines = run_dir.read_lines(runs["killed"].trained)
    groups = Counter(position for line in lines for position in line["groups"])
    assert max(groups.values()) == 1
    # A group without one scored rollout is made again when the worker comes round to it, and then given up.
    state = run_dir.read_json(last(runs["killed"]) / resume.ROLLOUT_STATE) or {}
    dropped = [position for line in lines for position in line["dropped"]] + state["cursor"]["dropped"]
    assert len(dropped) == len(set(dropped))
    known = {*groups, *dropped, *state["cursor"]["again"], *state["pending_positions"]}
    assert known >= set(range(state["cursor"]["next"]))
    assert all(position % 7 == 6 for position in dropped)
    for line in lines:
        expected = sum(GENERATIONS - (position % 5 == 4) for position in line["groups"])
        assert line["rollouts"] == expected, line


@pytest.mark.parametrize("step", range(SAVE_STEPS, STEPS + 1, SAVE_STEPS))
def test_adapter_is_the_same_bit_for_bit(runs: dict[str, RunDir], step: int) -> None:
    one, other = (load_file(run.checkpoints / f"checkpoint-{step}/adapter_model.safetensors") for run in runs.values())
    assert one.keys() == other.keys() and len(one) > 20
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(bool(one[name].any()) for name in one if "lora_B" in name), "nothing was learnt, so nothing is compared"


@pytest.mark.parametrize("piece", ["optimizer.pt", "scheduler.pt"])
def test_optimizer_and_schedule_are_the_same(runs: dict[str, RunDir], piece: str) -> None:
    one, other = (torch.load(last(run) / piece, weights_only=False) for run in runs.values())
    assert flat(one) and flat(one) == flat(other)


def test_step_and_random_numbers_go_on(runs: dict[str, RunDir]) -> None:
    states = [run_dir.read_json(last(run) / "trainer_state.json") for run in runs.values()]
    assert [state["global_step"] for state in states] == [STEPS, STEPS]
    one, other = (torch.load(last(run) / "rng_state.pth", weights_only=False)["cpu"] for run in runs.values())
    assert torch.equal(one, other)


def test_metrics_have_every_step_once_and_equal_losses(runs: dict[str, RunDir]) -> None:
    one, other = (run_dir.read_lines(run.metrics) for run in runs.values())
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in one] == [line["loss"] for line in other]
    assert [line["learning_rate"] for line in one] == [line["learning_rate"] for line in other]


def test_policy_versions_only_grow(runs: dict[str, RunDir]) -> None:
    versions = [line["version"] for line in run_dir.read_lines(runs["killed"].path / "policy_versions.jsonl")]
    assert versions == sorted(set(versions))
    assert len(versions) > STEPS + 1  # those of undone steps, and the resume's own first sync


@pytest.mark.parametrize("name", checkpoints.PIECES)
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_checkpoint_that_is_not_whole_is_refused_by_the_name_of_the_piece(
    runs: dict[str, RunDir], tmp_path: Path, name: str, damage: str
) -> None:
    run = RunDir(tmp_path / "copy")
    for folder in ("checkpoint-6", "checkpoint-8"):
        shutil.copytree(runs["killed"].checkpoints / folder, run.checkpoints / folder)
    piece = run.checkpoints / "checkpoint-8" / name
    if damage == "missing":
        piece.unlink()
    else:
        data = bytearray(piece.read_bytes())
        data[len(data) // 2] ^= 1
        piece.write_bytes(data)
    with pytest.raises(RecipeError, match=f"checkpoint-8 has .*{name.split('.')[0]}"):
        resume.begin(run, smoke())


def test_a_save_that_was_cut_short_is_not_resumed_from(runs: dict[str, RunDir], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "copy")
    for folder in ("checkpoint-6", "checkpoint-8"):
        shutil.copytree(runs["killed"].checkpoints / folder, run.checkpoints / folder)
    (run.checkpoints / "checkpoint-8" / run_dir.READY).unlink()
    assert resume.begin(run, smoke()).step == 6
    assert not (run.checkpoints / "checkpoint-8").exists()


def test_another_recipe_is_refused_by_the_name_of_what_differs(runs: dict[str, RunDir]) -> None:
    with pytest.raises(RecipeError, match=r"lora was .*'r': 8.*'r': 16"):
        resume.begin(runs["whole"], smoke(**{"lora.r": 16}))


def smoke(**overrides: Any) -> recipe.Recipe:
    return recipe.load(ROOT / "data/recipes/smoke.toml", {"trainer.max_steps": STEPS, **overrides})


def flat(value: Any) -> list[Any]:
    """Every number of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    if isinstance(value, dict):
        return [item for key in sorted(value, key=str) for item in flat(value[key])]
    if isinstance(value, list | tuple):
        return [item for entry in value for item in flat(entry)]
    return [value] if isinstance(value, int | float) else []
