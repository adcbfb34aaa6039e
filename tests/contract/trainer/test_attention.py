"""Packed attention is transformers' attention within each sample, and refuses what it cannot do; the Hub's kernel is
loaded the way the image carries it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from services.common.errors import RecipeError
from services.trainer import attention
from tests.contract.trainer.tiny_models import ATTENTION_ONLY, random_samples, tiny_lfm2


def last_hidden_states(model: torch.nn.Module, **kwargs: object) -> torch.Tensor:
    return model.model(use_cache=False, **kwargs).last_hidden_state


def test_packed_sdpa_equals_the_masked_attention_of_transformers():
    rows = [random_samples(9, 3, 20), random_samples(16, 16)]
    inputs = {
        "input_ids": torch.tensor([[token for s in row for token in s] for row in rows]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(s)) for s in row]) for row in rows]),
    }
    model = tiny_lfm2(ATTENTION_ONLY, lora=False)
    ours = last_hidden_states(model, **inputs)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, last_hidden_states(model, **inputs), atol=2e-5, rtol=0)


def test_rows_of_one_sample_need_no_position_ids():
    model = tiny_lfm2(ATTENTION_ONLY, lora=False)
    input_ids = torch.tensor(random_samples(12, 12))
    ours = last_hidden_states(model, input_ids=input_ids)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, last_hidden_states(model, input_ids=input_ids), atol=2e-5, rtol=0)


def test_padding_is_refused():
    model = tiny_lfm2(ATTENTION_ONLY, lora=False)
    input_ids, attention_mask = torch.tensor(random_samples(4)), torch.tensor([[0, 1, 1, 1]])
    last_hidden_states(model, input_ids=input_ids, attention_mask=torch.ones_like(attention_mask))
    with pytest.raises(ValueError, match="rows without padding"):
        last_hidden_states(model, input_ids=input_ids, attention_mask=attention_mask)


def test_a_cache_is_refused():
    model = tiny_lfm2(ATTENTION_ONLY, lora=False).eval()
    with pytest.raises(ValueError, match="takes no key-value cache"):
        model.generate(torch.tensor(random_samples(6)), max_new_tokens=2)


def test_varlen_calls_the_kernel_once_with_each_samples_bounds(monkeypatch):
    """The kernel itself needs CUDA (scripts/bench_attention_gpu.py runs it); this is what it is called with."""
    calls = []

    def fake_varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **kwargs):
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, kwargs))
        return per_sample(query, key, value, cu_q.tolist())

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    model = tiny_lfm2(ATTENTION_ONLY[:1], lora=False)
    inputs = {"input_ids": torch.tensor(random_samples(5, 5)), "position_ids": positions}
    expected = last_hidden_states(model, **inputs)
    model.set_attn_implementation(attention.PACKED_VARLEN)
    torch.testing.assert_close(last_hidden_states(model, **inputs), expected, atol=2e-5, rtol=0)
    starts, options = [0, 3, 5, 10], {"scale": 32**-0.5, "window_size": (-1, 0), "enable_gqa": True}
    assert calls == [(starts, starts, 5, 5, options)]


def per_sample(query, key, value, starts):
    """[tokens, heads, head_dim], plain causal attention between the starts."""
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[start:end].transpose(0, 1) for x in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for start, end in itertools.pairwise(starts)
    ]
    return torch.cat(parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here: the kernel would be right")
@pytest.mark.parametrize("implementation", [attention.FLASH, "varlen"])
def test_flash_attention_without_cuda_is_a_recipe_error(implementation):
    with pytest.raises(RecipeError, match="no CUDA device; set it to 'sdpa'"):
        attention.install(implementation)


def test_flash_attention_in_float32_is_a_recipe_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"model\.dtype 'float32'"):
        attention.install("varlen", "float32")


# -- the Hub's kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def image_kernels(tmp_path, monkeypatch):
    """Where the image would keep kernels; LOCAL_KERNELS as a start finds it, and put back afterwards."""
    monkeypatch.setattr(attention, "IMAGE_KERNELS", tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_kernel_of_the_image_is_what_transformers_loads(image_kernels: Path):
    """A FAKE kernel for the CPU, in the layout in which `kernels download` leaves one."""
    build = image_kernels / "kernels--kernels-community--flash-attn3/snapshots" / ("a" * 40) / "build/torch-cpu"
    build.mkdir(parents=True)
    build.joinpath("metadata.json").write_text(json.dumps(METADATA))
    build.joinpath("__init__.py").write_text("def flash_attn_varlen_func(): pass\ndef flash_attn_func(): pass\n")
    attention.load_flash_attention()
    from transformers import AttentionInterface

    assert attention.FLASH in AttentionInterface()


METADATA = {
    "id": "_fake_flash_attn3", "name": "flash-attn3", "version": 1, "license": "none", "python-depends": [],
    "backend": {"type": "cpu"},
}  # fmt: skip


def test_image_without_the_kernel_says_what_to_do(image_kernels: Path):
    with pytest.raises(RecipeError, match=r"cannot be loaded here: .* or set it to 'varlen'"):
        attention.load_flash_attention()
