"""The names that one LoRA target has in the places that know it.

====================  ===================================================================
PEFT, live model      ``base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight``
PEFT, checkpoint      ``base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight``
Hugging Face base     ``model.layers.2.self_attn.q_proj.weight``
vLLM                  ``model.layers.2.self_attn.qkv_proj.weight``, shard ``q`` (``served.locate`` finds it)
====================  ===================================================================

A *target* is the Hugging Face module name, ``model.layers.2.self_attn.q_proj``: it is what travels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_FACTOR = re.compile(rf"^{re.escape(_PREFIX)}(?P<target>.+)\.lora_(?P<which>[AB])(\.(?P<adapter>[^.]+))?\.weight$")


def parse_factor(name: str) -> tuple[str, Literal["A", "B"]]:
    """Target and factor of a PEFT parameter name, live or from a checkpoint.

    Raises: ValueError: not the name of a LoRA A or B matrix (an embedding's factors, DoRA magnitudes, a bias).
    """
    match = _FACTOR.match(name)
    if match is None:
        raise ValueError(
            f"parameter {name!r} is not a LoRA factor of a linear layer; "
            f"expected {_PREFIX}<module>.lora_A|lora_B[.<adapter>].weight"
        )
    return match["target"], "A" if match["which"] == "A" else "B"


def base_name(name: str) -> str | None:
    """Hugging Face name of a parameter of a PEFT model, or of a bare one; None for the adapter's own."""
    bare = name.removeprefix(_PREFIX)
    if ".lora_" in bare:
        return None
    return bare.replace(".base_layer.", ".")


def lora_factors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """``(PEFT name, tensor)`` of every LoRA factor: what ``LoraFactorSync.send_weights`` takes."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield name, parameter.detach()


def lora_layer(model: torch.nn.Module, target: str) -> torch.nn.Module:
    """The layer of ``target`` in a PEFT model, adapter included. Raises: AttributeError: it has no such module."""
    return model.get_submodule(_PREFIX + target)


def base_weight(model: torch.nn.Module, target: str) -> torch.Tensor:
    """Frozen weight ``(out_features, in_features)`` below the adapter of ``target`` in a PEFT model.

    Raises: AttributeError: the model has no such module, or no adapter on it.
    """
    return model.get_submodule(_PREFIX + target + ".base_layer").weight.detach()
