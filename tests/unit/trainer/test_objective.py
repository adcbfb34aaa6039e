"""Advantages, and how much each sampled token of a step counts; the losses are in tests/contract."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.common.recipe import Algorithm
from services.trainer.groups import Rollout, Row
from services.trainer.objective import advantages, token_weights

REWARDS = st.lists(st.one_of(st.none(), st.floats(-2, 2, allow_subnormal=False)), min_size=1, max_size=8)


def rollout(*trained_tokens: int, truncated: bool = False) -> Rollout:
    """One row for each number of trained tokens, beside as many of context."""
    rows = [Row([5] * 2 * n, [0] * n + [1] * n, [0.0] * 2 * n, [1] * 2 * n) for n in trained_tokens]
    return Rollout(rows, reward=1.0, advantage=1.0, version=1.0, truncated=truncated)


def test_advantages_are_counted_from_the_group_s_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "none") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1.0, 0.0, 0.0, 0.0], "std") == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_a_rollout_that_could_not_be_scored_gets_none_and_moves_no_other() -> None:
    assert advantages([None, 1.0, None, 0.0], "none") == [0.0, 0.5, 0.0, -0.5]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [None, 0.3, 0.3], [None, None], []])
def test_equal_rewards_give_exactly_no_advantage(rewards: list[float | None], scale: str) -> None:
    assert advantages(rewards, scale) == [0.0] * len(rewards)  # type: ignore[arg-type]


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float | None]) -> None:
    for scale in ("std", "none"):
        found = advantages(rewards, scale)  # type: ignore[arg-type]
        scored = [(reward, value) for reward, value in zip(rewards, found, strict=True) if reward is not None]
        assert sum(value for _, value in scored) == pytest.approx(0, abs=1e-6)
        ordered = [value for _, value in sorted(scored)]
        assert ordered == sorted(ordered)


@given(REWARDS)
def test_divided_advantages_have_the_spread_of_one(rewards: list[float | None]) -> None:
    scored = [reward for reward in rewards if reward is not None]
    assume(len(scored) > 1 and max(scored) - min(scored) > 1e-3)
    found = advantages(scored, "std")
    assert sum(value * value for value in found) / len(found) == pytest.approx(1, rel=1e-4)


TOKENS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6)


@given(TOKENS)
def test_each_rollout_counts_the_same_however_long_and_however_often_forked(tokens: list[list[int]]) -> None:
    rollouts = [rollout(*rows) for rows in tokens]
    weights = token_weights(rollouts, Algorithm())
    for weight, rows in zip(weights, tokens, strict=True):
        assert weight * sum(rows) == pytest.approx(1 / len(tokens))


@given(TOKENS)
def test_each_token_of_the_step_counts_the_same(tokens: list[list[int]]) -> None:
    weights = token_weights([rollout(*rows) for rows in tokens], Algorithm(aggregation="token"))
    assert weights == pytest.approx([1 / sum(map(sum, tokens))] * len(tokens))


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sequence", [1 / 6, 0.0, 1 / 2]), ("token", [1 / 4, 0.0, 1 / 4])]
)
def test_a_truncated_rollout_can_be_left_out_and_takes_no_place(aggregation: str, expected: list[float]) -> None:
    rollouts = [rollout(3), rollout(50, truncated=True), rollout(1)]
    masked = Algorithm(truncated="mask", aggregation=aggregation)  # type: ignore[arg-type]
    assert token_weights(rollouts, masked) == pytest.approx(expected)
    assert all(token_weights(rollouts, Algorithm(aggregation=aggregation)))  # type: ignore[arg-type]


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_a_step_of_truncated_rollouts_alone_trains_nothing(aggregation: str) -> None:
    masked = Algorithm(truncated="mask", aggregation=aggregation)  # type: ignore[arg-type]
    assert token_weights([rollout(3, truncated=True)] * 2, masked) == [0.0, 0.0]
