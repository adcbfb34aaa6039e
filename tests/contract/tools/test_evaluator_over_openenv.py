"""The evaluator's commands against OpenEnv 0.10's own server and client; FAKE rollouts behind it, FAKE policy-eval.

Runs in the tools image. What it pins: a rollout call as we make it is accepted by the real server over a real
websocket, a result comes back whole, and two at a time do not take each other's answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import CallToolAction, CallToolObservation
from openenv.core.harness.capture.sessions import SessionRegistry
from openenv.harbor.environment import HarborEnvironment
from openenv.harbor.models import HarborRolloutResult, HarborState, HarborTurn

from services.common import control, recipe, run_dir
from services.common.run_dir import RunDir
from services.common.tasks import load_suite
from services.env.state import WithKey
from services.evaluator import cells, rollout
from tests.fakes.evaluation import write_adapter
from tests.fakes.policy_eval import BASE_NAME, FakePolicyEval
from tests.hub.server import LocalHub

ROOT = Path(__file__).resolve().parents[3]
SUITE = "smoke/heldout"


class FakeRollouts(HarborEnvironment):
    """FAKE behind OpenEnv's environment: the protocol is real, ``_run_rollout`` starts no sandbox."""

    calls: ClassVar[list[dict[str, Any]]] = []
    verdict: ClassVar[Callable[[str, str], HarborRolloutResult]]
    delay_s: ClassVar[float] = 0.0

    async def _run_rollout(self, split: str, task_index: int, harness: str, sandbox: str, *rest: Any) -> str:  # type: ignore[override]
        llm_url, model, timeout_s, step_limit, sampling = rest[3], rest[4], rest[7], rest[8], rest[9]
        purpose, eval_sampling = rest[11], rest[12]
        # The very check that the real one makes of purpose and sampling.
        SessionRegistry().create(
            purpose=purpose, eval_sampling=eval_sampling, sampling=sampling, max_model_calls=step_limit
        )
        task = self._provider.task_dir(split, task_index).name
        FakeRollouts.calls.append(
            {"task": task, "harness": harness, "sandbox": sandbox, "llm_url": llm_url, "model": model,
             "purpose": purpose, "eval_sampling": eval_sampling, "agent_timeout_sec": timeout_s,
             "agent_step_limit": step_limit}
        )  # fmt: skip
        await asyncio.sleep(FakeRollouts.delay_s)
        result = FakeRollouts.verdict(model, task)
        for turn in result.turns:
            turn.sampling_params = dict(eval_sampling)
        return result.model_dump_json()


def good(reward: float, task: str, size: int = 3) -> HarborRolloutResult:
    turn = HarborTurn(
        turn=0, text="", tool_calls=[{"name": "bash", "arguments": "{}"}], completion_token_ids=list(range(size))
    )
    return HarborRolloutResult(reward=reward, rollout_type="eval", turns=[turn], n_turns=1, task_name=task, wall_s=1.5)


@pytest.fixture
def env_url(run: RunDir) -> Iterator[str]:
    FakeRollouts.calls = []
    FakeRollouts.delay_s = 0.0
    FakeRollouts.verdict = staticmethod(lambda _model, task: good(1.0, task))  # type: ignore[assignment]
    FakeRollouts.configure(datasets=[SUITE])
    FakeRollouts.__init__ = _with_suite(HarborEnvironment.__init__)  # type: ignore[method-assign]
    app = create_app(
        FakeRollouts, CallToolAction, CallToolObservation, state_cls=HarborState, env_name="harbor_env",
        max_concurrent_envs=6,
    )  # fmt: skip
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(WithKey(app, control.issue(run)), log_level="warning", ws_ping_timeout=60))
    thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    _until(lambda: _healthy(url))
    yield url
    server.should_exit = True
    thread.join(timeout=10)


def _with_suite(init: Callable[..., None]) -> Callable[..., None]:
    def with_suite(self: FakeRollouts) -> None:
        init(self)
        self._provider = Provider()

    return with_suite


class Provider:
    """The suite as services.env serves it: named as in the recipe, in the pinned order."""

    def __init__(self) -> None:
        self._tasks = load_suite(ROOT / "data/tasks", SUITE)

    def list_splits(self) -> list[dict[str, Any]]:
        return [{"name": SUITE, "num_tasks": len(self._tasks)}]

    def num_tasks(self, split: str) -> int:
        return len(self._tasks)

    def task_dir(self, split: str, index: int) -> Path:
        return self._tasks[index].folder

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        listed = [
            {"index": i, "task_id": str(task.folder), "task_name": task.name, "dataset": split,
             "instruction": task.instruction.strip()}
            for i, task in enumerate(self._tasks)
        ]  # fmt: skip
        return listed[start:stop]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def _until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def policy_eval() -> Iterator[FakePolicyEval]:
    fake = FakePolicyEval()
    yield fake
    fake.close()


@pytest.fixture
def cfg(tmp_path: Path) -> recipe.Recipe:
    text = (ROOT / "data/recipes/smoke.toml").read_text().replace("max_inflight = 2", "max_inflight = 3")
    (tmp_path / "recipe.toml").write_text(text)
    return recipe.load(tmp_path / "recipe.toml")


@pytest.fixture
def run(tmp_path: Path, cfg: recipe.Recipe) -> RunDir:
    run = RunDir(tmp_path / "runs" / "smoke")
    run.prepare()
    for step in (2, 4):
        folder = run.checkpoints / f"checkpoint-{step}"
        write_adapter(folder, cfg, fill=step)
        run_dir.write_text(folder / run_dir.READY, "now\n")
    return run


@pytest.fixture
def command(tmp_path: Path, run: RunDir, env_url: str, policy_eval: FakePolicyEval) -> Callable[..., Any]:
    """``python -m services.evaluator ...`` as compose starts it."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    shutil.copytree(ROOT / "data/tasks/smoke", tasks / "smoke")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RECIPE": str(tmp_path / "recipe.toml"),
        "RUNS_DIR": str(run.path.parent),
        "TASKS_DIR": str(tasks),
        "ENV_URL": env_url,
        "POLICY_EVAL_URL": policy_eval.url,
        "RUN_NAME": "smoke",
    }

    def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "services.evaluator", *arguments],
            cwd=ROOT, env=environment | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


def _finish(process: subprocess.Popen[str], limit_s: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


def test_final_runs_both_arms_over_real_websockets_and_writes_the_comparison(
    command: Callable[..., Any], run: RunDir, policy_eval: FakePolicyEval, cfg: recipe.Recipe
) -> None:
    FakeRollouts.verdict = staticmethod(  # type: ignore[assignment]
        lambda model, task: good(float(model != BASE_NAME or task == "first-a"), task)
    )
    code, out, err = _finish(command("final"))
    assert code == 0, err
    value = json.loads((run.eval / "final_results.json").read_text())
    assert (value["base"]["pass_at_1"], value["adapter"]["pass_at_1"], value["step"]) == (0.25, 1.0, 4)
    assert value["infrastructure_failures"] == []
    assert (run.eval / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "checkpoint-4" in out and "3 only adapter" in out
    assert not out.lstrip().startswith("{")  # for a person: the JSON lines are in the log
    assert '"event": "cell scored"' in (run.path / "evaluator.log").read_text()

    assert len(FakeRollouts.calls) == 8
    names = {call["model"] for call in FakeRollouts.calls}
    assert BASE_NAME in names and len(names) == 2
    call = FakeRollouts.calls[0]
    assert (call["harness"], call["sandbox"], call["purpose"]) == ("opencode", "docker", "eval")
    assert call["eval_sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert call["llm_url"] == f"{policy_eval.url}/v1"
    assert call["agent_timeout_sec"] == cfg.rollout.agent_timeout_s
    assert call["agent_step_limit"] == cfg.rollout.max_tool_calling_iterations


def test_rollouts_at_the_same_time_do_not_take_each_other_s_results(
    env_url: str, cfg: recipe.Recipe, run: RunDir, tmp_path: Path
) -> None:
    FakeRollouts.delay_s = 0.3
    sizes = {"first-a": 10, "largest-b": 20, "lines-a": 30, "smallest-c": 40}
    FakeRollouts.verdict = staticmethod(lambda _model, task: good(1.0, task, sizes[task]))  # type: ignore[assignment]
    tasks = load_suite(ROOT / "data/tasks", SUITE)
    client = rollout.connect(cfg, env_url, run)
    runner = rollout.Runner(
        connect=lambda: rollout.connect(cfg, env_url, run),
        suite=SUITE,
        index=rollout.locate(client, SUITE, tasks),
        under=cells.conditions(cfg, None),
        llm_url="http://127.0.0.1:1/v1",
        backend="docker",
        retries=0,
    )
    client.close()
    found: dict[str, int] = {}

    def ask(name: str) -> None:
        outcome = runner(cells.Cell(cells.Arm("base"), name, "", 0), BASE_NAME)
        assert outcome.scored, outcome
        found[name] = outcome.completion_tokens

    threads = [threading.Thread(target=ask, args=[name]) for name in sizes]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == sizes
    assert time.monotonic() - begin < 60


def test_a_result_of_several_megabytes_arrives_whole(env_url: str, cfg: recipe.Recipe, run: RunDir) -> None:
    big = good(1.0, "first-a", 90)
    big.conversations = []
    big.agent_log_tail = "x" * 8_000_000
    FakeRollouts.verdict = staticmethod(lambda *_: big)  # type: ignore[assignment]
    runner = rollout.Runner(
        lambda: rollout.connect(cfg, env_url, run), SUITE, {"first-a": 0}, cells.conditions(cfg, None), "u", "docker", 0
    )
    outcome = runner(cells.Cell(cells.Arm("base"), "first-a", "", 0), BASE_NAME)
    assert outcome.completion_tokens == 90, outcome


def test_a_server_that_is_not_there_is_a_failure_of_env_and_not_of_the_agent(cfg: recipe.Recipe) -> None:
    runner = rollout.Runner(
        lambda: rollout.connect(cfg, "http://127.0.0.1:9"), SUITE, {"first-a": 0}, cells.conditions(cfg, None), "u",
        "docker", 0,
    )  # fmt: skip
    outcome = runner(cells.Cell(cells.Arm("base"), "first-a", "", 0), BASE_NAME)
    assert (outcome.reward, outcome.cause) == (None, "env")


def test_the_watcher_killed_in_the_middle_loses_and_doubles_no_cell(command: Callable[..., Any], run: RunDir) -> None:
    run_dir.write_json(run.result, {"exit_code": 0, "reason": "done", "step": 4})
    FakeRollouts.delay_s = 2.0
    process = command("watch")
    _until(lambda: len(run_dir.read_lines(run.eval / "cells.jsonl")) >= 3, 240)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = len(run_dir.read_lines(run.eval / "cells.jsonl"))
    assert before < 12
    FakeRollouts.delay_s = 0.0
    code, _out, err = _finish(command("watch"))
    assert code == 0, err
    lines = run_dir.read_lines(run.eval / "cells.jsonl")
    assert len({line["key"] for line in lines}) == len(lines) == 12  # base, 2 and 4 on four tasks
    summary = json.loads((run.eval / "summary.json").read_text())
    assert [point["step"] for point in summary["checkpoints"]] == [2, 4]
    assert run_dir.read_json(run.heartbeats / "evaluator")["phase"] == "done"


def test_the_watcher_follows_a_hub_repository_where_it_shares_no_disk_with_the_trainer(
    command: Callable[..., Any], run: RunDir
) -> None:
    """From checkpoints pushed one after the other to the end, which is the recipe's last step."""
    folders = {step: run.checkpoints / f"checkpoint-{step}" for step in (2, 4)}
    files = {
        step: {f"checkpoints/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
        for step, folder in folders.items()
    }
    shutil.rmtree(run.checkpoints)
    with LocalHub() as hub:
        hub.commit("local/adapter", files[2])
        process = command("watch", "--hub", ADAPTER_REPO="local/adapter", **hub.environment())
        _until((run.eval / "checkpoint-2_results.json").exists, 240)
        hub.commit("local/adapter", files[4])
        code, _out, err = _finish(process)
    assert code == 0, err
    summary = json.loads((run.eval / "summary.json").read_text())
    assert [point["step"] for point in summary["checkpoints"]] == [2, 4]
    assert len(FakeRollouts.calls) == 12


def test_a_hub_to_follow_must_be_named(command: Callable[..., Any]) -> None:
    code, _out, err = _finish(command("watch", "--hub", ADAPTER_REPO=""))
    assert code == 2 and "ADAPTER_REPO is not set" in err and "Traceback" not in err


def test_sigterm_ends_the_watcher_within_seconds_although_a_rollout_runs(
    command: Callable[..., Any], run: RunDir
) -> None:
    FakeRollouts.delay_s = 300.0
    process = command("watch")
    _until(lambda: len(FakeRollouts.calls) >= 3, 240)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _out, err = _finish(process, 120)
    assert code == 0, err
    assert time.monotonic() - begin < 60


def test_eval_of_an_unknown_checkpoint_is_one_message_and_exit_code_2(command: Callable[..., Any]) -> None:
    code, _out, err = _finish(command("eval", "--checkpoint", "300"))
    assert code == 2
    assert "checkpoint 300 is not in" in err and "complete there: 2, 4" in err and "Traceback" not in err


def test_eval_of_chosen_tasks_prints_the_table(command: Callable[..., Any], run: RunDir) -> None:
    code, out, err = _finish(command("eval", "--checkpoint", "2", "--n", "2", "--greedy"))
    assert code == 0, err
    assert "checkpoint-2" in out and "2 tasks" in out and "greedy" in out
    assert (run.eval / "other" / "checkpoint-2-2-tasks-greedy_results.json").exists()
    assert {call["eval_sampling"]["temperature"] for call in FakeRollouts.calls} == {0.0}


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"RUN_NAME": "none-such"}, 2, "run none-such is not in"),
        ({"ENV_URL": ""}, 2, "ENV_URL not set"),
        ({"TASKS_DIR": ""}, 2, "TASKS_DIR is not set"),
        ({"RECIPE": "/none"}, 2, "recipe /none does not exist"),
    ],
)
def test_bad_surroundings_are_one_message_and_an_exit_code(
    command: Callable[..., Any], changes: dict[str, str], code: int, message: str
) -> None:
    found, _out, err = _finish(command("final", **changes))
    assert found == code and message in err and "Traceback" not in err


def test_the_watcher_stays_below_300_mb(command: Callable[..., Any], run: RunDir) -> None:
    FakeRollouts.verdict = staticmethod(lambda _model, task: good(1.0, task, 90))  # type: ignore[assignment]
    process = command("watch")
    _until(lambda: (run.eval / "checkpoint-4_results.json").exists(), 240)
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.send_signal(signal.SIGTERM)
    assert _finish(process)[0] == 0
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_kb < 300_000
