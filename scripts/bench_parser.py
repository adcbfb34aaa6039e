"""``python -m scripts.bench_parser``: is the tool-call parser's work linear in the length of the output?

Per family of hostile outputs: time for 16 Ki and 64 Ki characters of argument, read at once and in 1-character
deltas: CPU time, best of several. Linear work has a ratio near 4, quadratic 16. ``longest`` is what blocks vLLM's
event loop at one go. Exit 1 if a ratio is above 8 or the 64 Ki argument of paired inner quotes takes 50 ms or more.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from time import thread_time

from services.policy.lfm2_calls import TOOL_CALL_END, TOOL_CALL_START, Tool
from services.policy.lfm2_stream import CallStream

SMALL, LARGE = 16 * 1024, 64 * 1024
MAX_RATIO = 8.0
MAX_INNER_QUOTES_S = 0.050
NOISE_FLOOR_S = 0.001
TOOLS = {"bash": Tool.from_schema({"properties": {key: {} for key in ("command", "timeout", "workdir")}})}


def _in_string(unit: str) -> Callable[[int], str]:
    return lambda size: f"[bash(command='{_repeat(unit, size)}')]"


def _repeat(unit: str, size: int) -> str:
    return unit * (size // len(unit))


FAMILIES: dict[str, Callable[[int], str]] = {
    "paired inner quotes": _in_string("'a' "),
    "quotes only": _in_string("''"),
    "undeclared parameters": _in_string("'y', a="),
    "undeclared calls": _in_string("('y'), f('y'), "),
    "quote and comma": _in_string("x',"),
    "quote and brackets": _in_string("')) ]"),
    "quote and blanks": _in_string("'" + " " * 99),
    "a quote and blank lines": lambda size: "[bash(command='x'" + _repeat("\n", size) + "y')]",
    "contractions": _in_string("don't "),
    "backslashes": _in_string("\\\\"),
    "escaped quotes": _in_string("\\'"),
    "lone surrogates": _in_string("\\ud83d"),
    "end markers": _in_string(TOOL_CALL_END),
    "blocks cut short": lambda size: _repeat(f"[bash(command='{TOOL_CALL_END}{TOOL_CALL_START}", size),
    "a string never closed": lambda size: f"[bash(command='{_repeat('x', size)}",
    "almost a seam": lambda size: f"[bash(command='x',{_repeat('a', size)})]",
    "triple quotes": lambda size: f"[bash(command=''{_repeat(chr(39) * 3 + 'x', size)}')]",
    "triple quotes never closed": lambda size: f"[bash({','.join(f'a{i}={chr(39) * 3}x' for i in range(size // 10))})]",
    "a list": lambda size: f"[bash(command=[{_repeat('1,', size)}])]",
    "brackets": lambda size: "[" * size,
    "objects": lambda size: "[bash(command=" + _repeat('{"a":', size),
    "arguments": lambda size: f"[bash({','.join(f'a{i}=1' for i in range(size // 8))})]",
    "calls": lambda size: f"[{_repeat('bash(),', size)}]",
    "digits": lambda size: f"[bash(timeout={_repeat('1', size)})]",
    "thoughts": lambda size: TOOL_CALL_END + _repeat(f"<think>{TOOL_CALL_START}</think>", size),
    "echo": lambda size: "[]" + TOOL_CALL_END + " [" + _repeat("y ", size),
    "blanks": lambda size: "[]" + TOOL_CALL_END + _repeat(" \n", size),
    "almost markers": lambda size: "[]" + TOOL_CALL_END + _repeat("<|tool_call_star", size),
}


def text(family: str, size: int) -> str:
    return TOOL_CALL_START + FAMILIES[family](size) + TOOL_CALL_END


def read_s(raw: str, chars_per_delta: int) -> tuple[float, float]:
    """Seconds of CPU to read an output, and the most that one delta took."""
    stream = CallStream(TOOLS)
    marks = [thread_time()]
    for start in range(0, len(raw), chars_per_delta):
        stream.feed(raw[start : start + chars_per_delta])
        marks.append(thread_time())
    stream.finish()
    marks.append(thread_time())
    return marks[-1] - marks[0], max(after - before for before, after in pairwise(marks))


def best(family: str, size: int, repeats: int, chars_per_delta: int | None = None) -> tuple[float, float]:
    raw = text(family, size)
    runs = [read_s(raw, chars_per_delta or len(raw)) for _ in range(repeats)]
    return min(total for total, _ in runs), min(longest for _, longest in runs)


def ratio(small_s: float, large_s: float) -> float:
    return large_s / max(small_s, NOISE_FLOOR_S)


def main() -> int:
    bad = []
    print(f"{'':28}{'at once':>30}{'1-character deltas':>34}")
    print(f"{'family':28}{'16 Ki':>10}{'64 Ki':>10}{'ratio':>10}{'64 Ki':>12}{'longest':>12}{'ratio':>10}")
    for family in FAMILIES:
        small, _ = best(family, SMALL, 7)
        large, _ = best(family, LARGE, 7)
        small_stream, _ = best(family, SMALL, 3, chars_per_delta=1)
        large_stream, longest = best(family, LARGE, 3, chars_per_delta=1)
        ratios = ratio(small, large), ratio(small_stream, large_stream)
        print(
            f"{family:28}{small * 1e3:8.1f}ms{large * 1e3:8.1f}ms{ratios[0]:10.1f}"
            f"{large_stream * 1e3:10.1f}ms{longest * 1e3:10.1f}ms{ratios[1]:10.1f}"
        )
        too_slow = family == "paired inner quotes" and large >= MAX_INNER_QUOTES_S
        if max(ratios) > MAX_RATIO or too_slow:
            bad.append(family)
    print(f"not linear or too slow: {', '.join(bad)}" if bad else "linear")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
