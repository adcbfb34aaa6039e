"""One look at a FAKE run."""

import io
import json
import os
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from scripts import run_view, status
from services.common import run_dir
from services.common.run_dir import RunDir
from tests.fakes import run as fake

GPUS = [
    status.parse_gpu("0, NVIDIA H200, 97, 71000, 143771"),
    status.parse_gpu("1, NVIDIA H200, [N/A], 130000, 143771"),
]
app = typer.Typer()
app.command()(status.main)


def _text(run: RunDir, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(status.render(run_view.load(run), GPUS, now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """In the middle of training."""
    run = RunDir(tmp_path / "running")
    run.prepare()
    fake.beat(run, "trainer", "sync", 3, at_s=fake.T0, since_s=fake.T0 - 65)
    rollouts = [{"task": "first-a", "since_s": fake.T0 - 100}, {"task": "[red]", "since_s": fake.T0 - 7}]
    fake.beat(run, "env", "serving", at_s=fake.T0 - 90, inflight=4, rollouts=rollouts, done=7, failed={"policy": 1})
    fake.beat(run, "evaluator", "done", at_s=fake.T0 - 9000)
    for step, reward in ((1, 0.25), (2, 0.0), (3, 0.5)):
        fake.step(run, step, reward)  # one in 30 s
    run_dir.write_json(run.manifest, {"recipe": {"trainer": {"max_steps": 9}}})
    fake.rollout(run)
    fake.rollout(run, cause="verifier", reward=None)
    for event in ("intent", "created"):
        run_dir.append_line(run.ledger, {"event": event, "project": "a"})
    return run


def test_services_are_shown_with_phase_step_and_time_in_phase(run: RunDir) -> None:
    text = _text(run, fake.T0 + 3)
    assert "run running, step 3 of 9, 120 steps an hour, 0:03:00 to go" in text
    assert "reward ▅▁█ 0.000 to 0.500, last 0.500" in text
    assert "in flight: first-a 0:01:43, [red] 0:00:10" in text
    assert "GPU 0 (NVIDIA H200): 97 % busy, 69 of 140 GB" in text
    assert "GPU 1 (NVIDIA H200): - busy, 127 of 140 GB" in text
    assert "sync" in text and "0:01:08" in text and "3 s ago" in text
    assert "inflight 4" in text and "failed" not in text
    assert "rollouts: 4 in flight, 1 scored, 1 unscorable; 1 sandboxes open" in text
    assert "unscorable: verifier 1" in text
    assert "step 3: reward 0.500" in text


def test_a_heartbeat_that_stopped_is_marked_and_one_that_ended_is_not(run: RunDir) -> None:
    found = status.as_json(run_view.load(run), [], fake.T0 + 3)["services"]
    assert {name: service["alive"] for name, service in found.items()} == {
        "trainer": True, "env": False, "evaluator": True,
    }  # fmt: skip
    assert _text(run, fake.T0 + 3).count("none since") == 1


def test_stop_incident_and_result_are_shown(run: RunDir) -> None:
    run_dir.write_json(run.stop_request, {"reason": "No optimizer step."})
    run_dir.write_json(run.incidents / "watchdog-x/decision.json", {"reason": "No step for 1800 s."})
    costs = {"usd": 12.5, "usd_per_step": 0.25, "gpu_hours": 2.5, "sandbox_minutes": 90.4}
    run_dir.write_json(run.path / "costs.json", costs)
    run_dir.write_json(run.result, {"exit_code": 4, "reason": "No optimizer step.", "step": 3})
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-2", "collapse_alarms": []})
    text = _text(run, fake.T0)
    cost = "cost: 12.50 dollars, 0.250 a step; 2.50 GPU hours, 90 sandbox minutes"
    incident = "1 incidents, last watchdog-x: No step for 1800 s."
    for part in ("stop requested: No optimizer step.", incident, "exit code 4", "checkpoint-2", cost):
        assert part in text
    assert "to go" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"reason": "eno', ""),
        ('["enough"]', ""),
        ('"enough"', ""),
        ("", ""),
        ('{"resume": true}', "stop requested: asked for by hand"),
        ('{"reason": 7}', "stop requested: 7"),
    ],
)
def test_a_stop_request_that_a_person_wrote_badly_ends_no_view(run: RunDir, text: str, shown: str) -> None:
    run.stop_request.write_text(text)
    found = _text(run, fake.T0)
    assert shown in found and ("stop requested" in found) == bool(shown)


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
    assert (found["eta_s"], found["rewards"]) == (180.0, [0.25, 0.0, 0.5])
    assert [item["task"] for item in found["in_flight"]] == ["first-a", "[red]"]
    once = CliRunner().invoke(app, ["--once"])
    assert once.exit_code == 0 and "run running" in once.output
    assert CliRunner().invoke(app, []).exit_code == 0  # no terminal: one look


def test_an_unknown_run_is_one_message_and_exit_code_2(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    result = CliRunner().invoke(app, ["--run", "nope"])
    assert result.exit_code == 2
    assert "run nope is not in" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([], ""), ([0.5], "▁"), ([0.5, 0.5], "▁▁"), ([0, 1], "▁█"), ([0, 0, 1, 1, 0, 0], "▁█▁"), (range(8), "▁▃▆█")],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(numbers: list[float], shown: str) -> None:
    assert run_view.sparkline(numbers, width=len(shown) or 1) == shown


def test_the_live_view_ends_with_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.Console, "is_terminal", property(lambda _self: True))
    monkeypatch.setattr(status.run_view, "find_run", lambda _name: run)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            run_dir.write_json(run.result, {"exit_code": 0, "reason": "done", "step": 3})

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert status._show(None, once=False, as_text=False) == 0
    assert len(looks) == 2


def test_the_newest_run_is_the_one_that_lived_last_and_not_the_one_that_was_looked_at(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    monkeypatch.delenv("RUN_NAME", raising=False)
    older = RunDir(run.path.parent / "older")
    older.prepare()
    fake.beat(older, "trainer", "done")
    for folder, age_s in ((older, 100.0), (run, 50.0)):
        for beat in folder.heartbeats.iterdir():
            os.utime(beat, (fake.T0 - age_s, fake.T0 - age_s))
    (older.path / "traces.html").write_text("looked at just now")
    assert run_view.find_run().path.name == "running"
