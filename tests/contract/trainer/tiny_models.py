"""Small LFM2 models with random weights, as ``AsyncGRPOTrainer`` holds them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Lfm2Config, Lfm2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from services.trainer import attention, cpu

SHIPPED = Path(__file__).parents[3] / "data/models/tiny-lfm2"
VOCAB_SIZE = 512
HYBRID = ("conv", "full_attention", "conv", "full_attention")
ATTENTION_ONLY = ("full_attention",) * 4
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3"]


def use_stand_ins() -> None:
    """What a training process installs before it builds a trainer, on this machine."""
    if torch.cuda.is_available():
        attention.install("sdpa")
    else:
        cpu.install()


def tiny_lfm2(
    layers: tuple[str, ...] = HYBRID,
    *,
    lora: bool = True,
    kernel_size: int = 3,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = attention.PACKED_SDPA,
) -> torch.nn.Module:
    """A model with weights large enough (0.2) that one wrong input token is worth nats, in training mode."""
    use_stand_ins()
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, block_auto_adjust_ff_dim=False,
        num_hidden_layers=len(layers), num_attention_heads=2, num_key_value_heads=1, layer_types=list(layers),
        conv_L_cache=kernel_size, initializer_range=0.2, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).to(dtype)
    model.set_attn_implementation(attn_implementation)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    if lora:
        peft_config = LoraConfig(r=4, lora_alpha=8, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
        model = get_peft_model(model, peft_config)
        model.enable_input_require_grads()  # as TRL does under gradient checkpointing
    return model.train()


def random_samples(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
