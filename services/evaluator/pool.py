"""A fixed number of workers over a list of jobs, which a stop request ends at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from services.common.signals import StopFlag

POLL_S = 0.2
Job = TypeVar("Job")


def run_all(jobs: Iterable[Job], work: Callable[[Job], None], workers: int, stop: StopFlag) -> bool:
    """Call ``work`` on every job, ``workers`` at a time, each worker taking the next job as soon as it is free.

    The threads are daemons: a rollout that runs for minutes does not hold up a stop. Its job is simply not done.

    Returns: True when all are done, False when ``stop`` was set before.
    Raises: whatever ``work`` raised first; the other workers take no further job.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    errors: list[BaseException] = []

    def worker() -> None:
        while not stop.is_set() and not errors:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(job)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=worker, name=f"cell-{i}", daemon=True) for i in range(workers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not stop.is_set() and not errors:
        stop.wait(POLL_S)
    if errors:
        raise errors[0]
    return not stop.is_set()
