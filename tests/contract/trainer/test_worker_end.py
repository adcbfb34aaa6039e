"""The end of TRL's worker process: what it has scored reaches the checkpoint, and none waits for what never comes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest
from accelerate import PartialState

from services.trainer import grpo
from services.trainer.groups import GroupBook
from services.trainer.grpo import StoppableWorker
from services.trainer.resume import Cursor
from tests.contract.trainer.test_groups import group

LONG = "x" * 300_000
"""In a sample, so that a pipe holds not even one."""


def scores_three_groups(samples: Any, stop: Any) -> None:
    for position in range(3):
        for sample in group(position, 2):
            sample.metrics["text"] = LONG
            samples.put(sample)
    stop.wait()


def goes_on_whatever_is_asked(samples: Any, _stop: Any) -> None:
    while True:
        for sample in group(0, 2):
            sample.metrics["text"] = LONG
            samples.put(sample)


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> StoppableWorker:
    PartialState()  # accelerate's logger wants it
    context = multiprocessing.get_context("spawn")
    made = StoppableWorker.__new__(StoppableWorker)  # as TRL's __init__ and start leave it, without a model
    made.rollout_buffer, made._stop_event_mp = context.Queue(1024), context.Event()
    made._process = context.Process(target=request.param, args=(made.rollout_buffer, made._stop_event_mp))
    made._process.start()
    made.book = GroupBook(made.rollout_buffer, Cursor())
    until = time.monotonic() + 120
    while made.rollout_buffer.qsize() < 6:
        assert time.monotonic() < until
        time.sleep(0.05)
    return made


@pytest.mark.parametrize("worker", [scores_three_groups], indirect=True)
def test_what_was_scored_is_in_the_checkpoint_that_is_saved_after_the_worker_s_end(worker: StoppableWorker) -> None:
    child = worker._process
    worker.stop()
    assert child.exitcode == 0
    cursor, pending = worker.book.position(lambda: False)
    assert [sample.group_id for sample in pending] == [0, 0, 1, 1, 2, 2]
    assert (cursor.next, cursor.again) == (3, ())


@pytest.mark.parametrize("worker", [goes_on_whatever_is_asked], indirect=True)
def test_a_worker_that_is_killed_in_the_middle_of_a_sample_does_not_hold_up_the_checkpoint(
    worker: StoppableWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "HAND_OVER_S", 1.0)
    worker.stop()
    saved = threading.Thread(target=worker.book.position, args=[lambda: False], daemon=True)
    saved.start()
    saved.join(30)
    assert not saved.is_alive()
