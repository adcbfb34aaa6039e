"""Whether the policy's GPU holds its share, the copy of the base and the context; and the number to write if not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.doctor import memory
from scripts.doctor.setup import Setup
from services.common import recipe
from tests.unit.doctor.test_machine import fails

ROOT = Path(__file__).resolve().parents[3]
Broken = Callable[..., Setup]
BASE_GB = 4.04
"""Of the 2.6B model's trained matrices in bf16: 2.171 billion numbers."""
CARDS_GB = (24, 40, 48, 80, 141)


@pytest.mark.parametrize("total_gb", CARDS_GB)
def test_the_number_to_write_is_the_largest_that_fits(total_gb: float, broken: Broken) -> None:
    full = broken(variant="cuda", policy__gpu_memory_utilization=0.99)
    refused = memory.policy_memory(full, total_gb, BASE_GB)
    fails(refused, 5, f"{total_gb} GB", "base copy 4.0")
    number = float(re.findall(r"gpu_memory_utilization = ([\d.]+)", refused.mend)[0])
    assert (
        memory.policy_memory(broken(variant="cuda", policy__gpu_memory_utilization=number), total_gb, BASE_GB).state
        == "ok"
    )
    more = broken(variant="cuda", policy__gpu_memory_utilization=round(number + 0.01, 2))
    assert memory.policy_memory(more, total_gb, BASE_GB).state == "fail"


def test_a_trainer_on_the_same_card_counts(broken: Broken) -> None:
    shared = {"weight_sync__transport": "gloo", "trainer__gpu_memory_fraction": 0.45}
    one = broken(variant="cuda", policy__gpu_memory_utilization=0.45, **shared)
    assert memory.policy_memory(one, 141, BASE_GB).state == "ok"
    fails(memory.policy_memory(one, 24, BASE_GB), 5, "the trainer's 0.45 x 24", "gpu_memory_utilization = 0.29")
    fails(memory.policy_memory(one, 8, BASE_GB), 5, "larger card")


def test_the_copy_is_counted_from_the_weights_themselves(setup: Setup) -> None:
    found = memory._base_gb(setup)
    header = memory._header(setup.models_dir / setup.cfg.model.id / "model.safetensors")
    targets = setup.cfg.lora.target_modules
    trained = [name for name in header if name.endswith(".weight") and name.split(".")[-2] in targets]
    numbers = sum(header[name]["shape"][0] * header[name]["shape"][1] for name in trained)
    assert found is not None
    assert (len(trained), round(found * 2**30)) == (22, numbers * 4), "22 targets, as the trainer counts them; float32"


def test_the_table_of_cards_says_what_the_check_says() -> None:
    page = (ROOT / "docs/operating.md").read_text()
    two = recipe.load(ROOT / "data/recipes/lfm2.5-2.6b.toml")
    for total_gb in CARDS_GB:
        largest = memory.largest_utilization(total_gb, BASE_GB + memory.CONTEXT_GB)
        written = min(two.policy.gpu_memory_utilization, largest)
        assert re.search(rf"^\| {total_gb} GB \|.*\| {written:g} \|", page, re.MULTILINE), (total_gb, written)
