"""Runs inside the trainer image, fed on stdin: prints as JSON what its TRL makes of this model and recipe.

It judges nothing; ``scripts.doctor.pitfalls`` does. What cannot be found out is an ``error`` in the fact's place.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
Source = dict[str, Any]
CALL = {"name": "bash", "arguments": {"command": "ls -a", "timeout": 5}}


def fact(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("trl", "kernels", "transformers", "torch", "vllm")}


def model_config(source: Source) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**source)
    layers = sorted(set(getattr(config, "layer_types", None) or []))
    return {"model_type": config.model_type, "layer_types": layers, "eos_token_id": config.eos_token_id}


def supported(source: Source) -> bool:
    import trl

    from services.trainer import packing

    packing.require_supported(trl.__version__, model_config(source)["model_type"])
    return True


def tokenizer_of(source: Source) -> Any:
    from transformers import AutoTokenizer
    from trl.chat_template_utils import lfm2_2_5_template

    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.response_template = lfm2_2_5_template
    return tokenizer


def tool_call_round_trip(source: Source) -> list[dict[str, Any]]:
    """A tool call, rendered by the model's chat template and read back by TRL: what TRL reads."""
    from trl.chat_template_utils import parse_response

    tokenizer = tokenizer_of(source)
    messages = [
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    ]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
    prompt = tokenizer.apply_chat_template(messages[:1], tools=tools, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    ids = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    parsed = parse_response(tokenizer, ids, prefix=tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return [call["function"] for call in parsed.get("tool_calls") or []]


def worker(source: Source, recipe_path: str) -> dict[str, Any]:
    """What the trainer gives TRL's rollout worker, as far as it is plain values."""
    from pathlib import Path

    from services.common import recipe
    from services.trainer import train

    given = train.worker_arguments(recipe.load(Path(recipe_path)), "http://policy", object, [], tokenizer_of(source))
    return {"given": {name: value for name, value in given.items() if isinstance(value, int | float | str | list)}}


def push_callback() -> bool:
    """Whether transformers still has its own callback that pushes checkpoints."""
    import transformers

    return hasattr(transformers.integrations, "PushToHubCallback") or hasattr(transformers, "PushToHubCallback")


def image_kernel() -> bool:
    """Whether the image carries the attention kernel that the recipe may name."""
    from services.trainer import attention

    return attention.image_kernel() is not None


def main(location: str, revision: str, recipe_path: str) -> dict[str, Any]:
    source = {"pretrained_model_name_or_path": location, "revision": revision or None}
    return {
        "versions": fact(versions),
        "config": fact(lambda: model_config(source)),
        "supported": fact(lambda: supported(source)),
        "eos_token_id": fact(lambda: tokenizer_of(source).eos_token_id),
        "round_trip": fact(lambda: tool_call_round_trip(source)),
        "worker": fact(lambda: worker(source, recipe_path)),
        "image_kernel": fact(image_kernel),
        "push_callback": fact(push_callback),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        found = main(*sys.argv[1:])
    print(json.dumps(found))
