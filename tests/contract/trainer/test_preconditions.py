"""What is refused before a rollout is paid for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, Lfm2Config

from services.common.errors import MachineError, RecipeError
from services.trainer import preconditions
from tests.contract.trainer.tiny_models import HYBRID, LORA_TARGETS, SHIPPED


@pytest.fixture
def config() -> Any:
    return AutoConfig.from_pretrained(SHIPPED)


def test_the_recipes_own_targets_are_all_there(config):
    preconditions.require_known_targets(config, LORA_TARGETS)
    preconditions.require_known_targets(config, ["self_attn.out_proj", "model.layers.0.feed_forward.w1"])


@pytest.mark.parametrize(
    "unknown", ["o_proj", "down_proj", "proj", "conv", "layers", "embed_tokens", "lm_head", "W1", ""]
)
def test_a_name_that_no_linear_layer_has_is_refused_with_those_that_exist(config, unknown):
    with pytest.raises(RecipeError) as caught:
        preconditions.require_known_targets(config, [*LORA_TARGETS, unknown])
    assert f"lora.target_modules names {unknown!r}, which no linear layer of this model has" in str(caught.value)
    assert str(caught.value).endswith("allowed: in_proj, k_proj, out_proj, q_proj, v_proj, w1, w2, w3")


def test_a_model_of_any_size_is_looked_at_without_its_memory():
    huge = Lfm2Config(hidden_size=65536, intermediate_size=262144, num_hidden_layers=4, layer_types=list(HYBRID))
    preconditions.require_known_targets(huge, LORA_TARGETS)


def test_several_gpus_are_refused_and_one_or_none_is_not():
    preconditions.require_one_gpu(0)
    preconditions.require_one_gpu(1)
    with pytest.raises(MachineError, match="the trainer sees 4 GPUs and trains on one; give it one"):
        preconditions.require_one_gpu(4)
