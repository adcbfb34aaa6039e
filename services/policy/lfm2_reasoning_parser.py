"""vLLM reasoning parser for LFM2.5: ``--reasoning-parser-plugin <this file> --reasoning-parser lfm2_5``.

For a model whose prompt ends in ``<think>`` and only for one (``reasoning.py`` finds out): all text up to
``</think>`` is reasoning. Why none of vLLM 0.31's own: ``qwen3``, which is recommended for LFM2.5, ends the reasoning
at the words ``<tool_call>`` too (a call written in the thoughts after them runs), and drops LFM2.5's markers where a
tokenizer lists them among its named special tokens (no call is ever read). Parsers without ``engine_based_streaming``
make vLLM show the raw text of a call that could not be read.
"""

from collections.abc import Sequence

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager
from vllm.tokenizers import TokenizerLike

from services.policy.lfm2_stream import THINK_END, THINK_START, ReasoningStream
from services.policy.reasoning import REASONING_PARSER as NAME

_TAIL_TOKENS = 32  # enough for either marker, however the tokenizer splits it


class Lfm2ReasoningParser(ReasoningParser):
    """One per request and choice, as vLLM makes them."""

    engine_based_streaming = True
    reasoning_start_str = THINK_START
    reasoning_end_str = THINK_END

    def __init__(self, tokenizer: TokenizerLike, *args: object, **kwargs: object) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._stream = ReasoningStream()

    def adjust_request(
        self, request: ChatCompletionRequest | ResponsesRequest
    ) -> ChatCompletionRequest | ResponsesRequest:
        request.skip_special_tokens = False  # some tokenizers make </think> a special token
        return request

    def extract_reasoning(
        self, model_output: str, request: ChatCompletionRequest | ResponsesRequest
    ) -> tuple[str | None, str | None]:
        stream = ReasoningStream()
        reasoning, content = stream.feed(model_output)
        return reasoning + stream.finish() or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        reasoning, content = self._stream.feed(delta_text)
        if not reasoning and not content:
            return None
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    def finish_streaming(self) -> DeltaMessage | None:
        held = self._stream.finish()
        return DeltaMessage(reasoning=held) if held else None

    def has_engine_confirmed_reasoning_end(self) -> bool:
        return self._stream.ended

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Of a prompt, or of a growing output that is asked for at every step (structured output)."""
        tail = self.model_tokenizer.decode(list(input_ids[-_TAIL_TOKENS:]), skip_special_tokens=False)
        return tail.rfind(THINK_END) > tail.rfind(THINK_START)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids  # the tool parser reads text only


ReasoningParserManager.register_module(NAME, module=Lfm2ReasoningParser)
