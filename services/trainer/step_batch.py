"""From the groups of a step to the packed rows of its forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.common.recipe import Algorithm
from services.trainer.groups import Row, ScoredGroup
from services.trainer.objective import token_weights

Tensors = dict[str, Any]


@dataclass(frozen=True)
class _Weighed:
    """A row with what its rollout gives each of its sampled tokens."""

    row: Row
    advantage: float
    weight: float

    def has_gradient(self, algorithm: Algorithm) -> bool:
        return self.weight > 0 and (self.advantage != 0 or algorithm.kl_coef > 0)


def packed_rows(groups: Sequence[ScoredGroup], algorithm: Algorithm, samples_per_row: int) -> list[Tensors]:
    """All rows of all rollouts of a step, ``samples_per_row`` to a packed row; each is the input of a forward pass.

    Rows without a gradient (no advantage, and no KL term) share packed rows of their own, which need no backward pass.

    Returns: per packed row of T tokens, tensors [1, T]: ``input_ids``, ``position_ids`` (a sample starts where it is
        0), ``completion_mask``, ``old_log_probs``, ``advantages``, ``weights``, ``model_version``; and
        ``needs_gradient``.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    weights = token_weights(rollouts, algorithm)
    rows = [
        _Weighed(row, rollout.advantage, weight)
        for rollout, weight in zip(rollouts, weights, strict=True)
        for row in rollout.rows
    ]
    return [
        _pack(part) | {"needs_gradient": needs_gradient}
        for needs_gradient in (True, False)
        for part in _parts([row for row in rows if row.has_gradient(algorithm) == needs_gradient], samples_per_row)
    ]


def _parts(rows: Sequence[_Weighed], size: int) -> Iterator[Sequence[_Weighed]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _pack(rows: Sequence[_Weighed]) -> Tensors:
    mask = torch.cat([torch.tensor(weighed.row.completion_mask) for weighed in rows])
    lengths = [len(weighed.row.input_ids) for weighed in rows]

    def per_row(values: Sequence[float]) -> torch.Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), torch.tensor(lengths))

    tensors = {
        "input_ids": torch.cat([torch.tensor(weighed.row.input_ids) for weighed in rows]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "completion_mask": mask,
        "old_log_probs": torch.cat([torch.tensor(weighed.row.old_log_probs, dtype=torch.float32) for weighed in rows]),
        "advantages": per_row([weighed.advantage for weighed in rows]),
        "weights": per_row([weighed.weight for weighed in rows]) * mask,
        "model_version": torch.cat([torch.tensor(weighed.row.versions) for weighed in rows]),
    }
    return {name: tensor[None] for name, tensor in tensors.items()}
