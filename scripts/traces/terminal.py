"""The rollouts in a terminal: a table of many, the whole of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scripts.run_view import shown
from scripts.traces.page import content_text, logprob_class, readable_arguments, turn_facts, verdict_of
from scripts.traces.reader import Record, TokenText, Trace, Turn, length
from scripts.traces.text import one_line, printable

COLOURS = {"right": "green", "wrong": "red", "failed": "yellow"}
LOGPROB_STYLES = {"": "", "l1": "on grey23", "l2": "black on yellow3", "l3": "black on orange1", "l4": "white on red3"}
ID_CHARS = 8
ROLE_STYLES = {"assistant": "green", "tool": "yellow", "user": "cyan"}


def listing(records: Sequence[Record], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("id", "task", "reward", "step", "turns", "calls", "tokens", "s", "cause or findings"):
        table.add_column(name, justify="left" if name in ("id", "task", "cause or findings") else "right")
    for record in records:
        verdict, _ = verdict_of(record)
        reward = "failed" if verdict == "failed" else shown(record["reward"])
        notes = record["cause"] or ", ".join(sorted(set(record["breaches"])))
        table.add_row(
            Text(one_line(record["rollout_id"], ID_CHARS)), Text(one_line(record["task"], 40)),
            Text(reward, style=COLOURS[verdict]), str(record["policy_steps"][0]), str(record["turns"]),
            str(record["tool_calls"]), str(length(record)), f"{record['wall_s']:.0f}", Text(one_line(notes, 60)),
        )  # fmt: skip
    return table


def reading(trace: Trace, text_of: TokenText, tokens: bool) -> Iterator[RenderableType]:
    """Every message of one rollout. Args: tokens: with each turn's tokens, coloured by log-probability."""
    record = trace.record
    verdict, _ = verdict_of(record)
    head = f"{record['rollout_id']}, task {one_line(record['task'])}, reward {shown(record['reward'])}"
    yield Text(head, style=COLOURS[verdict])
    if record["error"]:
        yield Text(f"{record['cause']}: {printable(record['error'])}", style="yellow")
    if trace.problem:
        yield Text(printable(trace.problem))
    turns = iter(trace.turns)
    for message in trace.messages:
        role = str(message.get("role", "?"))
        yield Rule(Text(one_line(role)), style=ROLE_STYLES.get(role, "dim"), align="left")
        yield from _message(message, role)
        if role == "assistant" and (turn := next(turns, None)) is not None:
            yield Text(", ".join(turn_facts(turn)), style="dim")
            if tokens:
                yield coloured(turn, text_of)
    if trace.verifier:
        yield Rule(Text("verifier"), style="dim", align="left")
        yield Text(printable(trace.verifier))


def _message(message: object, role: str) -> Iterator[Text]:
    assert isinstance(message, dict)
    limit = 400 if role == "system" else 20_000
    for key in ("reasoning", "content"):
        if text := content_text(message.get(key)):
            yield Text(printable(text, limit))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield Text(f"calls {one_line(function.get('name', '?'))}", style="bold")
        yield Text(printable(readable_arguments(function.get("arguments"))))


def coloured(turn: Turn, text_of: TokenText) -> Text:
    """The turn's tokens; the less likely, the redder."""
    found = Text()
    known = len(turn.logprobs) == len(turn.ids)
    for place, token in enumerate(turn.ids):
        style = LOGPROB_STYLES[logprob_class(turn.logprobs[place])] if known else ""
        found.append(printable(text_of(token)), style=style)
    return found
