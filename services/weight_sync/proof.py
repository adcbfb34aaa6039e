"""Compare what the workers report with what was sent, and with what the trainer's own base gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from services.common.errors import StoppedError
from services.weight_sync import merge
from services.weight_sync.checksum import HAS_TRITON, checksum
from services.weight_sync.factors import Layout

Reports = list[dict[str, Any]]
BaseWeight = Callable[[str], torch.Tensor]
"""Target -> pristine weight, ``names.base_weight`` bound to the trainer's model."""


def received(reports: Reports, version: int, factors: str, peer: str) -> None:
    """Every worker serves ``version``, made of exactly these factors. Raises: StoppedError with both values."""
    if not reports:
        raise StoppedError(f"policy at {peer}: no worker reported; its --worker-extension-cls is not ours")
    for rank, report in enumerate(reports):
        if (report["version"], report["factors"]) != (version, factors):
            raise StoppedError(
                f"policy at {peer}: worker {rank} serves adapter version {report['version']} with factors "
                f"{report['factors']}; version {version} with {factors} was sent"
            )


def whole_checksums(reports: Reports, which: Literal["targets", "base"]) -> dict[str, int]:
    """Checksum of each whole matrix, from the slices that the workers hold. Replicas must agree.

    Raises: StoppedError: two workers hold different values for the same slice.
    """
    slices: dict[str, dict[tuple[int, ...], int]] = {}
    for report in reports:
        for name, (*span, value) in report[which].items():
            known = slices.setdefault(name, {}).setdefault(tuple(span), int(value, 16))
            if known != int(value, 16):
                raise StoppedError(f"workers serve different values of {name}, slice {span}")
    return {name: sum(parts.values()) % (1 << 64) for name, parts in slices.items()}


@dataclass(frozen=True)
class Merged:
    """The merge of the packed factors with the trainer's own base."""

    checksums: dict[str, int]
    """What ``targets`` must report."""
    kept_share: float | None
    """``merge.kept_share``. What matches the checksums keeps as much."""


def merged_again(layout: Layout, buffer: torch.Tensor, base: BaseWeight) -> Merged:
    """Merge in the trainer what the policy merged, for the sums alone."""
    factors = layout.unpack(buffer)
    weights = {name: base(name).to(layout.torch_dtype) for name in factors}
    if buffer.device.type == "cuda" and HAS_TRITON:
        from services.weight_sync.grouped import Group, Matrix

        group = Group([Matrix.of(weights[name], a, b, None, layout.dither(name)) for name, (a, b) in factors.items()])
        sums, kept = group.merged_sums(layout.scale)
        return Merged(_unsigned(factors, sums), merge.kept_share(kept.cpu()))
    checksums, parts = {}, []
    for name, (a, b) in factors.items():
        total = merge.change(a, b, layout.scale)
        served = merge.rounded(weights[name], total, layout.dither(name))
        checksums[name] = checksum(served)
        parts.append(merge.kept_sums(weights[name], served, total))
    return Merged(checksums, merge.kept_share(torch.stack(parts)))


def b_rms(layout: Layout, buffer: torch.Tensor) -> float:
    """Root mean square over all B of an adapter, as they travel: how far training has come from the base."""
    factors = [b for _, b in layout.unpack(buffer).values()]
    norms = torch.stack(torch._foreach_norm([b.float() for b in factors]))
    return float(norms.square().sum().div(sum(b.numel() for b in factors)).sqrt())


def base_checksums(targets: Iterable[str], base: BaseWeight, dtype: torch.dtype) -> dict[str, int]:
    return {name: checksum(base(name).to(dtype)) for name in targets}


def _unsigned(names: Iterable[str], sums: torch.Tensor) -> dict[str, int]:
    return {name: value % (1 << 64) for name, value in zip(names, sums.tolist(), strict=True)}


def same(what: str, expected: Mapping[str, int], served: Mapping[str, int], peer: str) -> None:
    """Raises: StoppedError: a matrix differs; the first one is named with both checksums."""
    different = [name for name in sorted(expected) if served.get(name) != expected[name]]
    if different:
        name = different[0]
        found = f"{served[name]:016x}" if name in served else "nothing"
        raise StoppedError(
            f"policy at {peer}: {len(different)} of {len(expected)} {what} differ from the trainer's, first {name}: "
            f"trainer {expected[name]:016x}, policy {found}"
        )
