"""A fixed prompt that both sides score after a sync: end-to-end proof that the trained policy is the served one.

Checksums prove the weights; the canary proves what is computed with them: the packed kernels, and that no block
of an older policy was left in the prefix, KV or convolution-state cache. For the latter the prompt is continued
through the cache first, then scored without it; the trainer's numbers must agree with both.

What must agree is the mean difference: in bfloat16 the largest of some hundred tokens is one token's rounding, which
depends on the model, and says little. The continuation has a mean of its own, so that a stale block behind its few
tokens is not lost among the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.errors import StoppedError
from services.weight_sync.policy_server import PolicyServer

if TYPE_CHECKING:
    import torch

Score = Callable[[Sequence[int]], Sequence[float]]
"""Token ids -> log-probability of each but the first, computed by the trainer's model, adapter included."""

CONTINUATION_TOKENS = 16

logger = logging.getLogger(__name__)

_TEXT = (
    "After each step the trainer sends what it learned to the server, and both read this page to see whether they "
    "still agree. If the server kept a block of an older policy, or one matrix did not arrive, the numbers differ. "
)


def prompt_ids(tokenizer: Any, min_tokens: int = 600) -> list[int]:
    """A fixed prompt of plain text, of at least ``min_tokens`` tokens: some blocks of vLLM's prefix cache."""
    once: list[int] = tokenizer.encode(_TEXT, add_special_tokens=False)
    return once * (min_tokens // len(once) + 1)


def model_score(model: torch.nn.Module) -> Score:
    """Scores with a causal language model as it stands, adapter included."""
    import torch

    @torch.no_grad()
    def score(token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
        # Attention of packed rows finds the samples by their positions, so one sample says that it is one.
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logprobs = logits[0, :-1].float().log_softmax(-1)
        found: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return found

    return score


@dataclass(frozen=True)
class CanaryResult:
    mean_abs_logprob_diff: float
    """Of the scored tokens or of the continued ones, whichever is larger. In nats, as all differences."""
    max_abs_logprob_diff: float
    position: int
    """Index of the token where it was found."""
    trainer: float
    policy: float


@dataclass(frozen=True)
class Canary:
    prompt_ids: Sequence[int]
    """Longer than one block of the prefix cache, or a stale block could not show."""
    score: Score
    bound: float
    """On the mean difference; the recipe's ``weight_sync.canary_mean_abs_logprob_diff``."""
    warn_above: float = math.inf
    """A largest difference beyond it is logged; the recipe's ``weight_sync.canary_max_abs_logprob_diff``."""

    def check(self, server: PolicyServer, version: int, timeout_s: float) -> CanaryResult:
        """Score on both sides. Raises: StoppedError: further apart than the bound, with the numbers of one token."""
        continuation, cached = server.complete(self.prompt_ids, CONTINUATION_TOKENS, timeout_s)
        token_ids = [*self.prompt_ids, *continuation]
        trainer = list(self.score(token_ids))
        policy = server.score(token_ids, timeout_s)
        result = difference(trainer, policy, cached)
        token = (
            f"token {result.position} has log-probability {result.trainer:.6f} in the trainer and {result.policy:.6f} "
            f"in the policy at {server.url}, {result.max_abs_logprob_diff:.2e} apart"
        )
        if not result.mean_abs_logprob_diff <= self.bound:  # also catches NaN
            raise StoppedError(
                f"canary after weight sync {version}: log-probabilities differ by {result.mean_abs_logprob_diff:.2e} "
                f"in the mean, and weight_sync.canary_mean_abs_logprob_diff allows {self.bound:.2e}; {token}. What is "
                "served is not what is trained, so the run stops"
            )
        if result.max_abs_logprob_diff > self.warn_above:
            logger.warning(
                "canary after weight sync %d: %s, more than weight_sync.canary_max_abs_logprob_diff = %.2e; the mean "
                "difference is %.2e", version, token, self.warn_above, result.mean_abs_logprob_diff,
            )  # fmt: skip
        return result


def difference(trainer: Sequence[float], policy: Sequence[float], cached: Sequence[float]) -> CanaryResult:
    """Compare the trainer's log-probabilities with the policy's, scored and (for the last tokens) continued.

    Args: trainer, policy: of tokens 1.. ; cached: of the last len(cached) tokens.
    Raises: ValueError: the lengths do not fit.
    """
    if len(trainer) != len(policy) or len(cached) > len(trainer):
        raise ValueError(
            f"{len(trainer)} log-probabilities of the trainer, {len(policy)} of the policy and {len(cached)} of the "
            "continuation; the first two must be equally many, and at least as many as the third"
        )
    tail = len(trainer) - len(cached)
    pairs = [(i + 1, trainer[i], policy[i]) for i in range(len(trainer))]
    pairs += [(tail + i + 1, trainer[tail + i], cached[i]) for i in range(len(cached))]
    # NaN compares as smaller than nothing, so it is made the largest.
    position, ours, theirs = max(pairs, key=lambda pair: d if (d := abs(pair[1] - pair[2])) == d else float("inf"))
    parts = [pairs[: len(trainer)], pairs[len(trainer) :]]
    means = [math.fsum(abs(a - b) for _, a, b in part) / len(part) for part in parts if part]
    mean = math.nan if any(map(math.isnan, means)) else max(means)
    return CanaryResult(mean, abs(ours - theirs), position, ours, theirs)
