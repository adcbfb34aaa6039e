"""A checksum of a matrix that adds up over its slices, so that tensor-parallel ranks can each sum their own.

``sum over i, j of bits(W[i, j]) * u(i) * v(j)  mod 2**64`` with fixed pseudo-random odd u and v of the position
in the whole matrix. Every element counts with its exact bits and its place: a changed, moved or missing one
changes the sum. It guards against accidents, not against an adversary.
"""

from __future__ import annotations

import importlib.util

import torch

from services.weight_sync.positions import COLUMN_SEED, ROW_SEED, position_weights

HAS_TRITON = importlib.util.find_spec("triton") is not None
_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 24
"""Bounds the int64 work space to 128 MiB."""
_FOLD = 4096
"""Columns into which a vector is folded: one row of millions would need a work space of four times its size."""


@torch.no_grad()
def checksum(matrix: torch.Tensor, first_row: int = 0, first_column: int = 0) -> int:
    """Checksum of ``matrix``, the slice of a larger one that begins at (first_row, first_column).

    Args: matrix: 2-D, or 1-D (rows of 4096, the last one shorter); any type.
    Returns: 0 <= sum < 2**64. Sums of disjoint slices add up, modulo 2**64, to the sum of the whole.
    """
    matrix = matrix.detach()
    if matrix.ndim == 1:
        whole = matrix.numel() // _FOLD
        rest: int = checksum(matrix[None, whole * _FOLD :], first_row=whole)
        full: int = checksum(matrix[: whole * _FOLD].view(whole, _FOLD))
        return (full + rest) % (1 << 64)
    rows, columns = matrix.shape
    if not matrix.numel():
        return 0
    if matrix.device.type == "cuda" and matrix.dtype in _ON_GPU and matrix.stride(1) == 1 and HAS_TRITON:
        from services.weight_sync import grouped

        return grouped.checksum_of(matrix, first_row, first_column)
    v = position_weights(first_column, first_column + columns, COLUMN_SEED, matrix.device)
    total = 0
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for top in range(0, rows, step):
        chunk = matrix[top : top + step].contiguous()
        bits = chunk.view(_BITS[chunk.element_size()]).to(torch.int64)
        u = position_weights(first_row + top, first_row + top + len(chunk), ROW_SEED, matrix.device)
        total += int(((bits * v).sum(1) * u).sum())
    return total % (1 << 64)
