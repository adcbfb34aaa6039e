"""The shipped suites: made from the seed, new combinations held out, wrong commands never right."""

import json
import random
from pathlib import Path

import pytest

from scripts import make_suites, suite_grader
from services.common.tasks import load_suite

TASKS = Path(__file__).resolve().parents[2] / "data" / "tasks"


def words(suite: str) -> list[tuple[str, ...]]:
    return [tuple(task.name.split("-")) for task in load_suite(TASKS, suite)]


def test_shipped_files_are_what_the_seed_makes(tmp_path: Path) -> None:
    for suite in make_suites.SUITES:
        make_suites.write_suite(tmp_path, suite)
    assert make_suites.different_files(tmp_path, TASKS, make_suites.SUITES) == []


def test_another_seed_makes_other_data_and_the_same_questions(tmp_path: Path) -> None:
    other = make_suites.write_suite(tmp_path, "smoke", seed=1)
    shipped = {task.instruction_sha256 for task in other.tasks}
    assert shipped == {task.instruction_sha256 for task in make_suites.write_suite(tmp_path / "x", "smoke").tasks}
    assert make_suites.different_files(tmp_path, TASKS, ["smoke"]) != []


@pytest.mark.parametrize(("suite", "train", "heldout"), [("smoke", 8, 4), ("learn", 50, 25)])
def test_sizes(suite: str, train: int, heldout: int) -> None:
    assert len(load_suite(TASKS, f"{suite}/train")) == train
    assert len(load_suite(TASKS, f"{suite}/heldout")) == heldout


@pytest.mark.parametrize("suite", ["smoke", "learn"])
def test_heldout_tasks_are_new_combinations_of_words_seen_in_training(suite: str) -> None:
    train, heldout = words(f"{suite}/train"), words(f"{suite}/heldout")
    assert not set(train) & set(heldout)
    for position in range(len(train[0])):
        assert {task[position] for task in heldout} <= {task[position] for task in train}
    if suite == "learn":  # each pair of words, too
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert {(t[first], t[second]) for t in heldout} <= {(t[first], t[second]) for t in train}


def test_learn_table_has_one_largest_value_and_repeats_others() -> None:
    for seed in range(200):
        table = make_suites.learn_table(random.Random(seed))
        for column in make_suites.LEARN_COLUMNS:
            values = [row[column] for row in table]
            assert values.count(max(values)) == 1
            assert len(set(values)) <= len(values)
        assert len({row["name"] for row in table}) == len(table)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("42", {"kind": "number", "value": 42}, True),
        (" 42.0\n", {"kind": "number", "value": 42}, True),
        ("1,042", {"kind": "number", "value": 1042}, True),
        ("43", {"kind": "number", "value": 42}, False),
        ("42 43", {"kind": "number", "value": 42}, False),
        ("the answer is 42", {"kind": "number", "value": 42}, False),
        ("nan", {"kind": "number", "value": 42}, False),
        ("inf", {"kind": "number", "value": 42}, False),
        ("", {"kind": "number", "value": 0}, False),
        ("Ann", {"kind": "text", "value": "ann"}, True),
        ("ann ben", {"kind": "text", "value": "ann"}, False),
        ("", {"kind": "text", "value": "ann"}, False),
    ],
)
def test_grader_takes_the_answer_and_nothing_else(answer: str, expected: dict[str, object], right: bool) -> None:
    assert suite_grader.is_correct(answer.strip(), expected) is right


def test_grader_reads_plain_small_text_files_only(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    assert suite_grader.read_answer(path) is None
    path.write_text(" 42\n")
    assert suite_grader.read_answer(path) == "42"
    path.write_bytes(b"1" * (suite_grader.MAX_ANSWER_BYTES + 1))
    assert suite_grader.read_answer(path) is None
    path.write_bytes(b"\xff\xfe")
    assert suite_grader.read_answer(path) is None
    (tmp_path / "link").symlink_to(tmp_path / "answer.txt")
    assert suite_grader.read_answer(tmp_path / "link") is None


def test_expected_answers_do_not_lie_where_an_agent_looks() -> None:
    for suite in ("smoke", "learn"):
        for split in ("train", "heldout"):
            for task in load_suite(TASKS, f"{suite}/{split}"):
                assert json.loads((task.folder / "tests" / "expected.json").read_text())["kind"] in ("number", "text")
                assert sorted(path.name for path in (task.folder / "environment").iterdir()) == ["docker-compose.yaml"]
