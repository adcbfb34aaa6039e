"""``python -m scripts.bench_attention_gpu [--tiny]``: the attentions that need no Hub, at the recipe's size.

Needs one GPU, torch, transformers and peft. The model is that of ``bench_packing_gpu``: LFM2.5-2.6B's shapes, random
weights, bf16, a LoRA adapter. For ``varlen`` and ``sdpa`` (services/trainer/packed_attention.py) and transformers' own
masked ``sdpa``: how far samples packed into a row are from the same samples alone, tokens/s and peak memory of a packed
training step, for a row of few long samples and one of many short ones.

Exit 1 if one leaks between samples, or ``varlen`` is slower than ``sdpa``. ``--tiny`` runs ``sdpa`` on a CPU, to see
that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys

import torch

from scripts import bench_packing_gpu as gpu
from scripts.bench_packing_gpu import TINY, Results, Size
from services.trainer import packed_attention, packing
from services.trainer.packed_attention import PACKED_SDPA, PACKED_VARLEN

ROWS = {"4 long samples": (3000, 1900, 1200, 1000), "32 short samples": (256,) * 32}
MASKED = "sdpa"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_attention_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("no CUDA device was found; the full size needs one, --tiny does not", file=sys.stderr)
        return 2
    size = TINY if options.tiny else Size()
    packed_attention.register()
    model = gpu.build(size, device, 0.1 if options.tiny else 0.02)
    packing.install(model)
    results = Results()
    names = [*([PACKED_VARLEN] if device == "cuda" else []), PACKED_SDPA, MASKED]
    for row, lengths in ROWS.items():
        shape = size if options.tiny else dataclasses.replace(size, samples=lengths)
        for name in names:
            exactness(model, shape, name, row, results)
        compare_speed(model, shape, names, row, results, judge=not options.tiny)
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "failed": results.failed, **results.numbers}))
    return 1 if results.failed else 0


def exactness(model: torch.nn.Module, size: Size, name: str, row: str, results: Results) -> None:
    model.get_base_model().set_attn_implementation(name)
    report = packing.measure(model, gpu.samples(size))
    value, bound = report.max_abs_logprob_diff, gpu.PACKING_BOUND
    results.add(f"{row}, {name}: packed vs alone, max |dlogp|", value, "nats", value <= bound)
    value, bound = report.max_rel_gradient_diff, packing.MAX_REL_GRADIENT_DIFF[torch.bfloat16]
    results.add(f"{row}, {name}: packed vs alone, relative gradient", value, passed=value <= bound)


def compare_speed(
    model: torch.nn.Module, size: Size, names: list[str], row: str, results: Results, judge: bool
) -> None:
    """A packed forward and backward with gradient checkpointing, each attention in turn."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    samples = gpu.samples(size)
    ids = torch.tensor([[token for sample in samples for token in sample]], device=gpu.device_of(model))
    positions = torch.cat([torch.arange(len(sample), device=ids.device) for sample in samples])[None]

    def step() -> None:
        model(input_ids=ids, position_ids=positions).log_probs.sum().backward()
        model.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(size.repeats + 1):
        for name in names:
            model.get_base_model().set_attn_implementation(name)
            if ids.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            taken = gpu.seconds(step, ids.device)
            if turn:  # the first one compiles and allocates
                times[name].append(taken)
            elif ids.is_cuda:
                results.add(f"{row}, {name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    model.gradient_checkpointing_disable()
    speeds = {name: ids.numel() / statistics.median(found) for name, found in times.items()}
    for name, speed in speeds.items():
        results.add(f"{row}, {name}: packed step", speed, "tokens/s")
    for name in names[:-1]:
        results.add(f"{row}, {name}: speed over masked sdpa", speeds[name] / speeds[MASKED])
    if PACKED_VARLEN in speeds:
        ratio = speeds[PACKED_VARLEN] / speeds[PACKED_SDPA]
        results.add(f"{row}, varlen over sdpa", ratio, passed=ratio >= 1 if judge else None)


if __name__ == "__main__":
    sys.exit(main())
