import math
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.recipe import Sampling
from services.trainer.capture_gate import breaches, of_the_policy

SAMPLING = Sampling(max_completion_tokens=64)
SUBMITTED = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


Ids = tuple[int, ...]


def turn(number: int = 0, prompt: Ids = (1, 2, 3), completion: Ids = (4, 5), **differs: Any) -> Any:
    good = {
        "turn": number, "finish_reason": "tool_calls", "prompt_token_ids": prompt, "completion_token_ids": completion,
        "per_token_logps": [-0.5] * len(completion), "loss_mask": [0] * len(prompt) + [1] * len(completion),
        "n_tools": 8, "discarded": False, "trainable": True, "sampling_params": SUBMITTED,
    }  # fmt: skip
    return SimpleNamespace(**good | differs)


def rollout(*turns: Any, **differs: Any) -> Any:
    good = {
        "rollout_type": "train", "turns": turns or (turn(), turn(1, (1, 2, 3, 4, 5, 6))), "findings": [],
        "param_fixes": [], "atif": "match", "n_trainable_tokens": 4, "exception_type": None,
    }  # fmt: skip
    return SimpleNamespace(**good | differs)


def names(found: Any, *, fatal: bool) -> list[str]:
    return [breach.name for breach in breaches(found, SAMPLING) if breach.fatal is fatal]


def test_faithful_capture_has_no_breach() -> None:
    assert breaches(rollout(), SAMPLING) == []


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("no_token_capture", {"rollout_type": "eval"}),
        ("nothing_trainable", {"n_trainable_tokens": 0}),
        ("sampling_changed", {"param_fixes": ["dropped temperature"]}),
        ("no_agent_log", {"atif": "none"}),
        ("turn_mismatch", {"findings": ["[FATAL] turn_mismatch: per-call completion tokens disagree."]}),
        ("logprob_misalign", {"findings": ["[sequence 0a] [FATAL] logprob_misalign: turn 0: 2 logprobs vs 3 ids"]}),
        ("no_turns", {"turns": (), "atif": "none", "findings": ["[FATAL] no_turns: the agent never reached it"]}),
    ],
)
def test_breach_of_the_session_is_fatal(name: str, differs: dict[str, Any]) -> None:
    assert names(rollout(**differs), fatal=True) == [name]


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("logprob_misalign", {"per_token_logps": [-0.5]}),
        ("mask_length", {"loss_mask": [0, 0, 0, 1]}),
        ("mask_length", {"loss_mask": None}),
        ("invalid_logprob", {"per_token_logps": [-0.5, 0.1]}),
        ("invalid_logprob", {"per_token_logps": [-0.5, math.nan]}),
        (
            "over_the_cap",
            {"completion_token_ids": (4,) * 65, "per_token_logps": [-0.5] * 65, "loss_mask": [0] * 3 + [1] * 65},
        ),
        ("finish_reason", {"finish_reason": "abort"}),
        ("finish_reason", {"finish_reason": None}),
        ("sampling_differs", {"sampling_params": SUBMITTED | {"temperature": 0.7}}),
        ("sampling_differs", {"sampling_params": SUBMITTED | {"top_k": 20}}),
        ("sampling_differs", {"sampling_params": SUBMITTED | {"repetition_penalty": 1.05}}),
    ],
)
def test_breach_of_a_turn_is_fatal(name: str, differs: dict[str, Any]) -> None:
    assert names(rollout(turn(**differs)), fatal=True) == [name]


def test_session_of_titles_only_is_not_the_agents() -> None:
    assert names(rollout(turn(n_tools=0)), fatal=True) == ["no_agent_call"]


def test_agent_that_was_stopped_in_its_first_step_need_have_no_log() -> None:
    found = rollout(turn(), atif="none", exception_type="AgentTimeoutError")
    assert names(found, fatal=True) == []
    assert names(found, fatal=False) == ["no_agent_log"]


def test_history_that_was_rewritten_is_counted() -> None:
    found = rollout(turn(), turn(1, (1, 2, 3, 4, 9, 6)))
    assert names(found, fatal=True) == []
    assert names(found, fatal=False) == ["prefix_break"]


def test_discarded_turn_breaks_no_prefix() -> None:
    assert breaches(rollout(turn(), turn(1, (9,), discarded=True), turn(2, (1, 2, 3, 4, 5))), SAMPLING) == []


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("cut_by_length", {"finish_reason": "length"}),
        ("empty_completion", {"completion_token_ids": (), "per_token_logps": [], "loss_mask": [0, 0, 0]}),
    ],
)
def test_what_the_model_itself_did_is_counted_and_trained(name: str, differs: dict[str, Any]) -> None:
    found = rollout(turn(**differs))
    assert names(found, fatal=True) == []
    assert names(found, fatal=False) == [name]


def test_fatal_breaches_come_first() -> None:
    found = breaches(rollout(turn(finish_reason="length", per_token_logps=[])), SAMPLING)
    assert [breach.fatal for breach in found] == [True, False]


def test_turn_across_a_weight_sync_is_counted_and_trained() -> None:
    assert of_the_policy([(3, 3), (4, 4)]) == []
    (found,) = of_the_policy([(3, 3), (3, 4)])
    assert (found.name, found.fatal) == ("two_policies", False)
    assert found.detail == "call 1 ran across a weight sync: versions 3 to 4"


def test_turns_of_unknown_policy_are_counted() -> None:
    assert [(found.name, found.fatal) for found in of_the_policy(None)] == [("no_policy_version", False)]
