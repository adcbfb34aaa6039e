"""Recipe, tasks and model, each broken in turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import Check
from scripts.doctor import data
from scripts.doctor.setup import Setup

Broken = Callable[..., Setup]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fails(check: Check, *words: str) -> None:
    assert check.state == "fail" and check.error.exit_code == 2, check
    text = f"{check.found} {check.mend}"
    assert all(word in text for word in words), text


@pytest.fixture
def own_tasks(broken: Broken, setup: Setup, tmp_path: Path) -> Setup:
    shutil.copytree(setup.tasks_dir, tmp_path / "tasks")
    return broken(tasks_dir=tmp_path / "tasks")


def first_task(setup: Setup) -> Path:
    return next(path for path in sorted((setup.tasks_dir / "smoke/train").iterdir()) if path.is_dir())


def test_the_shipped_recipe_tasks_and_model_are_ok(setup: Setup) -> None:
    assert {check(setup).state for check in (data.recipe_file, data.task_suites, data.model, data.output_caps)} == {
        "ok"
    }


def test_a_missing_task_is_named(own_tasks: Setup) -> None:
    gone = first_task(own_tasks)
    shutil.rmtree(gone)
    fails(data.task_suites(own_tasks), gone.name)


def test_a_changed_task_is_named(own_tasks: Setup) -> None:
    changed = first_task(own_tasks)
    (changed / "instruction.md").write_text("Do something else.")
    fails(data.task_suites(own_tasks), changed.name)


def test_a_task_without_an_image_is_named(own_tasks: Setup) -> None:
    task = first_task(own_tasks)
    text = (task / "task.toml").read_text()
    (task / "task.toml").write_text("\n".join(line for line in text.splitlines() if "docker_image" not in line))
    fails(data.task_suites(own_tasks), task.name, "docker_image")


def test_an_unknown_suite_or_model_lists_what_there_is(broken: Broken) -> None:
    fails(data.task_suites(broken(tasks__train="smoke/nothing")), "smoke/nothing")
    fails(data.model(broken(model__id="no-such-model")), "no-such-model", "tiny-lfm2")


def test_changed_weights_are_refused_with_both_hashes(broken: Broken) -> None:
    fails(data.model(broken(model__revision="sha256:" + "0" * 64)), "0000", "3c352b8384df")


def test_an_output_cap_of_the_agent_that_differs_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data.opencode.config

    def other(*arguments: Any) -> Any:
        config = whole(*arguments)
        config["provider"][data.opencode.PROVIDER]["models"]["policy"]["limit"]["output"] = 4096
        return config

    monkeypatch.setattr(data.opencode, "config", other)
    fails(data.output_caps(setup), "training 96", "OpenCode 4096")


def test_wandb_without_its_key_fails(broken: Broken) -> None:
    fails(data.tracker(broken(trainer__report_to="wandb")), "WANDB_API_KEY", "trackio")
    assert data.tracker(broken(trainer__report_to="wandb", environment={"WANDB_API_KEY": "k"})).state == "ok"


# --- A model of the Hub ---------------------------------------------------------------------------------------------


@pytest.fixture
def hub(broken: Broken) -> Setup:
    return broken(model__id="LiquidAI/LFM2.5-2.6B", model__source="hub", model__revision=COMMIT)


def test_a_hub_model_needs_its_commit(broken: Broken) -> None:
    fails(
        data.model(broken(model__id="LiquidAI/LFM2.5-2.6B", model__source="hub", model__revision=None)), "40-character"
    )


def test_a_hub_model_must_be_in_the_cache_whole(hub: Setup) -> None:
    fails(data.model(hub), COMMIT[:12], "make prepare RECIPE=")
    snapshot = data.hub_snapshot(hub.hf_cache, hub.cfg.model.id, COMMIT)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_text("")
    fails(data.model(hub), "lacks model-2.safetensors")
    (snapshot / "model-2.safetensors").write_text("")
    assert data.model(hub).state == "ok"
