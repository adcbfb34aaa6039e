"""One look at the run: files of the run directory, and the peers' /health."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import httpx

from services.common import health, run_dir
from services.common.run_dir import RunDir
from services.common.tail import Tail
from services.watchdog.plan import Observations, Progress, advance

PROBE_TIMEOUT_S = 5.0


class Observer:
    """Looks at a run again and again, and remembers what only a series of looks can tell.

    A stop request and heartbeats older than ``now_s`` at construction belong to an earlier attempt and are not seen.
    """

    def __init__(
        self, run: RunDir, peers: Mapping[str, str], client: httpx.Client, now_s: float, rollout_window: int
    ) -> None:
        """Args: peers: name -> base URL of a service with a /health. rollout_window: how many rollouts back to see."""
        self._run = run
        self._peers = peers
        self._client = client
        self._since_s = now_s
        self._progress = Progress(0, now_s)
        self._trainer_seen = False
        self._trainer_gone_s: float | None = None
        self._last_answer_s: dict[str, float] = {}
        self._refused_s: dict[str, float] = {}
        self._stop_seen_s: float | None = None
        self._env_pid: int | None = None
        self._rollouts = Tail(run.rollouts / "index.jsonl")
        self._causes: deque[str | None] = deque(maxlen=rollout_window)
        """Of the last rollouts; None: it was scored."""

    def look(self, now_s: float) -> Observations:
        beats = {name: beat for name, beat in health.read_heartbeats(self._run).items() if beat.time_s >= self._since_s}
        trainer = beats.get("trainer")
        self._progress = advance(self._progress, trainer, trainer.step if trainer else self._progress.step, now_s)
        self._note_trainer(trainer is not None, now_s)
        if not self._is_ours(self._run.stop_request):
            self._stop_seen_s = None
        elif self._stop_seen_s is None:
            self._stop_seen_s = now_s
        # Before the peers are asked: what failed with a peer is then read no later than the peer is seen away.
        rollouts = self._rollouts.new_lines()
        silent = self._silent_peers(now_s)
        if not silent and not self._was_replaced(beats.get("env")):
            self._count(rollouts)
        return Observations(
            beats=beats,
            watching_since_s=self._since_s,
            progress=self._progress,
            silent_since_s=silent,
            refused_since_s=dict(self._refused_s),
            trainer_gone_since_s=self._trainer_gone_s,
            stop_seen_s=self._stop_seen_s,
            exit_code=self._exit_code(),
            unscorable=dict(Counter(cause for cause in self._causes if cause is not None)),
        )

    def _note_trainer(self, there: bool, now_s: float) -> None:
        self._trainer_seen |= there
        if there:
            self._trainer_gone_s = None
        elif self._trainer_seen and self._trainer_gone_s is None:
            self._trainer_gone_s = now_s

    def forget_rollouts(self) -> None:
        """Those of an attempt that was stopped say nothing about the next."""
        self._causes.clear()

    def _was_replaced(self, env: health.Heartbeat | None) -> bool:
        """Whether env died since the last look, and the next one serves already."""
        before, self._env_pid = self._env_pid, env.pid if env else self._env_pid
        return before is not None and before != self._env_pid

    def _count(self, rollouts: list[dict[str, Any]]) -> None:
        """Not called while a peer is away: it takes all rollouts in flight with it, which is one failure, and other
        rules of the plan are about it."""
        for line in rollouts:
            # Whole seconds: the one in which this watch began is taken as ours.
            if datetime.fromisoformat(line["at"]).timestamp() >= int(self._since_s):
                self._causes.append(None if line["scored"] else line["cause"])

    def _silent_peers(self, now_s: float) -> dict[str, float]:
        silent = {}
        for name, url in self._peers.items():
            answer = _ask(self._client, url)
            if answer == "ok":
                self._last_answer_s[name] = now_s
            elif name in self._last_answer_s:
                silent[name] = self._last_answer_s[name]
            if answer == "refused" and name in self._last_answer_s:
                self._refused_s.setdefault(name, now_s)
            else:
                self._refused_s.pop(name, None)
        return silent

    def _exit_code(self) -> int | None:
        # Whatever its age: while it is there, nothing of the run is started again.
        value = run_dir.read_json(self._run.result)
        return None if value is None else int(value["exit_code"])

    def _is_ours(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self._since_s
        except FileNotFoundError:
            return False


def _ask(client: httpx.Client, url: str) -> Literal["ok", "refused", "silent"]:
    """What /health says. ``refused``: nobody listens there, or the name has no address any more."""
    try:
        return "ok" if client.get(f"{url}/health", timeout=PROBE_TIMEOUT_S).is_success else "silent"
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPError:
        return "silent"
