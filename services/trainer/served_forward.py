"""Train on what is served: the trainer's forward pass goes through the merged weights that the policy has.

PEFT computes ``W0 x`` in bfloat16 and adds the adapter's part to it. That output lies on bfloat16's grid, so a small
part is swallowed there, as a merge that rounds to the nearest swallows it in the weights; and what is left of it is
another change than the policy's. Here a target computes ``W x`` with ``W`` the merge, bit for bit what the policy
serves, and the gradient goes straight through the merge and its rounding::

    dx = dy W        dA = scale (dy B)^T x        dB = scale dy^T (x A^T)

with A and B as they travel, in the type of ``x``. The float32 factors stay the only trained parameters, and their
gradients are float32. So the importance ratio at staleness 0 tests the kernels of both sides alone, and a forward pass
costs what the base model's costs. The price is memory: one more copy of the targets' weights.

The copies are made again by the first forward pass after an optimizer's step or another write that torch counts, so
once per optimizer step. ``parameter.data.copy_`` is not counted, and not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch.nn.functional import linear
from torch.optim.optimizer import register_optimizer_step_post_hook

from services.weight_sync import factors, names
from services.weight_sync.copies import MergedCopies
from services.weight_sync.dither import Rounding


def install(model: torch.nn.Module, rounding: Rounding) -> ServedWeights:
    """Send the forward pass of every LoRA target of ``model`` through its merged weight. No name or parameter changes.

    With adapters disabled, or merged in place, the layers compute what PEFT's do.
    Args: model: a PEFT model with one plain LoRA adapter. rounding: the recipe's ``weight_sync.rounding``.
    Raises: ValueError: a target has several adapters, dropout or a variant of LoRA, or is no linear layer.
    """
    layers = {target: _plain(model, target) for target in factors.collect(names.lora_factors(model))}
    served = ServedWeights(layers, rounding)
    for target, layer in layers.items():
        layer.forward = _forward(layer, target, served, layer.forward)
    return served


class ServedWeights:
    """The merged copies of all targets, never older than the factors."""

    def __init__(self, layers: dict[str, LoraLinear], rounding: Rounding) -> None:
        self._layers = layers
        self._rounding = rounding
        self._copies: MergedCopies | None = None
        self._places: dict[str, tuple[int, ...]] = {}
        self._written: dict[str, tuple[int, ...]] = {}
        # A fused optimizer, transformers' default, writes parameters without counting up their version.
        forget = weakref.WeakMethod(self._forget)
        self._hook = register_optimizer_step_post_hook(lambda *_: (call := forget()) and call())
        weakref.finalize(self, self._hook.remove)

    def _forget(self) -> None:
        self._written = {}

    def weight(self, target: str) -> torch.Tensor:
        """What the policy serves for ``target`` once it has the adapter as it is now."""
        if self._copies is None or self._written.get(target) != self._state(target):
            self._refresh()
            assert self._copies is not None
        return self._copies.weights[target]

    def _state(self, target: str) -> tuple[int, ...]:
        """Changes whenever a factor is written or one of the three matrices is another one."""
        a, b = _factors(self._layers[target])
        return (*self._place(target), a._version, b._version)

    def _place(self, target: str) -> tuple[int, ...]:
        layer = self._layers[target]
        return tuple(tensor.data_ptr() for tensor in (layer.base_layer.weight, *_factors(layer)))

    @torch.no_grad()
    def _refresh(self) -> None:
        pairs = {target: _factors(layer) for target, layer in self._layers.items()}
        places = {target: self._place(target) for target in pairs}
        if self._copies is None or places != self._places:
            base = {target: layer.base_layer.weight.detach() for target, layer in self._layers.items()}
            first = next(iter(self._layers.values()))
            layout = factors.Layout.of(pairs, first.base_layer.weight.dtype, _scale(first), self._rounding)
            self._copies, self._places = MergedCopies(layout, base), places
        self._copies.pack(pairs)
        self._copies.merge()
        self._written = {target: self._state(target) for target in pairs}


def _plain(model: torch.nn.Module, target: str) -> LoraLinear:
    layer = names.lora_layer(model, target)
    if not isinstance(layer, LoraLinear) or len(layer.lora_A) != 1 or layer.lora_variant:
        raise ValueError(f"{target} is {type(layer).__name__}; only a linear layer with one plain LoRA can be served")
    if any(not isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values()):
        raise ValueError(f"{target} has LoRA dropout; what is served has none, so lora.dropout must be 0")
    return layer


def _factors(layer: LoraLinear) -> tuple[torch.Tensor, torch.Tensor]:
    (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
    return a.weight, b.weight


def _scale(layer: LoraLinear) -> float:
    (scale,) = layer.scaling.values()
    return float(scale)


def _forward(
    layer: LoraLinear, target: str, served: ServedWeights, peft_forward: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer.disable_adapters or layer.merged:
            return peft_forward(x, *args, **kwargs)
        output: torch.Tensor = _Served.apply(x, *_factors(layer), served.weight(target), _scale(layer))
        bias = layer.base_layer.bias
        return output if bias is None else output + bias

    return forward


class _Served(torch.autograd.Function):
    """``x W^T`` with the gradients of ``x (W0 + scale B A)^T``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b, weight)
        ctx.scale = scale
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_x, None, None, None, None
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_a = (grads @ b.to(x.dtype)).T @ rows
        grad_b = grads.T @ (rows @ a.to(x.dtype).T)
        return grad_x, grad_a.to(a.dtype) * ctx.scale, grad_b.to(b.dtype) * ctx.scale, None, None
