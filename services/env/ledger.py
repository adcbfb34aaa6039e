"""``runs/<run>/sandboxes.jsonl``: what was about to be created, what was, and what is gone.

A line before the engine is asked (``intent``), one with the container's id (``created``), one after its removal
(``closed``). So a sandbox whose creator was killed at any moment can still be found and removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.common import run_dir

Event = Literal["intent", "created", "closed"]


@dataclass(frozen=True)
class Ledger:
    """One run's ledger; any number of writers, one line a write."""

    path: Path

    def record(self, event: Event, project: str, **detail: Any) -> None:
        """Args: project: the Compose project of the sandbox, unique in the engine."""
        run_dir.append_line(self.path, {"at": run_dir.utc_now(), "event": event, "project": project, **detail})

    def open_projects(self) -> list[str]:
        """Projects with an intent and no closing line, oldest first."""
        opened: dict[str, None] = {}
        for line in run_dir.read_lines(self.path):
            if line["event"] == "closed":
                opened.pop(line["project"], None)
            else:
                opened[line["project"]] = None
        return list(opened)
