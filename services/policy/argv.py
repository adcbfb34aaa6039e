"""The command line and environment of ``vllm serve``, as pure functions of the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.weight_sync.plugin import ENGINE, PLUGIN, WORKER_EXTENSION

Role = Literal["train", "eval"]
Device = Literal["cpu", "cuda"]

PORT = 8000
TOOL_PARSER_PLUGIN = Path(__file__).with_name("lfm2_tool_parser.py")
TOOL_PARSER = "lfm2_5"
"""The name that the plugin registers; a contract test compares it."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank takes; a contract test compares it with vLLM's own list."""


def argv(
    recipe: Recipe,
    role: Role,
    device: Device,
    python: str = "python",
    reasoning: Sequence[str] = (),
    listen: tuple[str, int] = ("0.0.0.0", PORT),
) -> list[str]:
    """Command that serves the policy.

    ``train``: weights are replaced by the trainer's factors after each step, under one fixed model name.
    ``eval``: pristine base weights, adapters loaded at run time. Never both: an adapter over merged weights would
    apply the change twice.
    Args:
        reasoning: flags of the reasoning parser, for a model that needs one (``reasoning.reasoning_flags``).
        listen: address and port; in a container that others share, not the ones that Compose expects.
        python: the interpreter; vLLM is started as a module, so that no console script has to be installed.
    """
    return [
        python, "-m", "vllm.entrypoints.cli.main", "serve", recipe.model_location(),
        *_model(recipe, *listen),
        *_fidelity(),
        *_tools(),
        *reasoning,
        *_capacity(recipe, device),
        *_parallel(recipe, role, device),
        *(_cpu_build() if device == "cpu" else []),
        *(_weight_transfer(recipe) if role == "train" else _adapters(recipe)),
    ]  # fmt: skip


def environment(recipe: Recipe, role: Role, device: Device) -> dict[str, str]:
    """Variables that vLLM reads, to be set over the process's own."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if role == "train":
        # pause, resume, weight transfer, collective_rpc. Without authentication: only the trainer may reach the port.
        found["VLLM_SERVER_DEV_MODE"] = "1"
        found["VLLM_PLUGINS"] = PLUGIN  # without it vLLM loads no endpoint of a plugin
    else:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if device == "cpu":
        threads = str(recipe.policy.omp_threads)
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": str(recipe.policy.cpu_kvcache_gb),  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the other services
            "OMP_NUM_THREADS": threads,
            # Worker and engine in one process (--distributed-executor-backend uni): vLLM allows it on a CPU only
            # so, since it sets OpenMP's threads in a worker's environment. Ours are set above.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if recipe.policy.enforce_eager:
            # vLLM compiles its helper for log-probability ranks even in eager mode: half a minute inside the first
            # request, and a C++ compiler that the image does not have.
            found["TORCH_COMPILE_DISABLE"] = "1"
    return found


def hub_revision(recipe: Recipe) -> str | None:
    """Full commit of a Hub model; None for a local one, whose revision is the hash of its weights.

    Raises: RecipeError: a Hub model without one.
    """
    if recipe.model.source == "local":
        return None
    if recipe.model.revision is None:
        raise RecipeError(
            "model.revision is missing; a Hub model needs its full 40-character commit: run `make prepare`, which "
            "finds it and fetches the weights"
        )
    return recipe.model.revision


def _model(recipe: Recipe, host: str, port: int) -> list[str]:
    revision = hub_revision(recipe)
    return [
        *(["--revision", revision] if revision else []),
        "--served-model-name", recipe.policy.served_model_name,
        "--host", host,
        "--port", str(port),
        "--dtype", recipe.model.dtype,
        "--max-model-len", str(recipe.model.max_model_len),
        "--seed", str(recipe.run.seed),
        # Default sampling is vLLM's neutral one, whatever the model's generation_config.json asks for.
        "--generation-config", "vllm",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def _fidelity() -> list[str]:
    """Exact token ids, and log-probabilities of what was really sampled from."""
    return ["--return-tokens-as-token-ids", "--logprobs-mode", "processed_logprobs"]


def _tools() -> list[str]:
    """OpenCode always sends tool_choice="auto"; without these every call is refused."""
    plugin = ["--tool-parser-plugin", str(TOOL_PARSER_PLUGIN)]
    return ["--enable-auto-tool-choice", *plugin, "--tool-call-parser", TOOL_PARSER]


def _capacity(recipe: Recipe, device: Device) -> list[str]:
    policy = recipe.policy
    found = ["--max-num-seqs", str(policy.max_num_seqs)]
    if policy.max_num_batched_tokens is not None:
        found += ["--max-num-batched-tokens", str(policy.max_num_batched_tokens)]
    if device == "cuda":
        found += ["--gpu-memory-utilization", str(policy.gpu_memory_utilization)]
    else:
        # A process less, which on two cores starts 20 s sooner.
        found += ["--distributed-executor-backend", "uni"]
    if policy.enforce_eager:
        found.append("--enforce-eager")
    found.append("--enable-prefix-caching" if policy.enable_prefix_caching else "--no-enable-prefix-caching")
    return found


def _parallel(recipe: Recipe, role: Role, device: Device) -> list[str]:
    """Flags for more than one GPU. An adapter is loaded into one copy of the model, so evaluation has one.

    Raises: RecipeError: more than one process of the CPU build.
    """
    sizes = {"tensor": recipe.policy.tensor_parallel_size}
    if role == "train":
        sizes["data"] = recipe.policy.data_parallel_size
    found = []
    for name, size in sizes.items():
        if size > 1 and device == "cpu":
            raise RecipeError(f"policy.{name}_parallel_size is {size}; without a GPU the policy is one process: 1")
        if size > 1:
            found += [f"--{name}-parallel-size", str(size)]
    return found


def _cpu_build() -> list[str]:
    """vLLM 0.31's C++ rotary embedding for CPUs mixes up the tokens of a query with more than one head when it comes
    as (tokens, heads, head_dim), which is how LFM2 calls it: log-probabilities were wrong by up to 1.4 nats. PyTorch's
    own implementation is right."""
    return ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]


def _weight_transfer(recipe: Recipe) -> list[str]:
    if recipe.weight_sync.mode == "full":  # TRL's own client streams all merged weights
        return ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return ["--weight-transfer-config", json.dumps({"backend": ENGINE}), "--worker-extension-cls", WORKER_EXTENSION]


def _adapters(recipe: Recipe) -> list[str]:
    rank = next((rank for rank in LORA_RANKS if rank >= recipe.lora.r), None)
    if rank is None:
        raise RecipeError(f"lora.r is {recipe.lora.r}; vLLM serves adapters of rank {LORA_RANKS[-1]} at most")
    return ["--enable-lora", "--max-lora-rank", str(rank)]
