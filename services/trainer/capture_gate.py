"""The gate between capture and training: is what came back exactly what was sampled, and by the agent?

Pure checks over OpenEnv's ``HarborRolloutResult``, each breach with a name to count it by. A fatal breach makes the
rollout unscorable. The others leave every token exact, and are counted because many of them mean something.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.recipe import Sampling

FINISH_REASONS = ("stop", "tool_calls", "length")
_FATAL = re.compile(r"\[FATAL\] ([a-z_]+):? ?(.*)", re.DOTALL)
_COUNTED = re.compile(r"\[WARN\] (atif_aux_calls|atif_no_token_counts|discarded_turns|context_budget_exhausted)\b")


class Turn(Protocol):
    """The part of ``HarborTurn`` that is checked."""

    turn: int
    finish_reason: str | None
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    per_token_logps: Sequence[float]
    loss_mask: Sequence[int] | None
    n_tools: int
    discarded: bool
    trainable: bool
    sampling_params: Mapping[str, Any]


class Rollout(Protocol):
    """The part of ``HarborRolloutResult`` that is checked."""

    rollout_type: str
    turns: Sequence[Turn]
    findings: Sequence[str]
    param_fixes: Sequence[str]
    atif: str
    n_trainable_tokens: int
    exception_type: str | None


@dataclass(frozen=True)
class Breach:
    """One thing about a capture that is not as it must be."""

    name: str
    detail: str
    fatal: bool = True


def breaches(rollout: Rollout, sampling: Sampling) -> list[Breach]:
    """Everything found, fatal first. Args: sampling: what the recipe says every turn was sampled with."""
    found = [*_of_the_proxy(rollout), *_of_the_session(rollout), *_of_the_turns(rollout, sampling)]
    return sorted(dict.fromkeys(found), key=lambda breach: not breach.fatal)


def of_the_policy(versions: Sequence[tuple[int, int]] | None) -> list[Breach]:
    """Findings about the policy versions of a rollout's model calls. None is fatal: the loss weighs each token by the
    probability that it was really sampled with, whichever version that was.

    Args: versions: of each model call, lowest and highest that can have sampled it; None: not known.
    """
    if versions is None:
        return [Breach("no_policy_version", "the agent's log does not tell when its calls were answered", False)]
    return [
        Breach("two_policies", f"call {call} ran across a weight sync: versions {low} to {high}", False)
        for call, (low, high) in enumerate(versions)
        if low != high
    ]


def _of_the_proxy(rollout: Rollout) -> Iterator[Breach]:
    """What OpenEnv itself found: under its own names."""
    for finding in rollout.findings:
        if match := _FATAL.search(finding):
            yield Breach(match[1], match[2][:200])
        elif match := _COUNTED.search(finding):
            yield Breach(match[1], finding[:200], fatal=False)


def _of_the_session(rollout: Rollout) -> Iterator[Breach]:
    if rollout.rollout_type != "train":
        yield Breach("no_token_capture", "the engine did not return token ids and log-probabilities")
    if rollout.param_fixes:
        yield Breach("sampling_changed", f"the proxy changed the request to please the engine: {rollout.param_fixes}")
    if not rollout.n_trainable_tokens:
        yield Breach("nothing_trainable", "no sampled token of the agent can be trained on")
    if rollout.turns and not any(turn.n_tools for turn in rollout.turns):
        # OpenEnv labels a session's only calls as the agent's, also when they are titles or summaries.
        yield Breach("no_agent_call", "no model call offered tools: titles or summaries only")
    if rollout.turns and rollout.atif == "none":
        # OpenCode logs a step when it has ended: one that is stopped in its first step has nothing to compare.
        stopped = rollout.exception_type == "AgentTimeoutError"
        yield Breach("no_agent_log", "OpenCode left no log to check the captured turns against", not stopped)


def _of_the_turns(rollout: Rollout, sampling: Sampling) -> Iterator[Breach]:
    before: Turn | None = None
    for turn in rollout.turns:
        if turn.discarded:
            continue
        yield from _of_one_turn(turn, sampling)
        if before is not None and not _continues(before, turn):
            yield Breach("prefix_break", f"the prompt of turn {turn.turn} does not start with the turn before", False)
        before = turn


def _of_one_turn(turn: Turn, sampling: Sampling) -> Iterator[Breach]:
    ids, logprobs, mask = turn.completion_token_ids, turn.per_token_logps, turn.loss_mask
    where = f"turn {turn.turn}"
    if turn.finish_reason not in FINISH_REASONS:
        yield Breach("finish_reason", f"{where} ended with {turn.finish_reason!r}; known: {', '.join(FINISH_REASONS)}")
    if turn.finish_reason == "length":
        yield Breach("cut_by_length", f"{where} reached the output cap", fatal=False)
    if len(ids) > sampling.max_completion_tokens:
        yield Breach("over_the_cap", f"{where} has {len(ids)} tokens; the cap is {sampling.max_completion_tokens}")
    if not ids:
        yield Breach("empty_completion", f"{where} has no sampled token", fatal=False)
    if mask is None or len(mask) != len(turn.prompt_token_ids) + len(ids):
        yield Breach("mask_length", f"{where}: {len(mask or [])} mask bits for prompt and completion")
    if not turn.trainable:
        return
    if len(ids) != len(logprobs):
        yield Breach("logprob_misalign", f"{where}: {len(ids)} ids and {len(logprobs)} log-probabilities")
    if not all(math.isfinite(value) and value <= 0 for value in logprobs):
        yield Breach("invalid_logprob", f"{where} has a log-probability that is positive or not finite")
    yield from _of_its_sampling(turn, sampling)


def _of_its_sampling(turn: Turn, sampling: Sampling) -> Iterator[Breach]:
    wanted = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    for name, value in wanted.items():
        if (found := turn.sampling_params.get(name)) != value:
            yield Breach("sampling_differs", f"turn {turn.turn}: {name} was {found}, the recipe says {value}")
    if (found := turn.sampling_params.get("top_k")) not in (0, -1):  # both mean: no cut
        yield Breach("sampling_differs", f"turn {turn.turn}: top_k was {found}, the recipe says {sampling.top_k}")


def _continues(before: Turn, turn: Turn) -> bool:
    held = [*before.prompt_token_ids, *before.completion_token_ids]
    return list(turn.prompt_token_ids[: len(held)]) == held
