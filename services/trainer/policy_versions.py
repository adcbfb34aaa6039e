"""Which version of the policy sampled each turn of a rollout.

The engine does not say it in its answers, so times are compared: the weight sync notes when it began to serve a
version and when it was done (``runs/<run>/policy_versions.jsonl``), and OpenCode's own log in the trial's folder says
when each of its model calls was asked and answered. A sync lets calls in flight go on, so a turn can be of two
versions. All clocks are the one host's, or are kept by NTP where sandboxes run elsewhere.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.run_dir import RunDir

FILE = "policy_versions.jsonl"
MAX_LOG_BYTES = 64 * 2**20

Span = tuple[float, float]
"""Unix seconds: asked, answered."""
Versions = tuple[int, int]
"""Lowest and highest version that can have sampled a turn; equal for almost all turns."""


class VersionLog:
    """Written by the training process, read by the rollout worker's."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.path / FILE

    def begins(self, version: int) -> None:
        """From now on the policy may serve ``version``."""
        run_dir.append_line(self._path, {"version": version, "begins_s": time.time()})

    def served(self, version: int) -> None:
        """From now on the policy serves nothing older."""
        run_dir.append_line(self._path, {"version": version, "served_s": time.time()})

    def of(self, spans: Sequence[Span]) -> list[Versions]:
        """Versions that can have sampled what was asked and answered at these times; 0 is the bare base."""
        lines = run_dir.read_lines(self._path)
        return [_versions(lines, span) for span in spans]


def _versions(lines: list[dict[str, Any]], span: Span) -> Versions:
    # In order of the file, not of the numbers: a resumed trainer counts from the start again.
    asked_s, answered_s = span
    lowest = highest = 0
    for line in lines:
        if line.get("served_s", asked_s) < asked_s:
            lowest = highest = line["version"]
        if "begins_s" in line and line["begins_s"] <= answered_s:
            highest = line["version"]
    return lowest, highest


def call_spans(trial: Path, num_calls: int) -> list[Span] | None:
    """When each model call of the agent was asked and answered, from OpenCode's log.

    Returns: None if the log does not tell it for exactly ``num_calls`` calls.
    """
    started = (run_dir.read_json(trial / "result.json") or {}).get("agent_execution") or {}
    if not started.get("started_at"):
        return None
    asked_s = datetime.fromisoformat(started["started_at"]).timestamp()
    spans = list(_spans(_lines(trial / "agent" / "opencode.txt"), asked_s))
    return spans if len(spans) == num_calls else None


def _spans(lines: list[dict[str, Any]], asked_s: float) -> Iterator[Span]:
    """A step starts for OpenCode when the model's answer arrives; the next call goes out when it has ended."""
    for line in lines:
        at_ms = line.get("timestamp")
        if not isinstance(at_ms, int | float):
            continue
        if line.get("type") == "step_start":
            yield asked_s, at_ms / 1000
        elif line.get("type") == "step_finish":
            asked_s = at_ms / 1000


def _lines(path: Path) -> list[dict[str, Any]]:
    """The agent could write in this folder: what is no plain file, or is huge, is not read."""
    try:
        found = path.lstat()
    except OSError:
        return []
    return run_dir.read_lines(path) if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_LOG_BYTES else []
