"""The end of TRL's worker process: what it has scored reaches the checkpoint, and none waits for what never comes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from accelerate import PartialState

from services.trainer import grpo
from services.trainer.groups import Rollout, Row, ScoredGroup
from services.trainer.grpo import StoppableWorker, WorkerChannel
from services.trainer.resume import Cursor
from services.trainer.scheduler import GroupScheduler, Limits, RolloutEnded

LONG = 100_000
"""Tokens of a row, so that a pipe holds not even one group."""
OPEN = 4


def scored(ticket: Any) -> ScoredGroup:
    row = Row([5] * LONG, [1] * LONG, [-1.0] * LONG, [1] * LONG)
    return ScoredGroup(ticket.number, ticket.position, [Rollout([row], reward, reward, 1.0) for reward in (0.0, 1.0)])


def scores_three_groups(channel: WorkerChannel, stop: Any) -> None:
    for _ in range(3):
        ticket = channel.tickets.get()
        channel.put_nowait(RolloutEnded(ticket.number, 1.0))
        channel.put_nowait(scored(ticket))
    stop.wait()


def goes_on_whatever_is_asked(channel: WorkerChannel, _stop: Any) -> None:
    channel.put_nowait(scored(channel.tickets.get()))
    long = [1.0] * LONG
    while True:
        # Of no group that is being made, so it is read and forgotten.
        channel.put_nowait(RolloutEnded(-1, long))  # type: ignore[arg-type]
        time.sleep(0.001)


def dies(channel: WorkerChannel, _stop: Any) -> None:
    channel.put_nowait(RolloutEnded(channel.tickets.get().number, 1.0))
    time.sleep(1)
    raise SystemExit(3)


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> StoppableWorker:
    """As TRL's ``__init__`` and ``start`` leave it, without a model; it has its tickets and has begun to answer."""
    PartialState()  # accelerate's logger wants it
    context = multiprocessing.get_context("spawn")
    made = StoppableWorker.__new__(StoppableWorker)
    made.rollout_buffer, made._stop_event_mp = WorkerChannel(context), context.Event()
    made._process = context.Process(target=request.param, args=(made.rollout_buffer, made._stop_event_mp))
    made._process.start()
    limits = Limits(1, 4, max_open_groups=OPEN, min_group_size=2, max_group_tries=1)
    made.scheduler = GroupScheduler(made.rollout_buffer, limits, Cursor())
    made.scheduler.admit(version=1)
    until = time.monotonic() + 120
    while not made.rollout_buffer.qsize():
        assert time.monotonic() < until
        time.sleep(0.05)
    return made


def within(seconds: float, call: Callable[[], Any]) -> None:
    done = threading.Thread(target=call, daemon=True)
    done.start()
    done.join(seconds)
    assert not done.is_alive()


@pytest.mark.parametrize("worker", [scores_three_groups], indirect=True)
def test_what_was_scored_is_in_the_checkpoint_that_is_saved_after_the_worker_s_end(worker: StoppableWorker) -> None:
    child = worker._process
    worker.stop()
    assert child.exitcode == 0
    cursor, pending = worker.scheduler.position()
    assert [group.position for group in pending] == [0, 1, 2]
    assert all(len(rollout.rows[0].input_ids) == LONG for group in pending for rollout in group.rollouts)
    assert cursor == Cursor(OPEN, again=(3,))


@pytest.mark.parametrize("worker", [goes_on_whatever_is_asked], indirect=True)
def test_a_worker_that_is_killed_in_the_middle_of_a_message_does_not_hold_up_the_checkpoint(
    worker: StoppableWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "HAND_OVER_S", 1.0)
    child = worker._process
    # Messages count against the time only when none comes: this one would go on for ever.
    monkeypatch.setattr(worker.scheduler, "drain", lambda _alive, _timeout_s: worker.scheduler.receive(30) and False)
    within(60, worker.stop)
    assert child.exitcode not in (0, None)
    within(30, worker.scheduler.position)
    assert worker.scheduler.position()[0] == Cursor(OPEN, again=(1, 2, 3))


@pytest.mark.parametrize("worker", [dies], indirect=True)
def test_groups_of_a_worker_that_died_are_made_again(worker: StoppableWorker) -> None:
    worker._process.join(60)
    within(60, worker.stop)
    assert worker.scheduler.position() == (Cursor(OPEN, again=(0, 1, 2, 3)), [])


@pytest.mark.parametrize("worker", [scores_three_groups], indirect=True)
def test_a_worker_is_stopped_once(worker: StoppableWorker) -> None:
    worker.stop()
    within(5, worker.stop)
    assert len(worker.scheduler.position()[1]) == 3
