"""What cells add up to, and what the files say."""

import json
from pathlib import Path

import pytest

from services.common.recipe import Recipe
from services.evaluator import cells, curve, results
from services.evaluator.cells import BASE, Arm, CellStore, Conditions, Outcome
from services.evaluator.results import Question
from services.evaluator.statistics import wilson_interval

BASE_ARM, ADAPTER = Arm(BASE), Arm("checkpoint-2", "aa")
TASKS = {f"t{i}": f"hash{i}" for i in range(6)}


@pytest.fixture
def under(cfg: Recipe) -> Conditions:
    return cells.conditions(cfg, None)


@pytest.fixture
def store(tmp_path: Path, under: Conditions) -> CellStore:
    return CellStore(tmp_path / "cells.jsonl", under)


def _score(store: CellStore, question: Question, arm: Arm, rewards: str) -> None:
    """One character a cell, in order: ``1`` or ``0`` the reward, ``x`` a failure, ``.`` not run."""
    for cell, mark in zip(question.cells([arm]), rewards, strict=True):
        if mark == "x":
            store.add(cell, Outcome(None, cause="policy", error="gone"))
        elif mark != ".":
            store.add(
                cell, Outcome(float(mark), turns=4, tool_calls=2, completion_tokens=50, unparsed_calls=1, wall_s=9)
            )


def test_cells_come_in_pairs_so_that_a_part_of_them_can_be_compared() -> None:
    question = Question("s", {"a": "1", "b": "2"}, attempts=2)
    listed = [(cell.arm.label, cell.task, cell.attempt) for cell in question.cells([BASE_ARM, ADAPTER])]
    assert listed[:4] == [("base", "a", 0), ("checkpoint-2", "a", 0), ("base", "b", 0), ("checkpoint-2", "b", 0)]
    assert len(listed) == len(set(listed)) == 8


def test_a_comparison_counts_pairs_and_leaves_failures_out(store: CellStore, under: Conditions) -> None:
    question = Question("smoke/heldout", TASKS, attempts=1)
    _score(store, question, BASE_ARM, "110010")
    _score(store, question, ADAPTER, "1010x.")
    value = results.compile_results(store, question, under, BASE_ARM, ADAPTER)

    assert value["base"]["pass_at_1"] == pytest.approx(3 / 6)
    assert value["base"]["interval_95"] == wilson_interval(3 / 6, 6)
    adapter = value["adapter"]
    assert (adapter["pass_at_1"], adapter["tasks"], adapter["passed"], adapter["rollouts"]) == (0.5, 4, 2, 4)
    assert (adapter["mean_tool_calls"], adapter["mean_completion_tokens"]) == (2, 50)
    assert adapter["unparsed_call_share"] == 0.25
    pairs = value["paired"]
    assert (pairs["both"], pairs["only_base"], pairs["only_adapter"], pairs["neither"]) == (1, 1, 1, 1)
    assert pairs["mcnemar_exact_p"] == 1.0
    assert value["missing_cells"] == 2
    assert value["infrastructure_failures"] == [
        {"label": "checkpoint-2", "task": "t4", "attempt": 0, "cause": "policy", "error": "gone"}
    ]
    assert value["tasks"]["t4"] == {"base": 1.0, "checkpoint-2": None}
    assert json.loads(json.dumps(value))["conditions"]["opencode_version"] == "1.18.33"


def test_with_several_attempts_a_task_counts_once_with_its_share(store: CellStore, under: Conditions) -> None:
    question = Question("s", {"a": "1", "b": "2"}, attempts=2)
    _score(store, question, BASE_ARM, "1000")  # a: 1 of 2, b: 0 of 2
    value = results.summarise_arm(store, question, BASE_ARM)
    assert (value["pass_at_1"], value["tasks"], value["rollouts"]) == (0.25, 2, 4)
    assert value["interval_95"] == wilson_interval(0.25, 2)


def test_nothing_scored_is_none_and_not_0(store: CellStore, under: Conditions) -> None:
    question = Question("s", TASKS, attempts=1)
    _score(store, question, BASE_ARM, "xxxxxx")
    value = results.compile_results(store, question, under, BASE_ARM, None)
    assert (value["base"]["pass_at_1"], value["base"]["interval_95"]) == (None, None)
    assert len(value["infrastructure_failures"]) == 6
    assert "adapter" not in value and "paired" not in value


def _write_checkpoint(folder: Path, store: CellStore, under: Conditions, step: int, rewards: str) -> None:
    question = Question("s", {f"t{i}": "h" for i in range(len(rewards))}, attempts=1)
    arm = Arm(f"checkpoint-{step}", f"sha-{step}")
    if store.missing(question.cells([BASE_ARM])):
        _score(store, question, BASE_ARM, "1" + "0" * (len(rewards) - 1))
    _score(store, question, arm, rewards)
    value = results.compile_results(store, question, under, BASE_ARM, arm)
    (folder / f"checkpoint-{step}_results.json").write_text(json.dumps(value))


def test_the_summary_is_the_curve_in_order_of_steps_with_its_best(
    tmp_path: Path, store: CellStore, under: Conditions
) -> None:
    for step, rewards in ((1000, "1100"), (200, "1110"), (300, "0111"), (20, "0000")):
        _write_checkpoint(tmp_path, store, under, step, rewards)
    (tmp_path / "final_results.json").write_text("{}")
    (tmp_path / "checkpoint-x_results.json").write_text("{}")
    summary = results.write_summary(tmp_path, collapse_drop=0.1)
    assert [point["step"] for point in summary["checkpoints"]] == [20, 200, 300, 1000]
    assert [point["pass_at_1"] for point in summary["checkpoints"]] == [0.0, 0.75, 0.75, 0.5]
    assert summary["best"] == "checkpoint-200"
    assert summary["base"]["pass_at_1"] == 0.25
    assert summary["collapse_alarms"] == []
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == "checkpoint-200"


def test_a_collapse_is_in_the_summary(tmp_path: Path, store: CellStore, under: Conditions) -> None:
    _write_checkpoint(tmp_path, store, under, 100, "1" * 10)
    _write_checkpoint(tmp_path, store, under, 200, "1" * 3 + "0" * 7)
    (alarm,) = results.write_summary(tmp_path, collapse_drop=0.1)["collapse_alarms"]
    assert (alarm["step"], alarm["best_step"], alarm["drop"]) == (200, 100, pytest.approx(0.7))
    assert alarm["p_value"] == pytest.approx(2 / 2**7)


def test_a_summary_of_nothing_can_be_written_and_drawn(tmp_path: Path) -> None:
    summary = results.write_summary(tmp_path, collapse_drop=0.1)
    assert (summary["best"], summary["checkpoints"], summary["base"]) == (None, [], None)
    curve.draw(summary, [], tmp_path / "curve.png")
    assert curve.terminal(summary) == ""


def test_the_curve_is_drawn_as_a_png_and_in_the_terminal(tmp_path: Path, store: CellStore, under: Conditions) -> None:
    for step, rewards in ((100, "1100"), (200, "1110"), (300, "0110")):
        _write_checkpoint(tmp_path, store, under, step, rewards)
    summary = results.write_summary(tmp_path, collapse_drop=0.1)
    metrics = [{"step": step, "reward": step / 400} for step in range(300)] + [{"step": 300, "loss": 0.1}]
    curve.draw(summary, metrics, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".curve*"))
    text = curve.terminal(summary)
    assert "pass@1" in text and "\x1b[" not in text
    assert len(text.splitlines()) <= curve.TERMINAL_SIZE[1]


@pytest.mark.parametrize(
    ("curve_by_step", "best"),
    [({}, None), ({3: {}}, None), ({1: {"a": 0.0}}, 1), ({5: {"a": 1.0}, 2: {"a": 1.0}, 9: {"a": 0.0}}, 2)],
)
def test_the_best_step_is_the_first_of_the_highest(
    curve_by_step: dict[int, dict[str, float]], best: int | None
) -> None:
    assert results.best_step(curve_by_step) == best
