"""Which attention the trained model uses on rows of packed samples.

TRL packs samples into one row, marks their starts by ``position_ids`` alone, and always loads the model with a
FlashAttention kernel from the Hub, which derives the samples' lengths from those. ``install("sdpa")`` replaces that
choice where the kernel cannot run or cannot be fetched.

It does not install transformers' own ``sdpa``: on packed rows that builds a [T, T] mask, which costs memory with the
square of the row (1 GiB of booleans at 32k tokens) and rules out the fast kernels. ``packed_sdpa`` attends to each
sample on its own instead: no mask, and exact by construction. On a CPU a row of four samples of 2,500 tokens took
5.7 times less time than with the mask. It enters through transformers' attention and mask registries.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.experimental.async_grpo import async_grpo_trainer
from trl.trainer.utils import create_model_from_path

from services.common.errors import RecipeError
from services.trainer.packing import sample_bounds

FLASH = "kernels-community/flash-attn3"
PACKED_SDPA = "packed_sdpa"


def install(implementation: Literal["kernels-community/flash-attn3", "sdpa"]) -> None:
    """Have every ``AsyncGRPOTrainer`` built from now on load its model with the recipe's attention.

    TRL takes no such argument: it passes the kernel's name to ``create_model_from_path`` itself, and repeating it in
    ``model_init_kwargs`` is a TypeError. So that one name in TRL's trainer module is bound to a wrapper.

    Raises: RecipeError: the FlashAttention kernel is asked for on a machine without CUDA.
    """
    if implementation == FLASH:
        if not torch.cuda.is_available():
            raise RecipeError(
                f"trainer.attn_implementation is {FLASH!r} and this machine has no CUDA device; set it to 'sdpa'"
            )
        async_grpo_trainer.create_model_from_path = create_model_from_path
        return
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, _no_mask)

    @functools.wraps(create_model_from_path)
    def create(model_id: str, **kwargs: Any) -> torch.nn.Module:
        return create_model_from_path(model_id, **{**kwargs, "attn_implementation": PACKED_SDPA})

    async_grpo_trainer.create_model_from_path = create


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of each row.

    Args: query, key, value: [rows, heads, T, head_dim]. position_ids: [rows or 1, T], 0 where a sample starts.
    Returns: ([rows, T, heads, head_dim], None), as transformers' attention functions do.
    Raises: ValueError: no position_ids, or a key-value cache; this function is for training only.
    """
    num_rows, _, length, _ = query.shape
    if position_ids is None or key.shape[2] != length:
        raise ValueError(f"{PACKED_SDPA} is for training: it needs position_ids and takes no key-value cache")
    bounds = sample_bounds(position_ids)
    rows = []
    for row in range(num_rows):
        samples = [
            sdpa_attention_forward(
                module, *(x[row : row + 1, :, start:end] for x in (query, key, value)), None, **kwargs
            )[0]
            for start, end in bounds[row if len(bounds) > 1 else 0]
        ]
        rows.append(torch.cat(samples, dim=1))
    return torch.cat(rows), None


def _no_mask(*, attention_mask: torch.Tensor | None = None, **_kwargs: Any) -> None:
    """The mask that ``packed_sdpa`` needs: none. Padding is refused, since only a mask could hide it."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"{PACKED_SDPA} is for rows without padding; TRL strips it before the forward pass")
