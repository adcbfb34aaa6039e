"""What the recipe says of the weight sync: which settings cannot work together, and what the limits promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common import recipe
from services.common.errors import RecipeError
from services.common.recipe import SHARED_GPU_LIMIT, WeightSync
from services.weight_sync.policy_server import CONTROL_TIMEOUT_S, MARGIN_S

RECIPES = Path(__file__).parents[3] / "data/recipes"


def load(name: str, **changes: Any) -> recipe.Recipe:
    return recipe.load(RECIPES / name, {key.replace("__", "."): value for key, value in changes.items()})


def test_a_dead_peer_is_named_within_30_s_by_default():
    defaults = WeightSync()
    longest = max(defaults.pause_timeout_s, defaults.transfer_timeout_s) + MARGIN_S
    assert max(longest, CONTROL_TIMEOUT_S) < 30


def test_trls_stream_needs_nccl():
    with pytest.raises(RecipeError, match=r"weight_sync\.mode is 'full' and transport 'gloo'; .* over 'nccl' only"):
        load("smoke.toml", weight_sync__mode="full")


def test_the_trainer_cannot_compute_with_what_trls_stream_serves():
    full = {"weight_sync__mode": "full", "weight_sync__transport": "nccl"}
    with pytest.raises(RecipeError, match=r"weight_sync\.mode is 'full' and trainer\.forward 'served'; .* 'adapter'"):
        load("lfm2.5-2.6b.toml", **full)
    assert load("lfm2.5-2.6b.toml", **full, trainer__forward="adapter").weight_sync.mode == "full"


def test_the_one_gpu_recipe_differs_from_the_full_one_only_in_where_it_runs():
    one, two = (load(name).model_dump() for name in ("lfm2.5-2.6b-one-gpu.toml", "lfm2.5-2.6b.toml"))
    different = {
        f"{section}.{key}"
        for section in one.keys() - {"costs", "hf_job"}  # what the machine is and costs
        for key in one[section]
        if one[section][key] != two[section][key]
    }
    assert different == {
        "run.name", "policy.gpu_memory_utilization", "weight_sync.transport", "trainer.gpu_memory_fraction",
    }  # fmt: skip
    assert one["policy"]["gpu_memory_utilization"] + one["trainer"]["gpu_memory_fraction"] <= SHARED_GPU_LIMIT


def test_one_gpu_is_not_shared_over_nccl():
    with pytest.raises(RecipeError, match=r"gpu_memory_fraction is 0\.45, .* 'nccl', which refuses that; .* 'gloo'"):
        load("lfm2.5-2.6b-one-gpu.toml", weight_sync__transport="nccl")


def test_one_gpus_memory_is_not_given_away_twice():
    with pytest.raises(RecipeError, match=r"are 0\.95 together; on one GPU at most 0\.92 is allowed"):
        load("lfm2.5-2.6b-one-gpu.toml", policy__gpu_memory_utilization=0.5)
