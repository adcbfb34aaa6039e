"""``python -m scripts.export.merge BASE ADAPTER OUT DTYPE ROUNDING``: the base with an adapter in it, as it was served.

Needs torch, so ``scripts.export_adapter`` runs it in the trainer image where the host has none.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file

from scripts.export import BASE_FILES, MERGED_WEIGHTS
from services.common.errors import run_main
from services.weight_sync.adapter import Adapter, merged_weights
from services.weight_sync.dither import Rounding


def write_merged(base: Path, adapter: Path, out: Path, dtype: str, rounding: Rounding) -> None:
    """Write the merged model with the base's config, tokenizer and template to ``out``.

    Holds the whole model in memory.
    Raises: RecipeError: the adapter is not plain LoRA, or of another base.
    """
    weights = dict(merged_weights(base, Adapter.load(adapter), getattr(torch, dtype), rounding))
    out.mkdir(parents=True, exist_ok=True)
    for path in {path for pattern in BASE_FILES for path in base.glob(pattern)}:
        shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, out / MERGED_WEIGHTS, metadata={"format": "pt"}
    )


def main(arguments: list[str]) -> int:
    base, adapter, out, dtype, rounding = arguments
    write_merged(Path(base), Path(adapter), Path(out), dtype, cast(Rounding, rounding))
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
