"""The weight sync against a real vLLM: what is served after a sync, and what is left after a failure."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import StoppedError
from services.weight_sync import canary, names
from services.weight_sync.adapter import Adapter, base_hashes, drifted, merged_weights
from services.weight_sync.checksum import checksum
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.errors import WeightSyncError
from services.weight_sync.policy_server import PolicyServer
from services.weight_sync.proof import whole_checksums

FLOAT_NOISE = 1e-4
"""Bound on |difference| of log-probabilities between vLLM and transformers in float32; 2e-5 was seen."""
VISIBLE = 0.05
"""What a changed policy must differ by at least, so that agreement with the wrong one cannot pass."""


@pytest.fixture
def trainer_model(vllm_server: Any) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(
        vllm_server.model, dtype=torch.float32, attn_implementation="sdpa"
    )  # fmt: skip
    lora = vllm_server.recipe.lora
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


@pytest.fixture
def server(vllm_server: Any) -> Iterator[PolicyServer]:
    found = PolicyServer(vllm_server.url, vllm_server.recipe.policy.served_model_name)
    yield found
    found.close()


@pytest.fixture
def prompt(vllm_server: Any) -> list[int]:
    """657 tokens, five blocks of the prefix cache and a bit."""
    return canary.prompt_ids(AutoTokenizer.from_pretrained(vllm_server.model))


@contextlib.contextmanager
def connected(vllm_server: Any, model: PeftModel | None = None, prompt: list[int] | None = None) -> Iterator[Any]:
    """A sync that has connected; with a model and a prompt every proof is on."""
    sync = LoraFactorSync(vllm_server.recipe, vllm_server.url)
    if model is not None and prompt is not None:
        bound = vllm_server.recipe.weight_sync.canary_mean_abs_logprob_diff
        sync.prove_with(
            base_weight=functools.partial(names.base_weight, model),
            canary=canary.Canary(prompt, canary.model_score(model), bound),
        )
    try:
        sync.init_weight_transfer()
        yield sync
    finally:
        sync.destroy()


@torch.no_grad()
def train(model: PeftModel, seed: int, size: float = 0.02) -> None:
    """Stand-in for optimizer steps: another A and B."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            spread = size if ".lora_B." in name else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)


def largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# -- what is served --------------------------------------------------------------------------------------------


def test_a_sync_of_zero_b_changes_no_bit_of_the_output(vllm_server, trainer_model, server, prompt):
    before = server.score(prompt, 60), server.complete(prompt, 24, 60)
    with connected(vllm_server, trainer_model, prompt) as sync:
        sync.send_weights(names.lora_factors(trainer_model))
        first = sync.last_canary
    assert (server.score(prompt, 60), server.complete(prompt, 24, 60)) == before
    assert first.max_abs_logprob_diff < FLOAT_NOISE, "vLLM and transformers disagree on the base itself"


def test_the_served_policy_is_the_merged_model_and_the_checkpoint_on_the_pristine_base_bit_for_bit(
    vllm_server, trainer_model, server, prompt, tmp_path
):
    pristine = server.score(prompt, 60)
    before = base_hashes(trainer_model)
    with connected(vllm_server, trainer_model, prompt) as sync:
        for seed in range(1, 5):
            train(trainer_model, seed)
            sync.send_weights(names.lora_factors(trainer_model))
        reports = server.reports(10)
        served = server.score(prompt, 60)
    trainer_model.save_pretrained(tmp_path / "adapter")
    assert drifted(before, base_hashes(trainer_model)) == []

    on_disk = Adapter.load(tmp_path / "adapter")
    expected = {
        name.removesuffix(".weight"): checksum(weight)
        for name, weight in merged_weights(vllm_server.model, on_disk, torch.float32, "stochastic")
        if name.removesuffix(".weight") in on_disk.factors
    }
    assert whole_checksums(reports, "targets") == expected
    assert [report["version"] for report in reports] == [4]

    # PEFT's own merge, which shares nothing with ours.
    peft_merged = canary.model_score(trainer_model.merge_and_unload())(prompt)
    assert largest(served, peft_merged) < FLOAT_NOISE
    assert largest(served, pristine) > VISIBLE


def test_targets_are_those_that_peft_matches(vllm_server, trainer_model, server):
    """``out_proj`` also ends the name of the short convolution's output: 4 layers x 3 + 2 x 4 + 2 x 1."""
    with connected(vllm_server) as sync:
        sync.send_weights(names.lora_factors(trainer_model))
    served = whole_checksums(server.reports(10), "targets")
    assert len(served) == 22
    assert "model.layers.0.conv.out_proj" in served
    assert not any(name.endswith("in_proj") for name in served)


TOKENS = 1000
"""Of a request that must still run when a sync comes."""


def test_a_request_in_flight_goes_on_and_each_token_is_of_one_policy(vllm_server, trainer_model, server, prompt):
    prompt = prompt[:300]
    with connected(vllm_server, trainer_model, prompt) as sync:
        train(trainer_model, seed=11)
        sync.send_weights(names.lora_factors(trainer_model))
        old = canary.model_score(trainer_model)
        stream = Streamed(vllm_server.url, prompt, tokens=TOKENS)
        stream.wait_for(60)
        ids_before = len(stream.token_ids)
        old_adapter = {name: tensor.clone() for name, tensor in names.lora_factors(trainer_model)}
        train(trainer_model, seed=12)
        sync.send_weights(names.lora_factors(trainer_model))
        token_ids, logprobs = stream.result()
    assert len(token_ids) == TOKENS, "the request was cut off"
    assert ids_before < TOKENS - 10, "the request was over before the sync; the test proves nothing"

    everything = prompt + token_ids
    new_lp = canary.model_score(trainer_model)(everything)[-TOKENS:]
    for name, parameter in trainer_model.named_parameters():
        if name in old_adapter:
            parameter.data.copy_(old_adapter[name])
    old_lp = old(everything)[-TOKENS:]
    is_old = [abs(x - y) < FLOAT_NOISE for x, y in zip(logprobs, old_lp, strict=True)]
    is_new = [abs(x - y) < FLOAT_NOISE for x, y in zip(logprobs, new_lp, strict=True)]
    switch = next(i for i in range(TOKENS) if not is_old[i])
    assert switch >= ids_before - 1
    assert all(is_old[:switch]) and all(is_new[switch:]), "a token was computed from a mix of two policies"


def test_a_cached_prefix_of_the_old_policy_is_not_used_by_a_later_request(vllm_server, trainer_model, server, prompt):
    with connected(vllm_server, trainer_model, prompt) as sync:
        train(trainer_model, seed=21)
        sync.send_weights(names.lora_factors(trainer_model))
        server.complete(prompt, 1, 60)
        hits = prefix_hits(vllm_server.url)
        token_ids, cached = server.complete(prompt, 1, 60)
        assert prefix_hits(vllm_server.url) > hits, "the prefix cache is not in use; the test proves nothing"
        old = canary.model_score(trainer_model)([*prompt, *token_ids])[-1:]
        assert largest(cached, old) < FLOAT_NOISE

        train(trainer_model, seed=22)
        sync.send_weights(names.lora_factors(trainer_model))
        hits = prefix_hits(vllm_server.url)
        prompt_again = [*prompt[:-1], prompt[0]]  # not the canary itself, which the sync may have scored
        token_ids, fresh = server.complete(prompt_again, 1, 60)
        new = canary.model_score(trainer_model)([*prompt_again, *token_ids])[-1:]
        assert largest(fresh, new) < FLOAT_NOISE


def test_trls_own_order_of_pause_send_and_resume_works_too(vllm_server, trainer_model, server):
    with connected(vllm_server) as sync:
        sync.pause()
        sync.send_weights(names.lora_factors(trainer_model))
        assert server.is_paused()
        sync.resume()
        assert not server.is_paused()
        phases = {"pause_s", "drain_s", "reset_s", "merge_s", "transfer_s", "wire_s", "paused_s"}
        assert {f"weight_sync/{phase}" for phase in phases} <= sync.metrics().keys()


# -- proofs that fail ------------------------------------------------------------------------------------------


def test_a_canary_that_disagrees_stops_the_run_with_both_numbers(vllm_server, trainer_model, server, prompt):
    with connected(vllm_server, trainer_model, prompt) as sync:
        honest = canary.model_score(trainer_model)

        def off_by_a_hundredth(token_ids: list[int]) -> list[float]:
            return [value + 0.01 for value in honest(token_ids)]

        sync.prove_with(canary=canary.Canary(prompt, off_by_a_hundredth, bound=1e-3))
        with pytest.raises(StoppedError, match=r"in the trainer and -?\d+\.\d+ in the policy .* 1\.0\de-02 apart"):
            sync.send_weights(names.lora_factors(trainer_model))
    assert not server.is_paused()


def test_another_base_than_the_trainers_stops_the_run_and_names_the_matrix(vllm_server, trainer_model, prompt):
    target = "model.layers.1.self_attn.k_proj"
    with connected(vllm_server, trainer_model, prompt) as sync, torch.no_grad():
        names.base_weight(trainer_model, target)[5, 7] += 1e-6
        with pytest.raises(StoppedError, match=rf"1 of 22 base weights differ .* {target}: trainer \w+, policy \w+"):
            sync.send_weights(names.lora_factors(trainer_model))


# -- failures --------------------------------------------------------------------------------------------------


def test_factors_of_another_model_are_refused_and_the_server_goes_on(vllm_server, trainer_model, server, prompt):
    before = server.score(prompt[:50], 60)
    wrong = [
        ("base_model.model.model.layers.0.feed_forward.w1.lora_A.default.weight", torch.zeros(4, 64)),
        ("base_model.model.model.layers.0.feed_forward.w1.lora_B.default.weight", torch.zeros(999, 4)),
    ]
    with (
        connected(vllm_server) as sync,
        pytest.raises(WeightSyncError, match=r"'stage'.*feed_forward\.w1 is a matrix of \(999, 64\)"),
    ):
        sync.send_weights(iter(wrong))
    assert not server.is_paused()
    assert server.score(prompt[:50], 60) == before


DEAD_CLIENT = """
import json, os, sys
from services.common.recipe import Recipe
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.factors import Layout, Target
url, recipe, paused = sys.argv[1], Recipe.model_validate(json.loads(sys.argv[2])), sys.argv[3] == "paused"
sync = LoraFactorSync(recipe, url)
sync.init_weight_transfer()
layout = Layout((Target("model.layers.0.feed_forward.w1", 4, 256, 128),), "float32", 2.0)
sync._server.stage({"version": 1, "layout": layout.to_json()}, 30)
if paused:
    sync.pause()
print("staged", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_trainer_that_died_in_mid_transfer_leaves_a_server_that_the_next_one_can_use(
    vllm_server, trainer_model, server, prompt, state
):
    before = server.score(prompt[:50], 60)
    recipe = json.dumps(vllm_server.recipe.model_dump(mode="json"))
    child = subprocess.run(
        [sys.executable, "-c", DEAD_CLIENT, vllm_server.url, recipe, state],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL and "staged" in child.stdout, child.stderr
    assert server.is_paused() is (state == "paused")
    with connected(vllm_server, trainer_model, prompt) as sync:
        assert not server.is_paused()
        assert server.score(prompt[:50], 60) == before, "a transfer that never ended changed what is served"
        train(trainer_model, seed=31)
        sync.send_weights(names.lora_factors(trainer_model))


def test_a_broadcast_that_never_comes_fails_in_time_and_the_server_goes_on(vllm_server, trainer_model, server, prompt):
    """The trainer hangs between staging and broadcasting: the server's own limit ends its wait, and nothing pauses."""
    limit_s = vllm_server.recipe.weight_sync.transfer_timeout_s
    with connected(vllm_server) as sync:
        sync._transport.broadcast = lambda buffer: None
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"'apply'.*version 1 (did not arrive|were not complete)"):
            sync.send_weights(names.lora_factors(trainer_model))
        assert time.monotonic() - started < limit_s + 10
    assert not server.is_paused()
    with connected(vllm_server, trainer_model, prompt) as sync:
        sync.send_weights(names.lora_factors(trainer_model))


def test_a_frozen_server_gives_an_error_that_names_it_and_the_phase_and_can_be_used_again(
    vllm_server, trainer_model, server, prompt
):
    with connected(vllm_server) as sync:
        os.killpg(vllm_server.process.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(WeightSyncError) as caught:
                sync.send_weights(names.lora_factors(trainer_model))
            assert time.monotonic() - started < 30
        finally:
            os.killpg(vllm_server.process.pid, signal.SIGCONT)
    assert vllm_server.url in str(caught.value)
    assert caught.value.phase == "ask for its health"
    with connected(vllm_server, trainer_model, prompt) as sync:
        train(trainer_model, seed=41)
        sync.send_weights(names.lora_factors(trainer_model))


def test_a_second_trainer_on_the_same_port_is_told_so(vllm_server):
    with connected(vllm_server), pytest.raises(WeightSyncError, match=r"weight_sync\.port \d+: .*in use"):
        LoraFactorSync(vllm_server.recipe, vllm_server.url).init_weight_transfer()


# -- helpers ---------------------------------------------------------------------------------------------------


class Streamed:
    """A sampled completion, read token by token on a thread."""

    def __init__(self, url: str, prompt: list[int], tokens: int) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._body = {
            "model": "policy", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0,
            "logprobs": 0, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=self._body, timeout=120, trust_env=False) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.token_ids += choice["token_ids"] or []
                        self._logprobs += choice["logprobs"]["token_logprobs"]

    def wait_for(self, tokens: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.token_ids) < tokens:
            assert time.monotonic() < deadline, "the server generates nothing"
            time.sleep(0.01)

    def result(self) -> tuple[list[int], list[float]]:
        self._thread.join(120)
        return self.token_ids, self._logprobs


def prefix_hits(url: str) -> float:
    """vLLM's own count of prompt tokens that were found in the cache."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
