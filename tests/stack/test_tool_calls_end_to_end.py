"""Sampled text to executed command: our parser, the real capture proxy, real OpenCode, a real sandbox.

The policy is a FAKE that samples given texts. What ran is read from the log that OpenCode writes in the sandbox. vLLM's
own parser merges the two commands of T-10 into one that nobody wrote, and loses the new text of T-09's edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.common import run_dir
from services.trainer import rollout_log
from tests.fakes.policy import render_call
from tests.stack.test_env_rollout import IMAGE, ROOT, Stack, docker

CASES = {
    case["id"]: case
    for case in json.loads((ROOT / "tests" / "cases" / "lfm2_tool_calls.json").read_text(encoding="utf-8"))["cases"]
}
EDIT, TWO_COMMANDS = CASES["T-09"], CASES["T-10"]
AMBIGUOUS = "<|tool_call_start|>[bash(command='touch 'ran-1'') bash(command='touch 'ran-2'')]<|tool_call_end|>"
"""Without a comma it may be one call or two: nothing of it may run."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.started(tmp_path_factory) as stack:
        yield stack


def sampler(stack: Stack, name: str, *texts: str) -> str:
    """Start a fake policy that samples these texts, one a turn; return its URL."""
    docker(
        "run", "--detach", "--name", f"{stack.name}-{name}", *stack.options(),
        "--network", stack.network("train"), "--network-alias", name,
        IMAGE, "python", "/tests/fakes/raw_policy.py", "8000", *texts,
    )  # fmt: skip
    return f"http://{name}:8000"


@pytest.fixture(scope="module")
def outcomes(stack: Stack) -> dict[str, dict[str, Any]]:
    return stack.rollouts(
        edit=sampler(
            stack,
            "edit",
            render_call("bash", {"command": "echo \"print('a')\" > a.py"}),
            render_call("read", {"filePath": "a.py"}),
            EDIT["raw"],
            render_call("bash", {"command": "cat a.py"}),
        ),
        two=sampler(stack, "two", TWO_COMMANDS["raw"]),
        ambiguous=sampler(stack, "ambiguous", AMBIGUOUS),
    )


def ran(stack: Stack, rollout: str) -> list[dict[str, Any]]:
    """Every tool call that OpenCode carried out, in order: its tool, input, status and output."""
    trial = rollout_log.read(stack.run.rollouts / f"{rollout}.json.zst")["result"]["trial_name"]
    events = run_dir.read_lines(stack.run.trials / trial / "agent" / "opencode.txt")
    parts = [event["part"] for event in events if event["type"] == "tool_use"]
    return [{"tool": part["tool"], **part["state"]} for part in parts]


def test_two_commands_in_one_block_ran_as_two_and_the_merged_one_never_did(
    stack: Stack, outcomes: dict[str, Any]
) -> None:
    calls = ran(stack, "two")
    expected = [call["arguments"]["command"] for call in TWO_COMMANDS["calls"]]
    assert expected == ["echo 'a'", "echo 'b'"]
    assert sorted(call["input"]["command"] for call in calls) == expected  # OpenCode runs them side by side
    assert [(call["tool"], call["status"]) for call in calls] == [("bash", "completed")] * 2
    assert sorted(call["output"].strip() for call in calls) == ["a", "b"]
    assert outcomes["two"]["cause"] is None


def test_an_edit_with_unescaped_quotes_changed_what_the_model_wrote(stack: Stack, outcomes: dict[str, Any]) -> None:
    calls = ran(stack, "edit")
    assert [(call["tool"], call["status"]) for call in calls] == [
        ("bash", "completed"), ("read", "completed"), ("edit", "completed"), ("bash", "completed"),
    ]  # fmt: skip
    (arguments,) = [call["arguments"] for call in EDIT["calls"]]
    found = {name: calls[2]["input"][name] for name in arguments}
    assert found["filePath"].endswith(arguments["filePath"])
    assert (found["oldString"], found["newString"]) == ("print('a')", "print('b')")
    assert calls[3]["output"].strip() == "print('b')"
    assert outcomes["edit"]["cause"] is None


def test_nothing_ran_of_a_block_that_can_be_read_in_two_ways(stack: Stack, outcomes: dict[str, Any]) -> None:
    assert ran(stack, "ambiguous") == []
    assert outcomes["ambiguous"]["cause"] is None  # the agent's own failure: scored, and trained on
    assert outcomes["ambiguous"]["reward"] == 0.0


def test_no_marker_reached_the_agent(stack: Stack, outcomes: dict[str, Any]) -> None:
    for name in outcomes:
        result = rollout_log.read(stack.run.rollouts / f"{name}.json.zst")["result"]
        said = [str(m["content"]) for talk in result["conversations"] for m in talk["messages"] if m["role"] != "tool"]
        assert said
        assert not any("<|tool_call" in text for text in said), name


def test_every_model_call_has_a_policy_version(stack: Stack, outcomes: dict[str, Any]) -> None:
    """No weight sync has been made: all are of the bare base, and the times of all calls are known."""
    lines = {line["rollout_id"]: line for line in run_dir.read_lines(stack.run.rollouts / rollout_log.INDEX)}
    assert {name: lines[name]["policy_versions"] for name in outcomes} == {
        "edit": [[0, 0]] * 5, "two": [[0, 0]] * 2, "ambiguous": [[0, 0]],
    }  # fmt: skip
