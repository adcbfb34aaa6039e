"""SIGTERM and SIGINT set one event; loops look at it and drain."""

from __future__ import annotations

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
