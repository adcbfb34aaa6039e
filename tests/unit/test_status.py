"""One look at a FAKE run."""

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from scripts import run_view, status
from services.common import run_dir
from services.common.run_dir import RunDir
from tests.fakes import run as fake

app = typer.Typer()
app.command()(status.main)


def _text(run: RunDir, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(status.render(run_view.load(run), now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """In the middle of training."""
    run = RunDir(tmp_path / "running")
    run.prepare()
    fake.beat(run, "trainer", "sync", 3, at_s=fake.T0, since_s=fake.T0 - 65)
    fake.beat(run, "env", "serving", at_s=fake.T0 - 90, inflight=4, done=7, failed={"policy": 1})
    fake.beat(run, "evaluator", "done", at_s=fake.T0 - 9000)
    fake.step(run, 3, 0.5)
    fake.rollout(run)
    fake.rollout(run, cause="verifier", reward=None)
    for event in ("intent", "created"):
        run_dir.append_line(run.ledger, {"event": event, "project": "a"})
    return run


def test_services_are_shown_with_phase_step_and_time_in_phase(run: RunDir) -> None:
    text = _text(run, fake.T0 + 3)
    assert "run running, step 3" in text
    assert "sync" in text and "0:01:08" in text and "3 s ago" in text
    assert "inflight 4" in text and "failed" not in text
    assert "rollouts: 4 in flight, 1 scored, 1 unscorable; 1 sandboxes open" in text
    assert "unscorable: verifier 1" in text
    assert "step 3: reward 0.500" in text


def test_a_heartbeat_that_stopped_is_marked_and_one_that_ended_is_not(run: RunDir) -> None:
    found = status.as_json(run_view.load(run), fake.T0 + 3)["services"]
    assert {name: service["alive"] for name, service in found.items()} == {
        "trainer": True, "env": False, "evaluator": True,
    }  # fmt: skip
    assert _text(run, fake.T0 + 3).count("none since") == 1


def test_stop_incident_and_result_are_shown(run: RunDir) -> None:
    run_dir.write_json(run.stop_request, {"reason": "No optimizer step."})
    (run.incidents / "watchdog-x").mkdir()
    run_dir.write_json(run.result, {"exit_code": 4, "reason": "No optimizer step.", "step": 3})
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-2", "collapse_alarms": []})
    text = _text(run, fake.T0)
    for part in ("stop requested: No optimizer step.", "watchdog-x", "exit code 4", "checkpoint-2"):
        assert part in text


def test_a_run_that_wrote_nothing_yet_can_be_looked_at(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    run.prepare()
    assert "run new, step 0" in _text(run, fake.T0)


def test_json_and_once_print_one_look(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    monkeypatch.delenv("RUN_NAME", raising=False)
    result = CliRunner().invoke(app, ["--json"])
    found = json.loads(result.output)
    assert (result.exit_code, found["step"], found["services"]["trainer"]["phase"]) == (0, 3, "sync")
    assert found["rollouts"] == {"scored": 1, "unscorable": {"verifier": 1}, "inflight": 4}
    once = CliRunner().invoke(app, ["--once"])
    assert once.exit_code == 0 and "run running" in once.output
    assert CliRunner().invoke(app, []).exit_code == 0  # no terminal: one look


def test_an_unknown_run_is_one_message_and_exit_code_2(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    result = CliRunner().invoke(app, ["--run", "nope"])
    assert result.exit_code == 2
    assert "run nope is not in" in result.output and "Traceback" not in result.output
