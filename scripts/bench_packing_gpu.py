"""``python -m scripts.bench_packing_gpu [--tiny]``: packing, base drift, merge and canary in bf16 at the recipe's size.

Needs one GPU, torch, transformers and peft; no vLLM, no TRL, no weights from anywhere. LFM2.5-2.6B's shapes with random
weights: 20 short convolutions and 10 attention layers, 2.557 B parameters, LoRA r = 32 on the recipe's targets.
``--tiny`` runs the same on a CPU in seconds, to see that it runs.

Prints one line a number, and all of them as JSON at the end. Exit 1 if a check fails: packed samples with the hooks as
they are alone; hooks at no more than 5 % of a step's speed; a base without drift; a merge with B = 0 that changes no
bit; the merged weights' log-probabilities within the recipe's canary bound of the trainer's.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import Lfm2Config, Lfm2ForCausalLM

from services.trainer import packing
from services.weight_sync import names
from services.weight_sync.checksum import checksum
from services.weight_sync.merge import merged

TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3"]
PACKING_BOUND = 0.5
"""Of the recipe: trainer.packing_max_abs_logprob_diff."""
CANARY_BOUND = 0.15
"""Of the recipe: weight_sync.canary_mean_abs_logprob_diff."""
MIN_SPEED = 0.95
CYCLES = 50
CANARY_TOKENS = 600
LOGITS_TILE = 1024
CHANGE = 0.05
"""Size of scale * B @ A over the size of W0, of a random adapter."""


@dataclass(frozen=True)
class Size:
    hidden: int = 2048
    feed_forward: int = 10752
    heads: int = 32
    kv_heads: int = 8
    blocks: int = 10
    """Of two convolutions and one attention layer each."""
    vocab: int = 65536
    rank: int = 32
    samples: tuple[int, ...] = (3000, 1900, 1200, 1000)
    repeats: int = 5


TINY = Size(hidden=128, feed_forward=256, heads=2, kv_heads=1, blocks=2, vocab=512, rank=4, samples=(120, 70, 41))


class Results:
    """What was measured, printed as it comes."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.failed: list[str] = []

    def add(self, name: str, value: float, unit: str = "", passed: bool | None = None) -> None:
        self.numbers[name] = value
        verdict = "" if passed is None else "  PASS" if passed else "  FAIL"
        if passed is False:
            self.failed.append(name)
        print(f"{name:58} {value:.6g} {unit}{verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_packing_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    parser.add_argument("--initializer-range", type=float, default=None, help="of the random weights")
    options = parser.parse_args()
    size, device = (TINY if options.tiny else Size()), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("no CUDA device was found; the full size needs one, --tiny does not", file=sys.stderr)
        return 2
    results = Results()
    model = build(size, device, options.initializer_range or (0.1 if options.tiny else 0.02))
    results.add("parameters of the base", base_parameters(model) / 1e9, "B")
    results.add("parameters of the targets", sum(w.numel() for _, w, *_ in targets(model)) / 1e9, "B")
    for part in (packing_numbers, speed, zero_merge, merge_times, canary, drift):
        part(model, size, results)
    if device == "cuda":
        results.add("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "failed": results.failed, **results.numbers}))
    return 1 if results.failed else 0


# -- the model -------------------------------------------------------------------------------------------------


def build(size: Size, device: str, initializer_range: float) -> torch.nn.Module:
    """Random weights in bf16 under a random adapter, with the forward pass of training: log-probabilities only."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.feed_forward,
        block_auto_adjust_ff_dim=False, num_hidden_layers=3 * size.blocks, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, layer_types=["conv", "conv", "full_attention"] * size.blocks,
        conv_L_cache=3, initializer_range=initializer_range, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = Lfm2ForCausalLM(config).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    model.forward = types.MethodType(_forward, model)
    lora = LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, lora).train()
    wrapped.enable_input_require_grads()
    randomise(wrapped, seed=0)
    return wrapped


def _forward(
    self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any
) -> Any:
    """Stands for TRL's fused head: the [T, vocabulary] logits never exist at once, nor are they kept."""
    hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state[0, :-1]
    tiles = zip(hidden.split(LOGITS_TILE), input_ids[0, 1:].split(LOGITS_TILE), strict=True)
    weight = self.lm_head.weight
    found = [checkpoint(_tile_logprobs, h, weight, target, use_reentrant=False) for h, target in tiles]
    return SimpleNamespace(log_probs=torch.cat(found)[None])


def _tile_logprobs(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)


def base_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if names.base_name(name) is not None)


def targets(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Name, W0, A and B of every target."""
    factors = dict(names.lora_factors(model))
    for name, a in factors.items():
        target, which = names.parse_factor(name)
        if which == "A":
            yield target, names.base_weight(model, target), a, factors[name.replace(".lora_A.", ".lora_B.")]


def randomise(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for _, w0, a, b in targets(model):  # all detached
        b.normal_(std=float(CHANGE * w0.float().std() / (2.0 * a.float().std() * a.shape[0] ** 0.5)))


def samples(size: Size) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, size.vocab, (length,), generator=generator).tolist() for length in size.samples]


# -- packing ---------------------------------------------------------------------------------------------------


@contextmanager
def hooks(model: torch.nn.Module) -> Iterator[None]:
    installed = packing.install(model)
    try:
        yield
    finally:
        for hook in installed:
            hook.remove()


def packing_numbers(model: torch.nn.Module, size: Size, results: Results) -> None:
    leaking = packing.measure(model, samples(size))
    with hooks(model):
        exact = packing.measure(model, samples(size))
    gradient_bound = packing.MAX_REL_GRADIENT_DIFF[torch.bfloat16]
    results.add("packed vs alone, without hooks: max |dlogp|", leaking.max_abs_logprob_diff, "nats")
    results.add("packed vs alone, without hooks: max relative gradient", leaking.max_rel_gradient_diff)
    value = exact.max_abs_logprob_diff
    results.add("packed vs alone, with hooks: max |dlogp|", value, "nats", value <= PACKING_BOUND)
    value = exact.max_rel_gradient_diff
    results.add("packed vs alone, with hooks: max relative gradient", value, passed=value <= gradient_bound)
    shows = leaking.max_rel_gradient_diff > gradient_bound or leaking.max_abs_logprob_diff > PACKING_BOUND
    results.add("the check sees the leak (1 yes, 0 no)", float(shows), passed=shows)


def speed(model: torch.nn.Module, size: Size, results: Results) -> None:
    """A packed forward and backward with gradient checkpointing, with and without the hooks in turn."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows = samples(size)
    ids = torch.tensor([[token for sample in rows for token in sample]], device=device_of(model))
    positions = torch.cat([torch.arange(len(sample), device=ids.device) for sample in rows])[None]

    def step() -> None:
        model(input_ids=ids, position_ids=positions).log_probs.sum().backward()
        model.zero_grad(set_to_none=True)

    step()
    bare, hooked = [], []
    for _ in range(size.repeats):
        bare.append(seconds(step, ids.device))
        with hooks(model):
            hooked.append(seconds(step, ids.device))
    model.gradient_checkpointing_disable()
    results.add("packed step without hooks", ids.numel() / statistics.median(bare), "tokens/s")
    results.add("packed step with hooks", ids.numel() / statistics.median(hooked), "tokens/s")
    ratio = statistics.median(bare) / statistics.median(hooked)
    # The tiny step lasts milliseconds: its ratio says nothing.
    results.add("speed with hooks over without", ratio, passed=None if size is TINY else ratio >= MIN_SPEED)


# -- merge -----------------------------------------------------------------------------------------------------


def zero_merge(model: torch.nn.Module, _size: Size, results: Results) -> None:
    changed = sum(checksum(merged(w0, a, torch.zeros_like(b), 2.0)) != checksum(w0) for _, w0, a, b in targets(model))
    results.add("targets that a merge with B = 0 changes", changed, passed=changed == 0)


def merge_times(model: torch.nn.Module, size: Size, results: Results) -> None:
    found = list(targets(model))
    served = [torch.empty_like(w0) for _, w0, *_ in found]

    def ours() -> None:
        for target, (_, w0, a, b) in zip(served, found, strict=True):
            merged(w0, a, b, 2.0, out=target)

    def with_products() -> None:
        for target, (_, w0, a, b) in zip(served, found, strict=True):
            torch.addmm(w0, b.to(w0.dtype), a.to(w0.dtype), alpha=2.0, out=target)

    device = device_of(model)
    with torch.no_grad():
        for name, merge in (("fixed order, bit for bit the same everywhere", ours), ("matrix products", with_products)):
            merge()
            times = [seconds(merge, device) for _ in range(size.repeats)]
            results.add(f"merge of all targets, {name}", 1000 * statistics.median(times), "ms")


def canary(model: torch.nn.Module, size: Size, results: Results) -> None:
    """The trainer's forward (base and adapter apart) against the merged weights that the policy serves."""
    ids = torch.randint(3, size.vocab, (1, CANARY_TOKENS), generator=torch.Generator().manual_seed(2))
    score = functools.partial(_score, model, ids.to(device_of(model)))
    trainer = score()
    with served(model):
        policy = score()
    randomise(model, seed=3)
    moved = score()
    randomise(model, seed=0)
    mean = float((trainer - policy).abs().mean())
    # The tiny model's weights are large, to make its leak large; so are its rounding errors.
    passed = None if size is TINY else mean <= CANARY_BOUND
    results.add("canary, trainer vs merged weights: mean |dlogp|", mean, "nats", passed)
    results.add("canary, trainer vs merged weights: max |dlogp|", float((trainer - policy).abs().max()), "nats")
    mean = float((trainer - moved).abs().mean())
    results.add("canary, another adapter: mean |dlogp|", mean, "nats", mean > CANARY_BOUND)
    results.add("canary, another adapter: max |dlogp|", float((trainer - moved).abs().max()), "nats")


def _score(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, position_ids=positions).log_probs[0]
    return found


@contextmanager
def served(model: Any) -> Iterator[None]:
    """Merged weights in the base's place and no adapter, as the policy has it; the base comes back afterwards."""
    base = {target: w0 for target, w0, *_ in targets(model)}
    weights = {target: merged(w0, a, b, 2.0) for target, w0, a, b in targets(model)}
    _put(model, weights)
    try:
        with model.disable_adapter():
            yield
    finally:
        _put(model, base)


def _put(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for target, weight in weights.items():
        model.get_submodule(f"base_model.model.{target}.base_layer").weight.data = weight


def drift(model: Any, _size: Size, results: Results) -> None:
    """The base after ``CYCLES`` syncs: merged out of place as ours, then in place and undone as PEFT does it. Last, as
    that spoils the model."""
    before = {target: checksum(w0) for target, w0, *_ in targets(model)}
    for seed in range(CYCLES):
        randomise(model, seed)
        for _, w0, a, b in targets(model):
            merged(w0, a, b, 2.0)
    changed = sum(checksum(w0) != before[target] for target, w0, *_ in targets(model))
    results.add(f"base matrices changed by {CYCLES} merges out of place", changed, passed=changed == 0)
    pristine = {target: w0.clone() for target, w0, *_ in targets(model)}
    for seed in range(CYCLES):
        randomise(model, seed)
        model.merge_adapter()
        model.unmerge_adapter()
    largest = max(float((w0.float() - pristine[target].float()).abs().max()) for target, w0, *_ in targets(model))
    changed = sum(checksum(w0) != before[target] for target, w0, *_ in targets(model))
    results.add(f"base matrices changed by {CYCLES} merges in place", changed, f"of {len(before)}")
    results.add(f"largest drift after {CYCLES} merges in place", largest)


# -- time ------------------------------------------------------------------------------------------------------


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
