"""Session and factory over OpenEnv's real client and websocket, and under TRL's real worker loop."""

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from openenv.core.harness import ResourceSession, TrainableSession
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from services.common import control, recipe, run_dir
from services.common.causes import Cause
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.trainer import reward, rollout_log
from services.trainer.session import HarborSession, HarborSessionFactory, UnscorableRollout
from tests.fakes.harbor_server import SAMPLING, FakeHarborServer, result, turn

ROOT = Path(__file__).resolve().parents[3]
INSTRUCTIONS = ["Count the lines.", "Name the first.", "Find the largest."]
POLICY = "http://policy:8000"

Answer = Callable[[dict[str, Any]], Any]
Serve = Callable[..., FakeHarborServer]


@pytest.fixture
def cfg() -> Recipe:
    short = {"rollout.setup_timeout_s": 2.0, "tasks.max_train": 2}
    return recipe.load(ROOT / "data" / "recipes" / "smoke.toml", short)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[FakeHarborServer] = []

    def start(answer: Answer, instructions: list[str] = INSTRUCTIONS, port: int = 0, key: str = "") -> FakeHarborServer:
        servers.append(FakeHarborServer(instructions, answer, port, key))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def session_of(factory: HarborSessionFactory, number: int = 1, rollout_id: str = "0a") -> HarborSession:
    prompt = [{"role": "user", "content": INSTRUCTIONS[number]}]
    return factory.create(prompt, seed=4, episode_id=rollout_id)


@pytest.fixture
def factory_of(cfg: Recipe, run: RunDir) -> Callable[..., HarborSessionFactory]:
    def make(url: str, **bounds: float) -> HarborSessionFactory:
        bounded = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=bounds)})
        return HarborSessionFactory(bounded, url, POLICY, run, SAMPLING)

    return make


Factories = Callable[..., HarborSessionFactory]


def test_tasks_and_rollouts_are_asked_for_with_the_runs_key(serve: Serve, factory_of: Factories, run: RunDir) -> None:
    factory = factory_of(serve(lambda _call: result(), key=control.issue(run)).url)
    assert len(factory.prompt_rows()) == 2
    assert session_of(factory).wait_for_completion() == 0
    run.control_key.write_text("another\n")
    with pytest.raises(UnscorableRollout, match=r"^env: "):
        session_of(factory).wait_for_completion()
    with pytest.raises(NotReadyError, match="401"):
        factory_of(serve(lambda _call: result(), key="k").url).prompt_rows()


def test_rows_are_the_first_served_tasks_in_their_order(serve: Serve, factory_of: Factories) -> None:
    rows = factory_of(serve(lambda _call: result()).url).prompt_rows()
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": text}] for text in INSTRUCTIONS[:2]]


def test_prompt_that_is_no_task_is_refused(serve: Serve, factory_of: Factories) -> None:
    factory = factory_of(serve(lambda _call: result()).url)
    with pytest.raises(ValueError, match="no task of suite 'smoke/train' has the prompt 'Something else'"):
        factory.create([{"role": "user", "content": "Something else"}], seed=0, episode_id="0a")


def test_two_tasks_with_one_instruction_are_refused(serve: Any, factory_of: Factories) -> None:
    server = serve(lambda _call: result(), ["Same.", "Other.", "Same.\n"])
    with pytest.raises(RecipeError, match="tasks task-0 and task-2 have the same instruction"):
        factory_of(server.url).prompt_rows()


def test_call_carries_the_recipe_and_the_workers_sampling(serve: Serve, factory_of: Factories, cfg: Recipe) -> None:
    server = serve(lambda _call: result())
    session = session_of(factory_of(server.url))
    assert session.wait_for_completion() == 0
    session.close()
    (call,) = server.calls
    wanted = {
        "split": "smoke/train", "task_index": 1, "harness": "opencode", "sandbox": "docker", "purpose": "train",
        "llm_url": "http://policy:8000/v1", "model": cfg.policy.served_model_name, "sampling": SAMPLING,
        "agent_step_limit": cfg.rollout.max_tool_calling_iterations, "agent_timeout_sec": cfg.rollout.agent_timeout_s,
        "keep_sandbox": False, "reward_key": "correctness,reward",
    }  # fmt: skip
    assert {name: call[name] for name in wanted} == wanted


def test_good_rollout_is_handed_over_as_captured(serve: Serve, factory_of: Factories, run: RunDir) -> None:
    session = session_of(factory_of(serve(lambda _call: result()).url))
    assert isinstance(session, ResourceSession)
    assert isinstance(session, TrainableSession)
    session.wait_for_completion()
    trace = session.fetch_training_trace()
    assert [turn.completion_token_ids for turn in trace.turns] == [[4, 5], [7]]
    assert session.verify([]).env_reward == 1.0
    session.close()
    (line,) = run_dir.read_lines(run.rollouts / rollout_log.INDEX)
    found = {name: line[name] for name in ("task", "group", "scored", "reward", "cause", "turns", "tool_calls")}
    assert found == {
        "task": "task-1", "group": 4, "scored": True, "reward": 1.0, "cause": None, "turns": 2, "tool_calls": 1,
    }  # fmt: skip
    assert line["breaches"] == []
    assert rollout_log.read(run.rollouts / "0a.json.zst")["result"]["turns"][1]["completion_token_ids"] == [7]


BAD: list[tuple[Cause, Any]] = [
    (Cause.VERIFIER, result(reward=None)),
    (Cause.VERIFIER, result(reward=-1.0)),
    (Cause.VERIFIER, result(reward=37.0)),
    (Cause.VERIFIER, result(ok=False, reward=None, exception_type="VerifierTimeoutError", error="late")),
    (Cause.SANDBOX_CREATE, result(ok=False, reward=None, exception_type="EnvironmentStartTimeoutError", error="x")),
    (Cause.SETUP, result(ok=False, reward=None, exception_type="AgentSetupError", error="old")),
    (Cause.AGENT_CRASH, result(ok=False, exception_type="NonZeroAgentExitCodeError", error="boom")),
    (Cause.POLICY, result(ok=False, exception_type="NonZeroAgentExitCodeError", error="could not reach engine: x")),
    (Cause.AGENT_TIMEOUT, result(
        ok=False, reward=0.0, turns=[], n_trainable_tokens=0, exception_type="AgentTimeoutError", error="timed out",
        findings=["[FATAL] no_turns: the agent never reached it"],
    )),
    (Cause.CAPTURE, result(ok=False, findings=["[FATAL] turn_mismatch: x"], error="capture failed validation")),
    (Cause.CAPTURE, result(rollout_type="eval")),
    (Cause.CAPTURE, result(n_trainable_tokens=0)),
    (Cause.CAPTURE, result(turns=[turn(0, [1], [2, 3], per_token_logps=[-0.5])])),
    (Cause.CAPTURE, result(turns=[turn(0, [1], [2], n_tools=0)])),
    (Cause.CAPTURE, result(turns=[turn(0, [1], [2], loss_mask=[1, 1])])),
    (Cause.CAPTURE, result(param_fixes=["dropped temperature"])),
    (Cause.ENV, RuntimeError("a bug of the server")),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "answer"), BAD)
def test_unusable_rollout_is_unscorable_and_named(
    cause: Cause, answer: Any, serve: Serve, factory_of: Factories, run: RunDir
) -> None:
    session = session_of(factory_of(serve(lambda _call: answer).url))
    with pytest.raises(UnscorableRollout) as raised:
        session.wait_for_completion()
    assert raised.value.cause is cause
    with pytest.raises(RuntimeError, match="nothing to train on"):
        session.fetch_training_trace()
    session.close()
    (line,) = run_dir.read_lines(run.rollouts / rollout_log.INDEX)
    assert (line["scored"], line["cause"]) == (False, cause.value)


def test_agent_out_of_time_is_scored_by_what_it_left(serve: Serve, factory_of: Factories, run: RunDir) -> None:
    answer = result(ok=False, reward=0.0, exception_type="AgentTimeoutError", error="timed out after 150 s")
    session = session_of(factory_of(serve(lambda _call: answer).url))
    with pytest.raises(TimeoutError):
        session.wait_for_completion()
    assert len(session.fetch_training_trace().turns) == 2
    assert session.verify([]).env_reward == 0.0
    session.close()
    (line,) = run_dir.read_lines(run.rollouts / rollout_log.INDEX)
    assert (line["scored"], line["cause"], line["agent_timeout"]) == (True, None, True)


# --- In TRL's worker ----------------------------------------------------------------------------------------------


def run_in_worker(factory: HarborSessionFactory, number: int = 0) -> tuple[Any, Any]:
    """TRL's own handling of one rollout, with the reward function of the recipe."""
    PartialState()  # TRL's worker process makes it before its loop; its logger needs it
    loop = SimpleNamespace(
        _factory=factory,
        _live_sessions=set(),
        _stop_event=threading.Event(),
        _adapter=None,
        _rollout_reward_fn=partial(reward.score, bonus=0.1, max_tool_calls=32),
        _fork_threshold_tokens=0,
        _EMPTY_ROLLOUT=_HarnessRolloutLoop._EMPTY_ROLLOUT,
    )
    prompt = [{"role": "user", "content": INSTRUCTIONS[number]}]
    return _HarnessRolloutLoop._run_session(loop, prompt, 0)


def test_trl_trains_on_the_sampled_tokens(serve: Serve, factory_of: Factories) -> None:
    rollout, metrics = run_in_worker(factory_of(serve(lambda _call: result()).url))
    _completion, completion_ids, (sequence,), tool_calls, _failures, found = rollout
    assert completion_ids == [4, 5, 7]
    assert sequence.input_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.completion_mask == [0, 0, 0, 1, 1, 0, 1]
    assert sequence.old_log_probs == [0.0, 0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert tool_calls == 1
    assert found == pytest.approx(1.0 + 0.1 * 31 / 32)
    assert metrics["loop_exhausted"] is False


@pytest.mark.parametrize(("cause", "answer"), BAD)
def test_trl_goes_on_after_any_unusable_rollout(cause: Cause, answer: Any, serve: Serve, factory_of: Factories) -> None:
    rollout, _metrics = run_in_worker(factory_of(serve(lambda _call: answer).url))
    assert rollout == _HarnessRolloutLoop._EMPTY_ROLLOUT


def test_trl_counts_the_time_out_and_keeps_the_reward(serve: Serve, factory_of: Factories) -> None:
    answer = result(ok=False, exception_type="AgentTimeoutError", error="timed out")
    rollout, metrics = run_in_worker(factory_of(serve(lambda _call: answer).url))
    assert metrics["loop_exhausted"] is True
    assert rollout[-1] == pytest.approx(1.0 + 0.1 * 31 / 32)


def test_factory_reaches_the_worker_process_by_pickle(serve: Serve, factory_of: Factories) -> None:
    factory = factory_of(serve(lambda _call: result()).url)
    factory.prompt_rows()
    again = pickle.loads(pickle.dumps(factory))
    assert session_of(again).wait_for_completion() == 0


# --- Connections --------------------------------------------------------------------------------------------------


def test_rollouts_at_the_same_time_do_not_take_each_others_answers(serve: Serve, factory_of: Factories) -> None:
    def answer(call: dict[str, Any]) -> Any:
        time.sleep(0.05)
        return result(reward=float(call["task_index"]) / 10)

    factory = factory_of(serve(answer).url)
    sessions = [session_of(factory, number % 3, f"r{number}") for number in range(9)]
    threads = [threading.Thread(target=session.wait_for_completion) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [session.verify([]).env_reward for session in sessions] == [number % 3 / 10 for number in range(9)]
    for session in sessions:
        session.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_env_server_that_restarts_is_waited_for(serve: Any, factory_of: Factories) -> None:
    port = free_port()
    first = serve(lambda _call: result(), INSTRUCTIONS, port)
    session = session_of(factory_of(first.url, setup_timeout_s=60.0))
    first.stop()
    threading.Timer(0.7, lambda: serve(lambda _call: result(), INSTRUCTIONS, port)).start()
    assert session.wait_for_completion() == 0
    session.close()


def test_tasks_are_waited_for_while_the_env_server_restarts(serve: Any, factory_of: Factories) -> None:
    port = free_port()
    threading.Timer(0.7, lambda: serve(lambda _call: result(), INSTRUCTIONS, port)).start()
    session = session_of(factory_of(f"http://127.0.0.1:{port}", setup_timeout_s=60.0))
    assert session.wait_for_completion() == 0
    session.close()


def test_env_server_that_serves_no_tasks_is_named_in_bounded_time(factory_of: Factories) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NotReadyError, match=f"the env server at {url} does not answer"):
        factory_of(url).prompt_rows()


def test_a_bug_of_ours_is_recorded_as_unscorable(
    serve: Serve, factory_of: Factories, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr("services.trainer.session.breaches", broken)
    session = session_of(factory_of(serve(lambda _call: result()).url))
    with pytest.raises(UnscorableRollout, match="KeyError: 'a bug'"):
        session.wait_for_completion()
    session.close()
    [line] = run_dir.read_lines(run.rollouts / rollout_log.INDEX)
    assert (line["scored"], line["cause"]) == (False, "capture")


def test_env_server_that_stays_away_is_named_in_bounded_time(serve: Serve, factory_of: Factories) -> None:
    server = serve(lambda _call: result())
    session = session_of(factory_of(server.url))
    server.stop()
    with pytest.raises(UnscorableRollout) as raised:
        session.wait_for_completion()
    assert raised.value.cause is Cause.ENV
    session.close()


def test_answer_that_never_comes_is_given_up(serve: Serve, cfg: Recipe, run: RunDir) -> None:
    bounds = {"agent_timeout_s": 0.1, "setup_timeout_s": 0.1, "verifier_timeout_s": 0.1, "outer_timeout_s": 0.5}
    short = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=bounds)})
    session = session_of(HarborSessionFactory(short, serve(lambda _call: 30.0).url, POLICY, run, SAMPLING))
    with pytest.raises(UnscorableRollout) as raised:
        session.wait_for_completion()
    assert raised.value.cause is Cause.ENV
    session.close()


def test_close_from_another_thread_ends_the_wait_and_records_nothing(
    serve: Serve, factory_of: Factories, run: RunDir
) -> None:
    server = serve(lambda _call: 30.0)
    session = session_of(factory_of(server.url))
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait_for_completion()
        except UnscorableRollout as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not server.calls:
        time.sleep(0.05)
    session.close()
    waiting.join(20)
    assert len(ended) == 1
    assert not (run.rollouts / rollout_log.INDEX).exists()
