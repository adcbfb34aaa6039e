"""vLLM tool parser for LFM2.5: ``--tool-parser-plugin <this file> --tool-call-parser lfm2_5``.

Not called ``lfm2``: vLLM only logs a plugin that fails to load, and would then quietly serve its own parser of that
name. ``engine_based_streaming`` is vLLM's mark for parsers that take each delta once: with it vLLM hands over deltas
without the text so far (no quadratic copying), calls ``finish_streaming`` at the end, and shows the parser's content
instead of the raw output when no call was read. It holds only if the reasoning parser, if any, has the mark too.
"""

import functools
import json
from collections.abc import Sequence

from vllm.entrypoints.chat_utils import make_tool_call_id
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers.abstract_tool_parser import Tool as VllmTool
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from services.policy import parser_metrics
from services.policy.lfm2_calls import Call, Tool
from services.policy.lfm2_stream import CallStream, Output

NAME = "lfm2_5"

logger = init_logger(f"vllm.{__name__}")  # below vLLM's logger, so that its configuration applies


class Lfm2ToolParser(ToolParser):
    """One per request and choice, as vLLM makes them."""

    engine_based_streaming = True

    def __init__(self, tokenizer: TokenizerLike, tools: list[VllmTool] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._stream = self._new_stream()

    def adjust_request(
        self, request: ChatCompletionRequest | ResponsesRequest
    ) -> ChatCompletionRequest | ResponsesRequest:
        request = super().adjust_request(request)
        # The markers are special tokens. The stream removes all others from content itself.
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        stream = self._new_stream()
        output = Output.joined([stream.feed(model_output), stream.finish()])
        self._record(output)
        return ExtractedToolCallInformation(
            tools_called=bool(output.calls),
            tool_calls=[
                ToolCall(id=make_tool_call_id(), function=FunctionCall(name=call.name, arguments=_json(call)))
                for call in output.calls
            ],
            content=output.content or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        return self._delta(self._stream.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        return self._delta(self._stream.finish())

    def _new_stream(self) -> CallStream:
        return CallStream(_declared(self.tools), drop=_special_tokens(self.model_tokenizer))

    def _delta(self, output: Output) -> DeltaMessage | None:
        """A call goes out whole, in one delta: name, id and all arguments."""
        self._record(output)
        deltas = []
        for call in output.calls:
            arguments = _json(call)
            function = DeltaFunctionCall(name=call.name, arguments=arguments)
            index = len(self.prev_tool_call_arr)
            deltas.append(DeltaToolCall(index=index, id=make_tool_call_id(), type="function", function=function))
            # vLLM sends the difference of these two at the end of a stream: nothing.
            self.prev_tool_call_arr.append({"name": call.name, "arguments": arguments})
            self.streamed_args_for_tool.append(arguments)
        if not deltas and not output.content:
            return None
        return DeltaMessage(content=output.content or None, tool_calls=deltas)

    def _record(self, output: Output) -> None:
        parser_metrics.count(output)
        for reason in output.unread:
            logger.warning("tool call not read, so not run: %s", reason)


def _json(call: Call) -> str:
    return json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)


def _declared(tools: Sequence[VllmTool]) -> dict[str, Tool]:
    functions = [tool.function if isinstance(tool, ChatCompletionToolsParam) else tool for tool in tools]
    return {function.name: Tool.from_schema(function.parameters) for function in functions}


@functools.lru_cache(maxsize=4)
def _special_tokens(tokenizer: TokenizerLike) -> frozenset[str]:
    """What ``skip_special_tokens=True`` would have removed; the stream looks for its own markers first."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token.content for token in added.values() if token.special)


ToolParserManager.register_module(NAME, module=Lfm2ToolParser)
