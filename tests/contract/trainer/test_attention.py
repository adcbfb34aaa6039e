"""``packed_sdpa`` is transformers' attention within each sample, and refuses what it cannot do."""

from __future__ import annotations

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here: the kernel would be right")
def test_flash_attention_without_cuda_is_a_recipe_error():
    with pytest.raises(RecipeError, match="no CUDA device; set it to 'sdpa'"):
        attention.install(attention.FLASH)
