from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer import reward


@dataclass
class Outcome:
    env_reward: float | None
    tool_call_count: int


def score(env_reward: float | None, tool_calls: int) -> float | None:
    return reward.score(Outcome(env_reward, tool_calls), bonus=0.1, max_tool_calls=32)


@pytest.mark.parametrize(
    ("env_reward", "tool_calls", "expected"),
    [
        (1.0, 0, 1.1),
        (1.0, 8, 1.0 + 0.1 * 24 / 32),
        (1.0, 32, 1.0),
        (1.0, 50, 1.0),  # over the budget costs nothing more than the bonus
        (0.0, 0, 0.0),  # giving up at once earns nothing
        (0.0, 5, 0.0),
        (0.5, 1, 0.0),  # half right is not correct
        (None, 3, None),  # no verdict is not a wrong answer
    ],
)
def test_reward_follows_the_recipes_formula(env_reward: float | None, tool_calls: int, expected: float | None) -> None:
    assert score(env_reward, tool_calls) == (None if expected is None else pytest.approx(expected))


@given(st.integers(0, 200), st.integers(0, 200))
def test_fewer_calls_never_earn_less_and_correct_always_beats_wrong(a: int, b: int) -> None:
    few, many = sorted((a, b))
    assert score(1.0, few) >= score(1.0, many) >= 1.0 > score(0.0, few)
