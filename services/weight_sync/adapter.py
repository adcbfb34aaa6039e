"""From an adapter on disk to served weights: used by export and by every check of what was served.

Reads PEFT checkpoints and safetensors without PEFT or a model object, so that it runs anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from services.common.errors import RecipeError
from services.weight_sync import factors, names
from services.weight_sync.dither import Rounding, dither_of
from services.weight_sync.merge import merged

_REFUSED = {
    "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    "bias": "none", "fan_in_fan_out": False,
}  # fmt: skip
"""PEFT options that would change the merge, with the values that do not."""


@dataclass(frozen=True)
class Adapter:
    scale: float
    factors: factors.Factors

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        """Read ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises: RecipeError: a file is missing, or the adapter is not plain LoRA.
        """
        try:
            config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                pairs = factors.collect((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except FileNotFoundError as error:
            raise RecipeError(f"{folder} is not a PEFT checkpoint: {error.filename or error} is missing") from None
        except ValueError as error:
            raise RecipeError(f"adapter {folder}: {error}") from None
        for key, plain in _REFUSED.items():
            if (found := config.get(key, plain)) != plain and found:
                raise RecipeError(f"adapter {folder} has {key} = {found!r}; only plain LoRA ({plain!r}) can be merged")
        return cls(config["lora_alpha"] / config["r"], pairs)


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every weight in the model folder's safetensors files, one at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RecipeError(f"model folder {folder} has no safetensors file")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, file.get_tensor(name)


def merged_weights(
    model: Path, adapter: Adapter, dtype: torch.dtype, rounding: Rounding
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the model with the adapter merged in: bit for bit what the policy serves.

    Args: model: folder of the pristine base. dtype: the served type; the base is converted to it first. rounding: the
        run's ``weight_sync.rounding``.
    Raises: RecipeError: the adapter has a target that the base has not.
    """
    left = dict(adapter.factors)
    for name, weight in read_weights(model):
        target = name.removesuffix(".weight")
        pair = left.pop(target, None)
        weight = weight.to(dtype)
        dither = dither_of(rounding, dtype, target)
        yield name, weight if pair is None else merged(weight, *pair, adapter.scale, dither=dither)
    if left:
        raise RecipeError(f"model {model} has no {min(left)}.weight, a target of the adapter; wrong base model?")


def base_hashes(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of every base parameter, adapter left out, by Hugging Face name: equal before and after training."""
    found = {}
    for name, parameter in model.named_parameters():
        if (base := names.base_name(name)) is not None:
            data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found[base] = hashlib.sha256(data.numpy()).hexdigest()
    return found


def drifted(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names of base parameters that changed, appeared or vanished between two ``base_hashes``."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
