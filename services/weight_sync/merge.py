"""The one merge: engine, export and check all call ``merged`` and so get the same bits.

The sum over the rank is taken in float32, one rank after the other, with product and sum rounded separately, and is
rounded to the served type once: to the nearest, or stochastically with fixed thresholds (``dither``).
No matrix product is used on purpose: a GEMM picks its summation order from the device, the number of threads
and the shape, so a tensor-parallel slice, a GPU and an export on a laptop would differ in the last bit. With a
fixed order they cannot. The loop's price is r passes over the matrix; on a GPU one fused kernel
(``grouped``) keeps the order and the roundings, and so the bits, in a single pass.
"""

from __future__ import annotations

import torch

from services.weight_sync.checksum import HAS_TRITON
from services.weight_sync.dither import Dither, to_bfloat16

SMALLEST = 2.0**-60
"""Numbers of a factor below this travel as 0, so that no product of two of them underflows: it is then exact in
float32 for factors of 16 bits, and a fused multiply-add, half the work, gives the reference's bits."""


def sendable(factor: torch.Tensor) -> torch.Tensor:
    """The factor with what is smaller than ``SMALLEST`` set to 0. LoRA factors are larger by many orders."""
    return torch.where(factor.abs() < SMALLEST, 0, factor)


def merged(
    w0: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    dither: Dither | None = None,
) -> torch.Tensor:
    """``W0 + scale * B @ A``, accumulated in float32 and rounded once to the type of ``w0``.

    The factors are first rounded to the type of ``w0``, the type in which they travel (``sendable``). Where the
    change is exactly 0 the result is ``w0`` bit for bit, a negative zero included: B = 0 gives back the base.

    Args:
        w0: (out, in), or any slice of rows and columns. a: (r, in). b: (out, r). scale: alpha / r.
        out: (out, in), where to write; of the type and on the device of ``w0``, and not overlapping it.
        dither: round to bfloat16 stochastically; None: to the nearest. float32 is not rounded.
    Returns: ``out``, or a new tensor of the type and on the device of ``w0``.
    Raises: ValueError: the shapes do not fit; the message gives all three. Or ``dither`` with another type.
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

        grouped.Group([grouped.Matrix.of(w0, a, b, out, dither)]).merge(scale)
    else:
        out.copy_(reference(w0, a, b, scale, dither))
    return out


def reference(
    w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dither: Dither | None = None
) -> torch.Tensor:
    """``merged`` on any device, rank by rank: what defines its bits. The factors are sendable and of w0's type."""
    return rounded(w0, change(a, b, scale), dither)


def change(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * B @ A`` in float32, (out, in): what a merge adds before it rounds."""
    rows = a.float()
    columns = b.float().T.contiguous()
    total = torch.zeros((b.shape[0], a.shape[1]), dtype=torch.float32, device=a.device)
    product = torch.empty_like(total)
    for k in range(a.shape[0]):
        # Two kernels, so that no compiler can contract them to a fused multiply-add, which rounds differently.
        torch.mul(columns[k, :, None], rows[k, None, :], out=product)
        total.add_(product)
    return total.mul_(scale)


def rounded(w0: torch.Tensor, total: torch.Tensor, dither: Dither | None = None) -> torch.Tensor:
    """``w0 + total``, rounded once to the type of ``w0``. Args: total: of ``change``. dither: as for ``merged``."""
    base = w0.float()
    exact = torch.where(total == 0, base, base + total)
    if dither is None or w0.dtype == torch.float32:
        return exact.to(w0.dtype)
    require_ditherable(w0.dtype)
    return to_bfloat16(exact, dither)


def require_ditherable(dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        raise ValueError(f"weights of {dtype} cannot be rounded stochastically; bfloat16 can, float32 need not")


def kept_sums(w0: torch.Tensor, served: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """How much of a change its rounding left: the two sums of ``kept_share``.

    Args: served: ``rounded(w0, total)``.
    Returns: float64 of shape (2,): ``<served - w0, total>`` and ``<total, total>``, summed over all elements.
    """
    moved = served.float() - w0.float()
    return torch.stack([(moved * total).sum(dtype=torch.float64), (total * total).sum(dtype=torch.float64)])


def kept_share(sums: torch.Tensor) -> float | None:
    """``<W_served - W0, d> / <d, d>`` over all targets, with ``d = scale * B @ A`` in float32.

    1 says that the served weights have moved as far along the adapter's change as the adapter asks for; 0 that rounding
    took all of it, so that the base is sampled from. Both are of the factors as they travel. Around 1 it is a random
    number with stochastic rounding: one matrix of 2048 x 2048 at ``|B|`` = 1e-6 has a standard deviation of 0.02.

    Args: sums: float64 of shape (..., 2), of ``kept_sums``. Returns: None where nothing changes: B = 0.
    """
    along, whole = sums.reshape(-1, 2).sum(dim=0).tolist()
    return along / whole if whole else None
