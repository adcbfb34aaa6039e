"""TRL's view of a rollout: one session a rollout, driven by OpenCode in a sandbox of the env server.

TRL stops the whole worker when a capture cannot be trained on, so everything is judged here, before it asks. A rollout
that failed for another reason than the agent's answer raises ``UnscorableRollout`` in ``wait_for_completion``: TRL
counts one unscorable rollout, and goes on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult
from openenv.harbor.client import HarborEnv
from openenv.harbor.contract import to_training_trace
from openenv.harbor.models import HarborRolloutResult, HarborTurn
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_delay,
    wait_exponential,
)

from services.common import control, health
from services.common.causes import Cause, failure_cause, told
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.tasks import prompt_key
from services.trainer import policy_versions, rollout_log
from services.trainer.capture_gate import Breach, breaches, of_the_policy
from services.trainer.groups import Call

HARNESS = "opencode"
TASKS_A_CALL = 200
CONNECT_TIMEOUT_S = 10.0

Message = dict[str, Any]


class UnscorableRollout(RuntimeError):
    """A rollout that says nothing about the agent's answer. Not a ValueError: that would stop TRL's worker."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


class SessionClosed(Exception):
    """``close`` came while the session waited for a connection."""


@dataclass(frozen=True)
class Captured:
    """What a rollout tells the worker beside what TRL asks for."""

    calls: list[Call]
    """Empty if OpenCode's log does not say when they were made."""
    version: int
    """Lowest policy version that can have sampled any of it."""
    truncated: bool
    """A limit ended the rollout or one of its calls: output cap, context, model calls or time."""


@dataclass(frozen=True)
class ServedTask:
    """A task as the env server numbers it."""

    index: int
    name: str
    instruction: str


class HarborSessionFactory(ResourceSessionFactory["HarborSession"]):
    """Makes sessions for the prompts of ``prompt_rows``. TRL pickles it into its worker process."""

    def __init__(
        self, cfg: Recipe, env_url: str, policy_url: str, run: RunDir, sampling: dict[str, Any] | None = None
    ) -> None:
        self._cfg = cfg
        self._env_url = env_url
        self._policy_url = policy_url
        self._run = run
        self._sampling = sampling
        self.captured: dict[str, Captured] = {}
        """By rollout id: of the rollouts that can be trained; the worker takes them out."""
        self._tasks: dict[str, ServedTask] | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_tasks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def prompt_rows(self) -> list[dict[str, list[Message]]]:
        """The training data set: one row a task, in the pinned order.

        Raises: NotReadyError: the env server does not answer. RecipeError: two tasks have the same instruction.
        """
        tasks = list(self._served().values())[: self._cfg.tasks.max_train]
        return [{"prompt": [{"role": "user", "content": task.instruction}]} for task in tasks]

    def create(
        self, task: list[Message] | str, seed: int | None = None, episode_id: str | None = None
    ) -> HarborSession:
        """A session for the task with this prompt. Args: seed: TRL's group id.

        Raises: ValueError: no served task has this prompt.
        """
        text = task if isinstance(task, str) else str(task[-1]["content"])
        served = self._served().get(prompt_key(text))
        if served is None:
            raise ValueError(f"no task of suite {self._cfg.tasks.train!r} has the prompt {text[:80]!r}")
        if self._sampling is None or episode_id is None:
            raise ValueError("sampling and episode_id are needed; TRL's HarnessRolloutWorker gives both")
        place = self._cfg, self._env_url, self._policy_url, self._run
        return HarborSession(*place, served, self._sampling, episode_id, seed, self.captured)

    def _served(self) -> dict[str, ServedTask]:
        with self._lock:
            if self._tasks is None:
                # An env that restarts just then: without a wait, TRL's worker would drop group after group.
                patiently = Retrying(
                    retry=retry_if_exception_type(NotReadyError),
                    wait=wait_exponential(multiplier=0.5, max=10),
                    stop=stop_after_delay(self._cfg.rollout.setup_timeout_s),
                    reraise=True,
                )
                self._tasks = by_prompt(patiently(fetch_tasks, self._env_url, self._cfg.tasks.train, self._run))
            return self._tasks


def fetch_tasks(env_url: str, suite: str, run: RunDir) -> list[ServedTask]:
    """All tasks of a suite, from the env server's Task API."""
    client = HarborEnv(base_url=env_url)
    client._http.headers.update(control.headers(run))  # OpenEnv gives its ``headers`` to the websocket alone
    try:
        total = client.num_tasks(suite)
        found = [
            reference
            for start in range(0, total, TASKS_A_CALL)
            for reference in client.get_task_range(suite, start, min(start + TASKS_A_CALL, total))
        ]
    except (OSError, httpx.HTTPError) as error:
        raise NotReadyError(f"the env server at {env_url} does not answer: {error}") from None
    finally:
        client.close()
    return [ServedTask(reference.index, reference.task_name, reference.instruction) for reference in found]


def by_prompt(tasks: list[ServedTask]) -> dict[str, ServedTask]:
    """Tasks by the key of their instruction. Raises: RecipeError: two that cannot be told apart."""
    found: dict[str, ServedTask] = {}
    for task in tasks:
        other = found.setdefault(prompt_key(task.instruction), task)
        if other is not task:
            raise RecipeError(f"tasks {other.name} and {task.name} have the same instruction; remove one of them")
    return found


class HarborSession(ResourceSession):
    """One rollout: asks for it, waits, judges it, records it. Has its own connection, because one carries one call."""

    def __init__(
        self,
        cfg: Recipe,
        env_url: str,
        policy_url: str,
        run: RunDir,
        task: ServedTask,
        sampling: dict[str, Any],
        rollout_id: str,
        group: int | None,
        captured: dict[str, Captured],
    ) -> None:
        self._cfg = cfg
        self._env_url = env_url
        self._policy_url = policy_url
        self._run = run
        self._task = task
        self._sampling = sampling
        self._rollout_id = rollout_id
        self._group = group
        self._captured = captured
        self._closed = threading.Event()
        self._result: HarborRolloutResult | None = None
        self._trace: TrainingTrace | None = None
        self._versions: list[policy_versions.Versions] | None = None
        self._client: HarborEnv | None = None

    # --- TrainableSession ---------------------------------------------------------------------------------------

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Run the rollout. Returns: 0: it can be scored.

        Raises: UnscorableRollout: it cannot. TimeoutError: the agent's time was up, and what it left was graded: TRL
            trains on the captured turns and counts the time-out.
        """
        began_s, started, first_step = time.time(), time.monotonic(), self._policy_step()
        failure: UnscorableRollout | None = None
        found: list[Breach] = []
        try:
            self._result = self._run_rollout()
            found = breaches(self._result, self._cfg.sampling)
            if self._result.trial_name and self._result.turns:
                self._versions = self._policy_versions(self._result)
                found += of_the_policy(self._versions)
            self._trace = self._judge(self._result, found)
            self._captured[self._rollout_id] = self._capture(self._result, began_s)
        except UnscorableRollout as error:
            failure = error
            raise
        except Exception as error:
            # A bug of ours is no verdict on the agent either, and must be in the index as what it is.
            failure = UnscorableRollout(Cause.CAPTURE, f"{type(error).__name__}: {error}")
            raise failure from error
        finally:
            if not self._closed.is_set():
                self._record(failure, found, (first_step, self._policy_step()), time.monotonic() - started)
        if self._result.exception_type == "AgentTimeoutError":
            raise TimeoutError(f"the agent used up rollout.agent_timeout_s = {self._cfg.rollout.agent_timeout_s:g} s")
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        if self._trace is None:
            raise RuntimeError("there is nothing to train on: wait_for_completion has not succeeded")
        return self._trace

    # --- ResourceSession ----------------------------------------------------------------------------------------

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Forward the verifier's reward; nothing is computed here."""
        reward = self._result.reward if self._result is not None else None
        return VerifyResult(env_reward=reward, done=True)

    def close(self) -> None:
        """Also ends a rollout that another thread waits for; the env server then removes its sandbox."""
        self._closed.set()
        if self._client is not None:
            self._client.close()

    def initial_messages(self) -> list[Message]:
        return [{"role": "user", "content": self._task.instruction}]

    def list_tools(self) -> list[Any]:
        return []  # OpenCode brings its own

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error=f"{name}: OpenCode runs its tools itself")

    # --- Parts --------------------------------------------------------------------------------------------------

    def _run_rollout(self) -> HarborRolloutResult:
        rollout = self._cfg.rollout
        try:
            client = self._connect()
            return client.run_rollout(
                split=self._cfg.tasks.train,
                task_index=self._task.index,
                harness=HARNESS,
                sandbox=self._cfg.env.backend,
                llm_url=f"{self._policy_url}/v1",
                model=self._cfg.policy.served_model_name,
                purpose="train",
                reward_key=",".join(self._cfg.reward.keys),
                agent_step_limit=rollout.max_tool_calling_iterations,
                agent_timeout_sec=rollout.agent_timeout_s,
                sampling=self._sampling,
            )
        except Exception as error:
            # Whatever the client raises, the rollout is lost and training must go on: a closed or refused
            # connection, no answer in outer_timeout_s, an error message of the server, an answer that is none.
            raise UnscorableRollout(Cause.ENV, f"{type(error).__name__}: {error}") from error

    def _connect(self) -> HarborEnv:
        """Wait for a server that restarts or is full; without it, a run would use up all its tasks in a second."""
        for attempt in Retrying(
            retry=retry_if_not_exception_type(SessionClosed),
            wait=wait_exponential(multiplier=0.5, max=10),
            stop=stop_after_delay(self._cfg.rollout.setup_timeout_s),
            sleep=self._pause,
            reraise=True,
        ):
            with attempt:
                if self._closed.is_set():
                    raise SessionClosed("the session was closed")
                # A client of its own for each attempt: OpenEnv's closes itself when it cannot connect.
                self._client = HarborEnv(
                    base_url=self._env_url,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                    message_timeout_s=self._cfg.rollout.outer_timeout_s,
                    max_message_size_mb=self._cfg.env.max_message_size_mb,
                    headers=control.headers(self._run),
                )
                self._client.connect()
                return self._client
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _judge(self, result: HarborRolloutResult, found: list[Breach]) -> TrainingTrace:
        if (cause := failure_cause(result, training=True)) is not None and cause is not Cause.CAPTURE:
            raise UnscorableRollout(cause, told(result))
        if fatal := [breach for breach in found if breach.fatal]:
            raise UnscorableRollout(Cause.CAPTURE, "; ".join(f"{breach.name}: {breach.detail}" for breach in fatal))
        try:
            trace = to_training_trace(result)
        except ValueError as error:
            raise UnscorableRollout(Cause.CAPTURE, str(error)) from error
        if cause is not None or not trace.turns:
            raise UnscorableRollout(Cause.CAPTURE, result.error or "no turn to train on")
        return trace

    def _capture(self, result: HarborRolloutResult, began_s: float) -> Captured:
        versions = self._versions or []
        calls = [
            Call(len(turn.prompt_token_ids), turn.completion_token_ids, lowest)
            for turn, (lowest, _) in zip(result.turns, versions, strict=False)
            if _is_trained(turn)
        ]
        whole = policy_versions.VersionLog(self._run).of([(began_s, time.time())])
        return Captured(calls, whole[0][0], truncated(result))

    def _policy_versions(self, result: HarborRolloutResult) -> list[policy_versions.Versions] | None:
        # The proxy itself answers a call beyond the budget: the agent logs it, and no policy sampled it.
        logged = result.n_turns + result.budget_stop_count
        spans = policy_versions.call_spans(self._run.trials / result.trial_name, logged)
        return None if spans is None else policy_versions.VersionLog(self._run).of(spans[: result.n_turns])

    def _policy_step(self) -> int:
        beat = health.read_heartbeats(self._run).get("trainer")
        return beat.step if beat is not None else 0

    def _record(
        self, failure: UnscorableRollout | None, found: list[Breach], steps: tuple[int, int], wall_s: float
    ) -> None:
        result = self._result
        record = rollout_log.RolloutRecord(
            rollout_id=self._rollout_id,
            group=self._group,
            task=self._task.name,
            scored=failure is None,
            reward=result.reward if result else None,
            cause=failure.cause.value if failure else None,
            error=failure.detail[:500] if failure else None,
            breaches=[breach.name for breach in found],
            policy_steps=steps,
            policy_versions=self._versions,
            agent_timeout=bool(result and result.exception_type == "AgentTimeoutError"),
            turns=len(result.turns) if result else 0,
            tool_calls=sum(len(turn.tool_calls) for turn in result.turns) if result else 0,
            trainable_tokens=result.n_trainable_tokens if result else 0,
            completion_tokens=sum(len(turn.completion_token_ids) for turn in result.turns) if result else 0,
            cap_hits=sum(turn.finish_reason == "length" for turn in result.turns) if result else 0,
            budget_stops=result.budget_stop_count if result else 0,
            sandbox_s=result.wall_s if result else 0.0,
            agent_s=result.phase_timings.get("agent", 0.0) if result else 0.0,
            wall_s=round(wall_s, 2),
        )
        rollout_log.write(self._run, record, result)


def _is_trained(turn: HarborTurn) -> bool:
    """As ``to_training_trace`` chooses."""
    return turn.role == "agent" and not turn.discarded and any(turn.loss_mask or ())


def truncated(result: HarborRolloutResult) -> bool:
    """Whether a limit ended the rollout or one of its calls: output cap, context, model calls or time."""
    return (
        result.exception_type == "AgentTimeoutError"
        or result.budget_stop_count > 0
        or any(turn.finish_reason == "length" for turn in result.turns)
        or any("context_budget_exhausted" in finding for finding in result.findings)
    )
