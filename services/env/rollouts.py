"""OpenEnv's Harbor environment with this run's tasks and time bound, and a count of what came of the rollouts."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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

_ARGUMENTS = inspect.signature(HarborEnvironment._run_rollout)


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


@dataclass(frozen=True)
class Allowed:
    """What a rollout may be asked for. env starts and calls it, so that nobody can have it start or call another."""

    sandbox: str
    """The recipe's backend."""
    llm_urls: frozenset[str]
    """Of the policies that env was started with."""
    harness: str = "opencode"

    def refusal(self, asked: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments of OpenEnv's ``run_rollout``; None if nothing is."""
        only: dict[str, Collection[Any]] = {
            "harness": [self.harness], "sandbox": [self.sandbox], "llm_url": sorted(self.llm_urls),
            "keep_sandbox": [False], "force_build": [False], "api_key": [""], "auth_header": [""],
            "provider": ["openai"], "purpose": ["train", "eval"],
        }  # fmt: skip
        for name, allowed in only.items():
            if asked[name] not in allowed:
                return f"{name} is {asked[name]!r}; allowed: {', '.join(map(repr, allowed)) or 'none'}"
        sampling = "sampling" if asked["purpose"] == "train" else "eval_sampling"
        for name in (sampling, "agent_timeout_sec", "agent_step_limit"):
            if not asked[name]:
                return f"{name} is not set; a rollout to {asked['purpose']} needs it"
        return None


class RolloutEnvironment(HarborEnvironment):
    """One instance a session; what they share is set once, on the class, as OpenEnv's own does it."""

    suites: ClassVar[SuiteProvider]
    board: ClassVar[Scoreboard]
    trials: ClassVar[Path]
    outer_timeout_s: ClassVar[float]
    allowed: ClassVar[Allowed]

    @classmethod
    def serve(
        cls, suites: SuiteProvider, board: Scoreboard, trials: Path, outer_timeout_s: float, allowed: Allowed
    ) -> None:
        cls.suites, cls.board, cls.trials, cls.outer_timeout_s = suites, board, trials, outer_timeout_s
        cls.allowed = allowed
        cls.configure(datasets=[split["name"] for split in suites.list_splits()])

    def __init__(self) -> None:
        super().__init__()
        self._provider = self.suites

    @override
    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return await super().step_async(action, timeout_s=timeout_s or self.outer_timeout_s, **kwargs)

    @override
    async def _run_rollout(self, split: str, task_index: int, *args: Any, **kwargs: Any) -> str:
        asked = _ARGUMENTS.bind(self, split, task_index, *args, **kwargs)
        asked.apply_defaults()
        if refusal := self.allowed.refusal(asked.arguments):
            raise ValueError(refusal)
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
