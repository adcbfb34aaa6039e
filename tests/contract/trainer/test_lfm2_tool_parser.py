"""The plugins inside vLLM's own chat-completions path, and calls through LFM2.5's own chat templates and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import (
    lfm2_2_5_chat_template,
    lfm2_2_5_v2_chat_template,
    lfm2_2_5_vl_chat_template,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from services.policy import lfm2_reasoning_parser, lfm2_tool_parser
from services.policy.lfm2_calls import MAX_NUMBER_CHARS, TOOL_CALL_END, TOOL_CALL_START, Tool
from services.policy.lfm2_stream import MAX_END_MARKERS, CallStream, Output
from services.policy.reasoning import reasoning_flags

CASES = json.loads((Path(__file__).parents[2] / "cases" / "lfm2_tool_calls.json").read_text())
START, END = TOOL_CALL_START, TOOL_CALL_END
SPECIAL_TOKENS = ["<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", START, END, "<|tool_response_start|>"]

# (content, [(name, arguments as JSON text)], reasoning)
Message = tuple[str, list[tuple[str, str]], str]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with LFM2.5's kind of special tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|startoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )


def request(tools: dict[str, Any] = CASES["tools"], **options: Any) -> ChatCompletionRequest:
    entries = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": {key: {} for key in parameters}}},
        }
        for name, parameters in tools.items()
    ]
    return ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": "x"}], tools=entries, **options)


def whole(tokenizer: Any, raw: str, asked: ChatCompletionRequest, reasoning: str | None = None) -> Message:
    """What vLLM answers without streaming."""
    parser = ParserManager.get_parser(lfm2_tool_parser.NAME, reasoning, enable_auto_tools=True)(tokenizer, asked.tools)
    thoughts, content, calls = parser.parse(raw, asked, enable_auto_tools=True)
    return content or "", [(call.name, call.arguments) for call in calls or []], thoughts or ""


def streamed(
    tokenizer: Any, raw: str, asked: ChatCompletionRequest, size: int | None, reasoning: str | None = None
) -> Message:
    """What a client puts together from vLLM's deltas."""
    parser = ParserManager.get_parser(lfm2_tool_parser.NAME, reasoning, enable_auto_tools=True)(tokenizer, asked.tools)
    step = size or max(len(raw), 1)
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)] or [""]
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>" if reasoning else "<|im_start|>assistant\n")
    content, thoughts, calls, ids = "", "", {}, set()
    for number, piece in enumerate(pieces):
        delta = parser.parse_delta(
            piece, tokenizer.encode(piece), asked, prompt_token_ids=prompt, finished=number == len(pieces) - 1
        )
        if delta is None:
            continue
        content += delta.content or ""
        thoughts += delta.reasoning or ""
        for call in delta.tool_calls:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
            ids.add(call.id)
    assert len(ids) == len(calls)
    assert all(name.startswith("chatcmpl-tool-") for name in ids)
    assert sorted(calls) == list(range(len(calls)))
    return content, [calls[index] for index in sorted(calls)], thoughts


def every_way(tokenizer: Any, raw: str, asked: ChatCompletionRequest, reasoning: str | None = None) -> Message:
    result = whole(tokenizer, raw, asked, reasoning)
    for size in (None, 3, 1):
        assert streamed(tokenizer, raw, asked, size, reasoning) == result
    return result


def counts() -> dict[str, float]:
    return {
        outcome: REGISTRY.get_sample_value("lfm2_tool_calls_total", {"outcome": outcome}) or 0.0
        for outcome in ("parsed", "repaired", "unparsed")
    }


# --- inside vLLM ------------------------------------------------------------------------------------------------


def test_vllm_loads_both_plugins_from_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolParserManager, "tool_parsers", {})
    monkeypatch.setattr(ReasoningParserManager, "reasoning_parsers", {})
    for _ in range(2):  # vLLM may run a file more than once
        ToolParserManager.import_tool_parser(lfm2_tool_parser.__file__)
        ReasoningParserManager.import_reasoning_parser(lfm2_reasoning_parser.__file__)
    assert ToolParserManager.get_tool_parser("lfm2_5").__name__ == "Lfm2ToolParser"
    assert ReasoningParserManager.get_reasoning_parser("lfm2_5").__name__ == "Lfm2ReasoningParser"


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_case_is_read_as_asked_in_every_way(tokenizer: Any, case: dict[str, Any]) -> None:
    content, calls, _ = every_way(tokenizer, case["raw"], request())
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls] == case["calls"]
    assert content.strip() == (case["content"] or "").strip()


def test_block_that_cannot_be_read_shows_no_marker(tokenizer: Any) -> None:
    content, calls, _ = every_way(tokenizer, f"So: {START}[bash(command='a 'b')]{END} done{END}", request())
    assert (content, calls) == ("So:  done", [])


def test_special_tokens_reach_the_parser_and_the_others_do_not_reach_content(tokenizer: Any) -> None:
    adjusted = lfm2_tool_parser.Lfm2ToolParser(tokenizer, []).adjust_request(request())
    assert adjusted.skip_special_tokens is False
    assert every_way(tokenizer, "a<|tool_response_start|>b<|im_start|>", request())[0] == "ab"


def test_request_without_tools_gets_no_calls_and_no_markers(tokenizer: Any) -> None:
    title = ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": "x"}])
    assert title.tool_choice == "none"
    assert every_way(tokenizer, f"A title{START}[bash(command='ls')]{END}", title)[:2] == ("A title", [])


def test_tools_are_the_requests_own(tokenizer: Any) -> None:
    raw = f"{START}[bash(command='f(a='x', b='y')', note='n')]{END}"
    assert every_way(tokenizer, raw, request({"bash": ["command", "b", "note"]}))[1] == []
    (call,) = every_way(tokenizer, raw, request({"bash": ["command", "note"]}))[1]
    assert json.loads(call[1]) == {"command": "f(a='x', b='y')", "note": "n"}


def test_reasoning_that_the_prompt_opened_is_no_content_and_runs_no_call(tokenizer: Any) -> None:
    name = lfm2_reasoning_parser.NAME
    raw = f"Try <tool_call> or {START}[bash(command='rm -r /')]{END}?</think>ok {START}[bash(command='ls')]{END}"
    content, calls, thoughts = every_way(tokenizer, raw, request(), name)
    assert (content, calls) == ("ok ", [("bash", '{"command": "ls"}')])
    assert thoughts == "Try <tool_call> or [bash(command='rm -r /')]?"

    cut = every_way(tokenizer, f"Try {START}[bash(command='rm -r /')]{END} </thi", request(), name)
    assert cut == ("", [], "Try [bash(command='rm -r /')] </thi")


def test_reasoning_end_is_seen_in_token_ids(tokenizer: Any) -> None:
    parser = lfm2_reasoning_parser.Lfm2ReasoningParser(tokenizer)
    assert not parser.is_reasoning_end(tokenizer.encode("a</think>b<|im_start|>assistant\n<think>"))
    assert parser.is_reasoning_end(tokenizer.encode("<think>a</think>"))


def test_reasoning_parser_is_asked_for_where_the_template_opens_reasoning(tokenizer: Any, tmp_path: Path) -> None:
    plain = lfm2_2_5_vl_chat_template
    opening = plain.replace(
        'assistant\\n" -}}\n{%- endif -%}', 'assistant\\n<think>" -}}\n{%- endif -%}'
    )  # LFM2.5-2.6B's
    assert opening != plain
    flags = []
    for template in (plain, opening):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        flags.append(reasoning_flags(str(tmp_path)))
    assert flags[0] == []
    assert flags[1][2:] == ["--reasoning-parser", lfm2_reasoning_parser.NAME]
    assert flags[1][:2] == ["--reasoning-parser-plugin", lfm2_reasoning_parser.__file__]


def test_counter_is_on_the_registry_that_vllm_serves(tokenizer: Any) -> None:
    unregister_vllm_metrics()  # as vLLM's engine does when it starts, after the plugins were loaded
    before = counts()
    raw = f"{START}[bash(command='ls'), bash(command='echo 'a'')]{END}{START}[bash(command='l"
    whole(tokenizer, raw, request())
    streamed(tokenizer, raw, request(), 1)
    assert {key: value - before[key] for key, value in counts().items()} == {"parsed": 2, "repaired": 2, "unparsed": 2}
    assert b'lfm2_tool_calls_total{outcome="unparsed"}' in generate_latest(REGISTRY)


# --- through LFM2.5's templates ---------------------------------------------------------------------------------
#
# TRL ships three. ``vl`` escapes strings and writes lists as JSON: nothing is ambiguous. ``2_5`` and ``v2`` put
# strings between single quotes as they are, and lists as Python prints them. What those two cannot tell apart, and
# how it is read: a backslash and an n, or a line break -> a line break (so too r, t, quotes, backslashes, uXXXX);
# a string that begins with two quotes, or a triple-quoted one -> triple-quoted; one string that spells a seam
# ("x', timeout='y"), or two arguments -> two arguments.

Calls = list[tuple[str, dict[str, Any]]]
PLAIN = pytest.mark.parametrize("template", [lfm2_2_5_chat_template, lfm2_2_5_v2_chat_template], ids=["2_5", "v2"])

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}([.-][a-z0-9]{1,4})?", fullmatch=True)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from([START, END, "<think>", "'", '"', "\\", "\\n", "', b='", "')]", "it's", "\r\n\t\b\x1b\u200b"]),
)
unquoted_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="'\\"), max_size=20)
quoted_texts = st.text(st.sampled_from("ab '\"=.(-$|\n"), max_size=15)
largest = 10 ** (MAX_NUMBER_CHARS - 2)
scalars = st.none() | st.booleans() | st.integers(-largest, largest) | st.floats(allow_nan=False, allow_infinity=False)
nested = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
containers = st.lists(nested, max_size=3) | st.dictionaries(st.text(max_size=5), nested, max_size=3)


def calls_with(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Calls]:
    calls = st.lists(st.tuples(names, st.dictionaries(keys, values, max_size=4)), min_size=1, max_size=3)
    return calls.filter(lambda calls: json.dumps(calls).count(END) < MAX_END_MARKERS)


def rendered(tokenizer: Any, template: str, calls: Calls) -> str:
    """The completion that the template makes of an assistant message with these calls."""
    entries = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Go. ", "tool_calls": entries}]
    options = {"chat_template": template, "tokenize": False}
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
    text = tokenizer.apply_chat_template(messages, **options)
    assert text.startswith(prompt + "Go. ")
    return text.removeprefix(prompt).removesuffix("<|im_end|>\n")


def read(completion: str, calls: Calls) -> Output:
    """With the tools of these calls declared, names only."""
    declared: dict[str, dict[str, frozenset[str]]] = {}
    for name, arguments in calls:
        declared.setdefault(name, {}).update(dict.fromkeys(arguments, frozenset()))
    stream = CallStream({name: Tool(parameters) for name, parameters in declared.items()})
    return Output.joined([stream.feed(completion), stream.finish()])


def same(output: Output, calls: Calls) -> bool:
    found = [[call.name, call.arguments] for call in output.calls]
    return json.dumps(found) == json.dumps(calls)  # as text: to Python 1, 1.0 and True are equal


@given(calls=calls_with(scalars | texts | containers))
@settings(max_examples=300, deadline=None)
def test_calls_come_back_through_the_escaping_template(tokenizer: Any, calls: Calls) -> None:
    output = read(rendered(tokenizer, lfm2_2_5_vl_chat_template, calls), calls)
    assert same(output, calls)
    assert not any(call.repaired for call in output.calls)
    assert output.content == "Go. "


@PLAIN
@given(calls=calls_with(scalars | unquoted_texts | containers))
@settings(max_examples=200, deadline=None)
def test_calls_come_back_through_the_plain_templates(tokenizer: Any, template: str, calls: Calls) -> None:
    assert same(read(rendered(tokenizer, template, calls), calls), calls)


@PLAIN
@given(calls=calls_with(quoted_texts))
@settings(max_examples=300, deadline=None)
def test_unescaped_quotes_come_back_through_the_plain_templates_exactly_or_not_at_all(
    tokenizer: Any, template: str, calls: Calls
) -> None:
    assume(not any(f"'{text}'".startswith("'''") for _, arguments in calls for text in arguments.values()))
    output = read(rendered(tokenizer, template, calls), calls)
    assert same(output, calls) or (output.calls == [] and len(output.unread) == 1)


def test_thoughts_that_the_template_rendered_are_taken_off(tokenizer: Any) -> None:
    entry = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    answer = {"role": "assistant", "thinking": "hm", "content": "So.", "tool_calls": [entry]}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}, answer], chat_template=lfm2_2_5_vl_chat_template, tokenize=False
    )
    completion = text.rpartition("<|im_start|>assistant\n<think>")[2].removesuffix("<|im_end|>\n")
    content, calls, thoughts = every_way(tokenizer, completion, request(), lfm2_reasoning_parser.NAME)
    assert (content, calls, thoughts) == ("So.", [("bash", '{"command": "ls"}')], "hm")
