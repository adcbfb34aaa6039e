"""A byte-level BPE tokenizer that makes OpenCode's long, nearly constant prompt short.

BPE alone cannot: the prompt occurs once, so each further merge saves one token. Every whole line of the recorded
prompt is therefore one token (an added token, matched before BPE). A line that OpenCode words otherwise one day, or a
tool list with other tools, still encodes, only longer. LFM2.5's special tokens keep LFM2.5's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import lfm2_2_5_v2_chat_template

from scripts.tiny_policy import prompts

PAD, BOS, END_OF_TEXT, IM_START, IM_END = "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"
SPECIAL_TOKENS = (
    PAD, BOS, END_OF_TEXT, "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>", IM_START, IM_END,
    "<|tool_list_start|>", "<|tool_list_end|>", CALL_START, CALL_END,
    "<|tool_response_start|>", "<|tool_response_end|>",
)  # fmt: skip
TASK_WEIGHT = 50
"""Repetitions of the tasks' words in the BPE corpus, so that they become whole pieces in a small vocabulary."""
MIN_PHRASE_CHARS = 12
"""Shorter lines stay BPE: as added tokens they would also match inside a user's words."""


def phrases(texts: Iterable[str], tools: list[prompts.Tool]) -> list[str]:
    """The lines of the constant prompt texts, and of each tool as the chat template writes it (JSON)."""
    pieces: dict[str, None] = {}
    for text in texts:
        for line in re.findall(r"[^\n]*\n+|[^\n]+", text):
            pieces.update(dict.fromkeys(prompts.MARK.split(line)))
    for tool in tools:
        line = json.dumps(tool, ensure_ascii=False)
        pieces.update(dict.fromkeys(re.findall(r"(?:(?!\\n).)*(?:\\n)+|(?:(?!\\n).)+", line)))
    return [piece for piece in pieces if len(piece) >= MIN_PHRASE_CHARS]


def build(tasks: list[prompts.Task], bpe_pieces: int, with_phrases: bool = True) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the recorded prompts and on the tasks' words.

    Args: bpe_pieces: size of the BPE vocabulary, bytes and special tokens included.
        with_phrases: False leaves the prompt to BPE, for a realistic prompt length.
    """
    agent = prompts.recorded()["agent"]
    title = [message["content"] for message in prompts.recorded()["title"]]
    task_text = [
        f"user\n{prompts.user_text(task.instruction)}\nassistant\n{call_text(task.command)}\ntool\n(no output)\n"
        f"assistant\n{prompts.FINAL_TEXT}\n{prompts.TITLE_TEXT}"
        for task in tasks
    ]
    prompt_text = [agent["system"], *title, *(json.dumps(tool, ensure_ascii=False) for tool in agent["tools"])]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        task_text * TASK_WEIGHT + prompt_text,
        trainers.BpeTrainer(
            vocab_size=bpe_pieces,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if with_phrases:
        lines = phrases([agent["system"], *title], agent["tools"])
        tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=IM_END, pad_token=PAD,
        chat_template=lfm2_2_5_v2_chat_template,
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[prompts.Message], tools: list[prompts.Tool] | None = None
) -> str:
    """The text of a prompt that the assistant is to continue."""
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))


def call_text(command: str) -> str:
    """A tool call exactly as LFM2.5's template writes it."""
    return f"{CALL_START}[{prompts.SHELL_TOOL}(command='{command}')]{CALL_END}{IM_END}"


def tool_turn(result: str) -> str:
    """What stands between a tool call and the next assistant turn."""
    return f"\n{IM_START}tool\n{result}{IM_END}\n{IM_START}assistant\n"
