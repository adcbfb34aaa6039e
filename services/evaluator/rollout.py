"""One cell, run: a rollout on the env server against ``policy-eval``, judged.

One websocket client a cell: a socket has no request ids, so two rollouts on one would take each other's answers.
``purpose="eval"`` and the recipe's sampling are set here and nowhere else. What came back is checked against them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from services.common import causes, control
from services.common.causes import Cause
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.tasks import Task, prompt_key
from services.evaluator.cells import Cell, Conditions, Outcome

HARNESS = "opencode"
TOOL_CALL_MARKER = "<|tool_call_start|>"
MAX_ERROR = 400
"""Characters of an error that are kept."""
logger = logging.getLogger(__name__)


class Turn(Protocol):
    """The part of OpenEnv's ``HarborTurn`` that is read here."""

    text: str
    tool_calls: list[dict[str, Any]]
    completion_token_ids: list[int]
    sampling_params: dict[str, Any]


class Result(causes.Rollout, Protocol):
    """The part of OpenEnv's ``HarborRolloutResult`` that is read here."""

    capture_level: str
    turns: Sequence[Turn]
    wall_s: float
    trial_name: str | None


class Client(Protocol):
    """The part of OpenEnv's ``HarborEnv`` that is used here."""

    def splits(self) -> list[dict[str, Any]]: ...
    def num_tasks(self, split: str = "") -> int: ...
    def get_task_range(self, split: str, start: int = 0, stop: int = 20) -> list[Any]: ...
    def run_rollout(self, **kwargs: Any) -> Any: ...
    def close(self) -> None: ...


def connect(cfg: Recipe, env_url: str, run: RunDir) -> Client:
    """A client of its own for one rollout."""
    from openenv.harbor.client import HarborEnv

    headers = control.headers(run)
    client = HarborEnv(
        base_url=env_url,
        message_timeout_s=cfg.rollout.outer_timeout_s,
        max_message_size_mb=float(cfg.env.max_message_size_mb),
        headers=headers,
    )
    client._http.headers.update(headers)  # OpenEnv gives its ``headers`` to the websocket alone
    return client


def locate(client: Client, suite: str, tasks: Iterable[Task]) -> dict[str, int]:
    """Index of each task in the env server's split of the suite.

    The server's order need not be ours, so it is looked up by name, and the instruction must be the same.

    Raises: NotReadyError: the suite is not served. RecipeError: a task is missing there, or asks something else.
    """
    names = [split["name"] for split in client.splits()]
    if suite not in names:
        raise NotReadyError(f"the env server serves {names or 'no split'}, not {suite}; start it with this recipe")
    served = {task.task_name: task for task in client.get_task_range(suite, 0, client.num_tasks(suite))}
    index = {}
    for task in tasks:
        there = served.get(task.name)
        if there is None or prompt_key(there.instruction) != task.key:
            raise RecipeError(
                f"the env server {'does not serve' if there is None else 'asks something else in'} task {task.name} "
                f"of {suite}; start it with the same TASKS_DIR and recipe"
            )
        index[task.name] = int(there.index)
    return index


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs cells: everything about a rollout that does not differ from cell to cell."""

    connect: Callable[[], Client]
    suite: str
    index: Mapping[str, int]
    """Task -> its index on the env server: ``locate``."""
    under: Conditions
    llm_url: str
    backend: str
    retries: int
    wait_s: float = 30.0
    """Longest wait before the last retry; earlier ones wait less."""

    def __call__(self, cell: Cell, model: str) -> Outcome:
        """Run the cell until it has a score, at most ``1 + retries`` times.

        Args: model: name under which ``policy-eval`` serves the cell's arm.
        """
        retrying = Retrying(
            retry=retry_if_result(lambda outcome: not outcome.scored),
            stop=stop_after_attempt(1 + self.retries),
            wait=wait_random_exponential(multiplier=1, max=self.wait_s),
            before_sleep=lambda state: _log_retry(cell, state),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        outcome: Outcome = retrying(self._once, cell, model)
        return outcome

    def _once(self, cell: Cell, model: str) -> Outcome:
        try:
            with closing(self.connect()) as client:
                result = client.run_rollout(
                    split=self.suite,
                    task_index=self.index[cell.task],
                    harness=HARNESS,
                    sandbox=self.backend,
                    llm_url=self.llm_url,
                    model=model,
                    purpose="eval",
                    reward_key=",".join(self.under.reward_keys),
                    eval_sampling=dict(self.under.sampling),
                    agent_timeout_sec=self.under.agent_timeout_s,
                    agent_step_limit=self.under.max_model_calls,
                )
        # The client raises what its transports raise (httpx, websockets, RuntimeError, TimeoutError): whatever it
        # is, the rollout has no verdict.
        except Exception as error:
            return Outcome(None, cause=Cause.ENV.value, error=f"{type(error).__name__}: {error}"[:MAX_ERROR])
        return judge(result, self.under)


def judge(result: Result, under: Conditions) -> Outcome:
    """Score the rollout if the agent's answer was graded, and under the right conditions; else say what failed."""
    outcome = Outcome(
        reward=result.reward,
        agent_timeout=result.exception_type == "AgentTimeoutError",
        turns=len(result.turns),
        tool_calls=sum(len(turn.tool_calls) for turn in result.turns),
        completion_tokens=sum(len(turn.completion_token_ids) for turn in result.turns),
        unparsed_calls=sum(TOOL_CALL_MARKER in turn.text for turn in result.turns),
        wall_s=result.wall_s,
        trial=result.trial_name or "",
    )
    cause = causes.failure_cause(result, training=False)
    error = f"{result.exception_type or 'error'}: {causes.told(result)}"
    if cause is None and (fault := _wrong_conditions(result, under)):
        cause, error = fault
    return outcome if cause is None else replace(outcome, reward=None, cause=cause.value, error=error[:MAX_ERROR])


def _wrong_conditions(result: Result, under: Conditions) -> tuple[Cause, str] | None:
    """What was not as the recipe says, although there is a reward; None when all was."""
    if not result.turns:
        return Cause.POLICY, f"no model call of the agent was captured; {result.error or 'no error was reported'}"
    if result.capture_level != "tokens":
        return Cause.POLICY, f"policy-eval answered with {result.capture_level}, not with token ids"
    for turn in result.turns:
        used = {key: turn.sampling_params.get(key) for key in under.sampling}
        if used != under.sampling:
            return Cause.CAPTURE, f"sampled with {used} where the recipe has {dict(under.sampling)}"
        if len(turn.completion_token_ids) > under.max_completion_tokens:
            return Cause.CAPTURE, (
                f"a turn has {len(turn.completion_token_ids)} tokens and sampling.max_completion_tokens is "
                f"{under.max_completion_tokens}; the env server runs with another recipe"
            )
    return None


def _log_retry(cell: Cell, state: RetryCallState) -> None:
    outcome: Outcome = state.outcome.result()  # type: ignore[union-attr]
    logger.warning(
        "cell is run again",
        extra={
            "label": cell.arm.label, "task": cell.task, "try": state.attempt_number, "cause": outcome.cause,
            "error": outcome.error,
        },
    )  # fmt: skip
