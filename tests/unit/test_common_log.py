"""Logs: one JSON object a line, in both places, without secrets."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import log

TOKEN = "hf_abcdefghijklmnop"


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level


def _lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_one_json_object_on_stdout_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = log.setup("evaluator", tmp_path)
    logger.info("cell scored", extra={"task": "first-a", "reward": 1.0})
    (line,) = _lines(capsys.readouterr().out)
    assert _lines((tmp_path / "evaluator.log").read_text()) == [line]
    assert {key: line[key] for key in ("level", "service", "event", "task", "reward")} == {
        "level": "info", "service": "evaluator", "event": "cell scored", "task": "first-a", "reward": 1.0,
    }  # fmt: skip
    assert str(line["ts"]).endswith("Z") and "T" in str(line["ts"])


def test_line_breaks_and_odd_values_stay_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("env", tmp_path)
    logger.warning("two\nlines", extra={"path": tmp_path, "nested": {"a": {1, 2}}})
    (line,) = _lines(capsys.readouterr().out)
    assert line["event"] == "two\nlines" and line["path"] == str(tmp_path)


def test_a_traceback_is_in_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("env", tmp_path)
    try:
        raise ValueError("what was found")
    except ValueError:
        logger.exception("it failed")
    (line,) = _lines(capsys.readouterr().out)
    assert line["level"] == "error" and "ValueError: what was found" in str(line["traceback"])


@pytest.mark.parametrize("variable", ["HF_TOKEN", "WANDB_API_KEY", "OPENENV_CAPTURE_ADMIN_KEY"])
def test_no_secret_reaches_a_line_by_any_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, TOKEN)
    logger = log.setup("env", tmp_path)
    logger.info("token is %s", TOKEN, extra={"headers": {"Authorization": f"Bearer {TOKEN}"}})
    try:
        raise RuntimeError(f"401 with {TOKEN}")
    except RuntimeError:
        logging.getLogger("some.library").exception("refused")
    shown, kept = capsys.readouterr().out, (tmp_path / "env.log").read_text()
    assert shown.count("[secret]") >= 3
    for text in (shown, kept):
        assert TOKEN not in text
        assert len(_lines(text)) == 2


def test_an_empty_token_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    log.setup("env", tmp_path).info("hello")
    assert _lines(capsys.readouterr().out)[0]["event"] == "hello"


def test_lines_of_libraries_go_the_same_way_and_chatty_ones_are_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("env", tmp_path)
    logging.getLogger("openenv").info("heard")
    logging.getLogger("httpx").info("not heard")
    logging.getLogger("httpx").warning("heard too")
    assert [line["event"] for line in _lines(capsys.readouterr().out)] == ["heard", "heard too"]


def test_a_second_setup_does_not_double_the_lines_and_appends_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("env", tmp_path).info("one")
    log.setup("env", tmp_path).info("two")
    assert [line["event"] for line in _lines(capsys.readouterr().out)] == ["one", "two"]
    assert [line["event"] for line in _lines((tmp_path / "env.log").read_text())] == ["one", "two"]


def test_without_a_folder_there_is_stdout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("env-sweep").info("swept")
    assert len(_lines(capsys.readouterr().out)) == 1 and list(tmp_path.iterdir()) == []
