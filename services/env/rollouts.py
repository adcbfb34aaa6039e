"""OpenEnv's Harbor environment with this run's tasks and time bound, and a count of what came of the rollouts."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from openenv.core.env_server.types import Observation
from openenv.harbor.environment import HarborEnvironment
from typing_extensions import override

from services.common import run_dir
from services.common.causes import Cause, failure_cause
from services.env.suites import SuiteProvider

PHASES = {
    "environment_setup": "environment",
    "agent_setup": "agent_setup",
    "agent_execution": "agent",
    "verifier": "verifier",
}
"""Harbor's name of a phase -> ours in ``phase_timings``. The rest of ``wall_s`` is healthcheck and teardown."""


class Scoreboard:
    """Rollouts in flight, done, and failed by cause, since this process started. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inflight: dict[int, dict[str, Any]] = {}
        self._started = 0
        self._done = 0
        self._failed: Counter[str] = Counter()

    def started(self, task: str) -> int:
        """Returns: the rollout's number, for ``ended``."""
        with self._lock:
            self._started += 1
            self._inflight[self._started] = {"task": task, "since_s": round(time.time(), 1)}
            return self._started

    def ended(self, number: int, cause: str | None) -> None:
        with self._lock:
            del self._inflight[number]
            self._done += 1
            if cause is not None:
                self._failed[cause] += 1

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                "inflight": len(self._inflight),
                "rollouts": list(self._inflight.values()),  # oldest first
                "done": self._done,
                "failed": dict(self._failed),
            }


class RolloutEnvironment(HarborEnvironment):
    """One instance a session; what they share is set once, on the class, as OpenEnv's own does it."""

    suites: ClassVar[SuiteProvider]
    board: ClassVar[Scoreboard]
    trials: ClassVar[Path]
    outer_timeout_s: ClassVar[float]

    @classmethod
    def serve(cls, suites: SuiteProvider, board: Scoreboard, trials: Path, outer_timeout_s: float) -> None:
        cls.suites, cls.board, cls.trials, cls.outer_timeout_s = suites, board, trials, outer_timeout_s
        cls.configure(datasets=[split["name"] for split in suites.list_splits()])

    def __init__(self) -> None:
        super().__init__()
        self._provider = self.suites

    @override
    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return await super().step_async(action, timeout_s=timeout_s or self.outer_timeout_s, **kwargs)

    @override
    async def _run_rollout(self, split: str, task_index: int, *args: Any, **kwargs: Any) -> str:
        cause: str | None = Cause.ENV  # unless it ends by itself: a cancelled call, or a bug
        number = self.board.started(self.suites.task_name(split, task_index))
        try:
            result = json.loads(await super()._run_rollout(split, task_index, *args, **kwargs))
            cause = failure_cause(SimpleNamespace(**result), training=result["rollout_type"] == "train")
            if result["trial_name"]:
                result["phase_timings"] = phase_timings(self.trials / result["trial_name"] / "result.json")
            return json.dumps(result)
        finally:
            self.board.ended(number, cause)


def phase_timings(trial_result: Path) -> dict[str, float]:
    """Seconds of each phase of a trial, from Harbor's result file; OpenEnv leaves its field for them empty."""
    trial = run_dir.read_json(trial_result) or {}
    return {
        name: round((_time(trial[phase]["finished_at"]) - _time(trial[phase]["started_at"])).total_seconds(), 3)
        for phase, name in PHASES.items()
        if trial.get(phase) and trial[phase].get("finished_at")
    }


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
