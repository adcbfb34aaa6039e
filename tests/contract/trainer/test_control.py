"""Faults on purpose: shuffled rewards say nothing, and a policy that is never synced is found out by the canary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import StoppedError
from services.common.run_dir import RunDir
from services.trainer.control import DroppedSyncs, shuffled
from services.weight_sync import canary, names

Rewards = list[float | None]


@given(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0, 1.05])), max_size=12), st.integers(0, 1000))
def test_shuffling_keeps_every_reward_and_gives_none_to_what_was_not_scored(rewards: Rewards, group: int) -> None:
    found = shuffled(rewards, group)
    assert Counter(found) == Counter(rewards)
    assert [reward is None for reward in found] == [reward is None for reward in rewards]
    assert shuffled(rewards, group) == found


def test_a_shuffled_reward_says_nothing_about_its_rollout() -> None:
    rewards: Rewards = [1.0] * 4 + [0.0] * 4
    right = sum(reward or 0 for group in range(2000) for reward in shuffled(rewards, group)[:4]) / 8000
    assert right == pytest.approx(0.5, abs=0.03)


def test_the_canary_stops_a_run_whose_syncs_are_dropped(vllm_server: Any, tmp_path: Path) -> None:
    lora, settings = vllm_server.recipe.lora, vllm_server.recipe.weight_sync
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(vllm_server.model, dtype=torch.float32, attn_implementation="sdpa"),
        LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"),
    )
    run = RunDir(tmp_path / "run")
    run.prepare()
    prompt = canary.prompt_ids(AutoTokenizer.from_pretrained(vllm_server.model))
    sync = DroppedSyncs(run, vllm_server.recipe, vllm_server.url)
    sync.prove_with(canary=canary.Canary(prompt, canary.model_score(model), settings.canary_mean_abs_logprob_diff))
    try:
        sync.init_weight_transfer()
        sync.send_weights(names.lora_factors(model))
        with torch.no_grad():
            for name, parameter in names.lora_factors(model):
                if ".lora_B." in name:
                    parameter.fill_(0.02)
        with pytest.raises(StoppedError, match="canary"):
            for _ in range(settings.canary_every):
                sync.send_weights(names.lora_factors(model))
    finally:
        sync.destroy()
