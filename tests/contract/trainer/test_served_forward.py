"""The trainer's forward pass through the served weights: their very bits, with the gradients of PEFT's own forward."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from services.trainer import packing, served_forward
from services.weight_sync import names, proof
from services.weight_sync.adapter import Adapter, merged_weights
from services.weight_sync.checksum import checksum
from tests.contract.trainer.tiny_models import random_samples, tiny_lfm2

SAMPLES = random_samples(50, 70, 23)
TARGETS = 22


def randomise(model: torch.nn.Module, size: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def lora_model(dtype: torch.dtype = torch.float32, size: float = 0.05) -> torch.nn.Module:
    model = tiny_lfm2(dtype=dtype)
    randomise(model, size)
    packing.install(model)
    return model


def twins(dtype: torch.dtype = torch.float32, size: float = 0.05) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model and adapter with the served forward and with PEFT's."""
    served, peft = lora_model(dtype, size), lora_model(dtype, size)
    served_forward.install(served, "stochastic")
    return served, peft


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return packed_row(model)


def packed_row(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor([[token for sample in SAMPLES for token in sample]])
    positions = torch.cat([torch.arange(len(sample)) for sample in SAMPLES])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return model(input_ids=ids, position_ids=positions, labels=labels, fused_lm_head=True).log_probs[0]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, sum(map(len, SAMPLES)) - 1)  # as advantages do: not all of one sign
    (packed_row(model) * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- against PEFT's own forward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed-reentrant"])
def test_in_float32_log_probabilities_and_gradients_are_pefts(use_reentrant):
    served, peft = twins()
    if use_reentrant is not None:
        served.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        served.enable_input_require_grads()
    assert (logprobs(served) - logprobs(peft)).abs().max() < 2e-5
    found, expected = gradients(served), gradients(peft)
    assert found.keys() == expected.keys() and len(found) == 2 * TARGETS
    assert {name: relative(found[name], expected[name]) for name in found if not (
        relative(found[name], expected[name]) < 1e-5)} == {}  # fmt: skip


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), sizes=st.tuples(*[st.integers(1, 20)] * 3),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_layer_has_pefts_output_and_gradients_in_float32(shape, sizes, bias, seed):
    rank, inputs, outputs = sizes
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.add_module("m", torch.nn.Linear(inputs, outputs, bias=bias))
    peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=3, target_modules=["m"]))
    randomise(peft, 0.3, seed)
    served = copy.deepcopy(peft)
    served_forward.install(served, "stochastic")
    inputs_ = [torch.randn(*shape, inputs).requires_grad_() for _ in range(1)] * 2
    weights = torch.randn(*shape, outputs)
    results = []
    for which, x in zip((served, peft), inputs_, strict=True):
        x.grad = None
        output = which(x)
        (output * weights).sum().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in which.parameters() if p.requires_grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_gradients_are_pefts_but_for_rounding():
    served, peft = twins(torch.bfloat16, size=0.02)
    found, expected = gradients(served), gradients(peft)
    assert {p.dtype for p in found.values()} == {torch.float32}
    together = [torch.cat([part[name].flatten() for name in sorted(found)]) for part in (found, expected)]
    assert torch.nn.functional.cosine_similarity(*together, dim=0) > 0.99


# -- what is served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("size", [1e-5, 0.02])
def test_in_bfloat16_the_trainer_computes_the_very_numbers_of_the_merged_model(tmp_path, rounding, size):
    model = lora_model(torch.bfloat16, size)
    served_forward.install(model, rounding)
    plain = merged_model(model, tmp_path, rounding)
    assert torch.equal(logprobs(model), logprobs(plain))
    assert not torch.equal(logprobs(lora_model(torch.bfloat16, size)), logprobs(plain)), "PEFT's would do as well"


def merged_model(model: Any, folder: Path, rounding: Any) -> torch.nn.Module:
    """Base and checkpoint through files, merged as an export merges them, in a model without an adapter."""
    plain = tiny_lfm2(lora=False, dtype=torch.bfloat16)
    save_file({name: p.contiguous() for name, p in plain.named_parameters()}, folder / "model.safetensors")
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["r"]) == (8, 4)
    weights = dict(merged_weights(folder, Adapter.load(folder), torch.bfloat16, rounding))
    plain.load_state_dict(weights, strict=False)
    packing.install(plain)
    return plain


def test_the_copies_are_what_a_sync_proves():
    model = lora_model(torch.bfloat16, 1e-3)
    served = served_forward.install(model, "stochastic")
    found = {target: checksum(served.weight(target)) for target in served._layers}
    expected = proof.merged_again(
        served._copies.layout, served._copies.buffer, lambda target: names.base_weight(model, target)
    )
    assert found == expected.checksums and len(found) == TARGETS


def test_with_b_of_0_the_trainer_computes_the_very_numbers_of_the_base():
    served, _ = twins(torch.bfloat16, size=0.0)
    base = tiny_lfm2(lora=False, dtype=torch.bfloat16)
    packing.install(base)
    assert torch.equal(logprobs(served), logprobs(base))


@pytest.mark.parametrize(("served", "low", "high"), [(True, 0.8, 1.2), (False, 0.0, 0.2)], ids=["served", "peft"])
def test_an_output_in_bfloat16_keeps_a_young_adapters_part_where_it_goes_through_the_served_weight(served, low, high):
    """The control is PEFT's forward: it adds the part to an output that lies on bfloat16's grid already."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential()
    layer.add_module("m", torch.nn.Linear(512, 512, bias=False))
    torch.nn.init.normal_(layer.m.weight, std=0.02)
    model = get_peft_model(layer.bfloat16(), LoraConfig(r=32, lora_alpha=64, target_modules=["m"]))
    x = torch.randn(4096, 512).bfloat16()
    with torch.no_grad():
        before = model(x).float()
        randomise(model, 2e-5)
        (_, a), (_, b) = names.lora_factors(model)
        asked = 2.0 * (x.float() @ a.float().T) @ b.float().T
        if served:
            served_forward.install(model, "stochastic")
        moved = model(x).float() - before
    assert low < float((moved * asked).sum() / (asked * asked).sum()) < high


# -- never older than the factors --------------------------------------------------------------------------------


def written_by(model: torch.nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        yield f"AdamW {options}", torch.optim.AdamW(trainable, lr=1e-2, **options).step
    state = {name: p.detach() * 1.5 for name, p in model.named_parameters() if ".lora_" in name}
    yield "load_state_dict", lambda: model.load_state_dict(state, strict=False)
    yield "copy_ of a detached view", lambda: [factor.mul_(1.1) for _, factor in names.lora_factors(model)]

    def replaced() -> None:
        for target in {names.parse_factor(name)[0] for name, _ in names.lora_factors(model)}:
            layer = names.lora_layer(model, target)
            layer.lora_B["default"].weight = torch.nn.Parameter(layer.lora_B["default"].weight * 2)

    yield "another parameter", replaced


def test_whatever_writes_a_factor_the_next_forward_pass_has_it():
    model = lora_model()
    served_forward.install(model, "stochastic")
    peft = lora_model()
    gradients(model)
    last = logprobs(model)
    for label, write in written_by(model):
        write()
        peft.load_state_dict(model.state_dict())
        found = logprobs(model)
        assert (found - last).abs().max() > 1e-3, f"{label} changed nothing, so it shows nothing"
        assert (found - logprobs(peft)).abs().max() < 5e-5, label
        last = found


def test_the_copies_are_made_once_a_step(monkeypatch):
    merges = []
    merge = served_forward.MergedCopies.merge
    monkeypatch.setattr(served_forward.MergedCopies, "merge", lambda self: (merges.append(1), merge(self)))
    model = lora_model()
    served_forward.install(model, "stochastic")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(1, 4):
        for _ in range(2):
            gradients(model)
        optimizer.step()
        assert len(merges) == step


def test_a_step_between_forward_and_backward_is_refused():
    model = lora_model()
    served_forward.install(model, "stochastic")
    loss = packed_row(model).sum()
    randomise(model, 0.1, seed=1)
    logprobs(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- beside PEFT -------------------------------------------------------------------------------------------------


def test_names_and_saved_weights_are_pefts_and_without_the_adapter_the_base_computes():
    served, peft = twins()
    assert served.state_dict().keys() == peft.state_dict().keys()
    assert [name for name, _ in served.named_modules()] == [name for name, _ in peft.named_modules()]
    with served.disable_adapter(), peft.disable_adapter():
        assert torch.equal(logprobs(served), logprobs(peft))
    served.merge_adapter()
    peft.merge_adapter()
    assert torch.equal(logprobs(served), logprobs(peft))


def test_what_is_no_plain_lora_is_refused():
    model = get_peft_model(tiny_lfm2(lora=False), LoraConfig(r=2, lora_dropout=0.1, target_modules=["w1"]))
    with pytest.raises(ValueError, match=r"feed_forward\.w1 has LoRA dropout"):
        served_forward.install(model, "stochastic")
    model = get_peft_model(tiny_lfm2(lora=False), LoraConfig(r=2, target_modules=["w1"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["w1"]))
    with pytest.raises(ValueError, match="one plain LoRA"):
        served_forward.install(model, "stochastic")
