"""The alarm on the importance ratio at staleness 0."""

from __future__ import annotations

import math

import pytest

from services.common.errors import StoppedError
from services.trainer.ratio import RatioGuard

BOUNDS = (0.995, 1.005)


def test_a_ratio_within_its_bounds_is_no_alarm():
    guard = RatioGuard(BOUNDS, patience=1)
    assert [guard.observe(ratio) for ratio in (0.995, 1.0, 1.005)] == [False, False, False]
    assert guard.alarms == 0


@pytest.mark.parametrize("ratio", [0.9949, 1.0051, math.nan, math.inf])
def test_a_ratio_outside_its_bounds_is_an_alarm(ratio):
    assert RatioGuard(BOUNDS, patience=2).observe(ratio) is True


def test_the_run_stops_after_patience_steps_in_a_row_with_the_number_and_the_bounds():
    guard = RatioGuard(BOUNDS, patience=3)
    assert guard.observe(0.9) and guard.observe(1.1)
    with pytest.raises(StoppedError, match=r"is 1\.20000 .* \[0\.995, 1\.005\] at 3 observed steps in a row"):
        guard.observe(1.2)


def test_a_good_step_starts_the_count_again():
    guard = RatioGuard(BOUNDS, patience=2)
    assert [guard.observe(ratio) for ratio in (0.9, 1.0, 0.9, 1.0, 0.9)] == [True, False, True, False, True]
    assert guard.alarms == 3


def test_a_step_without_fresh_tokens_neither_counts_nor_clears():
    guard = RatioGuard(BOUNDS, patience=2)
    assert guard.observe(0.9) is True
    assert guard.observe(None) is False
    with pytest.raises(StoppedError):
        guard.observe(0.9)
