"""The merge as one Triton kernel: the bits of ``merge.reference`` in one pass over the matrix.

Triton ships with PyTorch's CUDA builds. Each element's sum stays in a register, so W0 is read once and the result
written once; what is left is 2 r float32 operations an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 8
"""Rows a program merges: each number of A that it reads serves all of them. Unrolled in ``_merge``."""
COLUMNS = 1024
WARPS = 4


@triton.jit
def _merge(
    out, w0, a, b, scale, rows, columns, out_stride, w0_stride, a_stride, b_stride,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge ``ROWS`` rows by ``COLUMNS`` columns.

    The sums are 1-D on purpose: each thread then holds neighbours of a row and reads A as one vector. For a 2-D tile
    the compiler chose layouts, and others in each release, that took two to four times as long.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    row = tl.program_id(0) * ROWS
    left = b + row.to(tl.int64) * b_stride
    s0 = tl.zeros((COLUMNS,), dtype=tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    s4 = s0
    s5 = s0
    s6 = s0
    s7 = s0
    for k in range(RANK):
        right = tl.load(a + k * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        # Two roundings each: the launch forbids contraction.
        s0 += tl.load(left + k, mask=row < rows, other=0.0).to(tl.float32) * right
        s1 += tl.load(left + b_stride + k, mask=row + 1 < rows, other=0.0).to(tl.float32) * right
        s2 += tl.load(left + 2 * b_stride + k, mask=row + 2 < rows, other=0.0).to(tl.float32) * right
        s3 += tl.load(left + 3 * b_stride + k, mask=row + 3 < rows, other=0.0).to(tl.float32) * right
        s4 += tl.load(left + 4 * b_stride + k, mask=row + 4 < rows, other=0.0).to(tl.float32) * right
        s5 += tl.load(left + 5 * b_stride + k, mask=row + 5 < rows, other=0.0).to(tl.float32) * right
        s6 += tl.load(left + 6 * b_stride + k, mask=row + 6 < rows, other=0.0).to(tl.float32) * right
        s7 += tl.load(left + 7 * b_stride + k, mask=row + 7 < rows, other=0.0).to(tl.float32) * right
    sums = (s0, s1, s2, s3, s4, s5, s6, s7)
    for i in tl.static_range(ROWS):
        total = sums[i] * scale
        here = inside & (row + i < rows)
        base = tl.load(w0 + (row + i).to(tl.int64) * w0_stride + column, mask=here, other=0.0).to(tl.float32)
        result = tl.where(total == 0, base, base + total)
        tl.store(out + (row + i).to(tl.int64) * out_stride + column, result.to(out.dtype.element_ty), mask=here)


def merge(w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write the merge to ``out``. All on one GPU and of one type; each row's elements lie side by side.

    Args: w0, out: (out, in). a: (r, in). b: (out, r).
    """
    rows, columns = w0.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    with torch.cuda.device(w0.device):
        _merge[grid](
            out, w0, a, b, float(scale), rows, columns, out.stride(0), w0.stride(0), a.stride(0), b.stride(0),
            RANK=a.shape[0], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
            enable_fp_fusion=False,  # a fused multiply-add rounds once, the reference twice
        )  # fmt: skip
