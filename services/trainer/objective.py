"""The training objective: advantages, and the loss of a packed row; the choices are the recipe's ``algorithm``.

The loss of a step is ``sum_t weight_t * term_t`` over its sampled tokens. The weights alone hold who counts how much
(``token_weights``), so however the step is cut into rows and packed, its gradient is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.common.recipe import AdvantageScale, Algorithm

if TYPE_CHECKING:
    import torch

    from services.trainer.groups import Rollout

__all__ = ["AdvantageScale", "Terms", "advantages", "clipped", "policy_loss", "token_weights"]

STD_EPSILON = 1e-8
"""TRL's."""


def advantages(rewards: Sequence[float | None], scale: AdvantageScale) -> list[float]:
    """Advantage of each rollout of a group over the group's mean.

    Args: rewards: None for one that could not be scored; it gets 0 and does not move the mean. scale: ``std`` divides
        by the group's standard deviation (GRPO, arXiv:2402.03300, eq. 3 with its baseline), ``none`` does not (Dr.
        GRPO, arXiv:2503.20783: hard and easy tasks are not raised over the others).
    """
    scored = np.array([reward for reward in rewards if reward is not None], dtype=float)
    # Equal rewards have no advantage at all; their mean may round to another number.
    if not scored.size or np.all(scored == scored[0]):
        return [0.0] * len(rewards)
    divisor = scored.std() + STD_EPSILON if scale == "std" else 1.0
    return [0.0 if reward is None else float((reward - scored.mean()) / divisor) for reward in rewards]


def token_weights(rollouts: Sequence[Rollout], algorithm: Algorithm) -> list[float]:
    """Weight of each sampled token of each rollout of a step; 0: it is not trained.

    ``aggregation = "sequence"``: mean over rollouts of the mean over a rollout's tokens (GRPO, arXiv:2402.03300).
    ``"token"``: mean over all tokens of the step (DAPO, arXiv:2503.14476). ``truncated = "mask"`` leaves out rollouts
    that a limit cut (DAPO's overlong filtering).
    """
    kept = [algorithm.truncated == "train" or not rollout.truncated for rollout in rollouts]
    trained = [rollout for rollout, is_kept in zip(rollouts, kept, strict=True) if is_kept]
    tokens = sum(rollout.trained_tokens for rollout in trained)

    def weight(rollout: Rollout) -> float:
        return 1 / tokens if algorithm.aggregation == "token" else 1 / (len(trained) * rollout.trained_tokens)

    return [weight(rollout) if is_kept else 0.0 for rollout, is_kept in zip(rollouts, kept, strict=True)]


@dataclass(frozen=True)
class Terms:
    """What the loss of a packed row is made of, each [tokens]."""

    log_probs: torch.Tensor
    """Of the trained policy."""
    old_log_probs: torch.Tensor
    """As sampled."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """0 where a token is context or not trained."""
    staleness: torch.Tensor
    """Policy versions between sampling and training."""
    ref_log_probs: torch.Tensor | None = None
    """Of the base; needed where ``kl_coef`` is not 0."""

    def counting(self) -> Terms:
        """Those of the tokens that are trained."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Terms(**{name: None if part is None else part[self.weights > 0] for name, part in found.items()})


def policy_loss(terms: Terms, algorithm: Algorithm) -> torch.Tensor:
    """The loss of one packed row, a scalar; that of a step is the sum over its rows.

    Per token, with ``r = exp(log_probs - old_log_probs)`` and advantage A:

    * ``-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` (PPO, arXiv:1707.06347; unequal bounds: DAPO);
    * where ``stale_weight_cap`` is set, for stale tokens instead ``-sg(min(r, cap)) * A * log_probs``: a truncated
      importance weight, which lowers a token's gradient but never ends it (IMPALA, arXiv:1802.01561; CISPO,
      arXiv:2506.13585). sg: no gradient flows through it;
    * plus ``kl_coef * (exp(q) - q - 1)`` with ``q = ref_log_probs - log_probs``, an estimate of the KL divergence from
      the base that is never negative (GRPO, eq. 4).
    """
    import torch

    # First: where a ratio overflows on a token that does not count, a weight of 0 would make its gradient NaN.
    terms = terms.counting()
    ratio = torch.exp(terms.log_probs - terms.old_log_probs)
    bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    per_token = -torch.min(ratio * terms.advantages, bounded * terms.advantages)
    if algorithm.stale_weight_cap is not None:
        weight = ratio.detach().clamp(max=algorithm.stale_weight_cap)
        per_token = torch.where(terms.staleness > 0, -weight * terms.advantages * terms.log_probs, per_token)
    if algorithm.kl_coef:
        assert terms.ref_log_probs is not None
        q = terms.ref_log_probs - terms.log_probs
        per_token = per_token + algorithm.kl_coef * (torch.exp(q) - q - 1)
    return (per_token * terms.weights).sum()


def clipped(terms: Terms, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens get no gradient because their ratio left the bounds: below, and above."""
    import torch

    ratio = torch.exp(terms.log_probs - terms.old_log_probs)
    low = (ratio < 1 - algorithm.clip_low) & (terms.advantages < 0)
    high = (ratio > 1 + algorithm.clip_high) & (terms.advantages > 0)
    return low, high
