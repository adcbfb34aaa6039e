"""``python -m services.policy.parse_cases FILE``: does the parser read each case, however its text is cut?

FILE is JSON: ``tools`` (name -> parameter names, or a JSON schema) and ``cases``, each with ``id``, ``raw``, ``calls``
(name, arguments) and ``content`` (compared without surrounding whitespace; null is empty). One line per case, one
verdict per way of cutting; exit 1 on any FAIL, 2 if FILE cannot be used. Reasoning is taken off first, as on the
server: up to a ``</think>`` that the completion did not open.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.policy.lfm2_calls import Tool
from services.policy.lfm2_stream import THINK_END, THINK_START, CallStream, Output, ReasoningStream

MODES = {"non-streaming": None, "one delta": None, "3-character deltas": 3, "1-character deltas": 1}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="services.policy.parse_cases", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    path: Path = parser.parse_args(arguments).file
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        cases, tools = document["cases"], declared(document["tools"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path} is no cases file ({error!r}); it must be JSON with 'tools' and 'cases'", file=sys.stderr)
        return 2
    failures = 0
    print("case  " + "  ".join(MODES))
    for case in cases:
        problems = {mode: problem(case, read(case["raw"], tools, size)) for mode, size in MODES.items()}
        verdicts = [("FAIL" if problems[mode] else "PASS").ljust(len(mode)) for mode in MODES]
        print(f"{case['id']:<5} " + "  ".join(verdicts).rstrip())
        for mode in filter(problems.get, MODES):
            failures += 1
            print(f"      {mode}: {problems[mode]}")
    print(f"{len(cases)} cases, {len(cases) * len(MODES) - failures} PASS, {failures} FAIL")
    return 1 if failures else 0


def declared(tools: dict[str, Any]) -> dict[str, Tool]:
    schemas = {
        name: spec if isinstance(spec, dict) else {"properties": dict.fromkeys(spec)} for name, spec in tools.items()
    }
    return {name: Tool.from_schema(schema) for name, schema in schemas.items()}


def read(raw: str, tools: dict[str, Tool], size: int | None = None) -> Output:
    """What the agent gets of one completion. Args: size: characters per delta; None is all at once."""
    deltas = [raw] if size is None else [raw[start : start + size] for start in range(0, len(raw), size)]
    stream = CallStream(tools, think_is_content=False)
    return Output.joined([*map(stream.feed, without_reasoning(raw, deltas)), stream.finish()])


def without_reasoning(raw: str, deltas: list[str]) -> Iterator[str]:
    if THINK_END not in raw or THINK_START in raw.partition(THINK_END)[0]:
        yield from deltas
        return
    reasoning = ReasoningStream()
    for delta in deltas:
        yield reasoning.feed(delta)[1]


def problem(case: dict[str, Any], output: Output) -> str:
    """Empty, or what was read instead of what the case asks for."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in output.calls]
    content = output.content.strip()
    # As JSON text: to Python 1, 1.0 and True are equal.
    same = json.dumps(calls, sort_keys=True) == json.dumps(case["calls"], sort_keys=True)
    if same and content == (case["content"] or "").strip():
        return ""
    return f"read {json.dumps(calls, ensure_ascii=False)} and content {content!r}; not read: {output.unread}"


if __name__ == "__main__":
    sys.exit(main())
