"""The books on samples and groups: what is trained, dropped, too old or waiting, and what a checkpoint says of it."""

from __future__ import annotations

import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from services.trainer.groups import SERIAL, GroupBook, ended_with_nothing, numbered
from services.trainer.resume import Cursor


def group(position: int, size: int) -> list[RolloutSample]:
    if size == 0:
        return [ended_with_nothing(position)]
    made = [
        RolloutSample(
            prompt=[], completion=[], input_ids=[1, 2], completion_mask=[0, 1], old_log_probs=[0.0, -1.0],
            advantage=1.0, model_version=1, group_id=position, metrics={"reward": 1.0},
        )
        for _ in range(size)
    ]  # fmt: skip
    return list(numbered(made))


START = Cursor()


class Desk:
    """A book and what the trainer does with it: takes samples, packs rows of one, steps."""

    def __init__(self, cursor: Cursor = START, pending: list[RolloutSample] | None = None) -> None:
        self.queue: queue.Queue[RolloutSample] = queue.Queue()
        self.book = GroupBook(self.queue, cursor, pending or [])
        self.collate = self.book.collator(lambda examples: examples)

    def put(self, *samples: RolloutSample) -> None:
        for sample in samples:
            self.queue.put(sample)

    def fetch(self, *, drop: bool = False) -> None:
        while True:
            try:
                sample = self.book.get(timeout=0.01)
                break
            except queue.Empty:
                assert self.queue.qsize(), "nothing came"
        if not drop:
            self.collate([[[{"metrics": sample.metrics}]]])
            assert SERIAL not in sample.metrics and "group/index" not in sample.metrics

    def train(self, rows: int) -> list[tuple[int, ...]]:
        for _ in range(rows):
            self.book.trained_row()
        return self.book.step_ended().samples


def keys(samples: list[RolloutSample]) -> list[tuple[int, int]]:
    return [(sample.group_id, sample.metrics["group/index"]) for sample in samples]


def test_a_sample_that_was_fetched_ahead_is_not_trained() -> None:
    desk = Desk()
    desk.put(*group(0, 2), *group(1, 2))
    for _ in range(3):
        desk.fetch()
    assert desk.train(2) == [(0, 0, 2), (0, 1, 2)]
    cursor, pending = desk.book.position()
    assert cursor == Cursor(2) and keys(pending) == [(1, 0), (1, 1)]


def test_groups_that_ended_out_of_order_leave_the_older_one_to_be_made_again() -> None:
    desk = Desk()
    desk.put(*group(2, 2), *group(0, 2))
    for _ in range(4):
        desk.fetch()
    desk.train(4)
    assert desk.book.position() == (Cursor(3, (1,)), [])


def test_a_group_without_a_sample_is_done_and_is_not_made_again() -> None:
    desk = Desk()
    desk.put(*group(0, 0), *group(1, 1))
    desk.fetch()
    desk.book.trained_row()
    trained = desk.book.step_ended()
    assert (trained.samples, trained.dropped) == ([(1, 0, 1)], [0])
    assert desk.book.position() == (Cursor(2), [])
    assert desk.book.step_ended().dropped == []


def test_a_group_that_was_given_up_just_before_a_checkpoint_is_named_after_the_resume() -> None:
    desk = Desk()
    desk.put(*group(0, 1), *group(1, 0))
    desk.fetch()
    desk.train(1)
    cursor, _ = desk.book.position()
    assert cursor == Cursor(2, (), (1,))
    assert Desk(cursor).book.step_ended().dropped == [1]


def test_a_sample_that_was_passed_over_is_counted_as_stale() -> None:
    desk = Desk()
    desk.put(*group(0, 3))
    desk.fetch()
    desk.fetch(drop=True)
    desk.fetch()
    desk.book.trained_row()
    desk.book.trained_row()
    trained = desk.book.step_ended()
    assert (trained.samples, trained.stale) == ([(0, 0, 3), (0, 2, 3)], [(0, 1, 3)])


def test_rows_that_were_trained_without_a_step_are_trained_again() -> None:
    desk = Desk()
    desk.put(*group(0, 2))
    desk.fetch()
    desk.fetch()
    desk.book.trained_row()
    _, pending = desk.book.position()
    assert keys(pending) == [(0, 0), (0, 1)]


def test_samples_of_before_a_resume_come_first_and_can_be_kept_once_more() -> None:
    desk = Desk(Cursor(4, (1,)), group(2, 2))
    desk.put(*group(1, 1))
    assert keys(desk.book.position()[1]) == [(2, 0), (2, 1), (1, 0)]
    desk.fetch()
    assert desk.train(1) == [(2, 0, 2)]
    assert desk.book.position()[0] == Cursor(4)


def test_a_group_whose_rest_went_with_its_worker_is_made_again() -> None:
    desk = Desk()
    desk.put(*group(0, 2), *group(1, 3)[:2])
    cursor, pending = desk.book.position(alive=lambda: False)
    assert (cursor, keys(pending)) == (Cursor(1), [(0, 0), (0, 1)])


def test_a_worker_that_goes_on_filling_the_queue_does_not_keep_a_checkpoint_waiting() -> None:
    desk = Desk()
    desk.put(*group(0, 2))

    class Endless(queue.Queue):
        def get(self, *_arguments: object, **_options: object) -> RolloutSample:  # type: ignore[override]
            sample = queue.Queue.get(self, timeout=0.1)
            for more in group(sample.group_id + 1, 1):
                self.put(more)
            return sample

    endless = Endless()
    endless.put(group(0, 1)[0])
    cursor, _ = GroupBook(endless, Cursor()).position()
    assert cursor == Cursor(1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 12))
def test_whatever_order_groups_end_in_nothing_is_lost_or_twice(sizes: list[int], random: object, trained: int) -> None:
    """Train some, keep the rest in a checkpoint, and account for every sample of every position."""
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ended = order[: len(order) - 1] or order
    desk = Desk()
    for position in ended:
        desk.put(*group(position, sizes[position]))
    there = sum(sizes[position] for position in ended)
    rows = min(trained, there)
    for _ in range(rows):
        desk.fetch()
    done = [key[:2] for key in desk.train(rows)]
    cursor, pending = desk.book.position()
    seen = done + keys(pending)
    assert sorted(seen) == sorted((position, index) for position in ended for index in range(sizes[position]))
    again = {*cursor.again, *range(cursor.next, len(sizes))}
    assert again == set(range(len(sizes))) - set(ended)


def test_a_group_needs_its_numbers() -> None:
    with pytest.raises(KeyError):
        desk = Desk()
        sample = group(0, 1)[0]
        del sample.metrics["group/size"]
        desk.put(sample)
        desk.fetch()
