"""LFM2's short convolution on processors with AVX-512 BF16, where vLLM 0.31's CPU build cannot load it.

On such a processor vLLM packs every convolution weight for a kernel of its own that takes width 4 only, while
LFM2's width is 3: ``causal_conv1d_weight_pack: support only width of 4``, and the server does not start. LFM2's
forward never calls that kernel; its own takes the weight as it is. So the packing is left out, with the flag
that vLLM itself sets on layers that must not be packed, on a subclass put in through vLLM's registry of
out-of-tree layers. Remove this when vLLM packs only what it can.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.mamba.short_conv import ShortConv

PACKABLE_WIDTH = 4


class UnpackedShortConv(ShortConv):
    """``ShortConv`` whose convolution weight stays as loaded unless the packed kernel can take it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.L_cache != PACKABLE_WIDTH:
            self.conv._cpu_skip_gemm_dispatch = True


def register() -> None:
    """Let vLLM build ``UnpackedShortConv`` wherever a model asks for ``ShortConv``; again changes nothing."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if ShortConv.__name__ not in op_registry_oot:
        PluggableLayer.register_oot(name=ShortConv.__name__)(UnpackedShortConv)
