"""``make learn``: what counts as learned, what a control must show, and the transcript before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import learn
from services.common import recipe, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "learn-1")
    run.prepare()
    return run


def evaluated(run: RunDir, base: float, *checkpoints: float, p: float = 0.5) -> None:
    run_dir.write_json(
        run.eval / "summary.json",
        {"base": {"pass_at_1": base}, "checkpoints": [{"pass_at_1": value} for value in checkpoints]},
    )
    run_dir.write_json(run.eval / "final_results.json", {"paired": {"mcnemar_exact_p": p}})


@pytest.mark.parametrize(
    ("curve", "learned"),
    [((0.28, 0.6, 0.88), True), ((0.28, 0.6, 0.84), False), ((0.44, 0.9), False), ((0.28, 0.9, 0.5), False)],
)
def test_a_run_has_learned_when_its_last_checkpoint_is_right_and_its_base_was_not(
    run: RunDir, curve: tuple[float, ...], learned: bool
) -> None:
    evaluated(run, *curve)
    assert learn.Outcome(run, 1, "").as_expected() is learned


def test_a_run_without_an_evaluation_has_learned_nothing(run: RunDir) -> None:
    assert not learn.Outcome(run, 1, "").as_expected()
    assert not learn.Outcome(run, 1, "shuffled-rewards").as_expected()


@pytest.mark.parametrize(("p", "flat"), [(0.5, True), (0.051, True), (0.049, False), (1e-6, False)])
def test_a_control_must_differ_from_the_base_by_chance_only(run: RunDir, p: float, flat: bool) -> None:
    evaluated(run, 0.3, 0.4, p=p)
    assert learn.Outcome(run, 1, "shuffled-rewards").as_expected() is flat


def test_a_run_whose_syncs_are_dropped_must_be_stopped(run: RunDir) -> None:
    evaluated(run, 0.3, 0.3)
    assert not learn.Outcome(run, 1, "no-sync").as_expected()
    assert learn.Outcome(run, 1, "no-sync", stopped=True).as_expected()


@pytest.mark.parametrize("name", learn.CONTROLS)
def test_every_control_is_a_recipe(name: str) -> None:
    assert recipe.load(learn.RECIPE, learn.CONTROLS[name]) != recipe.load(learn.RECIPE)


def test_no_shipped_recipe_has_a_control_on() -> None:
    for path in learn.RECIPE.parent.glob("*.toml"):
        assert recipe.load(path).control == recipe.Control(), path


@pytest.mark.parametrize("text", ["", "one", "1,,2"])
def test_seeds_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="whole numbers such as 1,2,3"):
        learn.parse_seeds(text)


def cell(label: str, task: str, reward: float, trial: str) -> dict[str, Any]:
    return {"label": label, "task": task, "reward": reward, "trial": trial}


def agent_ran(run: RunDir, trial: str, command: str) -> None:
    folder = run.trials / trial / "agent"
    folder.mkdir(parents=True)
    state = {"status": "completed", "input": {"command": command}, "output": "\x1b[31m5"}
    events = [{"type": "tool_use", "part": {"state": state}}, {"type": "text", "part": {"text": "Done."}}]
    (folder / "opencode.txt").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_before_and_after_are_a_task_that_only_the_newest_adapter_passed(run: RunDir) -> None:
    for line in (
        cell("base", "a", 1.0, "t1"), cell("checkpoint-9", "a", 1.0, "t2"), cell("checkpoint-10", "a", 1.0, "t3"),
        cell("base", "b", 0.0, "t4"), cell("checkpoint-9", "b", 1.0, "t5"), cell("checkpoint-10", "b", 1.0, "t6"),
    ):  # fmt: skip
        run_dir.append_line(run.eval / "cells.jsonl", line)
    agent_ran(run, "t4", "wc -l < a.csv")
    agent_ran(run, "t6", "wc -l < a.csv > answer.txt")
    lines = learn.before_and_after(run).splitlines()
    assert lines[0] == "Task b, before and after"
    assert lines[1:3] == ["base:", "  $ wc -l < a.csv"]
    assert lines[5:7] == ["checkpoint-10:", "  $ wc -l < a.csv > answer.txt"]
    assert "\x1b" not in "\n".join(lines), "what an agent printed controls no terminal"


def test_nothing_that_changed_is_said_so(run: RunDir) -> None:
    assert learn.before_and_after(run) == "No held-out task was failed before and passed after."
