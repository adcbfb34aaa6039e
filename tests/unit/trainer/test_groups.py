"""Rows of a rollout, the versions of their tokens, and the age that follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from services.trainer.groups import Call, Rollout, Row, ScoredGroup, oldest_version, rows_with_versions

UNKNOWN = 1


@dataclass
class Sequence:
    """As TRL's ``TrainingSequence``."""

    input_ids: list[int]
    completion_mask: list[int]
    old_log_probs: list[float] = field(default_factory=list)


def versions(sequences: list[Sequence], *calls: Call) -> list[list[int]]:
    """Of the trained tokens of each row."""
    rows = rows_with_versions(sequences, calls, UNKNOWN)
    return [[v for v, mask in zip(row.versions, row.completion_mask, strict=True) if mask] for row in rows]


def test_turns_that_were_appended_have_the_version_of_their_call() -> None:
    row = Sequence([5, 6, 10, 11, 7, 12], [0, 0, 1, 1, 0, 1])
    assert versions([row], Call(2, [10, 11], 3), Call(5, [12], 4)) == [[3, 3, 4]]


def test_a_rewritten_history_begins_a_row_and_its_copies_of_older_outputs_are_context() -> None:
    rows = [Sequence([5, 6, 10], [0, 0, 1]), Sequence([9, 6, 10, 7, 11], [0, 0, 0, 0, 1])]
    assert versions(rows, Call(2, [10], 3), Call(4, [11], 5)) == [[3], [5]]


def test_a_call_that_is_asked_again_and_answered_the_same_belongs_to_its_own_row() -> None:
    rows = [Sequence([5, 6, 10], [0, 0, 1]), Sequence([5, 6, 10], [0, 0, 1])]
    assert versions(rows, Call(2, [10], 3), Call(2, [10], 5)) == [[3], [5]]


def test_a_copy_of_an_output_in_another_row_s_context_is_not_that_call() -> None:
    """The row of the first call had nothing to train and is gone; the last one's history holds the same tokens."""
    rows = [Sequence([8, 12], [0, 1]), Sequence([5, 10, 7, 13], [0, 0, 0, 1])]
    assert versions(rows, Call(1, [10], 2), Call(1, [12], 4), Call(3, [13], 5)) == [[4], [5]]


def test_tokens_that_no_call_accounts_for_are_as_old_as_the_rollout() -> None:
    rows = [Sequence([5, 10, 6, 11], [0, 1, 0, 1])]
    assert versions(rows, Call(3, [11], 4)) == [[UNKNOWN, 4]]
    assert versions(rows) == [[UNKNOWN, UNKNOWN]]


def test_a_call_that_is_in_no_row_changes_nothing() -> None:
    rows = [Sequence([5, 10], [0, 1])]
    assert versions(rows, Call(1, [99], 7), Call(4, [10], 7), Call(1, [10], 3)) == [[3]]


def row(versions: list[int], mask: list[int]) -> Row:
    return Row([5] * len(mask), mask, [0.0] * len(mask), versions)


def test_a_row_is_as_old_as_its_sampled_tokens_in_the_mean_and_a_rollout_as_its_oldest_row() -> None:
    young, old = row([0, 4, 5], [0, 1, 1]), row([9, 3, 4, 9], [0, 1, 1, 0])
    assert oldest_version([young]) == 4.5
    assert oldest_version([young, old]) == 3.5


@pytest.mark.parametrize("rows", [[], [row([1, 1], [0, 0])]])
def test_what_was_not_sampled_has_no_age(rows: list[Row]) -> None:
    with pytest.raises(ValueError):
        oldest_version(rows)


def test_a_group_is_as_old_as_its_oldest_rollout_and_counts_on_as_a_whole() -> None:
    rollouts = [Rollout([row([2, 3], [0, 1])], 1.0, 1.0, 3.0), Rollout([row([2, 2], [0, 1])], 0.0, -1.0, 2.0)]
    group = ScoredGroup(0, 5, rollouts)
    assert group.oldest() == 2
    later = group.counted_on(10)
    assert later.oldest() == 12
    assert [r.rows[0].versions for r in later.rollouts] == [[12, 13], [12, 12]]
    assert group.oldest() == 2, "the one that was counted on is a copy"


def test_a_group_is_silent_where_no_rollout_has_an_advantage() -> None:
    silent = ScoredGroup(0, 0, [Rollout([], 1.0, 0.0, 1.0), Rollout([], 1.0, 0.0, 1.0)])
    assert silent.silent
    assert not ScoredGroup(0, 0, [*silent.rollouts, Rollout([], 0.0, -0.5, 1.0)]).silent
