"""Heartbeats: what a service is doing, at which step, since when. Written aside, then renamed.

``python -m services.common.health heartbeat <service> [max_age_s]`` is a container's healthcheck;
``python -m services.common.health http <url>`` probes a server.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from services.common import log, recipe, run_dir
from services.common.errors import StackError

PHASES = (
    "starting", "compiling", "first_sync", "rollout", "training", "sync", "saving", "pushing", "evaluating",
    "watching", "serving", "done", "failed",
)  # fmt: skip


logger = logging.getLogger("health")
MAX_ERROR = 500
"""Characters kept of the error that ended a service."""


@dataclass(frozen=True)
class Heartbeat:
    service: str
    phase: str
    step: int
    time_s: float
    """Unix time of this beat."""
    phase_since_s: float
    """Unix time at which the phase or the step last changed."""
    pid: int
    detail: dict[str, Any]


class Pulse:
    """A service's own heartbeat. ``set`` changes phase, step or detail; a thread renews the time.

    The time says that the process lives; ``phase_since_s`` says when it last got further, which is
    what tells slow from stalled.
    """

    def __init__(self, service: str, run: run_dir.RunDir, interval_s: float = 5.0) -> None:
        self._path = run.heartbeats / service
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        now = time.time()
        self._beat = Heartbeat(service, "starting", 0, now, now, os.getpid(), {})
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def __enter__(self) -> Pulse:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        self._stop.set()
        self._thread.join()
        if exc_type is not None:
            # Who starts the service again, and who looks at it, sees why it ended.
            self.set("failed", error=log.redacted(f"{exc_type.__name__}: {error}")[:MAX_ERROR])
        elif self._beat.phase not in ("done", "failed"):
            self.set("done")

    @property
    def phase(self) -> str:
        return self._beat.phase

    def set(self, phase: str | None = None, step: int | None = None, **detail: Any) -> None:
        """Record progress. A disk that is full for a moment must not end the beat, and so a healthy run.

        Raises: ValueError: a phase that is not in PHASES.
        """
        if phase is not None and phase not in PHASES:
            raise ValueError(f"phase {phase!r} is unknown; allowed: {', '.join(PHASES)}")
        with self._lock:
            old, now = self._beat, time.time()
            new_phase, new_step = phase or old.phase, old.step if step is None else step
            moved = (new_phase, new_step) != (old.phase, old.step)
            self._beat = Heartbeat(
                old.service, new_phase, new_step, now, now if moved else old.phase_since_s, old.pid,
                {**old.detail, **detail},
            )  # fmt: skip
        try:
            self._write()
        except OSError as error:
            logger.warning("the heartbeat could not be written", extra={"error": str(error)})

    def _write(self) -> None:
        with self._lock:
            run_dir.write_json(self._path, asdict(self._beat))

    def _renew(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.set()


def read_heartbeats(run: run_dir.RunDir) -> dict[str, Heartbeat]:
    """The last beat of every service that has one."""
    beats = {}
    for path in run.heartbeats.glob("[a-z]*") if run.heartbeats.is_dir() else ():
        if (value := run_dir.read_json(path)) is not None:
            beats[path.name] = Heartbeat(**value)
    return beats


def _main(arguments: list[str]) -> int:
    match arguments:
        case ["http", url]:
            with urllib.request.urlopen(url, timeout=4) as response:
                return 0 if response.status == 200 else 1
        case ["heartbeat", service, *rest]:
            run = run_dir.RunDir.from_environment(recipe.from_environment().run.name)
            value = run_dir.read_json(run.heartbeats / service)
            max_age_s = float(rest[0]) if rest else 60.0
            return 0 if value and time.time() - value["time_s"] <= max_age_s else 1
    print("usage: health http URL | health heartbeat SERVICE [MAX_AGE_S]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(_main(sys.argv[1:]))
    except (OSError, StackError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
