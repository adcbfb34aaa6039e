"""Comparisons on request: the final one, and any checkpoint on any tasks."""

import io
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from services.common import run_dir
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.evaluator import final
from services.evaluator.app import Evaluator, StoppedEarlyError
from services.evaluator.checkpoints import find as find_checkpoint
from services.evaluator.watch import watch
from tests.fakes.evaluation import FakeEnv, result
from tests.fakes.policy_eval import BASE_NAME, FakePolicyEval

Make = Callable[..., Evaluator]
AddCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_final_compares_base_and_newest_checkpoint_on_all_held_out_tasks(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    add_checkpoint(4)
    first, second = env.tasks[0].name, env.tasks[1].name
    env.verdict = lambda model, task, _: result(
        reward=float(
            task in ((first, second) if model == BASE_NAME else (second, env.tasks[2].name, env.tasks[3].name))
        )
    )
    assert final.final(make_evaluator(), console) == 0
    value = json.loads((run.eval / "final_results.json").read_text())
    assert value["step"] == 4
    assert (value["base"]["pass_at_1"], value["adapter"]["pass_at_1"]) == (0.5, 0.75)
    pairs = value["paired"]
    assert (pairs["both"], pairs["only_base"], pairs["only_adapter"], pairs["neither"]) == (1, 1, 2, 0)
    assert value["canary_max_abs_logprob_diff"] > 0 and value["adapter_is_zero"] is False
    shown = _text(console)
    assert "checkpoint-4" in shown and "0.750" in shown and "1 only base, 2 only adapter" in shown
    assert str(run.eval / "final_results.json") in shown


def test_final_adds_the_last_point_to_the_curve_without_a_further_rollout(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    final.final(make_evaluator(), console)
    assert len(env.calls) == 2 * 4
    value = json.loads((run.eval / "checkpoint-2_results.json").read_text())
    assert len(value["tasks"]) == 3 and value["step"] == 2
    assert json.loads((run.eval / "summary.json").read_text())["best"] == "checkpoint-2"


def test_final_reuses_what_the_watcher_computed(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    run.result.write_text("{}")
    watch(make_evaluator())
    env.calls.clear()
    final.final(make_evaluator(), console)
    assert sorted(call["task"] for call in env.calls) == [env.tasks[3].name] * 2


def test_a_second_final_runs_nothing_and_prints_the_same(
    make_evaluator: Make, run: RunDir, env: FakeEnv, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    consoles = [Console(file=io.StringIO(), width=160) for _ in range(2)]
    for console in consoles:
        final.final(make_evaluator(), console)
    assert len(env.calls) == 8 and len(policy_eval.loads) == 1
    assert _text(consoles[0]) == _text(consoles[1])


def test_any_checkpoint_on_the_watched_tasks_is_a_point_of_the_curve(
    make_evaluator: Make, run: RunDir, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    add_checkpoint(4)
    assert final.one(make_evaluator(), "2", None, [], console) == 0
    assert (run.eval / "checkpoint-2_results.json").exists()
    assert json.loads((run.eval / "summary.json").read_text())["best"] == "checkpoint-2"


@pytest.mark.parametrize(
    ("options", "limit", "names", "file", "tasks"),
    [
        ({}, 2, [], "checkpoint-2-2-tasks_results.json", 2),
        ({}, None, ["lines-a"], "checkpoint-2-1-tasks_results.json", 1),
        ({"greedy": True}, None, [], "checkpoint-2-3-tasks-greedy_results.json", 3),
    ],
)
def test_other_tasks_or_sampling_cannot_be_mistaken_for_a_point_of_the_curve(
    make_evaluator: Make,
    run: RunDir,
    add_checkpoint: AddCheckpoint,
    console: Console,
    options: dict[str, Any],
    limit: int | None,
    names: list[str],
    file: str,
    tasks: int,
) -> None:
    add_checkpoint(2)
    final.one(make_evaluator(**options), "checkpoint-2", limit, names, console)
    value = json.loads((run.eval / "other" / file).read_text())
    assert (len(value["tasks"]), value["greedy"]) == (tasks, "greedy" in file)
    assert not (run.eval / "checkpoint-2_results.json").exists()


def test_other_images_than_the_run_s_are_other_conditions_and_no_point_of_the_curve(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    ids = {"sandbox": "sha256:s", "env": "sha256:e", "policy": "sha256:p"}
    run_dir.write_json(run.manifest, {"images": ids | {"tools": "sha256:t"}})
    add_checkpoint(2)
    final.one(make_evaluator(images=ids), "2", None, [], console)
    assert (run.eval / "checkpoint-2_results.json").exists() and len(env.calls) == 6
    final.one(make_evaluator(images=ids | {"policy": "sha256:new"}), "2", None, [], console)
    assert len(env.calls) == 12, "both arms are run under the new image"
    value = json.loads((run.eval / "other" / "checkpoint-2-3-tasks_results.json").read_text())
    assert value["conditions"]["images"]["policy"] == "sha256:new"
    assert "not those of the run" in _text(console)


def test_greedy_is_asked_for_as_temperature_0(
    make_evaluator: Make, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    final.one(make_evaluator(greedy=True), "2", 1, [], console)
    assert {call["eval_sampling"]["temperature"] for call in env.calls} == {0.0}
    assert "greedy" in _text(console)


def test_the_base_alone_needs_no_checkpoint(
    make_evaluator: Make, run: RunDir, env: FakeEnv, policy_eval: FakePolicyEval, console: Console
) -> None:
    assert final.one(make_evaluator(), "base", None, [], console) == 0
    assert {call["model"] for call in env.calls} == {BASE_NAME} and policy_eval.loads == []
    value = json.loads((run.eval / "other" / "base-3-tasks_results.json").read_text())
    assert "adapter" not in value and value["base"]["pass_at_1"] == 1.0


def test_an_unknown_task_is_named_with_those_there_are(make_evaluator: Make, console: Console) -> None:
    with pytest.raises(RecipeError, match=r"nope: no such task in smoke/heldout; there: .*lines-a"):
        final.one(make_evaluator(), "base", None, ["nope"], console)


def test_an_unknown_checkpoint_lists_those_that_exist(run: RunDir, add_checkpoint: AddCheckpoint) -> None:
    add_checkpoint(2)
    add_checkpoint(10)
    add_checkpoint(11, ready=False)
    for name in ("3", "11", "checkpoint-11", "best"):
        with pytest.raises(RecipeError, match="complete there: 2, 10; allowed too: best, final, base"):
            find_checkpoint(run, name)


@pytest.mark.parametrize(("name", "step"), [("2", 2), ("checkpoint-10", 10), ("final", 10), ("best", 2)])
def test_a_checkpoint_is_found_by_step_name_final_or_best(
    run: RunDir, add_checkpoint: AddCheckpoint, name: str, step: int
) -> None:
    add_checkpoint(2)
    add_checkpoint(10)
    (run.eval / "summary.json").write_text('{"best": "checkpoint-2"}')
    assert find_checkpoint(run, name).step == step


def test_a_run_without_checkpoint_says_so(run: RunDir) -> None:
    with pytest.raises(RecipeError, match="complete there: none"):
        find_checkpoint(run, "final")


def test_an_unusable_adapter_is_a_message_and_not_a_traceback(
    make_evaluator: Make, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    (add_checkpoint(2).path / "adapter_config.json").unlink()
    with pytest.raises(RecipeError, match=r"checkpoint-2 has no adapter_config\.json"):
        final.final(make_evaluator(), console)


def test_nothing_scored_is_an_error_that_names_the_first_failure(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    env.verdict = lambda *_: ConnectionError("no route to env")
    with pytest.raises(NotReadyError, match=r"no rollout of base and checkpoint-2 .*first with env: .*no route to env"):
        final.final(make_evaluator(), console)
    assert json.loads((run.eval / "final_results.json").read_text())["base"]["pass_at_1"] is None


def test_a_partly_failed_evaluation_lists_what_failed(
    make_evaluator: Make, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    unlucky = env.tasks[0].name
    env.verdict = lambda _m, task, _: result(reward=None, error="no verdict") if task == unlucky else result()
    assert final.final(make_evaluator(), console) == 0
    shown = _text(console)
    assert "2 rollouts failed for another reason than the agent's answer" in shown
    assert f"base {unlucky}: verifier: error: no verdict" in shown


def test_an_adapter_of_zeros_is_called_the_base(
    make_evaluator: Make, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2, fill=0)
    final.final(make_evaluator(), console)
    assert "All B factors of the adapter are zero" in _text(console)


def test_a_stop_keeps_what_was_scored_and_writes_no_half_result(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console, cfg: Recipe
) -> None:
    add_checkpoint(2)
    one_at_a_time = cfg.model_copy(update={"evaluator": cfg.evaluator.model_copy(update={"max_inflight": 1})})
    evaluator = make_evaluator(cfg=one_at_a_time)

    def stop_at_the_third(*_: Any) -> Any:
        if len(env.calls) == 3:
            evaluator.stop.set()
        return result()

    env.verdict = stop_at_the_third
    with pytest.raises(StoppedEarlyError):
        final.final(evaluator, console)
    assert not (run.eval / "final_results.json").exists()
    assert (run.eval / "cells.jsonl").read_text().count("\n") in (2, 3)


def test_a_policy_server_that_refuses_the_adapter_is_quoted(
    make_evaluator: Make,
    env: FakeEnv,
    policy_eval: FakePolicyEval,
    add_checkpoint: AddCheckpoint,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_checkpoint(2)
    monkeypatch.setattr(policy_eval, "post", lambda *_: ({"error": "engine dead"}, 500))
    with pytest.raises(RecipeError, match="engine dead"):
        final.final(make_evaluator(), console)


def test_each_cell_is_announced_as_it_ends(
    make_evaluator: Make, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    told: list[tuple[str, str, int, int]] = []
    evaluator = make_evaluator(
        announce=lambda cell, _outcome, done, total: told.append((cell.arm.label, cell.task, done, total))
    )
    final.final(evaluator, console)
    assert [done for *_, done, _total in told] == list(range(1, 9)) and {total for *_, total in told} == {8}
    assert len({(label, task) for label, task, *_ in told}) == 8


def test_two_evaluators_of_one_run_do_not_compute_a_cell_twice(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, console: Console
) -> None:
    add_checkpoint(2)
    evaluators = [make_evaluator(), make_evaluator()]
    threads = [
        threading.Thread(target=final.final, args=[evaluator, Console(file=io.StringIO())]) for evaluator in evaluators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(env.calls) == 8
