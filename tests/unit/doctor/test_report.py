"""The command: order, exit codes, JSON; and what a start requires."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from scripts import checks
from scripts.doctor import __main__ as command
from scripts.doctor import machine, pitfalls, report
from scripts.doctor.setup import Setup
from services.common.errors import MachineError, NotReadyError, RecipeError

app = typer.Typer()
app.command()(command.main)


def test_a_bad_recipe_is_the_exit_code_before_all_others() -> None:
    machine, peer = checks.unfit("a", "x", "y"), checks.not_ready("b", "x", "y")
    recipe = checks.bad_recipe("c", "x", "y")
    assert checks.exit_code([checks.ok("o", ""), checks.warn("w", "x", "y"), checks.skipped("s", "x")]) == 0
    assert checks.exit_code([machine, peer]) == 5
    assert checks.exit_code([peer, machine]) == 3
    assert checks.exit_code([machine, peer, recipe]) == 2


def test_a_failure_without_a_way_out_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="says not how to mend it"):
        checks.Check("a", "fail", "found")


def test_every_failure_shows_how_to_mend_it() -> None:
    console = Console(file=io.StringIO(), width=100)
    checks.show([checks.unfit("disk", "1 GB [red]free[/red]", "free some"), checks.skipped("gpus", "none")], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "fail" in text and "1 GB [red]free[/red]" in text and "mend: free some" in text
    assert "0 ok, 0 warn, 1 fail, 1 skipped" in text


@pytest.fixture
def examined(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(Setup, "from_environment", classmethod(lambda _cls, _variant: setup))
    monkeypatch.setattr(pitfalls, "trainer_facts", lambda _setup: {"skipped": "no engine"})
    return setup


def test_names_are_unique_and_the_pitfalls_are_among_them(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pitfalls, "trainer_facts", lambda _setup: {"skipped": "no engine"})
    names = [check.name for check in report.examine(setup)]
    assert len(set(names)) == len(names)
    assert {check.__name__.replace("_", "-") for check in pitfalls.ALL} <= set(names)


def test_a_check_that_meets_an_error_has_failed_with_it_and_the_others_go_on(
    broken: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pitfalls, "trainer_facts", lambda _setup: {"skipped": "no engine"})
    unpinned = broken(model__source="hub", model__id="you/model", model__revision=None)
    found = {check.name: check for check in report.examine(unpinned)}
    assert found["eval-purpose"].state == "fail" and "revision" in found["eval-purpose"].found
    assert found["session-key-header"].state == "ok"
    assert checks.exit_code(found.values()) == 2


def test_json_has_every_check_and_the_exit_code(examined: Setup) -> None:
    result = CliRunner().invoke(app, ["--json"])
    found = json.loads(result.output)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["tasks"] == "ok" and states["engine"] == "fail" and states["policy-tokens"] == "skipped"
    assert result.exit_code == found["exit_code"] == 3


def test_an_unreadable_recipe_is_one_message_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECIPE", "data/recipes/none.toml")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "none.toml does not exist" in result.stderr


def test_a_start_raises_the_first_thing_that_is_missing(
    setup: Setup, broken: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "START", (lambda _setup: checks.unfit("disk", "1 GB", "free some"),))
    with pytest.raises(MachineError, match="1 GB; free some"):
        report.require(setup)
    monkeypatch.undo()
    with pytest.raises(RecipeError, match="no-such-model"):
        report.require(broken(model__id="no-such-model"))
    fit = dataclasses.replace(setup, variant="cpu")
    vars(fit)["engine"] = None
    monkeypatch.setattr(report, "START", report.START[report.START.index(machine.engine) :])
    with pytest.raises(NotReadyError, match="make docker"):
        report.require(fit)
