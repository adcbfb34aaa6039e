"""What a rollout is asked for, and what its result counts as."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.evaluator import cells
from services.evaluator.cells import Arm, Cell, Conditions
from services.evaluator.rollout import Runner, judge, locate
from tests.fakes.evaluation import FakeEnv, result

CELL = Cell(Arm("checkpoint-2", "aa"), "lines-a", "bb", 0)


@pytest.fixture
def under(cfg: Recipe) -> Conditions:
    return cells.conditions(cfg, None)


@pytest.fixture
def runner(env: FakeEnv, under: Conditions) -> Runner:
    index = locate(env.connect(), "smoke/heldout", env.tasks)
    env.open_clients = 0
    return Runner(env.connect, "smoke/heldout", index, under, "http://policy-eval:8000/v1", "docker", 2, wait_s=0)


def test_a_rollout_is_asked_for_with_the_purpose_sampling_and_budget_of_the_recipe(
    runner: Runner, env: FakeEnv, cfg: Recipe
) -> None:
    runner(CELL, "checkpoint-2-aa")
    (call,) = env.calls
    assert call.pop("task") == "lines-a"
    assert call == {
        "split": "smoke/heldout",
        "task_index": runner.index["lines-a"],
        "harness": "opencode",
        "sandbox": "docker",
        "llm_url": "http://policy-eval:8000/v1",
        "model": "checkpoint-2-aa",
        "purpose": "eval",
        "reward_key": "correctness,reward",
        "eval_sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "agent_timeout_sec": cfg.rollout.agent_timeout_s,
        "agent_step_limit": cfg.rollout.max_tool_calling_iterations,
    }


def test_a_graded_rollout_becomes_a_scored_outcome_with_its_counts(runner: Runner) -> None:
    outcome = runner(CELL, "policy")
    assert (outcome.reward, outcome.passed, outcome.cause) == (1.0, True, None)
    assert (outcome.turns, outcome.tool_calls, outcome.completion_tokens, outcome.wall_s) == (2, 1, 4, 12.5)
    assert outcome.trial == "oe-lines-a-1"


def test_each_rollout_has_a_client_of_its_own_that_is_closed_again(runner: Runner, env: FakeEnv) -> None:
    env.verdict = lambda *_: ConnectionError("gone")
    runner(CELL, "policy")
    assert len(env.calls) == 3
    assert env.open_clients == 0


def test_an_infrastructure_failure_is_run_again_until_it_is_scored(
    runner: Runner, env: FakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    gone = ConnectionResetError("peer went away")
    env.verdict = lambda _model, _task, before: gone if before < 2 else result(reward=0.0)
    with caplog.at_level(logging.WARNING):
        outcome = runner(CELL, "policy")
    assert (outcome.reward, len(env.calls)) == (0.0, 3)
    retries = [record for record in caplog.records if record.message == "cell is run again"]
    assert [record.__dict__["cause"] for record in retries] == ["env", "env"]


def test_what_still_fails_after_the_last_retry_has_no_score(runner: Runner, env: FakeEnv) -> None:
    env.verdict = lambda *_: result(reward=None, exception_type="EnvironmentStartTimeoutError", error="no sandbox")
    outcome = runner(CELL, "policy")
    assert (outcome.scored, outcome.cause, len(env.calls)) == (False, "sandbox_create", 3)
    assert "no sandbox" in outcome.error


def test_a_wrong_answer_is_scored_at_once(runner: Runner, env: FakeEnv) -> None:
    env.verdict = lambda *_: result(reward=0.0)
    assert runner(CELL, "policy").reward == 0.0
    assert len(env.calls) == 1


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"exception_type": "AgentSetupTimeoutError"}, "setup"),
        ({"exception_type": "NonZeroAgentExitCodeError", "error": "exit 1"}, "agent_crash"),
        ({"exception_type": "NonZeroAgentExitCodeError", "error": "upstream returned 502"}, "policy"),
        ({"exception_type": "VerifierTimeoutError", "reward": None}, "verifier"),
        ({"exception_type": "AgentTimeoutError", "reward": None}, "agent_timeout"),
        ({"reward": None}, "verifier"),
        ({"reward": -1.0}, "verifier"),
        ({"reward": 37.0}, "verifier"),
        ({"turns": []}, "policy"),
        ({"turns": [], "exception_type": "AgentTimeoutError"}, "policy"),
        ({"capture_level": "text"}, "policy"),
    ],
)
def test_a_failure_is_never_scored_even_when_the_verifier_says_0(
    under: Conditions, changes: dict[str, Any], cause: str
) -> None:
    outcome = judge(result(**{"reward": 0.0} | changes), under)
    assert (outcome.reward, outcome.cause) == (None, cause)
    assert outcome.error


def test_an_agent_that_ran_out_of_time_is_scored_by_what_it_left(under: Conditions) -> None:
    outcome = judge(result(reward=0.0, exception_type="AgentTimeoutError"), under)
    assert (outcome.reward, outcome.agent_timeout) == (0.0, True)


@pytest.mark.parametrize("changed", [{"temperature": 0.7}, {"top_p": 0.95}, {"top_k": 50}])
def test_a_rollout_sampled_otherwise_than_the_recipe_says_is_not_scored(
    under: Conditions, changed: dict[str, float]
) -> None:
    found = result()
    found.turns[1].sampling_params = {**under.sampling, **changed}
    outcome = judge(found, under)
    assert (outcome.reward, outcome.cause) == (None, "capture")
    assert str(next(iter(changed.values()))) in outcome.error


def test_a_turn_beyond_the_output_cap_is_not_scored(under: Conditions) -> None:
    found = result()
    found.turns[0].completion_token_ids = [1] * (under.max_completion_tokens + 1)
    outcome = judge(found, under)
    assert (outcome.reward, outcome.cause) == (None, "capture")
    found.turns[0].completion_token_ids.pop()
    assert judge(found, under).reward == 1.0


def test_a_tool_call_that_stayed_text_is_counted(under: Conditions) -> None:
    found = result()
    found.turns[0].text = "<|tool_call_start|>[bash(command='ls)]<|tool_call_end|>"
    assert judge(found, under).unparsed_calls == 1


def test_a_task_is_found_by_name_wherever_the_server_keeps_it(runner: Runner, env: FakeEnv) -> None:
    for name in runner.index:
        runner(Cell(Arm("base"), name, "", 0), "policy")
    assert [call["task"] for call in env.calls] == list(runner.index)
    assert [task.name for task in env.tasks] == list(runner.index)


def test_a_suite_that_is_not_served_is_named(env: FakeEnv) -> None:
    with pytest.raises(NotReadyError, match="not smoke/other"):
        locate(env.connect(), "smoke/other", env.tasks)


def test_a_task_that_the_server_lacks_or_words_otherwise_is_named(env: FakeEnv) -> None:
    wanted = list(env.tasks)
    env.tasks = wanted[1:]
    with pytest.raises(RecipeError, match=f"does not serve task {wanted[0].name}"):
        locate(env.connect(), "smoke/heldout", wanted)
    env.tasks = [SimpleNamespace(name=wanted[0].name, instruction="Something else."), *wanted[1:]]
    with pytest.raises(RecipeError, match=f"asks something else in task {wanted[0].name}"):
        locate(env.connect(), "smoke/heldout", wanted)
