"""SIGTERM and SIGINT set one event; loops look at it and drain. And processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

StopFlag = threading.Event


@contextmanager
def stop_event() -> Iterator[StopFlag]:
    """Yield an event that the first SIGTERM or SIGINT sets; the old handlers come back afterwards."""
    stop = StopFlag()

    def on_signal(_number: int, _frame: object) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, however that ended (Linux).

    The parent is the thread that started it, so start such a process from the main thread.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
