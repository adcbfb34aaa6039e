"""Rollouts as they were captured, from ``runs/<run>/rollouts/``: which there are, and one of them whole."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zstandard
from tokenizers import Tokenizer

from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir

Order = Literal["newest", "worst", "longest", "failed"]
Record = Mapping[str, Any]
"""One line of rollouts/index.jsonl: ``services.trainer.rollout_log.RolloutRecord``."""
MAX_VERIFIER_BYTES = 8_000


@dataclass(frozen=True)
class Turn:
    """One model call."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of ``ids``, at sampling time; as long, or empty."""
    finish_reason: str
    prompt_tokens: int
    trainable: bool
    discarded: bool
    versions: tuple[int, int] | None
    """Lowest and highest version of the policy that can have sampled it; None: not known."""


@dataclass(frozen=True)
class Trace:
    """One rollout. ``messages`` are OpenAI's; the agent's own turns are the assistant's among them, in order."""

    record: Record
    messages: Sequence[Mapping[str, Any]]
    turns: Sequence[Turn]
    verifier: str
    """End of what the verifier said."""
    problem: str = ""
    """Why there is nothing to read."""


def choose(
    run: RunDir, *, step: int | None = None, task: str | None = None, order: Order = "newest", limit: int | None = None
) -> list[Record]:
    """Lines of the index: those in flight at an optimizer step, of a task, in an order, the first ``limit``."""
    found = run_dir.read_lines(run.rollouts / "index.jsonl")
    if step is not None:
        found = [line for line in found if line["policy_steps"][0] <= step <= line["policy_steps"][1]]
    if task is not None:
        found = [line for line in found if line["task"] == task]
    return _ORDERS[order](found)[:limit]


def length(record: Record) -> int:
    """Sampled tokens; in records from before they were counted, trained ones."""
    return int(record.get("completion_tokens") or record.get("trainable_tokens") or 0)


def _worst(records: Iterable[Record]) -> list[Record]:
    """Graded ones with the lowest reward first; among equals those that cost most calls."""
    graded = [record for record in records if record["scored"] and record["reward"] is not None]
    return sorted(graded, key=lambda record: (record["reward"], -record["tool_calls"]))


_ORDERS: dict[Order, Callable[[list[dict[str, Any]]], list[Record]]] = {
    "newest": lambda records: list(reversed(records)),
    "worst": _worst,
    "longest": lambda records: sorted(records, key=length, reverse=True),
    "failed": lambda records: [record for record in reversed(records) if not record["scored"]],
}


def by_id(run: RunDir, prefix: str) -> Record:
    """The rollout whose id begins so. Raises: RecipeError: none, or several."""
    found = [line for line in run_dir.read_lines(run.rollouts / "index.jsonl") if line["rollout_id"].startswith(prefix)]
    if len(found) != 1:
        raise RecipeError(f"{len(found)} rollouts of {run.path.name} have an id that begins with {prefix!r}")
    return found[0]


def load(run: RunDir, record: Record) -> Trace:
    """The whole rollout; one that left no file, or a damaged one, says so in ``problem``."""
    path = run.rollouts / f"{record['rollout_id']}.json.zst"
    try:
        with zstandard.open(path, "rt", encoding="utf-8") as stream:
            result = json.load(stream)["result"]
        return Trace(record, _messages(result), _turns(record, result), _verifier(run, result))
    except FileNotFoundError:
        return Trace(record, (), (), "", "nothing was captured")
    except (OSError, ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
        return Trace(record, (), (), "", f"{path.name} cannot be read: {type(error).__name__}: {error}")


def _messages(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the agent's conversation; forks and titles are in the file only."""
    agents = [talk for talk in result["conversations"] if talk["role"] == "agent"] or result["conversations"]
    return list(max(agents, key=lambda talk: len(talk["messages"]))["messages"]) if agents else []


def _turns(record: Record, result: Mapping[str, Any]) -> list[Turn]:
    versions = record.get("policy_versions") or [None] * len(result["turns"])
    return [
        Turn(
            ids=turn["completion_token_ids"],
            logprobs=turn["per_token_logps"],
            finish_reason=turn["finish_reason"] or "",
            prompt_tokens=len(turn["prompt_token_ids"]),
            trainable=turn["trainable"],
            discarded=turn["discarded"],
            versions=tuple(found) if found else None,
        )
        for turn, found in zip(result["turns"], versions, strict=False)
    ]


def _verifier(run: RunDir, result: Mapping[str, Any]) -> str:
    """The folder is written from a sandbox: only a plain file with a plain name is read."""
    name = result.get("trial_name") or ""
    path = run.trials / name / "verifier" / "test-stdout.txt"
    if not name or "/" in name or name.startswith("."):
        return ""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return ""
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - MAX_VERIFIER_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


class TokenText:
    """Text of single tokens; without the model's tokenizer, their numbers."""

    def __init__(self, tokenizer: Path | None) -> None:
        found = tokenizer is not None and tokenizer.is_file()
        self._tokenizer = Tokenizer.from_file(str(tokenizer)) if found else None
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if self._tokenizer is None:
            return f" {token}"
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            # Part of a character, or nothing: the vocabulary's own spelling says more.
            plain = text and "\N{REPLACEMENT CHARACTER}" not in text
            self._known[token] = text if plain else self._tokenizer.id_to_token(token) or f"<{token}>"
        return self._known[token]
