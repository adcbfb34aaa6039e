"""All A and B of an adapter in one flat buffer, and the layout that says where each lies.

The layout is sent once, with the first sync; after that a sync is one buffer and a version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from services.weight_sync import names
from services.weight_sync.dither import Dither, Rounding, dither_of
from services.weight_sync.merge import SMALLEST

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Target -> (A of shape (r, in), B of shape (out, r))."""


@dataclass(frozen=True)
class Target:
    name: str
    rank: int
    out_features: int
    in_features: int

    @property
    def numel(self) -> int:
        return self.rank * (self.in_features + self.out_features)


@dataclass(frozen=True)
class Layout:
    """Order and shapes of the targets in the buffer, the type on the wire, and how they are merged: scale, rounding."""

    targets: tuple[Target, ...]
    dtype: str
    scale: float
    rounding: Rounding = "nearest"

    @classmethod
    def of(cls, factors: Factors, dtype: torch.dtype, scale: float, rounding: Rounding = "nearest") -> Layout:
        """The layout of ``factors``, targets in order of name."""
        targets = tuple(Target(name, a.shape[0], b.shape[0], a.shape[1]) for name, (a, b) in sorted(factors.items()))
        return cls(targets, str(dtype).removeprefix("torch."), scale, rounding)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        return cls(**{**value, "targets": tuple(Target(**target) for target in value["targets"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def id(self) -> str:
        """Short hash: equal on both ends, or they would read the buffer differently."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        return sum(target.numel for target in self.targets)

    def dither(self, target: str, first_row: int = 0, first_column: int = 0) -> Dither | None:
        """How ``target``, or a slice of it, is rounded; None: to the nearest, or not at all."""
        return dither_of(self.rounding, self.torch_dtype, target, first_row, first_column)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.torch_dtype, device=device)

    def pack(self, factors: Factors, buffer: torch.Tensor) -> None:
        """Copy ``factors`` into ``buffer``, rounding each to the wire's type (``merge.sendable``)."""
        places = [place for pair in self.unpack(buffer).values() for place in pair]
        torch._foreach_copy_(places, [factor.detach() for target in self.targets for factor in factors[target.name]])
        buffer.masked_fill_(buffer.abs() < SMALLEST, 0)

    def unpack(self, buffer: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Views of A and B inside ``buffer``; nothing is copied."""
        found, start = {}, 0
        for target in self.targets:
            middle = start + target.rank * target.in_features
            stop = start + target.numel
            a = buffer[start:middle].view(target.rank, target.in_features)
            b = buffer[middle:stop].view(target.out_features, target.rank)
            found[target.name] = (a, b)
            start = stop
        return found


def collect(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pair the PEFT-named tensors to factors by target.

    Raises: ValueError: a name that is no LoRA factor, a target with only one of A and B, two ranks, no factor.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named:
        target, which = names.parse_factor(name)
        halves.setdefault(target, {})[which] = tensor
    if not halves:
        raise ValueError("no LoRA factor was given; a factors sync needs a PEFT model with a LoRA adapter")
    for target, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"target {target} has only LoRA {'/'.join(sorted(pair))}; it needs A and B")
        if pair["A"].shape[0] != pair["B"].shape[1]:
            raise ValueError(
                f"target {target} has A {tuple(pair['A'].shape)} and B {tuple(pair['B'].shape)}; "
                "they must be (r, in) and (out, r)"
            )
    return {target: (pair["A"], pair["B"]) for target, pair in halves.items()}
