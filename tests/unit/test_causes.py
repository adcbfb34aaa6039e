import math
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.causes import Cause, failure_cause, told


def rollout(**differs: Any) -> SimpleNamespace:
    good = {
        "reward": 1.0, "rollout_type": "train", "n_trainable_tokens": 40, "findings": [], "error": None,
        "exception_type": None,
    }  # fmt: skip
    return SimpleNamespace(**good | differs)


@pytest.mark.parametrize("reward", [-1.0, -1e-9, 1.0000001, 2.0, 37.0, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("differs", [{}, {"exception_type": "AgentTimeoutError"}])
def test_number_that_is_no_verdict_is_the_verifiers_failure(reward: float, differs: dict[str, Any]) -> None:
    found = rollout(reward=reward, **differs)
    assert failure_cause(found, training=True) is failure_cause(found, training=False) is Cause.VERIFIER
    assert told(found) == f"the verifier's reward is {reward}; allowed is a number from 0 to 1"


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_graded_answer_is_scored_right_or_wrong(reward: float) -> None:
    assert failure_cause(rollout(reward=reward), training=True) is None


@pytest.mark.parametrize(
    ("exception", "error", "cause"),
    [
        ("EnvironmentStartTimeoutError", "", Cause.SANDBOX_CREATE),
        ("HealthcheckError", "", Cause.SANDBOX_CREATE),
        ("DockerError", "`docker container inspect x` did not answer in 60 s", Cause.SANDBOX_CREATE),
        ("SandboxLostError", "", Cause.SANDBOX_LOST),
        ("SandboxError", "connection lost while running command", Cause.SANDBOX_LOST),
        ("HfHubHTTPError", "503 Server Error", Cause.SANDBOX_LOST),
        ("RuntimeError", "Docker compose command failed for environment x", Cause.SANDBOX_CREATE),
        ("AgentSetupError", "", Cause.SETUP),
        ("AgentSetupTimeoutError", "", Cause.SETUP),
        ("NonZeroAgentExitCodeError", "OpenCode emitted error event(s): boom", Cause.AGENT_CRASH),
        ("ApiInternalServerError", "", Cause.AGENT_CRASH),
        ("NonZeroAgentExitCodeError", "OpenCode emitted error event(s): upstream returned 500: x", Cause.POLICY),
        ("NonZeroAgentExitCodeError", "could not reach engine: refused", Cause.POLICY),
        ("ValueError", "training requires exact engine token capture", Cause.POLICY),
        ("VerifierTimeoutError", "", Cause.VERIFIER),
        ("RewardFileNotFoundError", "", Cause.VERIFIER),
        ("CancelledError", "", Cause.ENV),
    ],
)
def test_exception_names_the_boundary(exception: str, error: str, cause: Cause) -> None:
    # Even with a reward: what the verifier made of a broken sandbox is not the agent's answer.
    assert failure_cause(rollout(exception_type=exception, error=error), training=True) is cause


def test_missing_reward_is_the_verifiers_not_zero() -> None:
    assert failure_cause(rollout(reward=None), training=True) is Cause.VERIFIER


@pytest.mark.parametrize(
    "differs",
    [{"n_trainable_tokens": 0}, {"rollout_type": "eval"}, {"findings": ["[FATAL] logprob_misalign: turn 0"]}],
)
def test_capture_counts_in_training_only(differs: dict[str, Any]) -> None:
    assert failure_cause(rollout(**differs), training=True) is Cause.CAPTURE
    assert failure_cause(rollout(**differs), training=False) is None


def test_agent_out_of_time_is_scored_when_it_was_graded_and_captured() -> None:
    assert failure_cause(rollout(exception_type="AgentTimeoutError", error="timed out"), training=True) is None


@pytest.mark.parametrize("differs", [{"reward": None}, {"n_trainable_tokens": 0, "findings": ["[FATAL] no_turns: x"]}])
def test_agent_out_of_time_before_anything_happened_is_unscorable(differs: dict[str, Any]) -> None:
    found = failure_cause(rollout(exception_type="AgentTimeoutError", **differs), training=True)
    assert found is Cause.AGENT_TIMEOUT
