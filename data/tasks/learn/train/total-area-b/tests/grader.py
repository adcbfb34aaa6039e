"""Grade /workdir/answer.txt against expected.json and print the reward, 1 or 0.

Copied into every shipped task as ``tests/grader.py``; runs in the sandbox on what an agent left there, so nothing
that it reads is trusted: the answer must be a plain file of at most 4 KiB. Standard library only.
"""

import json
import math
import os
import stat
from pathlib import Path

ANSWER = Path("/workdir/answer.txt")
MAX_ANSWER_BYTES = 4096


def read_answer(path: Path = ANSWER) -> "str | None":
    """The answer's text without surrounding space; None if there is no usable answer."""
    try:
        # O_NOFOLLOW and O_NONBLOCK: a link or a pipe in the answer's place must neither be read nor block.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        raw = file.read(MAX_ANSWER_BYTES + 1)
    if len(raw) > MAX_ANSWER_BYTES:
        return None
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def is_correct(answer: "str | None", expected: dict) -> bool:
    """Whether the answer is the expected one: ``kind`` number compares values, text compares words."""
    if not answer:
        return False
    if expected["kind"] == "number":
        try:
            found = float(answer.replace(",", ""))
        except ValueError:
            return False
        return math.isclose(found, expected["value"], rel_tol=1e-6, abs_tol=1e-9)
    return answer.casefold() == expected["value"].casefold()


if __name__ == "__main__":
    print(int(is_correct(read_answer(), json.loads(Path(__file__).with_name("expected.json").read_text()))))
