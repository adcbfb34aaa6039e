"""What a cell's key depends on, and what survives a kill."""

import dataclasses
import json
from pathlib import Path

import pytest

from services.common import recipe as recipes
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.evaluator import cells
from services.evaluator.cells import BASE, Arm, Cell, CellStore, Conditions, Outcome

CELL = Cell(Arm("checkpoint-2", "aa"), "first-a", "bb", 0)
PASSED = Outcome(1.0, turns=2, tool_calls=1, completion_tokens=30, wall_s=20.5)
FAILED = Outcome(None, cause="policy", error="RuntimeError: gone")


@pytest.fixture
def under(cfg: Recipe) -> Conditions:
    return cells.conditions(cfg, None)


def _changed(cfg: Recipe, **values: object) -> Recipe:
    """The recipe with ``section__key`` changed."""
    for dotted, value in values.items():
        section, key = dotted.split("__")
        part = getattr(cfg, section).model_copy(update={key: value})
        cfg = cfg.model_copy(update={section: part})
    return cfg


@pytest.mark.parametrize(
    "change",
    [
        {"model__revision": "sha256:" + "1" * 64},
        {"sampling__max_completion_tokens": 97},
        {"rollout__max_tool_calling_iterations": 7},
        {"rollout__agent_timeout_s": 151.0},
        {"env__opencode_version": "1.18.34"},
        {"env__sandbox_image": "local/other:cpu"},
    ],
)
def test_a_changed_condition_is_another_cell(cfg: Recipe, under: Conditions, change: dict[str, object]) -> None:
    assert CELL.key(cells.conditions(_changed(cfg, **change), None)) != CELL.key(under)


def test_another_image_id_or_greedy_sampling_is_another_cell(cfg: Recipe, under: Conditions) -> None:
    keys = {
        CELL.key(under),
        CELL.key(cells.conditions(cfg, {"images": {"sandbox": "sha256:1"}})),
        CELL.key(cells.conditions(cfg, {"images": {"sandbox": "sha256:2"}})),
        CELL.key(cells.conditions(cfg, {"images": {"sandbox": "sha256:2", "env": "sha256:3"}})),
        CELL.key(cells.conditions(cfg, None, greedy=True)),
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"task": "first-b"},
        {"task_sha256": "cc"},
        {"attempt": 1},
        {"arm": Arm("checkpoint-2", "ab")},
        {"arm": Arm(BASE)},
    ],
)
def test_another_task_attempt_or_adapter_is_another_cell(under: Conditions, change: dict[str, object]) -> None:
    assert dataclasses.replace(CELL, **change).key(under) != CELL.key(under)  # type: ignore[arg-type]


def test_the_same_weights_under_another_label_are_the_same_cell(cfg: Recipe, under: Conditions) -> None:
    renamed = dataclasses.replace(CELL, arm=Arm("checkpoint-4", "aa"))
    assert renamed.key(under) == CELL.key(under)
    # What does not reach a rollout of the evaluation is no condition of it.
    other = _changed(cfg, trainer__learning_rate=1.0, run__name="other", evaluator__max_inflight=5)
    assert CELL.key(cells.conditions(other, {"git_revision": "x"})) == CELL.key(under)


def test_sampling_is_the_training_s_with_no_top_k_written_as_openenv_wants_it(cfg: Recipe) -> None:
    assert cells.eval_sampling(cfg) == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    greedy = cells.conditions(cfg, None, greedy=True)
    assert (greedy.greedy, greedy.sampling["temperature"]) == (True, 0.0)


def test_a_local_model_without_revision_is_known_by_the_hash_of_its_weights(
    cfg: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))
    weights = tmp_path / cfg.model.id / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    nameless = _changed(cfg, model__revision=None)
    assert cells.conditions(nameless, None).model_revision == f"sha256:{recipes.file_sha256(weights)}"
    weights.unlink()
    with pytest.raises(RecipeError, match=r"model\.revision is missing"):
        cells.conditions(nameless, None)


def test_a_result_is_found_again_by_a_new_process(tmp_path: Path, under: Conditions) -> None:
    CellStore(tmp_path / "cells.jsonl", under).add(CELL, PASSED)
    assert CellStore(tmp_path / "cells.jsonl", under).get(CELL) == PASSED


def test_a_failure_is_kept_for_the_list_and_leaves_the_cell_missing(tmp_path: Path, under: Conditions) -> None:
    store = CellStore(tmp_path / "cells.jsonl", under)
    store.add(CELL, FAILED)
    for process in (store, CellStore(tmp_path / "cells.jsonl", under)):
        assert process.missing([CELL]) == [CELL]
        assert process.failure(CELL) == FAILED
    store.add(CELL, PASSED)
    for process in (store, CellStore(tmp_path / "cells.jsonl", under)):
        assert process.missing([CELL]) == []
        assert process.failure(CELL) is None


def test_a_cell_that_two_processes_computed_counts_once_and_the_first_wins(tmp_path: Path, under: Conditions) -> None:
    one, other = (CellStore(tmp_path / "cells.jsonl", under) for _ in range(2))
    one.add(CELL, PASSED)
    other.add(CELL, dataclasses.replace(PASSED, reward=0.0))
    one.reload()
    assert one.get(CELL) == PASSED
    other.reload()
    assert CellStore(tmp_path / "cells.jsonl", under).get(CELL) == PASSED


def test_a_line_that_a_kill_cut_off_is_a_missing_cell(tmp_path: Path, under: Conditions) -> None:
    path = tmp_path / "cells.jsonl"
    second = dataclasses.replace(CELL, attempt=1)
    store = CellStore(path, under)
    store.add(CELL, PASSED)
    store.add(second, PASSED)
    path.write_bytes(path.read_bytes()[:-20])
    after = CellStore(path, under)
    assert after.missing([CELL, second]) == [second]


def test_lines_hold_no_text_of_a_rollout(tmp_path: Path, under: Conditions) -> None:
    CellStore(tmp_path / "cells.jsonl", under).add(CELL, PASSED)
    line = json.loads((tmp_path / "cells.jsonl").read_text())
    assert line["label"] == "checkpoint-2" and line["task"] == "first-a" and line["reward"] == 1.0
    assert {"text", "messages", "token_ids", "completion_token_ids"}.isdisjoint(line)


@pytest.mark.parametrize(("reward", "passed"), [(1.0, True), (0.0, False), (0.5, False), (None, False)])
def test_passed_means_a_full_reward_as_in_training(reward: float | None, passed: bool) -> None:
    assert Outcome(reward).passed is passed
