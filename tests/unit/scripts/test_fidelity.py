"""How the fidelity command reads what its parts print."""

import json

import pytest
from rich.console import Console

from scripts import fidelity
from services.common.errors import NotReadyError

ROW = {"check": "B = 0 sync: max |dlogp|", "found": 0.0, "allowed": "<= 0", "passed": True, "control": False}


def test_checks_are_the_last_line_whatever_libraries_print_before() -> None:
    assert fidelity.trainer_rows(f"INFO something\n{json.dumps([ROW])}\n") == [ROW]


@pytest.mark.parametrize("printed", ["", "Traceback\nValueError: no"])
def test_no_checks_are_an_error_and_not_a_pass(printed: str) -> None:
    with pytest.raises(NotReadyError, match="came to no end"):
        fidelity.trainer_rows(printed)


@pytest.mark.parametrize(
    ("last", "found", "passed"),
    [
        ("31 cases, 124 PASS, 0 FAIL", "124 of 124 PASS", True),
        ("31 cases, 120 PASS, 4 FAIL", "120 of 124 PASS", False),
        ("0 cases, 0 PASS, 0 FAIL", "0 of 0 PASS", False),
        ("cases.json is no cases file", "cases.json is no cases file", False),
    ],
)
def test_cases_pass_only_if_there_are_some_and_none_failed(last: str, found: str, passed: bool) -> None:
    row = fidelity.cases_row(f"case  one delta\nT-01  PASS\n{last}\n")
    assert (row["found"], row["passed"]) == (found, passed)


def test_parser_that_printed_nothing_fails() -> None:
    row = fidelity.cases_row("")
    assert (row["found"], row["passed"]) == ("nothing printed", False)


def test_table_shows_small_numbers_and_marks_failures_and_controls() -> None:
    rows = [
        {**ROW, "found": 1.234e-6},
        {**ROW, "check": "importance ratio", "found": 0.99999975},
        {**ROW, "check": "leak", "passed": False, "control": True},
    ]
    console = Console(width=140)
    with console.capture() as text:
        console.print(fidelity.table(rows))
    lines = text.get().splitlines()
    assert any("1.23e-06" in line and "PASS" in line for line in lines)
    assert any("0.9999997" in line for line in lines)
    assert any("control: leak" in line and "FAIL" in line for line in lines)
