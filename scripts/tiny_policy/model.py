"""A tiny ``Lfm2ForCausalLM`` of LFM2.5's kind: short convolutions and attention, tied embeddings, float32."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

HIDDEN, FEED_FORWARD, HEAD_DIM = 128, 384, 64
"""vLLM's CPU attention takes a head_dim of 64 and refuses 16."""
LAYERS = ("conv", "full_attention", "conv", "full_attention")
INITIALIZER_RANGE = 0.08
"""About 1/sqrt(HIDDEN). With transformers' 0.02 the warm-up was 4 times further from its floor after 200 steps."""
MAX_POSITIONS = 32768


def config(tokenizer: PreTrainedTokenizerFast) -> Lfm2Config:
    """Shapes and token ids; conv_dim, conv_dim_out and block_dim are read by vLLM but unknown to transformers."""
    vocab_size = -(-len(tokenizer) // 64) * 64
    return Lfm2Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        block_ff_dim=FEED_FORWARD,
        block_auto_adjust_ff_dim=False,
        block_dim=HIDDEN,
        conv_dim=HIDDEN,
        conv_dim_out=HIDDEN,
        conv_L_cache=3,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.float32,
    )


def build(tokenizer: PreTrainedTokenizerFast, seed: int) -> Lfm2ForCausalLM:
    """A model with random weights from ``seed``; its generation config samples the full vocabulary."""
    torch.manual_seed(seed)
    model = Lfm2ForCausalLM(config(tokenizer)).to(torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    return model
