"""``python -m services.job.prefix``: prints what every program says, its name before each line.

An event listener of supervisord, which hands over all output of a program, its last words included. (A filter behind
each program would lose those: supervisord stops reading when the program is gone.)
"""

from __future__ import annotations

import sys
from typing import IO

from supervisor import childutils


class Lines:
    """Pieces of output in, whole lines with their program's name out."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._begun: dict[str, str] = {}

    def add(self, program: str, text: str) -> None:
        *whole, rest = (self._begun.pop(program, "") + text).split("\n")
        if rest:
            self._begun[program] = rest
        self._out.write("".join(f"[{program}] {line}\n" for line in whole))
        self._out.flush()

    def ended(self, program: str) -> None:
        """A program ended in the middle of a line."""
        if program in self._begun:
            self.add(program, "\n")


def main() -> None:
    lines = Lines(sys.stderr)  # standard output is supervisord's protocol
    while True:
        headers, payload = childutils.listener.wait(sys.stdin, sys.stdout)
        head, _, data = payload.partition("\n")  # a program's end has no data
        fields = childutils.get_headers(head)
        if headers["eventname"].startswith("PROCESS_LOG"):
            lines.add(fields["processname"], data)
        else:
            lines.ended(fields["processname"])
        childutils.listener.ok(sys.stdout)


if __name__ == "__main__":
    main()
