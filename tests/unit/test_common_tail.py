from pathlib import Path

from services.common import run_dir
from services.common.tail import Tail


def test_each_line_is_seen_once(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    tail = Tail(path)
    assert tail.new_lines() == []
    run_dir.append_line(path, {"n": 1})
    run_dir.append_line(path, {"n": 2})
    assert [line["n"] for line in tail.new_lines()] == [1, 2]
    assert tail.new_lines() == []
    run_dir.append_line(path, {"n": 3})
    assert [line["n"] for line in tail.new_lines()] == [3]


def test_line_that_is_not_whole_yet_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    tail = Tail(path)
    path.write_text('{"n": 1}\n{"n": ')
    assert tail.new_lines() == [{"n": 1}]
    with path.open("a") as stream:
        stream.write("2}\n")
    assert tail.new_lines() == [{"n": 2}]


def test_line_that_a_crash_cut_short_and_a_value_that_is_no_object_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    path.write_text('{"n": 1}\n{"n":\n[4]\n\n{"n": 5}\n')
    assert Tail(path).new_lines() == [{"n": 1}, {"n": 5}]


def test_file_that_was_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    tail = Tail(path)
    path.write_text('{"n": 1}\n{"n": 2}\n')
    tail.new_lines()
    path.write_text('{"n": 3}\n')
    assert tail.new_lines() == [{"n": 3}]
