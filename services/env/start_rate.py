"""How often sandboxes are started: a group's rollouts begin as one, and no backend likes that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StartRate:
    """Turns to start a sandbox, evenly spread. Safe for threads and event loops."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 60.0 / per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock()

    def turn_s(self) -> float:
        """Take the next turn; return how long to wait for it."""
        with self._lock:
            now_s = self._clock()
            turn_s = max(now_s, self._next_s)
            self._next_s = turn_s + self._interval_s
            return turn_s - now_s
