"""Does the policy's GPU hold what vLLM takes, the pristine copy of the trained matrices, and its context?

vLLM takes its share first; the copy comes at the first weight sync, and would end a run there.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

from scripts.checks import Check, ok, skipped, unfit
from scripts.doctor.data import hub_snapshot, weight_files
from scripts.doctor.setup import Setup, output_of
from services.common.recipe import Recipe

NAME = "gpu-memory"
CONTEXT_GB = 1.0
"""A CUDA context with the libraries' own buffers, outside vLLM's share."""
BYTES = {"float32": 4, "bfloat16": 2}


def policy_memory(setup: Setup, total_gb: float | None = None, base_gb: float | None = None) -> Check:
    """Args: total_gb: of the policy's GPU. base_gb: of the trained matrices, as they are served. GB are 2^30 bytes."""
    if setup.variant == "cpu":
        return skipped(NAME, "the cpu images use no GPU")
    total_gb = _total_gb(setup) if total_gb is None else total_gb
    base_gb = _base_gb(setup) if base_gb is None else base_gb
    if total_gb is None or base_gb is None:
        return skipped(NAME, "nvidia-smi names no such GPU" if total_gb is None else "the weights are not there")
    policy, trainer = setup.cfg.policy, setup.cfg.trainer.gpu_memory_fraction
    shared = f" + the trainer's {trainer:g} x {total_gb:.0f} and its context {CONTEXT_GB:g}" if trainer else ""
    other_gb = base_gb + CONTEXT_GB + (trainer * total_gb + CONTEXT_GB if trainer else 0.0)
    needed_gb = policy.gpu_memory_utilization * total_gb + other_gb
    found = (
        f"policy {policy.gpu_memory_utilization:g} x {total_gb:.0f} GB + base copy {base_gb:.1f} + context "
        f"{CONTEXT_GB:g}{shared} = {needed_gb:.1f} GB of {total_gb:.0f}"
    )
    if needed_gb < total_gb:
        return ok(NAME, found)
    fits = largest_utilization(total_gb, other_gb)
    if fits <= 0:
        return unfit(NAME, found, "use a larger card, or two: no value of policy.gpu_memory_utilization fits")
    return unfit(NAME, found, f"set policy.gpu_memory_utilization = {fits:.2f} in the recipe")


def largest_utilization(total_gb: float, other_gb: float) -> float:
    """The largest value of two digits that leaves room for the rest."""
    return math.ceil((total_gb - other_gb) / total_gb * 100 - 1) / 100


def base_copy_gb(headers: Iterable[dict[str, dict[str, list[int]]]], cfg: Recipe) -> float:
    """Args: headers: of the safetensors files, name -> ``{"shape": ...}``."""
    numbers = 0
    for header in headers:
        for name, tensor in header.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            if name.endswith(".weight") and module in cfg.lora.target_modules:
                numbers += math.prod(tensor["shape"])
    return numbers * BYTES[cfg.model.dtype] / 2**30


def _base_gb(setup: Setup) -> float | None:
    model = setup.cfg.model
    local = setup.models_dir / model.id
    folder = local if model.source == "local" else hub_snapshot(setup.hf_cache, model.id, model.revision or "")
    files = [folder / name for name in weight_files(folder)]
    return base_copy_gb(map(_header, files), setup.cfg) if all(path.is_file() for path in files) else None


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return dict(json.loads(stream.read(length)))


def _total_gb(setup: Setup) -> float | None:
    number = setup.environment.get("POLICY_GPU") or setup.environment.get("GPU")
    if number is None:
        number = "0" if setup.cfg.trainer.gpu_memory_fraction else "1"
    fields = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    code, found = output_of("nvidia-smi", f"--id={number}", *fields)
    return None if code or not found.strip().isdigit() else int(found) / 1024
