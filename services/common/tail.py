"""Lines that a JSONL file has gained since the last look, without reading it again from its start."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


class Tail:
    """Follows one file, which need not exist yet. One that was replaced or shrank is a new one, read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        self.restarts = 0
        """How often the file was a new one."""

    def new_lines(self) -> list[dict[str, Any]]:
        """The JSON objects on lines that ended since the last call; a line that is not whole yet is left for later."""
        try:
            with self._path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                    self._offset = 0
                    self.restarts += 1
                self._inode = status.st_ino
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.decode("utf-8", errors="replace").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):  # a line that a crash cut short, or an empty one
                if isinstance(value := json.loads(line), dict):
                    found.append(value)
        return found
