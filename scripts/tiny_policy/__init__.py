"""Parts of ``scripts.make_tiny_policy``: recorded prompts, tokenizer, model, warm-up and its measure."""
