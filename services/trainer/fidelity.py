"""``python -m services.trainer.fidelity``: is what would be trained exactly what is sampled?

In: the recipe, its model, and ``POLICY_URL`` of a running policy that serves the pristine base and that no trainer is
connected to. Out: one line of JSON on stdout, a list of checks with their numbers. ``scripts.fidelity`` starts the
policy, shows the table and adds the tool-call cases. Nothing is trained: adapters are random, so that many differ.

A small number proves little unless a fault would make it large. So beside these stand controls: the same measurement
where the fault is there on purpose, which must show it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config, Lfm2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from services.common import recipe
from services.common.errors import RecipeError, StoppedError, run_main
from services.common.recipe import Recipe
from services.trainer import attention, cpu, packing, sampling_check, served_forward
from services.trainer.ratio import RATIO_AT_0, ratio_stats
from services.weight_sync import names, proof
from services.weight_sync.adapter import Adapter, base_hashes, drifted, merged_weights, read_weights
from services.weight_sync.canary import Canary, model_score, prompt_ids
from services.weight_sync.checksum import checksum
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.policy_server import PolicyServer

SYNCS, CANARIES = 50, 5
TIMEOUT_S = 120.0
CHANGE = 0.05
"""Of a random adapter: size of scale * B @ A over the size of W0."""
SAMPLES, SAMPLE_TOKENS, SAMPLES_A_ROW = 8, 64, 4
REPETITION_PENALTY = 1.5


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    check: str
    found: float | int | str
    allowed: str
    passed: bool
    control: bool = False
    """The fault is there on purpose, and must show."""


def at_most(check: str, found: float, bound: float) -> Check:
    return Check(check, found, f"<= {bound:g}", found <= bound)  # not ``not >``: a NaN must fail


def must_show(check: str, found: float, bound: float) -> Check:
    return Check(check, found, f"> {bound:g}", found > bound, control=True)


def none_of(check: str, found: int, total: int) -> Check:
    return Check(check, found, f"0 of {total}", found == 0 and total > 0)


def main() -> int:
    cfg = recipe.from_environment()
    if not (policy_url := os.environ.get("POLICY_URL")):
        raise RecipeError("POLICY_URL is not set; it names the running policy, as http://policy:8000")
    checks = run(cfg, policy_url)
    print(json.dumps([asdict(check) for check in checks]), flush=True)
    return 0 if all(check.passed for check in checks) else 1


def run(cfg: Recipe, policy_url: str, num_syncs: int = SYNCS) -> list[Check]:
    """All checks, in the order of the issue's fidelity rules; a failed sync ends them with a row of its own."""
    model, tokenizer = load(cfg)
    checks = packing_checks(cfg, model, tokenizer)
    sync = LoraFactorSync(_with_canaries(cfg, num_syncs), policy_url, device=next(model.parameters()).device)
    server = PolicyServer(policy_url, cfg.policy.served_model_name)
    try:
        for part in (zero_sync_checks, many_sync_checks, ratio_checks, sampling_checks):
            checks += part(_Bench(cfg, model, tokenizer, sync, server, num_syncs))
    except StoppedError as error:
        checks.append(Check("weight sync proves what is served", str(error), "no difference", False))
    finally:
        sync.destroy()
        server.close()
    return checks


# -- the model, as a training process holds it -----------------------------------------------------------------


def load(cfg: Recipe) -> tuple[torch.nn.Module, Any]:
    """The recipe's model with a fresh adapter (B = 0), and its tokenizer, as ``AsyncGRPOTrainer`` makes them."""
    torch.set_num_threads(cfg.trainer.omp_threads)
    on_cpu = not torch.cuda.is_available()
    attention.install(cfg.trainer.attn_implementation, cfg.model.dtype)
    if on_cpu:
        cpu.install()
    source = {"pretrained_model_name_or_path": cfg.model_location(), "revision": cfg.model.revision}
    if cfg.model.source == "local":
        del source["revision"]
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=getattr(torch, cfg.model.dtype), attn_implementation=_attention(cfg)
    )
    return with_adapter(cfg, model.to("cpu" if on_cpu else "cuda")), AutoTokenizer.from_pretrained(**source)


def with_adapter(cfg: Recipe, model: torch.nn.Module) -> torch.nn.Module:
    add_fused_lm_head(model, temperature=cfg.sampling.temperature, outputs=("log_probs", "entropy"))
    config = LoraConfig(
        r=cfg.lora.r, lora_alpha=cfg.lora.alpha, target_modules=list(cfg.lora.target_modules), task_type="CAUSAL_LM"
    )
    wrapped: torch.nn.Module = get_peft_model(model, config).train()
    if cfg.trainer.forward == "served":
        served_forward.install(wrapped, cfg.weight_sync.rounding)
    return wrapped


def without_convolutions(cfg: Recipe, model: torch.nn.Module) -> torch.nn.Module:
    """The control: four attention layers of the model's own shape, random weights."""
    config = Lfm2Config(**{**model.config.to_dict(), "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4})
    parameter = next(model.parameters())
    bare = Lfm2ForCausalLM(config).to(parameter.dtype).to(parameter.device)
    bare.set_attn_implementation(_attention(cfg))
    return with_adapter(cfg, bare)


def _attention(cfg: Recipe) -> str:
    return attention.NAMES[cfg.trainer.attn_implementation]


@torch.no_grad()
def randomise(model: torch.nn.Module, scale: float, seed: int) -> None:
    """Another B for every target, of a size that changes each weight by ``CHANGE`` of its own."""
    generator = torch.Generator().manual_seed(seed)
    factors = dict(names.lora_factors(model))
    for name, a in factors.items():
        target, which = names.parse_factor(name)
        if which == "B":
            continue
        b = factors[name.replace(".lora_A.", ".lora_B.")]
        size = names.base_weight(model, target).float().std() / (a.float().std() * a.shape[0] ** 0.5 * scale)
        b.copy_(torch.randn(b.shape, generator=generator).to(b.device) * size * CHANGE)


@torch.no_grad()
def zero(model: torch.nn.Module) -> None:
    for name, factor in names.lora_factors(model):
        if ".lora_B." in name:
            factor.zero_()


# -- packing ---------------------------------------------------------------------------------------------------


def packing_checks(cfg: Recipe, model: torch.nn.Module, tokenizer: Any) -> list[Check]:
    """Packed against alone: with the hooks, without them, and for a model that needs none. Leaves the hooks in."""
    bound = cfg.trainer.packing_max_abs_logprob_diff
    longest = min(cfg.model.max_model_len // 4, 1024)
    ids = prompt_ids(tokenizer, longest)
    samples = [ids[:longest], ids[7 : 7 + longest // 3], ids[3 : 3 + longest // 2]]
    randomise(model, cfg.lora_scale, seed=0)
    leaking = packing.measure(model, samples)
    control = without_convolutions(cfg, model)
    randomise(control, cfg.lora_scale, seed=0)
    attending = packing.measure(control, samples)
    packing.install(model)
    exact = packing.measure(model, samples)
    zero(model)
    gradient_bound = cfg.trainer.packing_max_rel_gradient_diff
    if gradient_bound is None:
        gradient_bound = packing.MAX_REL_GRADIENT_DIFF[next(model.parameters()).dtype]
    return [
        at_most("packed vs alone, with the hooks: max |dlogp|", exact.max_abs_logprob_diff, bound),
        at_most("packed vs alone, with the hooks: max relative gradient", exact.max_rel_gradient_diff, gradient_bound),
        must_show("packed vs alone, without the hooks: max |dlogp|", leaking.max_abs_logprob_diff, bound),
        at_most("packed vs alone, no convolution layers: max |dlogp|", attending.max_abs_logprob_diff, bound),
    ]


# -- weight sync -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """What the checks against the policy work with."""

    cfg: Recipe
    model: torch.nn.Module
    tokenizer: Any
    sync: LoraFactorSync
    server: PolicyServer
    num_syncs: int

    def send(self) -> None:
        self.sync.send_weights(names.lora_factors(self.model))

    def prompt(self) -> list[int]:
        """Begins otherwise than the canary, so that it finds nothing of that in the prefix cache."""
        return prompt_ids(self.tokenizer)[3:]


def zero_sync_checks(bench: _Bench) -> list[Check]:
    """The first sync of a run, B = 0: no bit of what the policy says may change."""

    def say() -> tuple[list[float], list[int], list[float]]:
        return bench.server.score(bench.prompt(), TIMEOUT_S), *bench.server.complete(bench.prompt(), 32, TIMEOUT_S)

    scored, tokens, logprobs = say()
    bench.sync.init_weight_transfer()
    zero(bench.model)
    bench.send()
    scored_after, tokens_after, logprobs_after = say()
    changed = sum(a != b for a, b in zip(tokens, tokens_after, strict=True))
    difference = _largest([*scored, *logprobs], [*scored_after, *logprobs_after])
    return [
        none_of("B = 0 sync: greedy tokens that changed", changed, len(tokens)),
        at_most("B = 0 sync: max |dlogp|", difference, 0.0),
    ]


def many_sync_checks(bench: _Bench) -> list[Check]:
    """Adapters one after the other: the base stays, the last one is served, and both ends compute the same."""
    cfg, model, sync, server = bench.cfg, bench.model, bench.sync, bench.server
    bound = cfg.weight_sync.canary_max_abs_logprob_diff
    pristine = server.score(bench.prompt(), TIMEOUT_S)
    before = base_hashes(model)
    # The bound is infinite here, so that the table shows the number whatever it is; NaN still stops.
    canary = Canary(prompt_ids(bench.tokenizer), model_score(model), math.inf)
    sync.prove_with(base_weight=functools.partial(names.base_weight, model), canary=canary)
    differences = []
    for seed in range(1, bench.num_syncs + 1):
        randomise(model, cfg.lora_scale, seed)
        bench.send()
        if sync.last_canary is not None:
            differences.append(sync.last_canary.mean_abs_logprob_diff)
    after = base_hashes(model)
    moved = _largest(pristine, server.score(bench.prompt(), TIMEOUT_S))
    times = f"{bench.num_syncs} syncs"
    return [
        Check(f"hash of all base weights after {times}", _digest(after), f"{_digest(before)} before",
              not drifted(before, after)),
        none_of(f"trainer's base weights that {times} changed", len(drifted(before, after)), len(before)),
        *served_checks(cfg, model, server.reports(TIMEOUT_S), times),
        must_show("policy before vs after: max |dlogp|", moved, bound),
        at_most(f"canary, largest of {len(differences)}: mean |dlogp|", max(differences, default=math.nan),
                cfg.weight_sync.canary_mean_abs_logprob_diff),
    ]  # fmt: skip


def served_checks(cfg: Recipe, model: torch.nn.Module, reports: proof.Reports, times: str) -> list[Check]:
    """The policy's weights against files: its base against the model's, what it serves against the saved adapter."""
    folder, dtype = weights_folder(cfg), getattr(torch, cfg.model.dtype)
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint)
        on_disk = Adapter.load(Path(checkpoint))
    targets = {f"{target}.weight" for target in on_disk.factors}

    def unlike(weights: Iterator[tuple[str, torch.Tensor]], found: Mapping[str, int]) -> int:
        sums = {name.removesuffix(".weight"): checksum(weight) for name, weight in weights if name in targets}
        return sum(found.get(name) != value for name, value in sums.items())

    pristine = ((name, weight.to(dtype)) for name, weight in read_weights(folder))
    expected = merged_weights(folder, on_disk, dtype, cfg.weight_sync.rounding)
    return [
        none_of(f"policy's base weights that {times} changed",
                unlike(pristine, proof.whole_checksums(reports, "base")), len(targets)),
        none_of("served weights unlike saved adapter + pristine base",
                unlike(expected, proof.whole_checksums(reports, "targets")),
                len(targets)),
    ]  # fmt: skip


def weights_folder(cfg: Recipe) -> Path:
    if cfg.model.source == "local":
        return Path(cfg.model_location())
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(cfg.model.id, revision=cfg.model.revision, local_files_only=True))


# -- importance ratio ------------------------------------------------------------------------------------------


def ratio_checks(bench: _Bench) -> list[Check]:
    """The ratio at staleness 0, of tokens that the policy samples when a request asks for nothing special."""
    low, high = bench.cfg.trainer.ratio_bounds
    bound = bench.cfg.weight_sync.canary_max_abs_logprob_diff
    log_ratio, mask = _log_ratio(bench)
    found = ratio_stats(log_ratio, mask, torch.zeros_like(mask, dtype=torch.long))
    ratio, kl = (total / count for total, count in (found[RATIO_AT_0], found["kl/staleness_0"]))
    penalised, penalised_mask = _log_ratio(bench, repetition_penalty=REPETITION_PENALTY)
    return [
        Check(f"importance ratio at staleness 0, mean of {int(mask.sum())} tokens", ratio, f"{low:g} to {high:g}",
              low <= ratio <= high),
        at_most("importance ratio at staleness 0: KL", kl, bound),
        at_most("importance ratio at staleness 0: max |log ratio|", _max_abs(log_ratio, mask), bound),
        must_show("the same, repetition penalty in the request", _max_abs(penalised, penalised_mask), bound),
    ]  # fmt: skip


def sampling_checks(bench: _Bench) -> list[Check]:
    """What a generation_config.json may not do: change how a call is sampled that asks for nothing."""
    report = sampling_check.measure(bench.server.url, bench.server.model)
    bound = sampling_check.BOUND
    return [
        at_most("call without parameters vs full vocabulary: max |dlogp|", report.without_parameters, bound),
        must_show("the same, temperature 0.5 in the request", report.half_temperature, bound),
    ]


def _log_ratio(bench: _Bench, **sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability in the trainer, packed as it packs, less that which the policy reports for what it sampled.

    Returns: log ratio and mask of the sampled tokens, [tokens - 1] each.
    """
    prompt = bench.prompt()[:128]
    body = {
        "model": bench.cfg.policy.served_model_name, "prompt": prompt, "n": SAMPLES, "max_tokens": SAMPLE_TOKENS,
        "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "seed": 1, **sampling,
    }  # fmt: skip
    response = httpx.post(f"{bench.server.url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
    response.raise_for_status()
    choices = response.json()["choices"]
    ratios, masks = [], []
    for start in range(0, len(choices), SAMPLES_A_ROW):
        row = choices[start : start + SAMPLES_A_ROW]
        trained, mask = _row_logprobs(bench.model, [(prompt, choice["token_ids"]) for choice in row])
        sampled = torch.zeros_like(trained)
        sampled[mask] = torch.tensor([value for choice in row for value in choice["logprobs"]["token_logprobs"]])
        ratios.append(trained - sampled)
        masks.append(mask)
    return torch.cat(ratios), torch.cat(masks)


@torch.no_grad()
def _row_logprobs(
    model: torch.nn.Module, samples: Sequence[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One packed row through the forward pass of training: log-probabilities and mask of completions, on the CPU."""
    device = next(model.parameters()).device
    ids = torch.tensor([[token for prompt, completion in samples for token in prompt + completion]], device=device)
    lengths = [len(prompt) + len(completion) for prompt, completion in samples]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    mask = torch.cat([torch.arange(n) >= len(prompt) for n, (prompt, _) in zip(lengths, samples, strict=True)])
    labels = ids.masked_fill(positions == 0, -100)
    found = model(input_ids=ids, position_ids=positions, labels=labels, fused_lm_head=True, use_cache=False)
    return found.log_probs[0].float().cpu(), mask[1:]


# -- numbers ---------------------------------------------------------------------------------------------------


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    return float((torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max())


def _max_abs(log_ratio: torch.Tensor, mask: torch.Tensor) -> float:
    return float(log_ratio[mask].abs().max())


def _digest(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def _with_canaries(cfg: Recipe, num_syncs: int) -> Recipe:
    every = {"canary_every": max(1, num_syncs // CANARIES)}
    return cfg.model_copy(update={"weight_sync": cfg.weight_sync.model_copy(update=every)})


if __name__ == "__main__":
    run_main(main)
