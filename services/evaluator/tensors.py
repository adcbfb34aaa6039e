"""A safetensors file without torch: names, types and bytes. Format: 8 bytes of length, JSON header, data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TruncatedError(Exception):
    """The file is not whole; the message says what was found."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    path: Path
    header: Mapping[str, Mapping[str, Any]]
    """Tensor name -> ``dtype``, ``shape``, ``data_offsets`` (start and end within the data)."""
    data_start: int

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read the header and compare the size of the file with it.

        Raises: TruncatedError: shorter or longer than the header says, or without one. FileNotFoundError.
        """
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= size - 8:
                raise TruncatedError(f"{path.name} is truncated: {size} bytes hold no whole header")
            try:
                header = json.loads(stream.read(length))
            except ValueError:
                raise TruncatedError(f"{path.name} has no readable header") from None
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if not header or end != size:
            raise TruncatedError(f"{path.name} is truncated: {size} bytes, its header says {end}")
        return cls(path, header, 8 + length)

    def read(self, name: str) -> bytes:
        start, end = self.header[name]["data_offsets"]
        with self.path.open("rb") as stream:
            stream.seek(self.data_start + start)
            return stream.read(end - start)

    def copy(self, path: Path, replaced: Mapping[str, bytes]) -> None:
        """Write the same file to ``path`` with other bytes, as many, for the tensors in ``replaced``."""
        with self.path.open("rb") as source, path.open("wb") as target:
            target.write(source.read(self.data_start))
            for name in sorted(self.header, key=lambda name: self.header[name]["data_offsets"][0]):
                start, end = self.header[name]["data_offsets"]
                data = source.read(end - start)
                target.write(replaced.get(name, data))
