"""Which attention the trained model uses on rows of packed samples: the recipe's ``trainer.attn_implementation``.

TRL packs samples into one row, marks their starts by ``position_ids`` alone, and always loads the model with a
FlashAttention kernel from the Hub, which derives the samples' lengths from those. Three choices keep packing right:

* ``kernels-community/flash-attn3``: that kernel. The trainer image carries it where the Hub answered while the image
  was built (images/trainer/fetch_kernels.py).
* ``varlen``: the FlashAttention 2 kernel that torch carries. CUDA, bf16.
* ``sdpa``: torch's scaled dot product attention, a call a sample. Any device, any dtype.

Nothing is chosen silently: what the recipe asks for is there, or the run does not start.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.integrations.hub_kernels import load_and_register_attn_kernel
from trl.experimental.async_grpo import async_grpo_trainer
from trl.trainer.utils import create_model_from_path

from services.common.errors import RecipeError
from services.trainer import packed_attention
from services.trainer.packed_attention import PACKED_SDPA, PACKED_VARLEN

Implementation = Literal["kernels-community/flash-attn3", "varlen", "sdpa"]

FLASH: Literal["kernels-community/flash-attn3"] = "kernels-community/flash-attn3"
NAMES: dict[Implementation, str] = {FLASH: FLASH, "varlen": PACKED_VARLEN, "sdpa": PACKED_SDPA}
"""The recipe's key -> transformers' name."""
IMAGE_KERNELS = Path("/app/kernels")
"""Where images/trainer/fetch_kernels.py puts them."""


def install(implementation: Implementation, dtype: str = "bfloat16") -> str:
    """Have every ``AsyncGRPOTrainer`` built from now on load its model with the recipe's attention.

    TRL takes no such argument: it passes the kernel's name to ``create_model_from_path`` itself, and repeating it in
    ``model_init_kwargs`` is a TypeError. So that one name in TRL's trainer module is bound to a wrapper.

    Args: dtype: the recipe's ``model.dtype``.
    Returns: transformers' name of it, for the log.
    Raises: RecipeError: the machine has no CUDA device, the image no kernel, or the kernel cannot do the dtype.
    """
    if implementation != "sdpa":
        _require_cuda_and_bf16(implementation, dtype)
    name = NAMES[implementation]
    if implementation == FLASH:
        load_flash_attention()
        async_grpo_trainer.create_model_from_path = create_model_from_path
        return name
    packed_attention.register()

    @functools.wraps(create_model_from_path)
    def create(model_id: str, **kwargs: Any) -> torch.nn.Module:
        return create_model_from_path(model_id, **{**kwargs, "attn_implementation": name})

    async_grpo_trainer.create_model_from_path = create
    return name


def load_flash_attention() -> None:
    """Load TRL's kernel the way transformers will: from the image, else from the Hub cache that is mounted.

    ``LOCAL_KERNELS``, which the ``kernels`` package reads, names the image's copy; one that is set already stays.
    Raises: RecipeError: there is none for this machine, with the reason that ``kernels`` gives.
    """
    if "LOCAL_KERNELS" not in os.environ and (folder := image_kernel()) is not None:
        os.environ["LOCAL_KERNELS"] = f"{FLASH}={folder}"
    try:
        load_and_register_attn_kernel(FLASH)
    except (ValueError, ImportError) as error:
        raise RecipeError(
            f"trainer.attn_implementation is {FLASH!r}, and that kernel cannot be loaded here: {error} Build the "
            "trainer image where the Hub answers, or set it to 'varlen', which needs nothing from the Hub"
        ) from None


def image_kernel() -> Path | None:
    """Folder of the kernel's repository in this image, a snapshot as the Hub's cache keeps it."""
    return next(IMAGE_KERNELS.glob(f"kernels--{FLASH.replace('/', '--')}/snapshots/*"), None)


def _require_cuda_and_bf16(implementation: str, dtype: str) -> None:
    if not torch.cuda.is_available():
        raise RecipeError(
            f"trainer.attn_implementation is {implementation!r} and this machine has no CUDA device; set it to 'sdpa'"
        )
    if dtype == "float32":
        raise RecipeError(
            f"trainer.attn_implementation is {implementation!r} and model.dtype 'float32'; FlashAttention takes "
            "bfloat16 only: set model.dtype to 'bfloat16', or attn_implementation to 'sdpa'"
        )
