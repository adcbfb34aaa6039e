"""Following a run, with real files and a FAKE env and policy-eval: order, restarts, half-written checkpoints."""

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common import health, run_dir
from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.common.signals import StopFlag
from services.common.tasks import load_suite
from services.evaluator.adapters import SNAPSHOTS, WEIGHTS, snapshot
from services.evaluator.app import Evaluator
from services.evaluator.checkpoints import find
from services.evaluator.watch import ALARMS, alarm_on_collapse, identity, watch
from tests.fakes.evaluation import FakeEnv, result
from tests.fakes.policy_eval import BASE_NAME, FakePolicyEval

ROOT = Path(__file__).resolve().parents[3]
Make = Callable[..., Evaluator]
AddCheckpoint = Callable[..., Checkpoint]


def _end(run: RunDir) -> None:
    run_dir.write_json(run.result, {"exit_code": 0, "reason": "done", "step": 4})


def _arm(model: str) -> str:
    """``policy`` or the checkpoint of an adapter's name."""
    return model if model == BASE_NAME else "-".join(model.split("-")[:2])


def _ran(env: FakeEnv) -> dict[tuple[str, str], int]:
    return {(_arm(model), task): count for (model, task), count in env.ran().items()}


def test_every_checkpoint_is_evaluated_once_in_order_and_the_base_only_once(
    make_evaluator: Make, run: RunDir, env: FakeEnv, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint
) -> None:
    for step in (10, 2, 4):
        add_checkpoint(step)
    _end(run)
    assert watch(make_evaluator()) == 0
    tasks = [task.name for task in env.tasks[:3]]
    arms = [BASE_NAME, "checkpoint-2", "checkpoint-4", "checkpoint-10"]
    assert _ran(env) == {(arm, task): 1 for arm in arms for task in tasks}
    assert [_arm(load["lora_name"]) for load in policy_eval.loads] == arms[1:]
    summary = json.loads((run.eval / "summary.json").read_text())
    assert [point["step"] for point in summary["checkpoints"]] == [2, 4, 10]
    assert (run.eval / "checkpoint-10_results.json").exists() and (run.eval / "curve.png").exists()


def test_adapters_are_unloaded_and_their_snapshots_removed(
    make_evaluator: Make, run: RunDir, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    add_checkpoint(4)
    _end(run)
    evaluator = make_evaluator()
    watch(evaluator)
    assert policy_eval.adapters == {}
    assert len(list((run.eval / "adapters").iterdir())) == 1
    evaluator.close()
    assert not (run.eval / "adapters").exists()


def test_what_a_killed_evaluator_left_is_unloaded_but_its_files_stay_while_its_rollouts_run(
    make_evaluator: Make, run: RunDir, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, cfg: Recipe
) -> None:
    """vLLM reads an adapter's files again for a request in flight, and its engine ends where they are gone."""
    left = snapshot(add_checkpoint(2), run.eval / "adapters", cfg.lora)
    policy_eval.adapters[left.name] = left.path
    policy_eval.requests_running = 2
    evaluator = make_evaluator()
    evaluator.evaluate(add_checkpoint(4), evaluator.watch_question)
    assert policy_eval.unloads[0] == left.name and policy_eval.adapters == {}
    assert (left.path / WEIGHTS).exists()
    policy_eval.requests_running = 0
    evaluator.evaluate(add_checkpoint(4), evaluator.watch_question)
    assert not left.path.exists()


def test_a_restart_in_the_middle_of_a_checkpoint_runs_only_the_missing_cells(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, cfg: Recipe
) -> None:
    add_checkpoint(2)
    _end(run)
    one_at_a_time = cfg.model_copy(update={"evaluator": cfg.evaluator.model_copy(update={"max_inflight": 1})})
    stop, ended = StopFlag(), threading.Event()

    def killed_at_the_fourth(*_: Any) -> Any:
        if len(env.calls) == 4:
            stop.set()
            ended.wait(300)  # the rollout goes on; the process does not wait for it
        return result()

    env.verdict = killed_at_the_fourth
    assert watch(make_evaluator(cfg=one_at_a_time, stop=stop)) == 0
    before = len(run_dir.read_lines(run.eval / "cells.jsonl"))
    assert before == 3
    assert not (run.eval / "checkpoint-2_results.json").exists()

    env.verdict = lambda *_: result()
    env.calls.clear()
    watch(make_evaluator(cfg=one_at_a_time))
    assert len(env.calls) == 6 - before
    lines = run_dir.read_lines(run.eval / "cells.jsonl")
    assert len({line["key"] for line in lines}) == len(lines) == 6
    value = json.loads((run.eval / "checkpoint-2_results.json").read_text())
    assert value["missing_cells"] == 0
    ended.set()


def test_a_restart_after_the_end_runs_nothing(
    make_evaluator: Make, run: RunDir, env: FakeEnv, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    _end(run)
    watch(make_evaluator())
    env.calls.clear()
    policy_eval.loads.clear()
    watch(make_evaluator())
    assert env.calls == [] and policy_eval.loads == []


def test_a_checkpoint_without_its_marker_waits_until_it_has_it(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    stop, checkpoint = StopFlag(), add_checkpoint(2, ready=False)
    watching = threading.Thread(target=watch, args=[make_evaluator(stop=stop)])
    watching.start()
    time.sleep(0.3)
    assert env.calls == []
    run_dir.write_text(checkpoint.path / run_dir.READY, "now\n")
    _end(run)
    watching.join(timeout=20)
    assert not watching.is_alive()
    assert len(env.calls) == 6


def test_a_truncated_checkpoint_is_left_for_later_and_the_others_are_not(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    weights = add_checkpoint(2).path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    add_checkpoint(4)
    stop = StopFlag()
    with caplog.at_level(logging.WARNING):
        watching = threading.Thread(target=watch, args=[make_evaluator(stop=stop)])
        watching.start()
        _until(lambda: (run.eval / "checkpoint-4_results.json").exists())
        assert any(record.message == "checkpoint is left for later" for record in caplog.records)
        weights.write_bytes(whole)
        _until(lambda: (run.eval / "checkpoint-2_results.json").exists())
        _end(run)
        watching.join(timeout=20)
    assert not watching.is_alive()


def test_a_checkpoint_that_never_becomes_usable_does_not_keep_an_ended_run_watched(
    make_evaluator: Make, run: RunDir, add_checkpoint: AddCheckpoint
) -> None:
    (add_checkpoint(2).path / "adapter_config.json").unlink()
    _end(run)
    assert watch(make_evaluator()) == 0


def test_a_step_that_a_resumed_run_wrote_again_is_evaluated_again(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2, fill=1)
    _end(run)
    watch(make_evaluator())
    add_checkpoint(2, fill=2)
    watch(make_evaluator())
    models = {model for model, _ in env.ran()}
    assert len(models) == 3 and BASE_NAME in models
    assert set(env.ran().values()) == {1}


def test_failures_are_tried_again_on_later_passes_and_never_scored_0(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    _end(run)
    unlucky = env.tasks[0].name
    env.verdict = lambda model, task, before: (
        ConnectionError("gone") if (task, model) == (unlucky, BASE_NAME) and before < 3 else result()
    )
    assert watch(make_evaluator()) == 0
    value = json.loads((run.eval / "checkpoint-2_results.json").read_text())
    assert value["base"]["pass_at_1"] == 1.0
    assert value["infrastructure_failures"] == [] and value["missing_cells"] == 0
    assert _ran(env)[BASE_NAME, unlucky] == 4


def test_a_cell_that_always_fails_is_listed_and_given_up(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    _end(run)
    unlucky = env.tasks[0].name
    env.verdict = lambda model, task, _: ConnectionError("gone") if task == unlucky else result()
    assert watch(make_evaluator()) == 0
    value = json.loads((run.eval / "checkpoint-2_results.json").read_text())
    assert {(item["label"], item["task"], item["cause"]) for item in value["infrastructure_failures"]} == {
        ("base", unlucky, "env"),
        ("checkpoint-2", unlucky, "env"),
    }
    assert value["base"]["tasks"] == 2 and value["paired"]["tasks"] == 2


def test_no_more_rollouts_run_at_once_than_the_recipe_allows_and_none_fewer(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint, cfg: Recipe
) -> None:
    add_checkpoint(2)
    _end(run)
    together = threading.Barrier(cfg.evaluator.max_inflight)
    env.verdict = lambda *_: (together.wait(timeout=10), result())[1]  # breaks unless so many run at once
    assert watch(make_evaluator()) == 0
    assert env.most_at_once == cfg.evaluator.max_inflight


def test_a_policy_server_that_never_answers_ends_the_watch_with_its_name(
    make_evaluator: Make, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    policy_eval.healthy = False
    with pytest.raises(NotReadyError, match=r"/health did not answer within 0 s|/health did not answer within 1 s"):
        watch(make_evaluator())


def test_the_heartbeat_tells_how_far_an_evaluation_is(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(7)
    _end(run)
    seen = []

    def look(*_: Any) -> Any:
        seen.append(health.read_heartbeats(run)["evaluator"])
        return result()

    env.verdict = look
    watch(make_evaluator())
    assert {(beat.phase, beat.step, beat.detail["cells"]) for beat in seen} == {("evaluating", 7, 6)}
    last = health.read_heartbeats(run)["evaluator"]
    assert (last.phase, last.detail["cells_done"]) == ("watching", 6)


@pytest.mark.parametrize("stops", [True, False])
def test_a_collapse_stops_the_run_only_where_the_recipe_says_so(
    cfg: Recipe, run: RunDir, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = cfg.model_copy(update={"evaluator": cfg.evaluator.model_copy(update={"collapse_stops": stops})})
    alarm = {"step": 200, "best_step": 100, "drop": 0.5, "p_value": 0.002}
    with caplog.at_level(logging.ERROR):
        alarm_on_collapse(cfg, run, {"collapse_alarms": [alarm]}, step=300)
        assert not caplog.records
        alarm_on_collapse(cfg, run, {"collapse_alarms": [alarm]}, step=200)
    assert [record.message for record in caplog.records] == ["collapse"]
    assert run.stop_request.exists() is stops
    if stops:
        assert "checkpoint-200 is 0.500 below checkpoint-100" in json.loads(run.stop_request.read_text())["reason"]


def test_a_collapse_does_not_replace_a_stop_request_that_is_there(cfg: Recipe, run: RunDir) -> None:
    cfg = cfg.model_copy(update={"evaluator": cfg.evaluator.model_copy(update={"collapse_stops": True})})
    run_dir.write_json(run.stop_request, {"reason": "first"})
    alarm_on_collapse(cfg, run, {"collapse_alarms": [{"step": 1, "best_step": 0, "drop": 1.0, "p_value": 0.0}]}, step=1)
    assert json.loads(run.stop_request.read_text()) == {"reason": "first"}


@pytest.fixture
def collapsing(
    make_evaluator: Make, cfg: Recipe, tasks_dir: Path, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> Callable[[], Evaluator]:
    """An evaluator of 12 tasks: checkpoint-2 passes all of them, later ones the first three."""
    shutil.copytree(ROOT / "data/tasks/learn", tasks_dir / "learn")
    shutil.copy(ROOT / "data/tasks/learn.json", tasks_dir)
    env.suite = "learn/heldout"
    env.tasks = list(load_suite(tasks_dir, env.suite, limit=12))
    left = [task.name for task in env.tasks[:3]]
    env.verdict = lambda model, task, _: result(
        reward=float(_arm(model) in (BASE_NAME, "checkpoint-2") or task in left)
    )
    stopping = cfg.model_copy(
        update={
            "tasks": cfg.tasks.model_copy(update={"heldout": env.suite}),
            "evaluator": cfg.evaluator.model_copy(
                update={"watch_tasks": 12, "final_tasks": 12, "collapse_stops": True}
            ),
        }
    )
    add_checkpoint(2)
    add_checkpoint(4)
    return lambda: make_evaluator(cfg=stopping)


def test_a_collapse_is_recorded_and_asks_the_trainer_to_stop(collapsing: Callable[[], Evaluator], run: RunDir) -> None:
    _end(run)
    assert watch(collapsing()) == 0
    summary = json.loads((run.eval / "summary.json").read_text())
    assert summary["best"] == "checkpoint-2"
    [alarm] = summary["collapse_alarms"]
    assert (alarm["step"], alarm["best_step"], alarm["drop"]) == (4, 2, 0.75)
    assert alarm["p_value"] == pytest.approx(2 / 2**9)
    request = json.loads(run.stop_request.read_text())
    assert request["by"] == "evaluator" and "checkpoint-4 is 0.750 below checkpoint-2" in request["reason"]
    assert run_dir.read_lines(run.eval / ALARMS)[0]["reason"] == request["reason"]


def test_a_request_to_start_again_does_not_hide_a_collapse(collapsing: Callable[[], Evaluator], run: RunDir) -> None:
    run_dir.write_json(run.stop_request, {"reason": "stall", "by": "watchdog", "resume": True})
    _end(run)
    watch(collapsing())
    assert json.loads(run.stop_request.read_text())["by"] == "evaluator"


def test_a_run_that_was_resumed_in_spite_of_a_collapse_is_not_stopped_by_it_again(
    collapsing: Callable[[], Evaluator], run: RunDir, add_checkpoint: AddCheckpoint
) -> None:
    _end(run)
    watch(collapsing())
    run.stop_request.unlink()  # as the trainer's supervisor does at its start
    watch(collapsing())
    assert not run.stop_request.exists()
    add_checkpoint(6)
    watch(collapsing())
    assert "checkpoint-6 is 0.750 below checkpoint-2" in json.loads(run.stop_request.read_text())["reason"]


def test_of_a_small_drop_nobody_is_told(collapsing: Callable[[], Evaluator], run: RunDir, env: FakeEnv) -> None:
    lost = [task.name for task in env.tasks[:5]]  # 5 of 12, p = 0.0625
    env.verdict = lambda model, task, _: result(reward=float(_arm(model) != "checkpoint-4" or task not in lost))
    _end(run)
    watch(collapsing())
    assert not run.stop_request.exists() and not (run.eval / ALARMS).exists()


# --- The best checkpoint ------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_tagged_and_survives_the_rotation_of_checkpoints(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    env.verdict = lambda model, *_: result(reward=float(_arm(model) == "checkpoint-4"))
    weights = {step: (add_checkpoint(step).path / WEIGHTS).read_bytes() for step in (2, 4, 6)}
    _end(run)
    watch(make_evaluator())
    summary = json.loads((run.eval / "summary.json").read_text())
    assert summary["best"] == "checkpoint-4"
    assert [point["adapter_sha256"] for point in summary["checkpoints"]] == [
        hashlib.sha256(weights[step]).hexdigest() for step in (2, 4, 6)
    ]
    shutil.rmtree(run.checkpoints / "checkpoint-4")
    best = find(run, "best")
    assert (best.step, (best.path / WEIGHTS).read_bytes()) == (4, weights[4])
    assert [path.name for path in (run.eval / "best").iterdir()] == ["checkpoint-4"]
    evaluator = make_evaluator()
    env.calls.clear()
    assert evaluator.evaluate(best, evaluator.watch_question)["adapter"]["pass_at_1"] == 1.0
    assert env.calls == []


def test_a_checkpoint_that_is_rotated_away_while_it_is_evaluated_can_still_be_the_best(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    checkpoint = add_checkpoint(2)
    weights = (checkpoint.path / WEIGHTS).read_bytes()
    env.verdict = lambda *_: (shutil.rmtree(checkpoint.path, ignore_errors=True), result())[1]
    _end(run)
    watch(make_evaluator())
    assert (find(run, "best").path / WEIGHTS).read_bytes() == weights


def test_a_copy_that_another_evaluator_removes_meanwhile_is_followed_by_the_checkpoint(
    make_evaluator: Make, run: RunDir, add_checkpoint: AddCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = make_evaluator()
    checkpoint = add_checkpoint(2)
    value = evaluator.evaluate(checkpoint, evaluator.watch_question)
    loaded = run.eval / SNAPSHOTS
    assert list(loaded.iterdir())
    real = shutil.copyfile

    def removed_first(source: Path, target: Path) -> None:
        shutil.rmtree(loaded, ignore_errors=True)
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", removed_first)
    evaluator.record_checkpoint(value)
    best = find(run, "best").path
    assert (best / WEIGHTS).read_bytes() == (checkpoint.path / WEIGHTS).read_bytes()


def test_weights_that_were_written_anew_since_are_not_kept_as_the_best(
    make_evaluator: Make, run: RunDir, add_checkpoint: AddCheckpoint
) -> None:
    evaluator = make_evaluator()
    value = evaluator.evaluate(add_checkpoint(2, fill=1), evaluator.watch_question)
    evaluator.close()
    add_checkpoint(2, fill=2)
    evaluator.record_checkpoint(value)
    assert not (run.eval / "best").exists()


def test_the_share_of_time_in_which_sandboxes_were_in_use_is_recorded(
    make_evaluator: Make, run: RunDir, env: FakeEnv, add_checkpoint: AddCheckpoint
) -> None:
    add_checkpoint(2)
    _end(run)
    env.verdict = lambda *_: (time.sleep(0.1), result(wall_s=0.1))[1]
    watch(make_evaluator())
    value = json.loads((run.eval / "checkpoint-2_results.json").read_text())
    assert 0 < value["sandboxes_busy_share"] <= 1
    evaluator = make_evaluator()
    again = evaluator.evaluate(run.complete_checkpoints()[0], evaluator.watch_question)
    assert again["sandboxes_busy_share"] is None


def _until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_checkpoint_that_is_written_again_is_another_one(add_checkpoint: AddCheckpoint) -> None:
    checkpoint = add_checkpoint(2)
    first = identity(checkpoint)
    (checkpoint.path / run_dir.READY).unlink()
    assert identity(checkpoint) == (2, 0.0) != first
