"""The merge as one Triton kernel: the bits of ``merge.reference`` in one pass over the matrix.

Triton ships with PyTorch's CUDA builds. Each element's sum stays in a register, so W0 is read once and the result
written once; what is left is 2 r float32 operations an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128
"""Rows and columns of a program's tile: 64 sums a thread, in registers."""
WARPS = 8


@triton.jit
def _merge(
    out, w0, a, b, scale, rows, columns, out_stride, w0_stride, a_stride, b_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    row_inside, column_inside = row < rows, column < columns
    inside = row_inside & column_inside
    base = tl.load(w0 + row.to(tl.int64) * w0_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Zeros, in the register layout of ``base``: 8 neighbours of a row a thread, so that a row of A is read as one
    # vector. From ``tl.zeros`` the compiler takes a layout that loads twice as many numbers as it adds.
    total = tl.where(base == base, 0.0, -0.0)
    for k in range(RANK):
        left = tl.load(b + row * b_stride + k, mask=row_inside, other=0.0).to(tl.float32)
        right = tl.load(a + k * a_stride + column, mask=column_inside, other=0.0).to(tl.float32)
        total += left * right  # two roundings: the launch forbids contraction
    total *= scale
    result = tl.where(total == 0, base, base + total)
    at = out + row.to(tl.int64) * out_stride + column
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


def merge(w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write the merge to ``out``. All on one GPU and of one type; each row's elements lie side by side.

    Args: w0, out: (out, in). a: (r, in). b: (out, r).
    """
    rows, columns = w0.shape
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK))
    with torch.cuda.device(w0.device):
        _merge[grid](
            out, w0, a, b, float(scale), rows, columns, out.stride(0), w0.stride(0), a.stride(0), b.stride(0),
            RANK=a.shape[0], BLOCK_M=BLOCK, BLOCK_N=BLOCK, num_warps=WARPS,
            enable_fp_fusion=False,  # a fused multiply-add rounds once, the reference twice
        )  # fmt: skip
