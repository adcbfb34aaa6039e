"""Merged weights of all targets, kept beside their base: for a trainer that computes with what is served.

The bits are the policy's: the same factors as they travel, the same merge.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.weight_sync.checksum import HAS_TRITON
from services.weight_sync.factors import Factors, Layout
from services.weight_sync.merge import merged


class MergedCopies:
    """Takes as much memory as the targets' weights.

    Args: base: target -> pristine weight, of the layout's type and all on one device; its memory must stay in place.
    """

    def __init__(self, layout: Layout, base: Mapping[str, torch.Tensor]) -> None:
        self.weights = {target.name: torch.empty_like(base[target.name]) for target in layout.targets}
        """Target -> what is served. Undefined before the first ``merge``, and then written in place."""
        device = next(iter(self.weights.values())).device
        self.layout, self.buffer = layout, layout.empty(device)
        """The factors as they travel."""
        self._base = base
        self._factors = layout.unpack(self.buffer)
        self._group = None
        if device.type == "cuda" and HAS_TRITON:
            from services.weight_sync.grouped import Group, Matrix

            self._group = Group([
                Matrix.of(base[name], a, b, self.weights[name], layout.dither(name))
                for name, (a, b) in self._factors.items()
            ])  # fmt: skip

    def pack(self, factors: Factors) -> None:
        """Take the factors that the next ``merge`` merges."""
        self.layout.pack(factors, self.buffer)

    @torch.no_grad()
    def merge(self) -> None:
        if self._group is not None:
            self._group.merge(self.layout.scale)
            return
        for name, (a, b) in self._factors.items():
            merged(self._base[name], a, b, self.layout.scale, self.weights[name], self.layout.dither(name))
