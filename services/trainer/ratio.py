"""Importance ratio and KL by staleness, and the alarm on the ratio at staleness 0.

At staleness 0 the policy that is trained is the policy that sampled, so the ratio of their probabilities is 1 but for
float noise. If it is not, the two ends do not compute the same thing (weights, tokens, sampling, packing, kernels), and
no clipping of the loss makes up for that. At a higher staleness the ratio shows how far the policy has moved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from services.common.errors import StoppedError

if TYPE_CHECKING:
    import torch

RATIO_AT_0 = "ratio/staleness_0"


def ratio_stats(log_ratio: torch.Tensor, mask: torch.Tensor, staleness: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Mean importance ratio and KL of each staleness, as TRL's metric sink takes a mean: (sum, count).

    Args: log_ratio: log-probability under the trained policy minus that under the sampling one, any shape. mask: same
        shape, true for trained tokens. staleness: same shape, policy versions between sampling and training.
    Returns: ``ratio/staleness_N`` and ``kl/staleness_N`` for each N that occurs among the trained tokens. KL is of the
        sampling from the trained policy, estimated as ``r - 1 - log r`` (never negative, low variance), as TRL does.
    """
    mask = mask.bool()
    log_ratio, staleness = log_ratio[mask].detach().double(), staleness[mask]
    stats = {}
    for n in staleness.unique().tolist():
        log_r = log_ratio[staleness == n]
        ratio = log_r.exp()
        count = float(log_r.numel())
        stats[f"ratio/staleness_{n}"] = (ratio.sum().item(), count)
        stats[f"kl/staleness_{n}"] = ((ratio - 1 - log_r).sum().item(), count)
    return stats


class RatioGuard:
    """Alarm when the mean ratio at staleness 0 leaves its bounds, end of the run when it stays outside."""

    def __init__(self, bounds: tuple[float, float], patience: int) -> None:
        """Args: bounds: lowest and highest allowed mean ratio. patience: steps in a row that end the run."""
        self._low, self._high = bounds
        self._patience = patience
        self._outside = 0
        self.alarms = 0
        """Steps outside the bounds so far."""

    def observe(self, ratio: float | None) -> bool:
        """Take one optimizer step's mean ratio; None if the step held no token of staleness 0, which proves nothing.

        Returns: whether this step is an alarm.
        Raises: StoppedError: the ratio was outside its bounds at ``patience`` observed steps in a row.
        """
        if ratio is None:
            return False
        if self._low <= ratio <= self._high and not math.isnan(ratio):
            self._outside = 0
            return False
        self._outside += 1
        self.alarms += 1
        if self._outside >= self._patience:
            raise StoppedError(
                f"the mean importance ratio at staleness 0 is {ratio:.5f} and was outside its bounds "
                f"[{self._low}, {self._high}] at {self._outside} observed steps in a row (trainer.ratio_patience is "
                f"{self._patience}): the trained and the served policy do not agree. Compare the canary's two "
                "numbers, the packing check and the sampling parameters before training on"
            )
        return True
