"""The one merge: engine, export and check all call ``merged`` and so get the same bits.

The sum over the rank is taken in float32, one rank after the other, with product and sum rounded separately.
No matrix product is used on purpose: a GEMM picks its summation order from the device, the number of threads
and the shape, so a tensor-parallel slice, a GPU and an export on a laptop would differ in the last bit. With a
fixed order they cannot. The loop's price is r passes over the matrix; on a GPU one fused kernel
(``grouped``) keeps the order and the roundings, and so the bits, in a single pass.
"""

from __future__ import annotations

import torch

from services.weight_sync.checksum import HAS_TRITON

SMALLEST = 2.0**-60
"""Numbers of a factor below this travel as 0, so that no product of two of them underflows: it is then exact in
float32 for factors of 16 bits, and a fused multiply-add, half the work, gives the reference's bits."""


def sendable(factor: torch.Tensor) -> torch.Tensor:
    """The factor with what is smaller than ``SMALLEST`` set to 0. LoRA factors are larger by many orders."""
    return torch.where(factor.abs() < SMALLEST, 0, factor)


def merged(
    w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``W0 + scale * B @ A``, accumulated in float32 and rounded once to the type of ``w0``.

    The factors are first rounded to the type of ``w0``, the type in which they travel (``sendable``). Where the
    change is exactly 0 the result is ``w0`` bit for bit, a negative zero included: B = 0 gives back the base.

    Args:
        w0: (out, in), or any slice of rows and columns. a: (r, in). b: (out, r). scale: alpha / r.
        out: (out, in), where to write; of the type and on the device of ``w0``, and not overlapping it.
    Returns: ``out``, or a new tensor of the type and on the device of ``w0``.
    Raises: ValueError: the shapes do not fit; the message gives all three.
    """
    out_features, in_features = w0.shape
    rank = a.shape[0]
    if a.shape != (rank, in_features) or b.shape != (out_features, rank):
        raise ValueError(
            f"W0 is {tuple(w0.shape)}, A {tuple(a.shape)} and B {tuple(b.shape)}; "
            "they must be (out, in), (r, in) and (out, r)"
        )
    a, b = (sendable(factor.to(device=w0.device, dtype=w0.dtype)) for factor in (a, b))
    if out is None:
        out = torch.empty(w0.shape, dtype=w0.dtype, device=w0.device)
    if w0.device.type == "cuda" and HAS_TRITON and all(t.stride(1) == 1 for t in (w0, a, b, out)):
        from services.weight_sync import grouped

        grouped.Group([grouped.Matrix(w0, a, b, out)]).merge(scale)
    else:
        out.copy_(reference(w0, a, b, scale))
    return out


def reference(w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``merged`` on any device, rank by rank: what defines its bits. The factors are sendable and of w0's type."""
    rows = a.float()
    columns = b.float().T.contiguous()
    total = torch.zeros(w0.shape, dtype=torch.float32, device=w0.device)
    product = torch.empty_like(total)
    for k in range(a.shape[0]):
        # Two kernels, so that no compiler can contract them to a fused multiply-add, which rounds differently.
        torch.mul(columns[k, :, None], rows[k, None, :], out=product)
        total.add_(product)
    total.mul_(scale)
    base = w0.float()
    return torch.where(total == 0, base, base + total).to(w0.dtype)
