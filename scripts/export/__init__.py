"""Parts of ``scripts.export_adapter``: what is known of an adapter, its model card, the merge; here, which files."""

RECIPE = "recipe.toml"
RESULTS = "results.json"
ADAPTER_FILES = ("README.md", "adapter_config.json", "adapter_model.safetensors", RECIPE, RESULTS)
BASE_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "LICENSE*",
)  # fmt: skip
"""Patterns of what a merged model takes over from its base: what loads and renders, and the licence."""
MERGED_WEIGHTS = "model.safetensors"
MERGED_FILES = ("README.md", MERGED_WEIGHTS, RECIPE, *BASE_FILES)
"""Only these are pushed, whatever else lies in the folder."""
