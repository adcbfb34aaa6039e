"""The one merge: engine, export and check all call ``merged`` and so get the same bits.

The sum over the rank is taken in float32, one rank after the other, with product and sum rounded separately.
No matrix product is used on purpose: a GEMM picks its summation order from the device, the number of threads
and the shape, so a tensor-parallel slice, a GPU and an export on a laptop would differ in the last bit. With a
fixed order they cannot. The price is r passes over the matrix; a fused kernel may replace the loop as long as
it keeps the order.
"""

from __future__ import annotations

import torch


def merged(w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``W0 + scale * B @ A``, out of place, accumulated in float32 and rounded once to the type of ``w0``.

    The factors are first rounded to the type of ``w0``, the type in which they travel. Where the change is
    exactly 0 the result is ``w0`` bit for bit, a negative zero included: B = 0 gives back the base.

    Args: w0: (out, in), or any slice of rows and columns. a: (r, in). b: (out, r). scale: alpha / r.
    Returns: a new (out, in) tensor of the type and on the device of ``w0``.
    Raises: ValueError: the shapes do not fit; the message gives all three.
    """
    out_features, in_features = w0.shape
    rank = a.shape[0]
    if a.shape != (rank, in_features) or b.shape != (out_features, rank):
        raise ValueError(
            f"W0 is {tuple(w0.shape)}, A {tuple(a.shape)} and B {tuple(b.shape)}; "
            "they must be (out, in), (r, in) and (out, r)"
        )
    rows = a.to(device=w0.device, dtype=w0.dtype).float()
    columns = b.to(device=w0.device, dtype=w0.dtype).float().T.contiguous()
    total = torch.zeros(w0.shape, dtype=torch.float32, device=w0.device)
    product = torch.empty_like(total)
    for k in range(rank):
        # Two kernels, so that no compiler can contract them to a fused multiply-add, which rounds differently.
        torch.mul(columns[k, :, None], rows[k, None, :], out=product)
        total.add_(product)
    total.mul_(scale)
    base = w0.float()
    return torch.where(total == 0, base, base + total).to(w0.dtype)
