"""A FAKE run directory: what a training run of four steps with an evaluation leaves behind, in the same files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.health import Heartbeat
from services.common.run_dir import RunDir

T0 = 1_800_000_000.0


def beat(
    run: RunDir, service: str, phase: str, step: int = 0, at_s: float = T0, since_s: float = T0, **detail: Any
) -> None:
    run_dir.write_json(run.heartbeats / service, asdict(Heartbeat(service, phase, step, at_s, since_s, 1, detail)))


def step(run: RunDir, number: int, reward: float, ratio: float = 1.0, staleness: float = 0.0, **more: Any) -> None:
    line = {
        "step": number,
        "time_s": T0 + 30 * number,
        "reward": reward,
        "ratio": ratio,
        "sample/staleness_max": staleness,
        "perf/weight_sync_s": 0.25 * number,
        "perf/rollout_wait_s": 20.0,
        "perf/fwd_bwd_s": 4.0,
    }
    if staleness == 0:
        line["ratio/staleness_0"] = ratio
    run_dir.append_line(run.metrics, line | more)


def rollout(run: RunDir, *, reward: float | None = 1.0, cause: str | None = None, **more: Any) -> None:
    line = {
        "rollout_id": "r", "task": "first-b", "scored": cause is None, "reward": reward, "cause": cause, "error": None,
        "agent_timeout": False, "turns": 2, "tool_calls": 1, "trainable_tokens": 40, "sandbox_s": 18.0, "wall_s": 20.0,
    }  # fmt: skip
    run_dir.append_line(run.rollouts / "index.jsonl", line | more)


def trial(
    run: RunDir, name: str, *, setup_s: float = 3, agent_s: float = 20, verifier_s: float = 0.5, teardown_s: float = 1
) -> None:
    """The times in Harbor's result.json of one trial: set-up, 20 s of agent, 0.5 s of verifier, 1 s of teardown."""
    marks = [0.0]
    for seconds in (setup_s, 20.0, 0.5, 1.0):
        marks.append(marks[-1] + seconds)
    begin, agent, verifier, teardown, end = (f"2026-11-29T12:00:{mark:09.6f}Z" for mark in marks)
    value = {
        "started_at": begin,
        "agent_execution": {"started_at": agent, "finished_at": verifier},
        "verifier": {"started_at": verifier, "finished_at": teardown},
        "finished_at": end,
    }
    run_dir.write_json(run.trials / name / "result.json", value)


def evaluation() -> dict[str, Any]:
    def arm(label: str, rate: float, low: float, high: float, passed: int) -> dict[str, Any]:
        return {
            "label": label, "pass_at_1": rate, "interval_95": [low, high], "passed": passed, "rollouts": 4,
            "mean_tool_calls": 1.5, "mean_completion_tokens": 60.0,
        }  # fmt: skip

    return {
        "suite": "smoke/heldout",
        "base": arm("base", 0.25, 0.046, 0.699, 1),
        "adapter": arm("checkpoint-4", 0.75, 0.301, 0.954, 3),
        "paired": {"tasks": 4, "both": 1, "only_base": 0, "only_adapter": 2, "neither": 1, "mcnemar_exact_p": 0.5},
        "infrastructure_failures": [{"label": "base", "task": "t", "cause": "policy", "error": "gone"}],
    }


def finished(folder: Path, name: str = "done") -> RunDir:
    """A run that ended well."""
    run = RunDir(folder / name)
    run.prepare()
    for number, (reward, ratio, staleness) in enumerate(
        [(0.25, 0.9991, 0.0), (0.5, 0.9995, 1.0), (0.5, 1.0007, 0.0), (1.0, 1.2, 2.0)], start=1
    ):
        step(run, number, reward, ratio, staleness)
    for reward in (1.0, 0.0, 1.0, 0.0, 1.0):
        rollout(run, reward=reward)
    rollout(run, reward=0.0, agent_timeout=True)
    for cause in ("policy", "sandbox_create", "policy"):
        rollout(run, reward=None, cause=cause)
    for service, phase in (("trainer", "done"), ("env", "serving"), ("watchdog", "done"), ("evaluator", "done")):
        beat(run, service, phase, 4 if service == "trainer" else 0)
    beat(run, "env", "serving", inflight=0, done=9, failed={"policy": 2})
    for event, project in (("intent", "a"), ("created", "a"), ("closed", "a"), ("intent", "b")):
        run_dir.append_line(run.ledger, {"event": event, "project": project})
    for index, setup_s in enumerate((3, 4, 9)):
        trial(run, f"t{index}", setup_s=setup_s)
    run_dir.write_json(run.trials / "cut" / "result.json", {"started_at": "2026-11-29T12:00:00Z"})
    checkpoint = run.checkpoints / "checkpoint-4"
    run_dir.write_text(checkpoint / "adapter_model.safetensors", "x")
    run_dir.write_text(checkpoint / run_dir.READY, "now\n")
    run_dir.write_json(run.eval / "final_results.json", evaluation())
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-4", "collapse_alarms": [], "checkpoints": []})
    run_dir.write_json(run.path / "timings.json", {"start": 90.0, "train": 120.5, "eval_start": 85.0, "eval": 60.0})
    run_dir.write_json(run.result, {"exit_code": 0, "reason": "done", "step": 4})
    return run
