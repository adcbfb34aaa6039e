"""Statistics against published values, brute force and properties."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.evaluator.statistics import (
    Collapse,
    collapses,
    compare,
    mcnemar_exact_p,
    pass_at_1,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("passed", "tasks", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_gives_the_published_values(passed: int, tasks: int, low: float, high: float) -> None:
    found = wilson_interval(passed / tasks, tasks)
    assert found == pytest.approx((low, high), abs=5e-5)


@given(tasks=st.integers(1, 400), data=st.data())
def test_wilson_bounds_solve_the_score_equation(tasks: int, data: st.DataObject) -> None:
    """By definition a bound b is where the observed rate lies z standard errors of b away from b."""
    passed = data.draw(st.integers(0, tasks))
    rate, z = passed / tasks, 1.959963984540054
    for bound in wilson_interval(rate, tasks):
        assert (rate - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / tasks, abs=1e-9)


@given(tasks=st.integers(1, 300), data=st.data())
def test_wilson_interval_holds_the_rate_and_stays_within_0_and_1(tasks: int, data: st.DataObject) -> None:
    rate = data.draw(st.floats(0, 1))
    low, high = wilson_interval(rate, tasks)
    assert 0 <= low <= rate <= high <= 1


@pytest.mark.parametrize(("rate", "tasks"), [(0.5, 0), (-0.1, 5), (1.1, 5), (math.nan, 5)])
def test_wilson_interval_refuses_what_is_no_proportion(rate: float, tasks: int) -> None:
    with pytest.raises(ValueError, match=f"num_tasks {tasks}"):
        wilson_interval(rate, tasks)


def test_mcnemar_gives_the_published_value() -> None:
    # Bentur et al. 2009 in Fagerland, Lydersen and Laake 2013: 1 and 7 discordant pairs, exact conditional p 0.0703
    assert mcnemar_exact_p(1, 7) == pytest.approx(0.0703, abs=5e-5)


@pytest.mark.parametrize("n", range(9))
def test_mcnemar_is_the_share_of_coin_tosses_at_least_as_uneven(n: int) -> None:
    tosses = [sum(toss) for toss in itertools.product((0, 1), repeat=n)]
    for heads in range(n + 1):
        uneven = sum(abs(2 * other - n) >= abs(2 * heads - n) for other in tosses)
        assert mcnemar_exact_p(heads, n - heads) == pytest.approx(uneven / len(tosses))


def test_mcnemar_is_exact_where_floating_point_would_overflow() -> None:
    assert mcnemar_exact_p(1500, 1500) == 1.0
    assert 0 < mcnemar_exact_p(0, 1000) < 1e-300


def test_mcnemar_refuses_a_negative_count() -> None:
    with pytest.raises(ValueError, match="-1 and 2"):
        mcnemar_exact_p(-1, 2)


def test_pass_at_1_is_the_mean_over_tasks_and_nothing_without_a_task() -> None:
    assert pass_at_1([1.0, 0.0, 0.5]) == 0.5
    assert pass_at_1([]) is None


def test_compare_counts_each_task_both_have_once() -> None:
    base = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0, "only-base-has-it": 1.0}
    adapter = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0, "only-adapter-has-it": 1.0}
    found = compare(base, adapter)
    assert (found.both, found.only_first, found.only_second, found.neither) == (1, 1, 1, 1)
    assert found.num_tasks == 4
    assert found.p_value == 1.0


def test_compare_takes_the_task_as_the_unit_when_there_are_several_attempts() -> None:
    first = {"better": 2 / 3, "tied": 1 / 3, "worse": 1 / 3}
    second = {"better": 1 / 3, "tied": 1 / 3, "worse": 1.0}
    found = compare(first, second)
    assert (found.both, found.only_first, found.only_second, found.neither) == (1, 1, 1, 0)


def _curve(**passed: int) -> dict[int, dict[str, float]]:
    """step -> 20 tasks of which the first so many pass."""
    return {int(step[1:]): {f"t{i}": float(i < count) for i in range(20)} for step, count in passed.items()}


def test_a_fall_below_the_best_that_is_large_and_significant_is_a_collapse() -> None:
    found = collapses(_curve(s100=5, s200=16, s300=15, s400=6), min_drop=0.1)
    assert found == [Collapse(400, 200, pytest.approx(0.5), mcnemar_exact_p(10, 0))]


def test_a_fall_that_chance_explains_is_no_collapse() -> None:
    # 5 tasks lost and none won: p = 0.0625
    assert collapses(_curve(s100=16, s200=11), min_drop=0.1) == []


def test_a_significant_fall_within_the_bound_is_no_collapse() -> None:
    assert collapses(_curve(s100=16, s200=10), min_drop=0.3) == []
    assert len(collapses(_curve(s100=16, s200=10), min_drop=0.29)) == 1


def test_a_collapse_is_judged_on_the_tasks_that_both_checkpoints_have() -> None:
    curve = _curve(s100=16, s200=16)
    for task in list(curve[200])[8:]:
        del curve[200][task]
    assert collapses(curve, min_drop=0.0) == []


def test_an_unscored_checkpoint_does_not_hide_the_best() -> None:
    curve = _curve(s100=18, s300=4)
    assert [found.best_step for found in collapses({**curve, 200: {}}, min_drop=0.1)] == [100]
