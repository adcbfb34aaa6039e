"""An exported adapter gives the tokens of the live policy: through PEFT, through ``policy-eval``, and merged.

Two real vLLM servers on a small random LFM2: the training policy with a synced adapter, and ``policy-eval``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import export_adapter
from services.common import run_dir
from services.common.errors import NotReadyError
from services.common.run_dir import RunDir
from services.evaluator import adapters, probe
from services.evaluator.adapters import WEIGHTS, PolicyEval
from services.evaluator.tensors import TensorFile
from services.policy.argv import argv, environment
from services.weight_sync import canary, names
from services.weight_sync.checksum import checksum
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.policy_server import PolicyServer
from services.weight_sync.proof import whole_checksums
from tests.contract.conftest import free_ports, serving

TOKENS = 48
FLOAT_NOISE = 1e-4
"""Bound on |difference| of log-probabilities between vLLM and transformers in float32."""


@pytest.fixture(scope="module")
def eval_url(vllm_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``policy-eval`` on the same model, started with the project's own argv and environment."""
    recipe = vllm_server.recipe
    (port,) = free_ports(1)
    command = argv(recipe, "eval", "cpu", python=sys.executable)
    command[command.index("--port") + 1] = str(port)
    command[command.index("--host") + 1] = "127.0.0.1"
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("policy-eval") / "vllm.log"
    with serving(command, environment(recipe, "eval", "cpu"), url, log):
        yield url


@pytest.fixture(scope="module")
def trained(vllm_server: Any) -> PeftModel:
    """As after some optimizer steps: every A and B is other than at the start."""
    base = AutoModelForCausalLM.from_pretrained(vllm_server.model, dtype=torch.float32, attn_implementation="sdpa")
    lora = vllm_server.recipe.lora
    model = get_peft_model(
        base,
        LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in names.lora_factors(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.02 if ".lora_B." in name else 0.1))
    return model


@pytest.fixture(scope="module")
def run(vllm_server: Any, trained: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with this adapter as its checkpoint-4."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "contract")
    run.prepare()
    trained.save_pretrained(run.checkpoints / "checkpoint-4")
    run_dir.write_text(run.checkpoints / "checkpoint-4" / run_dir.READY, "now\n")
    run_dir.write_json(run.manifest, {"recipe": vllm_server.recipe.model_dump(mode="json")})
    return run


@pytest.fixture(scope="module")
def exported(run: RunDir) -> Path:
    """Folder of the exported adapter; the merged model is beside it."""
    out = run.path / "export" / "adapter"
    export_adapter.export(run, "4", out, merged=True, license_id="apache-2.0", repo=None, api=None)
    return out


@pytest.fixture(scope="module")
def prompt(vllm_server: Any) -> list[int]:
    return canary.prompt_ids(AutoTokenizer.from_pretrained(vllm_server.model))[:200]


@pytest.fixture(scope="module")
def live(vllm_server: Any, trained: PeftModel, prompt: list[int]) -> dict[str, Any]:
    """What the training policy said before and after it took the adapter, and the checksums of what it served."""
    policy = PolicyServer(vllm_server.url, vllm_server.recipe.policy.served_model_name)
    before = policy.complete(prompt, TOKENS, 60)[0]
    sync = LoraFactorSync(vllm_server.recipe, vllm_server.url)
    try:
        sync.init_weight_transfer()
        sync.send_weights(names.lora_factors(trained))
        tokens, reports = policy.complete(prompt, TOKENS, 60)[0], policy.reports(10)
    finally:
        sync.destroy()
        policy.close()
    assert tokens != before, "the adapter changes no greedy token; the tests would prove nothing"
    return {"tokens": tokens, "checksums": whole_checksums(reports, "targets")}


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
    )
    return out[0, len(prompt) :].tolist()


def test_peft_loads_the_export_and_says_what_the_live_policy_says(
    vllm_server: Any, exported: Path, live: dict[str, Any], prompt: list[int]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(vllm_server.model, dtype=torch.float32)
    assert greedy(PeftModel.from_pretrained(base, exported), prompt) == live["tokens"]


def test_vllm_loads_the_export_and_says_what_the_live_policy_says(
    vllm_server: Any, eval_url: str, exported: Path, live: dict[str, Any], prompt: list[int], trained: PeftModel
) -> None:
    """As the evaluator loads it: with the canary, under a name of its own; every token's log-probability is PEFT's."""
    zero = adapters.inspect(exported, vllm_server.recipe.lora)
    with httpx.Client(timeout=60) as http:
        policy = PolicyEval(eval_url, http)
        assert policy.load(adapters.Adapter("export", "export-1", exported, "", zero)) > 0.01
        server = PolicyServer(eval_url, "export-1")
        assert server.complete(prompt, TOKENS, 60)[0] == live["tokens"]
        text = prompt + live["tokens"]
        expected = canary.model_score(trained)(text)
        assert max(abs(a - b) for a, b in zip(server.score(text, 60), expected, strict=True)) < FLOAT_NOISE
        policy.unload("export-1")
        server.close()


def test_the_merged_export_is_bit_for_bit_what_the_live_policy_served(
    exported: Path, live: dict[str, Any], prompt: list[int]
) -> None:
    folder = exported.with_name("adapter-merged")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {name: checksum(file.get_tensor(f"{name}.weight")) for name in live["checksums"]}
    assert found == live["checksums"]
    assert greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompt) == live["tokens"]
    assert AutoTokenizer.from_pretrained(folder).vocab_size > 0


def test_every_kind_of_layer_of_the_adapter_takes_effect_in_vllm(
    vllm_server: Any, eval_url: str, run: RunDir, tmp_path: Path
) -> None:
    adapter = adapters.snapshot(run.complete_checkpoints()[0], tmp_path, vllm_server.recipe.lora)
    found = sorted(probe.kinds(TensorFile.open(adapter.path / WEIGHTS)))
    assert [kind.removeprefix("base_model.model.model.layers.*.") for kind in found] == [
        "conv.out_proj", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "self_attn.k_proj",
        "self_attn.out_proj", "self_attn.q_proj", "self_attn.v_proj",
    ]  # fmt: skip
    with httpx.Client(timeout=60) as http:
        probe.check_every_kind(PolicyEval(eval_url, http), adapter)


def test_modules_that_vllm_leaves_out_without_a_word_are_found_by_the_probe(
    vllm_server: Any, eval_url: str, run: RunDir, tmp_path: Path
) -> None:
    """``out_proj`` is a name that vLLM knows, so it takes modules of a path that it does not know."""
    adapter = adapters.snapshot(run.complete_checkpoints()[0], tmp_path, vllm_server.recipe.lora)
    weights = adapter.path / WEIGHTS
    weights.write_bytes(weights.read_bytes().replace(b".conv.out_proj.", b".konv.out_proj."))
    with httpx.Client(timeout=60) as http:
        policy = PolicyEval(eval_url, http)
        assert policy.load(adapter) > 0, "the canary alone sees nothing amiss"
        policy.unload(adapter.name)
        with pytest.raises(NotReadyError, match=r"does not apply adapters to .*konv\.out_proj"):
            probe.check_every_kind(policy, adapter)


def test_a_request_of_a_killed_evaluator_ends_well_although_its_adapter_is_unloaded_and_evicted(
    vllm_server: Any, eval_url: str, run: RunDir, tmp_path: Path, prompt: list[int]
) -> None:
    """vLLM reads the files again for it; had they been removed, its engine would end, and so it would with a canary of
    prompt log-probabilities beside the request."""
    adapter = adapters.snapshot(run.complete_checkpoints()[0], tmp_path, vllm_server.recipe.lora)
    body = {
        "model": adapter.name, "prompt": prompt, "max_tokens": 1200, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    with httpx.Client(timeout=120) as http, ThreadPoolExecutor(1) as pool:
        policy = PolicyEval(eval_url, http)
        policy.load(adapter)
        flying = pool.submit(httpx.post, f"{eval_url}/v1/completions", json=body, timeout=120)
        while policy.is_idle() and not flying.done():
            time.sleep(0.01)
        policy.forget()
        assert policy.models().keys() == {vllm_server.recipe.policy.served_model_name}
        assert not flying.done() and not policy.is_idle(), "the request was over too soon; the test proves nothing"
        probe.check_every_kind(policy, adapter)
        answer = flying.result()
        assert answer.json()["usage"]["completion_tokens"] == 1200
        while not policy.is_idle():
            time.sleep(0.05)
        assert policy.load(adapter) > 0
        policy.forget()
