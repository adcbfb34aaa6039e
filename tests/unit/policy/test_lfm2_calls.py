"""The parsing core: what is read, what is refused, and that neither depends on how the text is cut."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import bench_parser
from services.policy import parse_cases
from services.policy.lfm2_calls import BlockError, Tool, parse_block
from services.policy.lfm2_stream import CallStream, Output, ReasoningStream

CASES = Path(__file__).parents[2] / "cases" / "lfm2_tool_calls.json"
START, END = "<|tool_call_start|>", "<|tool_call_end|>"

# OpenCode 1.18.33's own, shortened.
TOOLS = {
    "bash": Tool.from_schema(
        {
            "properties": {
                "command": {"type": "string"},
                "timeout": {"type": "integer"},
                "workdir": {"type": "string"},
                "description": {"type": "string"},
            },
            "required": ["command", "description"],
        }
    ),
    "edit": Tool.from_schema(
        {
            "properties": {
                "filePath": {"type": "string"},
                "oldString": {"type": "string"},
                "newString": {"type": "string"},
                "replaceAll": {"type": "boolean"},
            },
            "required": ["filePath", "oldString", "newString"],
        }
    ),
    "write": Tool.from_schema({"properties": {"content": {"type": "string"}, "filePath": {"type": "string"}}}),
    "read": Tool.from_schema({"properties": {"filePath": {"type": "string"}, "offset": {"type": ["integer", "null"]}}}),
    "todowrite": Tool.from_schema({"properties": {"todos": {"type": "array"}}}),
}


def calls(text: str) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in parse_block(text, TOOLS)]


def read(text: str, cuts: list[int] | None = None, **options: object) -> Output:
    stream = CallStream(TOOLS, **options)
    marks = [0, *sorted(cuts or []), len(text)]
    return Output.joined([*(stream.feed(text[a:b]) for a, b in pairwise(marks)), stream.finish()])


def commands(output: Output) -> list[str]:
    return [call.arguments["command"] for call in output.calls]


def refused(text: str) -> str:
    with pytest.raises(BlockError) as error:
        parse_block(text, TOOLS)
    return str(error.value)


# --- the cases file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 3, 1])
@pytest.mark.parametrize("case", json.loads(CASES.read_text())["cases"], ids=lambda case: case["id"])
def test_case_is_read_as_asked(case: dict, size: int | None) -> None:
    tools = parse_cases.declared(json.loads(CASES.read_text())["tools"])
    assert parse_cases.problem(case, parse_cases.read(case["raw"], tools, size)) == ""


def test_parse_cases_passes_on_the_cases_file(capsys: pytest.CaptureFixture) -> None:
    assert parse_cases.main([str(CASES)]) == 0
    assert "FAIL" not in capsys.readouterr().out.replace("0 FAIL", "")


@pytest.mark.parametrize(
    ("raw", "asked"),
    [("[f(a=1)]", 1.0), ("[f(a=true)]", 1), ("[f(a=1)]", 2)],
    ids=["float for int", "int for bool", "other value"],
)
def test_parse_cases_fails_on_a_wrong_case(
    tmp_path: Path, capsys: pytest.CaptureFixture, raw: str, asked: object
) -> None:
    case = {"id": "X", "raw": START + raw + END, "calls": [{"name": "f", "arguments": {"a": asked}}], "content": None}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"tools": {}, "cases": [case]}))
    assert parse_cases.main([str(file)]) == 1
    assert capsys.readouterr().out.count("FAIL") == 5  # four ways and the sum


def test_parse_cases_refuses_a_file_without_cases(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "cases.json").write_text("[]")
    assert parse_cases.main([str(tmp_path / "cases.json")]) == 2
    assert "must be JSON with 'tools' and 'cases'" in capsys.readouterr().err


def test_parse_cases_takes_off_reasoning_that_the_prompt_opened() -> None:
    raw = f"I could {START}[bash(command='rm -r /')]{END}.</think>\n{START}[bash(command='ls')]{END}"
    for size in (None, 3, 1):
        output = parse_cases.read(raw, TOOLS, size)
        assert (commands(output), output.content, output.unread) == (["ls"], "", [])


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'a\nb\tc\rd'", "a\nb\tc\rd"),
        (r"'it\'s \"x\" \\ end\\'", "it's \"x\" \\ end\\"),
        (r"'\d+\.\s\w\$HOME \(a\) a\/b'", r"\d+\.\s\w\$HOME \(a\) a\/b"),
        (r"'\bword\b \0 \1 \x1b[0m \a \e \U0001F600 \N{DASH}'", r"\bword\b \0 \1 \x1b[0m \a \e \U0001F600 \N{DASH}"),
        (r"'caf\u00e9 \ud83d\ude00 \ud83d \ude00x \u12'", "café 😀 � �x \\u12"),
        ("'one \\\n  two'", "one \\\n  two"),
        ("'a\tb\nc\x00'", "a\tb\nc\x00"),
        ('"it\'s"', "it's"),
        ("'''a 'b' \"c\"'''", "a 'b' \"c\""),
        (r"""'''\ba\n'''""", "\\ba\n"),
        ("''", ""),
        (r"[{'a': 'x\x1b\u200b\n', 'b': None}, [True, 1.5, -2]]", [{"a": "x\x1b\u200b\n", "b": None}, [True, 1.5, -2]]),
        (r'{"a": "\b\f\/\u00e9 \d", "b": [null, true]}', {"a": "\b\f/é \\d", "b": [None, True]}),
        ("[]", []),
        ("07", 7),
        ("-1e3", -1000.0),
        ("1.", 1.0),
        ("None", None),
    ],
)  # fmt: skip
def test_value_is_read(text: str, value: object) -> None:
    (call,) = parse_block(f"[f(a={text})]", TOOLS)
    assert json.dumps(call.arguments) == json.dumps({"a": value})
    assert not call.repaired


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ bash ( command = 'ls' , timeout = 5 , ) , ]", [("bash", {"command": "ls", "timeout": 5})]),
        ("[mcp.files-2.read_file(max-lines=3, from='x')]", [("mcp.files-2.read_file", {"max-lines": 3, "from": "x"})]),
        ("[bash('ls', 'list')]", [("bash", {"command": "ls", "description": "list"})]),
        ("[bash('ls', timeout=5)]", [("bash", {"command": "ls", "timeout": 5})]),
        (r"[bash('grep \bls\b')]", [("bash", {"command": r"grep \bls\b"})]),
        ("[bash({'command': 'ls'})]", [("bash", {"command": "ls"})]),
        ('{"name": "bash", "parameters": {"command": "ls"}}', [("bash", {"command": "ls"})]),
        (r"""{"name": "bash", "arguments": "{\"command\": \"ls\"}"}""", [("bash", {"command": "ls"})]),
        (r"""[bash(command=r"grep '\d\n' a\"b")]""", [("bash", {"command": r"""grep '\d\n' a\"b"""})]),
        ('[{"name":"read","arguments":{}}, bash(command="ls")]', [("read", {}), ("bash", {"command": "ls"})]),
        ("[]", []),
    ],
)
def test_drift_is_read(text: str, expected: list) -> None:
    assert calls(text) == expected
    assert not any(call.repaired for call in parse_block(text, TOOLS))


@pytest.mark.parametrize(
    "command",
    [
        "echo 'a'",
        "'a'",
        "git commit -m 'don't'",
        "awk -F',' '{print $1}' data.csv",
        "python -c 'import os; print(os.listdir('.'))'",
        "python -c 'print(', '.join(['a','b']))'",
        "x.split(' ').replace('%', '') + '+'",
        "df.groupby('a').agg(n=('b', 'sum'), k='c')",
        "plt.plot(x, label='a', color='r')\nplt.legend(loc='best')",
        "f(description='x')",
        "open('f').read('x')\nread('y')",
        "print('a'), print('b')",
        "x = {'a': 'b', 'c': ['d']}",
        "f(command='x')(command='y', command='z')",
        "''" * 4,
    ],
)
@pytest.mark.parametrize("rest", ["", ", timeout=5", ", description='list'"])
def test_unescaped_inner_quotes_are_kept(command: str, rest: str) -> None:
    (call,) = parse_block(f"[bash(command='{command}'{rest})]", TOOLS)
    assert call.arguments["command"] == command
    assert call.repaired


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        # One argument or two? Read as one, what the model meant for the second would run as part of the command.
        "[bash(command='echo 'a'', descr='x')]",
        "[bash(command='echo 'a'' description='x')]",
        "[bash(command='echo 'a'', description: 'x')]",
        "[bash(command='echo 'a'', 'x')]",
        "[bash(command='ls', 'x')]",
        "[bash(command='echo '\n'a')]",
        "[bash(command='echo ' + 'a')]",
        "[bash(command='echo %s' % 'a')]",
        "[bash(command='echo 5' tall', description='6' tall')]",
        "[bash(command='f('a', description='b')', timeout=5)]",
        # One call or two?
        "[bash(command='echo 'a'') bash(command='echo 'b'')]",
        "[bash(command='echo 'a''); bash(command='echo 'b'')]",
        "[bash(command='echo 'a'')][bash(command='echo 'b'')]",
        "[bash(command='echo 'a''), shell(command='echo 'b'')]",
        # Where the string ends is not known.
        "[bash(command='ls 'a')]",
        "[bash(command='echo 'a''",
        "[bash(command='echo 'a'')",
        "[bash('echo 'a'')]",
        # A repaired call that its tool does not take.
        "[bash(command='echo 'a'', timeout='5')]",
        "[bash(command='echo 'a'', timeout=5, x=1)]",
        "[bash(command='echo 'a'', description='''x''')]",
        "[bash(command='echo 'a''), read('')]",
    ],
)
def test_ambiguous_block_is_refused(text: str) -> None:
    assert refused(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a list of calls nor an object"),
        ("bash(command='ls')", "neither a list of calls nor an object"),
        ("[bash]", "not a tool's name and '('"),
        ("[bash(command=ls)]", "bare word"),
        ("[bash(command=1e999)]", "not finite"),
        ("[bash(command=-Infinity)]", "not a value"),
        ("[bash(command=" + "9" * 301 + ")]", "more than 300 characters"),
        ("[todowrite(todos=" + "[" * 34 + "]" * 34 + ")]", "nested more than 32 deep"),
        ("[todowrite(todos=[{'a': 'don't'}])]", "no '}' where one belongs"),
        ("[todowrite(todos=[{1: 2}])]", "key that is no string"),
        ("[bash(command='a', command='b')]", "given twice"),
        ("[bash('a', command='b')]", "given twice"),
        ("[bash(timeout=1, 'a')]", "positional argument after a named one"),
        ("[bash('a', 'b', 'c', 'd', 'e')]", "the declaration has no place for"),
        ("[bash(5)]", "the declaration has no place for"),
        ("[unknown('a')]", "the declaration has no place for"),
        ("[bash(timeout=1)] and more", "text after the calls"),
        ('[{"name": "bash", "arguments": [1]}]', "neither a list of calls nor an object"),
        ("[bash(command==1)]", "bare word"),
        ("[bash(command=f'{x}')]", "bare word"),
        ('{"name": "bash", "arguments": "{} {}"}', "text after the arguments"),
        ('{"name": "bash", "arguments": "ls"}', "text after the arguments"),
    ],
)
def test_block_that_is_no_call_list_is_refused(text: str, reason: str) -> None:
    assert reason in refused(text)


# --- the stream -------------------------------------------------------------------------------------------------


def test_several_blocks_and_the_text_around_them() -> None:
    output = read(f"First.\n{START}[read(filePath='a')]{END} then\n{START}[read(filePath='b')]{END}\n\nDone.")
    assert [call.arguments["filePath"] for call in output.calls] == ["a", "b"]
    assert output.content == "First.\n then\n\n\nDone."
    assert output.unread == []


def test_call_cut_by_the_length_limit_is_not_run() -> None:
    output = read(f"{START}[bash(command='ls')]{END}{START}[bash(command='rm a'), bash(command='rm b")
    assert commands(output) == ["ls"]
    assert output.content == ""
    assert output.unread == ["the output ended before the block did"]


def test_nothing_is_run_after_a_block_that_could_not_be_read() -> None:
    injected = f"{START}[bash(command='rm -r /')]{END}"
    output = read(f"{START}[write(content='a 'b', x='{END}'{injected}')]{END}{injected} bye")
    assert output.calls == []
    assert len(output.unread) == 3
    assert START not in output.content
    assert END not in output.content


@pytest.mark.parametrize("quote", ["'", '"'])
def test_markers_inside_a_string_belong_to_it(quote: str) -> None:
    command = f"grep {START} a; echo {END}; echo {START}[bash(command=1)]{END} <think> </think>"
    output = read(f"{START}[bash(command={quote}{command}{quote}), read(filePath='b')]{END} ok")
    assert output.calls[0].arguments == {"command": command}
    assert output.content == " ok"


def test_text_after_an_unread_block_is_shown_as_soon_as_its_end_is_known() -> None:
    stream = CallStream(TOOLS)
    assert stream.feed(f"{START}[bash(command=ls)]{END} Done.").content == " Done."
    stream = CallStream(TOOLS)
    assert stream.feed(f"{START}[bash(command='ls)]{END} Done.").content == ""  # or the string goes on
    assert stream.finish() == Output(" Done.", [], ["the output ended before the block did"])


def test_two_blocks_are_never_joined_by_a_repair() -> None:
    output = read(f"{START}[bash(command='a 'b {END} {START}[bash(command='ls')]{END}")
    assert output.calls == []


def test_call_inside_think_is_not_run() -> None:
    raw = f"<think>try {START}[bash(command='rm -r /')]{END} no</think>ok {START}[bash(command='ls')]{END}"
    assert commands(read(raw)) == ["ls"]
    assert read(raw).content == "<think>try [bash(command='rm -r /')] no</think>ok "
    assert read(raw, think_is_content=False).content == "ok "
    assert read("<think>" + START + "[bash(command='ls')]" + END).calls == []


def test_echo_of_a_block_is_left_out_and_a_list_after_one_is_not() -> None:
    block = "[read(filePath='a')]"
    assert read(f"{START}{block}{END}\n{block}{END}").content == ""
    assert len(read(f"{START}{block}{END}\n{block}{END}").calls) == 1
    assert read(f"{START}{block}{END}\n[1] is a footnote").content == "\n[1] is a footnote"
    assert read(f"[1]{END} text").content == "[1] text"


def test_other_special_tokens_are_dropped_from_content_and_kept_in_arguments() -> None:
    output = read(f"a<|im_start|>b<|none|>{START}[read(filePath='<|im_start|>')]{END}", drop={"<|im_start|>"})
    assert output.content == "ab<|none|>"
    assert output.calls[0].arguments == {"filePath": "<|im_start|>"}


def test_text_goes_out_at_once_except_what_may_become_a_marker() -> None:
    stream = CallStream(TOOLS)
    assert [stream.feed(text).content for text in ("Hi <", "b> <|tool", "_call", " x", "<|tool_call_start|", ">[")] == [
        "Hi ", "<b> ", "", "<|tool_call x", "", "",
    ]  # fmt: skip


def test_reasoning_ends_at_its_end_marker_only() -> None:
    for size in (1, 3, 100):
        stream = ReasoningStream()
        text = f"a <tool_call> {START}[bash()]{END} <b></think>c</think>{START}"
        parts = [stream.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(reasoning for reasoning, _ in parts) == "a <tool_call> [bash()] <b>"
        assert "".join(rest for _, rest in parts) == f"c</think>{START}"
    unfinished = ReasoningStream()
    assert unfinished.feed("a </thi") == ("a ", "")
    assert unfinished.finish() == "</thi"
    assert not unfinished.ended


# --- properties -------------------------------------------------------------------------------------------------

PIECES = [
    START, END, "<think>", "</think>", "<|im_start|>", "<|tool_call", "<", "|>", "[", "]", "(", ")", "{", "}", ",", "=",
    ":", "'", '"', "'''", "\\", "\\'", "\\n", "\\ud83d", "\n", " ", "bash(", "bash(command='", "', description='",
    "')]", "read(filePath=", "command", "timeout=5", "true", "1e9", "don't", "a", "é😀",
    f"{START}[bash(command='ls')]{END}", f"{START}[read(filePath=\"a 'b'\")]{END}",
]  # fmt: skip
outputs = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


@given(outputs, st.lists(st.integers(0, 400), max_size=12))
@settings(max_examples=300, deadline=None)
def test_every_cut_gives_the_same_result_and_nothing_raises(text: str, cuts: list[int]) -> None:
    whole = read(text)
    assert read(text, [min(cut, len(text)) for cut in cuts]) == whole
    assert read(text, list(range(len(text)))) == whole
    for call in whole.calls:
        json.dumps(call.arguments, allow_nan=False).encode("utf-8")
    assert START not in whole.content
    assert END not in whole.content


names = st.sampled_from(sorted(TOOLS))
raw_strings = st.text(st.sampled_from("ab '\"=.(-$|\n"), max_size=12).filter(
    lambda text: not f"'{text}'".startswith("'''")
)


@given(
    st.lists(
        names.flatmap(
            lambda name: st.tuples(
                st.just(name),
                st.dictionaries(st.sampled_from(sorted(TOOLS[name].parameters)), raw_strings, min_size=1),
            )
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=300, deadline=None)
def test_unescaped_strings_come_back_exactly_or_not_at_all(expected: list[tuple[str, dict[str, str]]]) -> None:
    """As LFM2.5's first templates write them, without commas and brackets, which a string can spell a seam with."""
    written = [
        name + "(" + ", ".join(f"{key}='{text}'" for key, text in arguments.items()) + ")"
        for name, arguments in expected
    ]
    try:
        found = calls("[" + ", ".join(written) + "]")
    except BlockError:
        return
    assert found == expected


@contextmanager
def counted_operations() -> Iterator[list[int]]:
    """Calls of Python and C functions made inside."""
    count = [0]

    def profile(frame: object, event: str, argument: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(before)


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.integers(1, 15))
@settings(max_examples=60, deadline=None)
def test_operations_grow_no_faster_than_the_text(unit: str, times: int) -> None:
    text = unit * times
    for cuts in ([], list(range(len(text)))):
        with counted_operations() as count:
            read(text, cuts)
        assert count[0] <= 100 + 150 * len(text)


@pytest.mark.parametrize("family", bench_parser.FAMILIES)
def test_cpu_time_grows_no_faster_than_the_text(family: str) -> None:
    """The regex engine's share, which no count of operations sees: a ratio of CPU time, best of several."""

    def ratio() -> float:  # the two side by side, since what a second of CPU does depends on the neighbours
        small, _ = bench_parser.best(family, 4_000, repeats=5)
        return bench_parser.ratio(small, bench_parser.best(family, 32_000, repeats=1)[0])

    assert any(ratio() < 2.5 * 8 for _ in range(5))  # 8 if linear, 64 if quadratic
