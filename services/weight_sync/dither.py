"""Stochastic rounding to bfloat16 whose every bit is fixed: the threshold is a hash of target, row and column.

The base lies on bfloat16's grid, so rounding ``W0 + d`` to the nearest gives W0 again unless ``|d|`` exceeds half a
step of that grid, and most changes of a young adapter do not. Here ``x`` between two grid points goes to the outer one
where its distance from the inner one exceeds the element's threshold, in steps: over all elements that keeps the change
in expectation. What lies on the grid stays, whatever the threshold, so B = 0 still serves the base bit for bit.

The thresholds are the same for ever and everywhere: no seed and no version enters, so whoever has the base and the
adapter (engine, a tensor-parallel slice, trainer, export) computes the same weights, and an element changes from one
version to the next only where its sum crosses its threshold.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch

from services.weight_sync.checksum import COLUMN_SEED, ROW_SEED, position_weights

Rounding = Literal["stochastic", "nearest"]
"""The recipe's ``weight_sync.rounding``."""

_MASK = (1 << 32) - 1
FACTORS = (0x21F0AAAD, 0x735A2D97)
"""Of a 32-bit integer hash with shifts 16 and 15, after https://github.com/skeeto/hash-prospector."""


def key_of(target: str) -> int:
    """32 bits that set the pattern of a target apart from the others'."""
    return int.from_bytes(hashlib.sha256(target.encode()).digest()[:4], "little")


@dataclass(frozen=True)
class Dither:
    """Stochastic rounding of one target, or of the slice of it that begins at (first_row, first_column)."""

    target: str
    first_row: int = 0
    first_column: int = 0

    @property
    def key(self) -> int:
        return key_of(self.target)


def dither_of(
    rounding: Rounding, dtype: torch.dtype, target: str, first_row: int = 0, first_column: int = 0
) -> Dither | None:
    """What ``merge.merged`` is given. None: to the nearest; also for float32, in which nothing is rounded."""
    if rounding == "nearest" or dtype == torch.float32:
        return None
    return Dither(target, first_row, first_column)


def thresholds(rows: int, columns: int, dither: Dither, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 of shape (rows, columns), each uniform in [0, 2**16). ``grouped._dithered`` computes the same."""
    first_row, first_column = dither.first_row, dither.first_column
    device = torch.device(device)
    u = position_weights(first_row, first_row + rows, ROW_SEED, device) >> 32
    v = position_weights(first_column, first_column + columns, COLUMN_SEED, device) >> 32
    x = ((u[:, None] ^ v[None]) ^ dither.key) & _MASK
    x ^= x >> 16
    x = x.mul_(FACTORS[0]).bitwise_and_(_MASK)
    x ^= x >> 15
    x = x.mul_(FACTORS[1]).bitwise_and_(_MASK)
    return (x >> 16).to(torch.int32)


def to_bfloat16(value: torch.Tensor, dither: Dither) -> torch.Tensor:
    """Round a float32 matrix. A bfloat16 is the upper half of a float32, so the lower half is the distance from the
    grid point next to 0, in units of 2**-16 of a step: adding a uniform number and cutting rounds up as often as that.
    """
    bits = value.view(torch.int32) + thresholds(value.shape[0], value.shape[1], dither, value.device)
    cut = (bits & ~0xFFFF).view(torch.float32)
    return torch.where(value.isnan(), value, cut).to(torch.bfloat16)
