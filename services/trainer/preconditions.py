"""What must hold of machine and recipe before a rollout is paid for, and what upstream would pass over in silence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.common.errors import MachineError, RecipeError


def require_one_gpu(count: int) -> None:
    """transformers would wrap the model in ``nn.DataParallel``, which neither the loss nor the packing is made for.

    Args: count: ``torch.cuda.device_count()``.
    Raises: MachineError: more than one.
    """
    if count > 1:
        raise MachineError(
            f"the trainer sees {count} GPUs and trains on one; give it one: device_ids in compose.yaml, or "
            "CUDA_VISIBLE_DEVICES=0"
        )


def require_known_targets(config: Any, target_modules: Iterable[str]) -> None:
    """PEFT leaves out a name that matches nothing, as long as another one matches.

    Args: config: of transformers, of the model that will be trained. target_modules: the recipe's; each stands for
        the linear layers of that name, or whose dotted name ends in it.
    Raises: RecipeError: a name that no linear layer has, with those that exist.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head}
    unknown = [
        target for target in target_modules if not any(name == target or name.endswith(f".{target}") for name in linear)
    ]
    if unknown:
        raise RecipeError(
            f"lora.target_modules names {', '.join(map(repr, unknown))}, which no linear layer of this model has; "
            f"allowed: {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
        )
