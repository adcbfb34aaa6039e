"""Pseudo-random odd weights of a position: what ``checksum`` and its GPU kernel (``grouped``) both multiply by."""

from __future__ import annotations

import torch

ROW_SEED, COLUMN_SEED = 0x1E3779B97F4A7C15, 0x632BE59BD9B4E019


def position_weights(start: int, stop: int, seed: int, device: torch.device) -> torch.Tensor:
    """splitmix64 of the positions, made odd so that no bit of an element is lost. Wraps like any int64."""
    x = torch.arange(start, stop, dtype=torch.int64, device=device) + seed
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1
