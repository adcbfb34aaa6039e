"""Rollouts listed, chosen and read; what an agent wrote never is markup or a terminal's command."""

from __future__ import annotations

import html
import io
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from scripts.traces import __main__ as command
from scripts.traces import page, reader, terminal
from scripts.traces.html import tag
from scripts.traces.reader import TokenText
from scripts.traces.text import one_line, printable
from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir
from tests.fakes.traces import captured, hostile

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "data/models/tiny-lfm2/tokenizer.json"
NO_TOKENIZER = TokenText(None)
app = typer.Typer()
app.command()(command.main)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "read")
    run.prepare()
    captured(run, "aa01", reward=1.0, step=0, completion_tokens=10)
    captured(run, "aa02", reward=0.0, step=1, tool_calls=3, completion_tokens=90, task="second-b")
    captured(run, "bb01", reward=0.0, step=2, tool_calls=9, completion_tokens=20)
    captured(run, "bb02", reward=None, cause="agent_crash", step=3, error="exit code 1", completion_tokens=0)
    return run


def ids(records: list[reader.Record]) -> list[str]:
    return [str(record["rollout_id"]) for record in records]


# --- Choosing -------------------------------------------------------------------------------------------------------


def test_the_worst_the_longest_and_the_failed_are_found(run: RunDir) -> None:
    assert ids(reader.choose(run)) == ["bb02", "bb01", "aa02", "aa01"]
    assert ids(reader.choose(run, order="worst")) == ["bb01", "aa02", "aa01"]
    assert ids(reader.choose(run, order="longest")) == ["aa02", "bb01", "aa01", "bb02"]
    assert ids(reader.choose(run, order="failed")) == ["bb02"]


def test_a_step_a_task_and_a_number_narrow_the_list(run: RunDir) -> None:
    assert ids(reader.choose(run, step=1)) == ["aa02", "aa01"]
    assert ids(reader.choose(run, task="second-b")) == ["aa02"]
    assert ids(reader.choose(run, limit=1)) == ["bb02"]


def test_an_id_is_found_by_its_beginning_and_must_be_one(run: RunDir) -> None:
    assert reader.by_id(run, "bb02")["cause"] == "agent_crash"
    with pytest.raises(RecipeError, match="2 rollouts"):
        reader.by_id(run, "aa")
    with pytest.raises(RecipeError, match="0 rollouts"):
        reader.by_id(run, "cc")


# --- Reading --------------------------------------------------------------------------------------------------------


def test_a_rollout_comes_with_messages_tokens_versions_and_verdict(run: RunDir) -> None:
    line = captured(run, "cc01", verifier="expected 4, found 5")
    trace = reader.load(run, line)
    assert [message["role"] for message in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [(turn.versions, list(turn.ids), list(turn.logprobs)) for turn in trace.turns] == [
        ((1, 1), [10, 11], [-0.01, -3.0]), ((1, 2), [10, 11], [-0.01, -3.0]),
    ]  # fmt: skip
    assert trace.verifier == "expected 4, found 5"


def test_a_rollout_without_a_file_or_with_a_damaged_one_says_so(run: RunDir) -> None:
    line = reader.by_id(run, "aa01")
    path = run.rollouts / "aa01.json.zst"
    path.write_bytes(path.read_bytes()[:40])
    assert "aa01.json.zst cannot be read" in reader.load(run, line).problem
    path.unlink()
    assert reader.load(run, line).problem == "nothing was captured"


def test_a_verifier_file_that_a_sandbox_made_a_link_is_not_read(run: RunDir, tmp_path: Path) -> None:
    line = captured(run, "cc02", verifier="x")
    path = run.trials / "trial-cc02/verifier/test-stdout.txt"
    path.unlink()
    (tmp_path / "secret").write_text("secret")
    path.symlink_to(tmp_path / "secret")
    assert reader.load(run, line).verifier == ""


def test_tokens_are_shown_in_the_models_own_words() -> None:
    text_of = TokenText(TOKENIZER)
    tokenizer = text_of._tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("ls -a", add_special_tokens=False).ids
    assert "".join(text_of(token) for token in ids) == "ls -a"
    assert text_of(7) == "<|im_end|>"
    assert NO_TOKENIZER(7) == " 7"


# --- Hostile text ---------------------------------------------------------------------------------------------------


@given(st.text())
def test_no_text_holds_a_character_that_a_terminal_or_a_reader_would_obey(text: str) -> None:
    shown = printable(text)
    obeyed = {char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    assert obeyed <= {"\n", "\t"}
    assert not set(one_line(text)) & {"\n", "\t", "\r"}


def test_long_text_is_cut_with_its_rest_counted() -> None:
    assert printable("abcdef", limit=4) == "abcd\n[2 more characters]"


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _value in attrs}
        self.scripts += tag == "script"


def whole_page(run: RunDir) -> str:
    records = reader.choose(run)
    return page.render(run.path.name, (reader.load(run, record) for record in records), NO_TOKENIZER, len(records))


def test_a_hostile_agent_adds_no_element_and_no_attribute_to_the_page(tmp_path: Path, run: RunDir) -> None:
    bad = RunDir(tmp_path / "bad")
    hostile(bad)
    captured(run, "cc03", verifier="fine")
    found, expected = Elements(), Elements()
    found.feed(whole_page(bad))
    expected.feed(whole_page(run))
    assert found.elements <= expected.elements and found.attributes <= expected.attributes
    assert found.scripts == 1


@given(st.text(), st.text())
def test_any_text_and_attribute_comes_back_from_the_markup_as_it_was(text: str, value: str) -> None:
    class Back(HTMLParser):
        text, value = "", ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.value = dict(attrs)["title"] or ""

        def handle_data(self, data: str) -> None:
            self.text += data

    back = Back(convert_charrefs=True)
    back.feed(tag("p", text, title=value))
    back.close()

    def same(one: str, other: str) -> bool:
        return one.replace("\r", "\n") == other.replace("\r", "\n")

    assert same(back.text, text) and same(back.value, value)


def test_tokens_show_their_log_probability_and_sure_ones_share_a_span(run: RunDir) -> None:
    line = captured(run, "cc04", ids=[1, 2, 3, 4, 5], logprobs=[-0.01, -0.04, -3.0, -9.0, -0.02])
    text = page.render("r", [reader.load(run, line)], NO_TOKENIZER, 1)
    expected = (
        '<span title="2 tokens, each at least -0.0400"> 1 2</span><span class="l3" title="3: -3.0000"> 3</span>'
        '<span class="l4" title="4: -9.0000"> 4</span><span title="1 tokens, each at least -0.0200"> 5</span>'
    )
    assert expected in text
    line = captured(run, "cc05", ids=[1, 2], logprobs=[])
    assert '<span title="no log-probabilities"> 1 2</span>' in page.render(
        "r", [reader.load(run, line)], NO_TOKENIZER, 1
    )


def test_a_page_that_is_full_names_the_rest(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PAGE_CHARS", 3_000)
    text = whole_page(run)
    assert text.count('class="rollout"') == 4
    assert 1 <= text.count("The page is full: make traces ID=") <= 3


def test_the_page_forbids_every_script_but_its_own_and_every_request(run: RunDir) -> None:
    text = whole_page(run)
    assert html.escape(page.POLICY) in text
    assert page.POLICY.startswith("default-src 'none'; ") and "unsafe" not in page.POLICY
    assert not re.search(r"(src|href)=", text) and " style=" not in text


def test_a_terminal_gets_no_escape_sequence_of_an_agent(tmp_path: Path) -> None:
    bad = RunDir(tmp_path / "bad")
    hostile(bad)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(terminal.listing(reader.choose(bad), "bad"))
    for record in reader.choose(bad):
        for part in terminal.reading(reader.load(bad, record), NO_TOKENIZER, tokens=True):
            console.print(part)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\u200b"}
    assert "\\x1b]0;owned\\x07" in text and "[red]markup of rich[/red]" in text


# --- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    for name in ("RUN_NAME", "STEP", "TASK", "SORT", "N", "ID", "TOKENS"):
        monkeypatch.delenv(name, raising=False)
    return run


def test_a_list_is_printed_and_written_as_one_file(here: RunDir) -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "140"})
    assert result.exit_code == 0 and "4 of 4 rollouts" in result.output and "agent_crash" in result.output
    assert (here.path / "traces.html").read_text().count('class="rollout"') == 4


def test_make_gives_its_variables_as_the_environment(here: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK", "second-b")
    monkeypatch.setenv("SORT", "longest")
    assert "1 of 4 rollouts, longest first" in CliRunner().invoke(app, [], env={"COLUMNS": "140"}).output


def test_one_rollout_is_read_with_its_tokens_in_the_models_words(here: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.write_json(here.manifest, {"recipe": {"model": {"source": "local", "id": "tiny-lfm2", "revision": None}}})
    monkeypatch.setenv("MODELS_DIR", str(ROOT / "data/models"))
    output = CliRunner().invoke(app, ["--id", "aa01", "--tokens"], env={"COLUMNS": "140"}).output
    assert "task first-a, reward 1.000" in output and "command: ls" in output
    assert "2 tokens after 300, log-probability -3.01, ended by tool_calls, policy version 1" in output
    assert "<|tool_call_start|>" in output


def test_what_is_not_there_is_one_message_and_exit_code_2(here: RunDir) -> None:
    for arguments, message in ((["--sort", "best"], "SORT is 'best'"), (["--id", "zz"], "0 rollouts of read")):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and message in result.stderr
