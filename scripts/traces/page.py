"""The rollouts as one HTML file: no other file, no network, nothing that an agent wrote is markup or script."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.run_view import shown
from scripts.traces.html import Html, source_hash, tag
from scripts.traces.reader import TokenText, Trace, Turn, length
from scripts.traces.text import one_line, printable

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
POLICY = (
    f"default-src 'none'; style-src {source_hash(STYLE)}; script-src {source_hash(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)
"""All else is refused by the browser: a script that slipped through would not run, a picture not be loaded."""
MAX_PAGE_CHARS = 32_000_000
"""Rollouts after these are only named: a browser must be able to open the page."""
LOGPROB_CLASSES = ((-0.05, ""), (-0.7, "l1"), (-2.3, "l2"), (-4.6, "l3"))
"""Lower bound in nats -> class: above 95, 50, 10 and 1 %; below that ``l4``."""


def render(run_name: str, traces: Iterable[Trace], text_of: TokenText, listed_of: int) -> str:
    """Args: listed_of: how many rollouts the run has; the page says so when it holds fewer."""
    rollouts: list[Html] = []
    size = 0
    for number, trace in enumerate(traces):
        rollouts.append(_rollout(number, trace, text_of if size < MAX_PAGE_CHARS else None))
        size += len(rollouts[-1])
    body = tag(
        "body",
        tag("h1", f"Rollouts of {run_name}"),
        tag("p", f"{len(rollouts)} of {listed_of} training rollouts. ", tag("span", id="count")),
        _controls(),
        tag("main", *rollouts, id="rollouts"),
        tag("script", Html(SCRIPT)),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"Rollouts of {run_name}"),
        tag("style", Html(STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _controls() -> Html:
    def options(**labels: str) -> Iterator[Html]:
        return (tag("option", label, value=value) for value, label in labels.items())

    verdicts = options(all="all", right="correct", wrong="wrong", failed="failed, not scored")
    orders = options(listed="as listed", worst="worst first", longest="longest first")
    return tag(
        "nav",
        tag("input", id="find", type="search", placeholder="find in tasks and messages", aria_label="find"),
        tag("select", *verdicts, id="show", aria_label="show"),
        tag("select", *orders, id="order", aria_label="order"),
    )


def _rollout(number: int, trace: Trace, text_of: TokenText | None) -> Html:
    """Args: text_of: None: the page is full, and this rollout is only named."""
    record = trace.record
    verdict, colour = verdict_of(record)
    reward = record["reward"]
    facts = (
        f"step {record['policy_steps'][0]}",
        f"{record['turns']} turns",
        f"{record['tool_calls']} calls",
        f"{length(record)} tokens",
        f"{record['wall_s']:.0f} s",
    )
    return tag(
        "details",
        tag(
            "summary",
            tag("span", "failed" if verdict == "failed" else shown(reward), class_=f"badge {colour}"),
            tag("span", one_line(record["task"]), class_="task"),
            *(tag("span", fact, class_="dim") for fact in facts),
        ),
        tag("div", *_body(trace, text_of), class_="body"),
        class_="rollout",
        data_listed=number,
        data_verdict=verdict,
        data_reward=99 if reward is None else reward,
        data_calls=record["tool_calls"],
        data_tokens=length(record),
    )


def verdict_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """``right``, ``wrong`` or ``failed``, and its colour."""
    if not record["scored"]:
        return "failed", "warn"
    return ("right", "good") if (record["reward"] or 0) >= 1 else ("wrong", "bad")


def _body(trace: Trace, text_of: TokenText | None) -> Iterator[Html]:
    yield _facts(trace.record)
    if text_of is None:
        yield tag("p", f"The page is full: make traces ID={trace.record['rollout_id'][:8]}, or fewer with N=")
        return
    if trace.problem:
        yield tag("p", printable(trace.problem))
    turns = iter(trace.turns)
    for message in trace.messages:
        turn = next(turns, None) if message.get("role") == "assistant" else None
        yield _message(message, turn, text_of)
    for turn in turns:  # discarded ones, or of a fork
        yield tag("div", tag("div", "a turn outside of this conversation", class_="role"), _tokens(turn, text_of))
    if trace.verifier:
        yield _folded("verifier", tag("pre", printable(trace.verifier)), open_=True)


def _facts(record: Mapping[str, Any]) -> Html:
    steps, versions = record["policy_steps"], record.get("policy_versions")
    known = {
        "rollout": record["rollout_id"],
        "group": record["group"],
        "optimizer step at begin and end": f"{steps[0]}, {steps[1]}",
        "policy version of each turn": ", ".join(version_text(pair) for pair in versions) if versions else None,
        "cause": record["cause"],
        "error": record["error"],
        "findings of the capture gate": ", ".join(record["breaches"]) or None,
        "agent out of time": "yes, graded by what it left" if record.get("agent_timeout") else None,
        "turns cut at the output cap": record.get("cap_hits") or None,
        "model calls beyond the budget": record.get("budget_stops") or None,
        "ended": record["at"],
    }
    shown_facts = {name: printable(str(value), 2_000) for name, value in known.items() if value is not None}
    rows = ((tag("dt", name), tag("dd", value)) for name, value in shown_facts.items())
    return tag("dl", *(cell for row in rows for cell in row))


def version_text(pair: Sequence[int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _message(message: Mapping[str, Any], turn: Turn | None, text_of: TokenText) -> Html:
    role = str(message.get("role", "?"))
    parts: list[Html] = []
    for key in ("reasoning", "content"):
        if text := content_text(message.get(key)):
            block = tag("pre", printable(text))
            parts.append(_folded(f"{len(text)} characters", block) if role == "system" else block)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(tag("div", "calls ", tag("strong", one_line(function.get("name", "?")))))
        parts.append(tag("pre", printable(readable_arguments(function.get("arguments")))))
    if turn is not None:
        parts.append(_tokens(turn, text_of))
    known = role if role in ("system", "user", "assistant", "tool") else "other"
    return tag("div", tag("div", one_line(role), class_="role"), *parts, class_=f"message {known}")


def content_text(content: object) -> str:
    """OpenAI's content: a string, parts, or nothing."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def readable_arguments(arguments: object) -> str:
    """Arguments of a call, a line each; as they are if they are no JSON object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    if not isinstance(value, dict):
        return str(arguments)
    return "\n".join(f"{key}: {item if isinstance(item, str) else json.dumps(item)}" for key, item in value.items())


def _tokens(turn: Turn, text_of: TokenText) -> Html:
    summary = ", ".join(turn_facts(turn))
    if not turn.ids:
        return tag("p", summary)
    return _folded(summary, tag("pre", *_spans(turn, text_of), class_="tokens"))


def _spans(turn: Turn, text_of: TokenText) -> Iterator[Html]:
    """A span a token; sure ones that follow each other share one, or a page of a long run could not be opened."""
    if len(turn.logprobs) != len(turn.ids):
        yield tag("span", printable("".join(map(text_of, turn.ids))), title="no log-probabilities")
        return
    pairs = zip(turn.ids, turn.logprobs, strict=True)
    for name, group in itertools.groupby(pairs, key=lambda pair: logprob_class(pair[1])):
        if name:
            for token, logprob in group:
                yield tag("span", printable(text_of(token)), class_=name, title=f"{token}: {logprob:.4f}")
        else:
            tokens, logprobs = zip(*group, strict=True)
            title = f"{len(tokens)} tokens, each at least {min(logprobs):.4f}"
            yield tag("span", printable("".join(map(text_of, tokens))), title=title)


def turn_facts(turn: Turn) -> list[str]:
    total = sum(turn.logprobs)
    return [
        f"{len(turn.ids)} tokens after {turn.prompt_tokens}",
        f"log-probability {total:.2f}",
        f"ended by {printable(turn.finish_reason) or 'nothing'}",
        *([f"policy version {version_text(turn.versions)}"] if turn.versions else []),
        *(["discarded"] if turn.discarded else [] if turn.trainable else ["not trained"]),
    ]


def logprob_class(logprob: float) -> str:
    return next((name for bound, name in LOGPROB_CLASSES if logprob >= bound), "l4")


def _folded(summary: str, content: Html, open_: bool = False) -> Html:
    return tag("details", tag("summary", tag("span", summary, class_="dim")), content, open=open_)
