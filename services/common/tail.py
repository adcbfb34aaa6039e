"""Lines that a JSONL file has gained since the last look, without reading it again from its start."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class Tail:
    """Follows one file, which need not exist yet. A file that shrank is a new one and is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The JSON objects on lines that ended since the last call; a line that is not whole yet is left for later."""
        try:
            with self._path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset = 0
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
