"""The reward of a rollout: the verifier's verdict, plus a small bonus for few tool calls on correct answers."""

from __future__ import annotations

from typing import Protocol


class Outcome(Protocol):
    """The part of TRL's ``HarnessRolloutOutcome`` that the reward reads."""

    env_reward: float | None
    tool_call_count: int


def score(outcome: Outcome, *, bonus: float, max_tool_calls: int) -> float | None:
    """``env_reward + bonus * max(0, (N - tool_calls) / N)`` for a correct answer, else 0.

    A wrong answer earns 0 whatever it cost, so that the bonus cannot reward giving up; a correct one is
    worth more the fewer calls it took, so that an all-correct group still carries contrast.

    Args: bonus: recipe.reward.tool_efficiency_bonus. max_tool_calls: N, the agent's budget of model calls.
    Returns: None when the verifier gave no verdict: the rollout is unscorable, which is not 0.
    """
    if outcome.env_reward is None:
        return None
    if outcome.env_reward < 1.0:
        return 0.0
    unused_share = max(0.0, (max_tool_calls - outcome.tool_call_count) / max_tool_calls)
    return outcome.env_reward + bonus * unused_share
