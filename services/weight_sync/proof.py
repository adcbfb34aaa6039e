"""Compare what the workers report with what was sent, and with what the trainer's own base gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from services.common.errors import StoppedError
from services.weight_sync.checksum import HAS_TRITON, checksum
from services.weight_sync.factors import Layout
from services.weight_sync.merge import merged

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


def merged_checksums(layout: Layout, buffer: torch.Tensor, base: BaseWeight) -> dict[str, int]:
    """What ``targets`` must report: the merge of the packed factors with the trainer's own base."""
    factors = layout.unpack(buffer)
    weights = {name: base(name).to(layout.torch_dtype) for name in factors}
    if buffer.device.type == "cuda" and HAS_TRITON:
        from services.weight_sync.grouped import Group, Matrix

        group = Group([Matrix(weights[name], a, b) for name, (a, b) in factors.items()])
        return _unsigned(factors, group.merged_checksums(layout.scale))
    return {name: checksum(merged(weights[name], a, b, layout.scale)) for name, (a, b) in factors.items()}


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
