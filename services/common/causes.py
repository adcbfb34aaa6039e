"""Where a rollout failed that failed for another reason than the agent's answer.

A failed rollout is data: it is unscorable, never reward 0, and counted by cause. Env server, trainer and evaluator
name causes alike, from the same fields of OpenEnv's ``HarborRolloutResult``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol


class Cause(StrEnum):
    """The boundary at which a rollout failed."""

    POLICY = "policy"
    """The policy server did not answer, or not with token ids and log-probabilities."""
    ENV = "env"
    """The env server could not be reached, refused the call, or did not answer in the outer time bound."""
    SANDBOX_CREATE = "sandbox_create"
    """The sandbox did not start, or its data never came."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox ended before its rollout did: killed, out of memory, or over its bound on disk."""
    SETUP = "setup"
    """The agent's binary is missing, of another version, or did not start in time."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent's time was up before there was anything to score."""
    AGENT_CRASH = "agent_crash"
    """The agent ended with an error of its own."""
    VERIFIER = "verifier"
    """No number from 0 to 1 came from the verifier."""
    CAPTURE = "capture"
    """What the proxy recorded is not exactly what was sampled, or holds nothing to train."""
    STALENESS = "staleness"
    """Sampled by a policy too old to train on."""


class Rollout(Protocol):
    """The fields of ``HarborRolloutResult`` that a cause is read from."""

    reward: float | None
    rollout_type: str
    n_trainable_tokens: int
    findings: Sequence[str]
    error: str | None
    exception_type: str | None


_BY_EXCEPTION = {
    "DockerError": Cause.SANDBOX_CREATE,  # the engine is asked while a sandbox starts, and not later
    "EnvironmentStartTimeoutError": Cause.SANDBOX_CREATE,
    "HealthcheckError": Cause.SANDBOX_CREATE,
    "SandboxBuildFailedError": Cause.SANDBOX_CREATE,
    "SandboxLostError": Cause.SANDBOX_LOST,
    "SandboxError": Cause.SANDBOX_LOST,  # this one and the next: of a Job that was there, and does not answer any more
    "HfHubHTTPError": Cause.SANDBOX_LOST,
    "AgentSetupTimeoutError": Cause.SETUP,
    "AgentSetupError": Cause.SETUP,
    "AgentTimeoutError": Cause.AGENT_TIMEOUT,
    "AddTestsDirError": Cause.VERIFIER,
    "DownloadVerifierDirError": Cause.VERIFIER,
    "RewardFileEmptyError": Cause.VERIFIER,
    "RewardFileNotFoundError": Cause.VERIFIER,
    "VerifierOutputParseError": Cause.VERIFIER,
    "VerifierTimeoutError": Cause.VERIFIER,
    "CancelledError": Cause.ENV,
}
"""Harbor's exception, by name: the services that classify do not all have Harbor installed."""

# Texts of OpenEnv's capture proxy and probe; the agent repeats them in its own error.
_POLICY_ERROR = re.compile(
    r"upstream returned 5\d\d|could not reach engine|engine timed out|training requires exact engine token capture"
)
_SANDBOX_ERROR = re.compile(r"Docker compose command failed|No such container|Cannot connect to the Docker daemon")
_ENV_ERROR = re.compile(r"server not initialised|out of range|unknown split")


def failure_cause(rollout: Rollout, *, training: bool) -> Cause | None:
    """Why the rollout cannot be scored; None if it can.

    An agent whose time was up is scored by what it left behind, as long as the verifier graded it and, for
    training, at least one of its turns was captured: running out of time is an outcome of the agent's choices.

    Args: training: also ask for exact tokens to train on; an evaluation needs the reward only.
    """
    raised = _raised(rollout)
    if raised is not None and raised is not Cause.AGENT_TIMEOUT:
        return raised
    if training and not _trainable(rollout):
        return raised or Cause.CAPTURE
    if rollout.reward is None:
        return raised or Cause.VERIFIER
    return None if is_verdict(rollout.reward) else Cause.VERIFIER


def is_verdict(reward: float) -> bool:
    """Whether the verifier's number says how right the answer is. Another one says something else: graders write -1
    when they broke, and 37 on a scale of their own; neither is a wrong answer, nor a better one than right."""
    return 0 <= reward <= 1


def told(rollout: Rollout) -> str:
    """What the rollout says of its failure, for a person."""
    if rollout.error:
        return rollout.error
    if rollout.reward is None or is_verdict(rollout.reward):
        return "the verifier gave no reward"
    return f"the verifier's reward is {rollout.reward}; allowed is a number from 0 to 1"


def _raised(rollout: Rollout) -> Cause | None:
    """The cause that the rollout's exception or error names; findings about the capture are judged apart."""
    error = rollout.error or ""
    if _POLICY_ERROR.search(error):
        return Cause.POLICY
    if _SANDBOX_ERROR.search(error):
        return Cause.SANDBOX_CREATE
    if rollout.exception_type is not None:
        # Harbor has about twenty classes for what an agent can print before it exits with an error.
        return _BY_EXCEPTION.get(rollout.exception_type, Cause.AGENT_CRASH)
    if _ENV_ERROR.search(error):
        return Cause.ENV
    return None


def _trainable(rollout: Rollout) -> bool:
    fatal = any("[FATAL" in finding for finding in rollout.findings)
    return rollout.rollout_type == "train" and rollout.n_trainable_tokens > 0 and not fatal
