"""Does this model's prompt end inside ``<think>``? Then vLLM needs our reasoning parser, else it must not have it."""

from pathlib import Path

THINK = "<think>"
REASONING_PARSER = "lfm2_5"
REASONING_PARSER_PLUGIN = Path(__file__).with_name("lfm2_reasoning_parser.py")


def reasoning_flags(location: str, revision: str | None = None) -> list[str]:
    """Flags for ``vllm serve``.

    LFM2.5-2.6B's template ends the generation prompt with ``<think>``: without the parser the thoughts would be
    content, and a call written in them would run. The templates of LFM2.5's other models, which TRL ships, do not: with
    the parser all that the model says would be thoughts.
    Args: location, revision: folder of the model, or its name on the Hub (from the local cache if offline).
    """
    template = Path(location, "chat_template.jinja")
    if template.is_file() and THINK not in template.read_text(encoding="utf-8"):
        return []
    from transformers import AutoTokenizer  # seconds to import

    tokenizer = AutoTokenizer.from_pretrained(location, revision=revision)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    if not prompt.rstrip().endswith(THINK):
        return []
    return ["--reasoning-parser-plugin", str(REASONING_PARSER_PLUGIN), "--reasoning-parser", REASONING_PARSER]
