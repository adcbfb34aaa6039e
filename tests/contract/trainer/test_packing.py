"""Packed samples compute what they compute alone; the control without the hooks shows that the tests can tell."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.lfm2 import modeling_lfm2

from services.common.errors import NotReadyError, RecipeError
from services.trainer import packing
from tests.contract.trainer.tiny_models import ATTENTION_ONLY, HYBRID, random_samples, tiny_lfm2

SAMPLES = random_samples(70, 130, 41)
FLOAT_NOISE = 2e-5
LEAK_NATS = 0.5


@pytest.fixture
def distributed():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_without_the_hooks_a_convolution_leaks_and_attention_does_not():
    leaking = packing.measure(tiny_lfm2(HYBRID), SAMPLES)
    control = packing.measure(tiny_lfm2(ATTENTION_ONLY), SAMPLES)
    assert leaking.max_abs_logprob_diff > LEAK_NATS
    assert leaking.max_rel_gradient_diff > LEAK_NATS
    assert control.max_abs_logprob_diff < FLOAT_NOISE
    assert control.max_rel_gradient_diff < FLOAT_NOISE


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed-reentrant"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_packed_samples_equal_themselves_alone_in_forward_and_backward(lora, use_reentrant):
    model = tiny_lfm2(lora=lora)
    packing.install(model)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    report = packing.measure(model, SAMPLES)
    assert report.max_abs_logprob_diff < FLOAT_NOISE
    assert report.max_rel_gradient_diff < FLOAT_NOISE


def test_packed_samples_equal_themselves_alone_with_transformers_own_sdpa():
    model = tiny_lfm2(attn_implementation="sdpa")
    packing.install(model)
    report = packing.measure(model, SAMPLES)
    assert report.max_abs_logprob_diff < FLOAT_NOISE
    assert report.max_rel_gradient_diff < FLOAT_NOISE


def test_ddp_may_wrap_the_model_after_the_hooks(distributed):
    model = tiny_lfm2()
    packing.install(model)
    report = packing.measure(torch.nn.parallel.DistributedDataParallel(model), SAMPLES)
    assert report.max_abs_logprob_diff < FLOAT_NOISE
    assert report.max_rel_gradient_diff < FLOAT_NOISE


def test_ddp_may_wrap_the_model_before_the_hooks(distributed):
    model = torch.nn.parallel.DistributedDataParallel(tiny_lfm2())
    packing.install(model)
    assert packing.measure(model, SAMPLES).max_abs_logprob_diff < FLOAT_NOISE


def test_bfloat16_is_as_close_as_its_rounding():
    model = tiny_lfm2(dtype=torch.bfloat16)
    assert packing.measure(model, SAMPLES).max_rel_gradient_diff > packing.MAX_REL_GRADIENT_DIFF[torch.bfloat16]
    packing.install(model)
    packing.check(model, SAMPLES, max_abs_logprob_diff=0.05)


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_any_lengths_pack_exactly_for_any_kernel_size(kernel_size, lengths):
    model = tiny_lfm2(kernel_size=kernel_size, lora=False)
    packing.install(model)
    samples = random_samples(*lengths)
    with torch.no_grad():
        alone = torch.cat([hidden_states(model, [[sample]]) for sample in samples], dim=1)
        packed = hidden_states(model, [samples])
    torch.testing.assert_close(packed, alone, atol=FLOAT_NOISE, rtol=0)


def test_several_rows_at_once_pack_exactly():
    model = tiny_lfm2(lora=False)
    packing.install(model)
    rows = [random_samples(5, 2, 9), random_samples(1, 12, 3)]
    with torch.inference_mode():
        together = hidden_states(model, rows)
        for row, samples in enumerate(rows):
            alone = torch.cat([hidden_states(model, [[sample]]) for sample in samples], dim=1)
            torch.testing.assert_close(together[row : row + 1], alone, atol=FLOAT_NOISE, rtol=0)


def test_another_forward_pass_before_the_backward_pass_changes_nothing():
    """Gradient checkpointing replays a layer after others have run: nothing may be left over from those."""
    model = tiny_lfm2(lora=False)
    packing.install(model)
    model.gradient_checkpointing_enable()
    first, other = [random_samples(9, 14)], [random_samples(4, 6, 13)]
    expected = embedding_gradient(model, hidden_states(model, first).sum())
    output = hidden_states(model, first)
    with torch.no_grad():
        hidden_states(model, other)
    torch.testing.assert_close(embedding_gradient(model, output.sum()), expected, atol=0, rtol=0)


def test_position_ids_that_are_written_in_place_are_read_again():
    model = tiny_lfm2(lora=False)
    packing.install(model)
    sample = random_samples(20)[0]
    input_ids, position_ids = torch.tensor([sample]), torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        position_ids[0, 8:] -= 8
        found = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        expected = torch.cat([hidden_states(model, [[part]]) for part in (sample[:8], sample[8:])], dim=1)
    torch.testing.assert_close(found, expected, atol=FLOAT_NOISE, rtol=0)


def test_the_convolution_may_be_another_kernel(monkeypatch):
    """``causal_conv1d`` or a Hub kernel takes the place of this function; the hooks must not depend on which."""
    numbered = []

    def fused_kernel(hidden_states, weight, bias=None, activation=None, seq_idx=None):
        numbered.append(seq_idx)
        width, length = weight.shape[-1], hidden_states.shape[-1]
        padded = torch.nn.functional.pad(hidden_states, (width - 1, 0))
        return sum(padded[..., i : i + length] * weight[:, i, None] for i in range(width))

    model = tiny_lfm2()
    packing.install(model)
    expected = packing.measure(model, SAMPLES)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", fused_kernel)
    report = packing.measure(model, SAMPLES)
    packed = [x for x in numbered if x is not None and x.shape[1] == sum(map(len, SAMPLES))]
    assert len(packed) == HYBRID.count("conv")
    for seq_idx in packed:  # what causal_conv1d honours by itself
        assert seq_idx.dtype == torch.int32
        assert seq_idx[0].tolist() == [number for number, sample in enumerate(SAMPLES) for _ in sample]
    assert expected.max_abs_logprob_diff < FLOAT_NOISE
    assert report.max_abs_logprob_diff < FLOAT_NOISE
    assert report.max_rel_gradient_diff < FLOAT_NOISE


def test_parameter_names_and_generation_stay_as_they_were():
    model = tiny_lfm2(lora=False, attn_implementation="sdpa").eval()
    names, prompt = list(model.state_dict()), torch.tensor(random_samples(11))
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    packing.install(model)
    assert list(model.state_dict()) == names
    assert model.generate(prompt, max_new_tokens=8, do_sample=False).equal(before)


def test_removed_hooks_leak_again():
    model = tiny_lfm2()
    for hook in packing.install(model):
        hook.remove()
    assert packing.measure(model, SAMPLES).max_abs_logprob_diff > LEAK_NATS


def test_a_model_without_convolutions_gets_no_hooks():
    assert packing.install(tiny_lfm2(ATTENTION_ONLY)) == []


def test_check_passes_with_the_hooks_and_names_both_numbers_without():
    model = tiny_lfm2()
    with pytest.raises(NotReadyError, match=r"70 and 130 and 41 tokens.*nats \(allowed 1e-05\).*\(allowed 0.001\)"):
        packing.check(model, SAMPLES, max_abs_logprob_diff=1e-5)
    packing.install(model)
    report = packing.check(model, SAMPLES, max_abs_logprob_diff=1e-5)
    assert report.sample_tokens == (70, 130, 41)


def test_check_refuses_a_leak_of_gradients_alone():
    model = tiny_lfm2()
    with pytest.raises(NotReadyError, match="gradients by up to"):
        packing.check(model, SAMPLES, max_abs_logprob_diff=math.inf)


def test_check_refuses_nan():
    model = tiny_lfm2()
    packing.install(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[SAMPLES[1][0]] = math.nan
    with pytest.raises(NotReadyError, match="nan"):
        packing.check(model, SAMPLES, max_abs_logprob_diff=1e-5)


def test_measuring_leaves_gradients_and_weights_as_they_were():
    model = tiny_lfm2()
    packing.install(model)
    parameter = next(p for p in model.parameters() if p.requires_grad)
    parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    packing.measure(model, SAMPLES)
    assert parameter.grad.equal(torch.ones_like(parameter))
    assert all(p.grad is None for p in model.parameters() if p is not parameter)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_sample_bounds_cover_every_row():
    position_ids = torch.tensor([[0, 1, 0, 0, 1], [3, 4, 5, 0, 1]])
    assert packing.sample_bounds(position_ids) == (((0, 2), (2, 3), (3, 5)), ((0, 3), (3, 5)))


def test_only_the_pinned_trl_and_lfm2_are_supported():
    packing.require_supported("1.15.0", "lfm2")
    with pytest.raises(NotReadyError, match=r"TRL 1\.16\.0 .* only 1\.15 .* prefix trees.* refuses models with conv"):
        packing.require_supported("1.16.0", "lfm2")
    with pytest.raises(NotReadyError, match=r"TRL 1\.14\.2 .* only 1\.15"):
        packing.require_supported("1.14.2", "lfm2")
    with pytest.raises(RecipeError, match="model of type 'mamba2'; allowed: lfm2"):
        packing.require_supported("1.15.1", "mamba2")


def hidden_states(model: torch.nn.Module, rows: list[list[list[int]]]) -> torch.Tensor:
    """Last hidden states of rows of packed samples, [rows, T, hidden]."""
    return model.model(
        input_ids=torch.tensor([[token for sample in row for token in sample] for row in rows]),
        position_ids=torch.stack([torch.cat([torch.arange(len(sample)) for sample in row]) for row in rows]),
        use_cache=False,
    ).last_hidden_state


def embedding_gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, [model.get_input_embeddings().weight])
    return gradient
