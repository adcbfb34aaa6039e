"""Workers: as many as allowed, none idle, none that outlives a stop."""

import threading
import time

import pytest

from services.common.signals import StopFlag
from services.evaluator.pool import run_all


def test_every_job_is_done_once_by_no_more_than_the_workers() -> None:
    lock, now, most, done = threading.Lock(), 0, 0, []
    together = threading.Barrier(4)

    def work(job: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if job < 4:
            together.wait(timeout=60)
        with lock:
            now -= 1
            done.append(job)

    assert run_all(range(30), work, 4, StopFlag())
    assert sorted(done) == list(range(30))
    assert most == 4


def test_a_slow_job_does_not_keep_the_other_workers_waiting() -> None:
    slow, others = threading.Event(), []

    def work(job: int) -> None:
        if job == 0:
            assert slow.wait(60)
        else:
            others.append(job)
            if len(others) == 9:
                slow.set()

    assert run_all(range(10), work, 2, StopFlag())
    assert len(others) == 9


def test_a_stop_returns_at_once_and_leaves_the_rest_undone() -> None:
    stop, never, started = StopFlag(), threading.Event(), []

    def work(job: int) -> None:
        started.append(job)
        stop.set()
        never.wait(30)

    begin = time.monotonic()
    assert run_all(range(10), work, 2, stop) is False
    assert time.monotonic() - begin < 5
    assert len(started) <= 2
    never.set()


def test_the_first_error_is_raised_and_no_further_job_begins() -> None:
    done = []

    def work(job: int) -> None:
        done.append(job)
        if job == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_all(range(1000), work, 1, StopFlag())
    assert done == [0, 1, 2, 3]


def test_no_job_is_no_work() -> None:
    assert run_all([], lambda _: None, 3, StopFlag())
