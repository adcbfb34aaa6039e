"""The end-of-run summary over FAKE run directories."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scripts import run_view, summary
from services.common import recipe, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import RunDir
from tests.fakes import run as fake

ROOT = Path(__file__).resolve().parents[2]


def _shown(run: RunDir, **options: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    summary.show(run, console=console, **options)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rollouts_are_counted_by_verdict_and_cause(tmp_path: Path) -> None:
    found = summary.build(run_view.load(fake.finished(tmp_path)))["rollouts"]
    assert (found["total"], found["scored"], found["correct"], found["agent_timeouts"]) == (9, 6, 3, 1)
    assert found["unscorable"] == {"policy": 2, "sandbox_create": 1}
    assert list(found["unscorable"]) == ["policy", "sandbox_create"]
    assert (found["mean_turns"], found["mean_tool_calls"], found["mean_wall_s"]) == (2, 1, 20)


def test_reward_ratio_and_sync_are_of_the_steps(tmp_path: Path) -> None:
    found = summary.build(run_view.load(fake.finished(tmp_path)))
    assert found["reward"] == {"first": 0.25, "last": 1.0, "mean": pytest.approx(0.5625)}
    assert found["sync"] == {"count": 4, "mean_s": pytest.approx(0.625), "max_s": 1.0}
    assert found["step_s"]["waiting for rollouts"] == 20.0
    assert found["step_s"]["optimizer"] is None


def test_the_ratio_at_staleness_0_leaves_out_steps_with_an_older_sample(tmp_path: Path) -> None:
    found = summary.build(run_view.load(fake.finished(tmp_path)))["ratio"]
    assert found["at_staleness_0"] == {"steps": 2, "mean": pytest.approx(0.9999), "min": 0.9991, "max": 1.0007}
    assert found["all"]["steps"] == 4 and found["all"]["max"] == 1.2


def test_numbers_that_are_not_finite_are_not_averaged(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    fake.step(run, 1, 0.5)
    fake.step(run, 2, float("nan"), ratio=float("inf"))
    run_dir.append_line(run.metrics, {"step": 3, "reward": None})
    found = summary.build(run_view.load(run))
    assert found["reward"] == {"first": 0.5, "last": 0.5, "mean": 0.5}
    assert found["ratio"]["all"]["steps"] == 1
    assert found["steps"] == 3


def test_sandbox_overhead_is_all_but_the_agent_and_its_parts(tmp_path: Path) -> None:
    found = summary.sandbox_overhead(fake.finished(tmp_path))
    assert found == {
        "median": pytest.approx(4 + 1.5),
        "worst": pytest.approx(9 + 1.5),
        "before the agent": pytest.approx(4),
        "verifier": pytest.approx(0.5),
        "after the verifier": pytest.approx(1),
    }


def test_a_run_without_a_finished_rollout_has_no_overhead(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    assert summary.sandbox_overhead(run) == {}
    run_dir.write_json(run.trials / "t" / "result.json", {"started_at": None, "agent_execution": None})
    assert summary.sandbox_overhead(run) == {}


def test_the_tables_show_what_a_person_asks_for(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    text = _shown(run, cfg=recipe.load(ROOT / "data/recipes/smoke.toml"))
    for part in (
        "4 of 4",  # steps
        "6 of 9",  # rollouts
        "unscorable: policy",
        "0.562, 0.250, 1.000",  # reward
        "0.9999 (0.9991 - 1.0007, 2 steps)",
        "bounds 0.995 - 1.005",
        "0.62 s, 1.00 s",  # sync
        "eval start",
        "356 s",  # all phases
        "checkpoint-4",
        "0.301 - 0.954",
        "3 of 4",
        "2 only adapter",
        "1 evaluation rollouts failed",
        "Training ended with exit code 0: done",
        f"adapter: {run.checkpoints}/checkpoint-4/adapter_model.safetensors",
        f"evaluation: {run.eval}/final_results.json",
    ):
        assert part in text, part
    assert "learning curve" not in text  # there is none: curve.png was not drawn


@pytest.mark.parametrize("state", ["nothing", "empty", "started", "first step"])
def test_a_run_in_any_state_can_be_summed_up(tmp_path: Path, state: str) -> None:
    run = RunDir(tmp_path / "young")
    if state != "nothing":
        run.prepare()
    if state in ("started", "first step"):
        fake.beat(run, "trainer", "compiling")
    if state == "first step":
        fake.step(run, 1, 0.5, staleness=1.0)
    text = _shown(run)
    assert ("wrote nothing" in text) == (state == "nothing")
    assert ("Training has not ended." in text) == (state != "nothing")
    assert "no such step" in text or state == "nothing"
    assert json.loads(json.dumps(summary.build(run_view.load(run))))["steps"] == (1 if state == "first step" else 0)


def test_a_stopped_run_names_reason_and_incident(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    run_dir.write_json(run.result, {"exit_code": 4, "reason": "No optimizer step for 601 s.", "step": 2})
    (run.incidents / "watchdog-2026-11-29T120000Z").mkdir()
    (run.incidents / ".watchdog-half").mkdir()
    text = _shown(run)
    assert "exit code 4: No optimizer step for 601 s." in text
    assert "Incident: watchdog-2026-11-29T120000Z" in text and "half" not in text


def test_a_collapse_is_told(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    alarm = {"step": 4, "best_step": 2, "drop": 0.5, "p_value": 0.01}
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-2", "collapse_alarms": [alarm]})
    assert "Collapse: checkpoint-4 is 0.500 below checkpoint-2" in _shown(run)


def test_an_evaluation_without_a_score_is_shown_as_none(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    value = fake.evaluation()
    value["base"] |= {"pass_at_1": None, "interval_95": None, "mean_tool_calls": None, "mean_completion_tokens": None}
    run_dir.write_json(run.eval / "final_results.json", value)
    assert "base" in _shown(run)


def test_the_json_is_the_same_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    fake.finished(tmp_path, "one")
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    app = typer.Typer()
    app.command()(summary.main)
    result = CliRunner().invoke(app, ["--run", "one", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["run"] == "one" and found["evaluation"]["paired"]["only_adapter"] == 2
    assert CliRunner().invoke(app, ["--run", "none-such"]).exit_code == 2


def test_the_newest_run_is_taken_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.delenv("RUN_NAME", raising=False)
    with pytest.raises(RecipeError, match="there is no run"):
        run_view.find_run()
    old, new = fake.finished(tmp_path, "b-old"), fake.finished(tmp_path, "a-new")
    for path in (old.path, *old.heartbeats.iterdir()):
        os.utime(path, (1, 1))
    assert run_view.find_run() == new
    os.utime(old.heartbeats / "trainer")
    os.utime(old.heartbeats / "trainer", (2**33, 2**33))
    assert run_view.find_run() == old
    monkeypatch.setenv("RUN_NAME", "a-new")
    assert run_view.find_run() == new
    with pytest.raises(RecipeError, match=r"run nope is not in .*; there: a-new, b-old"):
        run_view.find_run("nope")


def test_cost_is_a_row_of_a_run_that_cost_something() -> None:
    costs = {"usd": 12.345, "usd_per_step": 0.5, "gpu_hours": 1.0, "sandbox_minutes": 3.0}
    assert summary.cost_row(costs) == [("dollars: all, a step", "12.35, 0.500")]
    assert summary.cost_row({**costs, "usd": 0.0}) == summary.cost_row(None) == []
