"""One look at the run: files of the run directory, and the peers' /health."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import httpx

from services.common import health, run_dir
from services.common.run_dir import RunDir
from services.common.tail import Tail
from services.watchdog.plan import Observations, Progress, advance

PROBE_TIMEOUT_S = 5.0


class Observer:
    """Looks at a run again and again, and remembers what only a series of looks can tell.

    Files and heartbeats older than ``now_s`` at construction belong to an earlier attempt and are not seen.
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
        self._last_answer_s: dict[str, float] = {}
        self._stop_seen_s: float | None = None
        self._rollouts = Tail(run.rollouts / "index.jsonl")
        self._causes: deque[str | None] = deque(maxlen=rollout_window)
        """Of the last rollouts; None: it was scored."""

    def look(self, now_s: float) -> Observations:
        beats = {name: beat for name, beat in health.read_heartbeats(self._run).items() if beat.time_s >= self._since_s}
        trainer = beats.get("trainer")
        self._progress = advance(self._progress, trainer, trainer.step if trainer else 0, now_s)
        if self._stop_seen_s is None and self._is_ours(self._run.stop_request):
            self._stop_seen_s = now_s
        return Observations(
            beats=beats,
            watching_since_s=self._since_s,
            progress=self._progress,
            silent_since_s=self._silent_peers(now_s),
            stop_seen_s=self._stop_seen_s,
            exit_code=self._exit_code(),
            unscorable=self._unscorable(),
        )

    def _unscorable(self) -> dict[str, int]:
        for line in self._rollouts.new_lines():
            # Whole seconds: the one in which this watch began is taken as ours.
            if datetime.fromisoformat(line["at"]).timestamp() >= int(self._since_s):
                self._causes.append(None if line["scored"] else line["cause"])
        return dict(Counter(cause for cause in self._causes if cause is not None))

    def _silent_peers(self, now_s: float) -> dict[str, float]:
        silent = {}
        for name, url in self._peers.items():
            if _answers(self._client, url):
                self._last_answer_s[name] = now_s
            elif name in self._last_answer_s:
                silent[name] = self._last_answer_s[name]
        return silent

    def _exit_code(self) -> int | None:
        if not self._is_ours(self._run.result):
            return None
        value = run_dir.read_json(self._run.result)
        return None if value is None else int(value["exit_code"])

    def _is_ours(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self._since_s
        except FileNotFoundError:
            return False


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health", timeout=PROBE_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False
