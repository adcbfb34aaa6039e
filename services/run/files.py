"""The two forms that a file of a run has: lines that are appended, and one record that is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from services.common import run_dir
from services.common.tail import Tail
from services.run.records import Record

R = TypeVar("R", bound=Record)


class Lines(Generic[R]):
    """A file with one record per line. Any number of processes may append."""

    def __init__(self, path: Path, record: type[R]) -> None:
        self.path = path
        self._record = record

    def append(self, record: R) -> None:
        """Raises: OSError: the line could not be written whole; the file is then as it was."""
        run_dir.append_line(self.path, record.model_dump(mode="json", exclude_unset=True))

    def all(self) -> list[R]:
        return self.follow().look()

    def follow(self) -> Follower[R]:
        """A reader of its own for who looks again and again."""
        return Follower(self.path, self._record)


class Follower(Generic[R]):
    """The records of one file of lines, parsed once each.

    A file that was replaced or cut, as a resume does with the steps that it undoes, is read anew.
    """

    def __init__(self, path: Path, record: type[R]) -> None:
        self._tail = Tail(path)
        self._record = record
        self._restarts = 0
        self.records: list[R] = []
        """All that are in the file, oldest first, as of the last look."""
        self.unreadable = 0
        """Whole lines that are no such record: damaged, or of another program."""

    def look(self) -> list[R]:
        """Read what is new. Returns: ``records``."""
        lines = self._tail.new_lines()
        if self._tail.restarts != self._restarts:
            self._restarts, self.records, self.unreadable = self._tail.restarts, [], 0
        for line in lines:
            try:
                self.records.append(self._record.model_validate(line))
            except ValidationError:
                self.unreadable += 1
        return self.records


class Document(Generic[R]):
    """A file with one record, which is replaced as a whole."""

    def __init__(self, path: Path, record: type[R]) -> None:
        self.path = path
        self._record = record

    def write(self, record: R) -> None:
        run_dir.write_json(self.path, record.model_dump(mode="json", exclude_unset=True))

    def read(self) -> R | None:
        """None: it is not there, or a person is just writing it by hand. Raises: ValidationError: not such a record."""
        try:
            value: Any = run_dir.read_json(self.path)
        except ValueError:
            return None
        return None if value is None else self._record.model_validate(value)
