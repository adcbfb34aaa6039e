"""What ``metrics.jsonl`` says of a step: its groups, its tokens, and what became of those that were not trained.

Values go into TRL's sink, ``key -> list``: a number (the mean is logged; the sum where the name has ``total``), or
(sum, count) of a mean that is taken over the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.common.recipe import Algorithm
from services.trainer import objective
from services.trainer.groups import ScoredGroup
from services.trainer.ratio import ratio_stats
from services.trainer.scheduler import StepAccount

Sink = Mapping[str, list[Any]]


def of_groups(sink: Sink, groups: Sequence[ScoredGroup], version: int) -> None:
    """Args: version: of the policy that is served when the step begins."""
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        sink["reward"].append((float(np.sum(rewards)), float(len(rewards))))
        sink["reward_std"].append(float(np.std(rewards)))
        sink["groups/silent_share"].append((float(group.silent), 1.0))
        for rollout in group.rollouts:
            age = version - rollout.version
            sink["sample/staleness_mean"].append(age)
            sink["sample/staleness_max"].append(age)
            sink["sample/truncated_share"].append((float(rollout.truncated), 1.0))
            sink["tools/call_frequency"].append(float(rollout.tool_calls))
            sink["tools/failure_frequency"].append(rollout.tool_failures / max(rollout.tool_calls, 1))
            sink["sample/forwarded_tokens_mean"].append(float(rollout.tokens))
            sink["sample/forwarded_tokens_max"].append(float(rollout.tokens))
            sink["sample/trained_tokens_mean"].append(float(rollout.trained_tokens))


def of_tokens(
    sink: Sink, terms: objective.Terms, sampled: torch.Tensor, entropy: torch.Tensor, algorithm: Algorithm
) -> None:
    """Means over the sampled tokens of a packed row. Args: sampled: [tokens], bool. entropy: [tokens]."""
    with torch.no_grad():
        log_ratio = (terms.log_probs - terms.old_log_probs)[sampled].double()
        ratio = log_ratio.exp()
        low, high = (part[sampled].double() for part in objective.clipped(terms, algorithm))
        count = float(log_ratio.numel())
        means = {
            "ratio": ratio,
            "kl": ratio - 1 - log_ratio,
            "entropy": entropy[sampled].double(),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if terms.ref_log_probs is not None:
            q = (terms.ref_log_probs - terms.log_probs)[sampled].double()
            means["kl/base"] = q.exp() - q - 1
        for key, values in means.items():
            sink[key].append((values.sum().item(), count))
        difference = terms.log_probs - terms.old_log_probs
        for key, value in ratio_stats(difference, sampled, terms.staleness).items():
            sink[key].append(value)


def of_row(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """TRL's own accounts of a packed row: throughput, and what a row holds."""
    tokens = float(inputs["input_ids"].numel())
    samples = float((inputs["position_ids"] == 0).sum())
    trained = float(inputs["completion_mask"].sum())
    trainer._step_forward_tokens += tokens
    trainer._step_trained_tokens += trained
    trainer._step_seq_len_weighted += tokens / samples * tokens
    trainer._step_samples += samples
    sink = trainer._metrics["train"]
    sink["batch/masked_token_frac"].append((tokens - trained, tokens))
    sink["batch/samples_per_row"].append(samples)
    sink["batch/row_tokens_mean"].append(tokens)
    sink["batch/row_tokens_max"].append(tokens)
    sink["batch/forward_only_share"].append((0.0 if inputs["needs_gradient"] else tokens, tokens))


def of_account(sink: Sink, account: StepAccount) -> None:
    sink["groups/dropped_stale_total"].append(float(len(account.stale)))
    sink["groups/dropped_total"].append(float(len(account.dropped)))
    sink["groups/refilled_total"].append(float(len(account.refilled)))
    if account.stale:
        rollouts = float(sum(group.rollouts for group in account.stale))
        sink["groups/dropped_stale_tokens_mean"].append((float(sum(g.tokens for g in account.stale)), rollouts))
        sink["groups/dropped_stale_age_max"].append(max(group.age for group in account.stale))
