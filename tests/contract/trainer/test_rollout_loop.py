"""TRL's real loop under tickets: which groups it makes, what it sends, and what its end leaves behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from accelerate import PartialState
from datasets import Dataset
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult
from openenv.core.harness.training import TrainingTurn
from transformers import AutoTokenizer
from trl.chat_template_utils import lfm2_2_5_template
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from scripts.bench_schedule import PlainChannel
from services.common import signals
from services.trainer.groups import Call, ScoredGroup
from services.trainer.objective import advantages
from services.trainer.rollout_loop import RolloutLoop
from services.trainer.scheduler import RolloutEnded, Ticket
from services.trainer.session import Captured, UnscorableRollout
from tests.contract.trainer.tiny_models import SHIPPED

SIZE = 3
TASKS = 4
WAIT_S = 60.0


class Channel(PlainChannel):
    """The worker's side of it, too."""

    def put_nowait(self, item: ScoredGroup | RolloutEnded) -> None:
        self.messages.put(item)

    def next(self) -> ScoredGroup | RolloutEnded:
        return self.messages.get(timeout=WAIT_S)


class FakeAgent(ResourceSession):
    """FAKE rollout: one call of two tokens; ends when it is told to, or is closed."""

    def __init__(self, factory: FakeFactory, rollout_id: str, position: int, number: int) -> None:
        self._factory, self._rollout_id = factory, rollout_id
        self.position, self.number = position, number
        self.closed = threading.Event()

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        while not self._factory.may_end(self):
            if self.closed.wait(0.01):
                raise UnscorableRollout("env", "the session was closed")  # type: ignore[arg-type]
        call = Call(2, [10 + self.number, 11], version=self.position + 1)
        self._factory.captured[self._rollout_id] = Captured([call], version=0, truncated=self.number == 1)
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        turn = TrainingTurn(
            node_id="0", prompt_token_ids=[5, 6], completion_token_ids=[10 + self.number, 11],
            per_token_logps=[-1.0, -2.0], loss_mask=[0, 0, 1, 1],
        )  # fmt: skip
        return TrainingTrace(turns=[turn])

    def verify(self, transcript: Any, final_state: Any | None = None) -> VerifyResult:
        return VerifyResult(env_reward=float(self.number == 0), done=True)

    def close(self) -> None:
        self.closed.set()

    def initial_messages(self) -> list[Any]:
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error="none")


class FakeFactory(ResourceSessionFactory[FakeAgent]):
    """FAKE: numbers the rollouts of a position in the order in which they are asked for."""

    def __init__(self, may_end: Callable[[FakeAgent], bool] = lambda _agent: True) -> None:
        self.may_end = may_end
        self.captured: dict[str, Captured] = {}
        self.asked: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> FakeAgent:
        assert seed is not None and episode_id is not None
        with self._lock:
            number = sum(position == seed for _, position in self.asked) % SIZE
            self.asked.append((task[-1]["content"], seed))
        return FakeAgent(self, episode_id, seed, number)


class Loop:
    """The loop in a thread."""

    def __init__(self, factory: FakeFactory, slots: int) -> None:
        PartialState()  # accelerate's logger wants it
        self.factory, self.channel = factory, Channel()
        context = multiprocessing.get_context("spawn")
        self.failed: queue.Queue[Any] = queue.Queue()
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
        tokenizer.response_template = lfm2_2_5_template
        prompts = [{"prompt": [{"role": "user", "content": f"task {number}"}]} for number in range(TASKS)]
        self.loop = RolloutLoop(
            advantage="std", harness_session_factory=lambda sampling: factory, model_name="policy",
            dataset=Dataset.from_list(prompts), reward_funcs=[], processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id], num_generations=SIZE, max_inflight_tasks=slots,
            rollout_buffer=self.channel, model_version_value=context.Value("i", 0),
            heartbeat_value=context.Value("d", 0.0), failed_event=threading.Event(),
            exception_info_queue=self.failed, metrics_queue=queue.Queue(),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(BaseException):  # what failed is on the queue, as in the worker's process
            self.loop.run()

    def stop(self) -> None:
        self.loop._loop.call_soon_threadsafe(self.loop._stop_event.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    monkeypatch.setattr(signals, "die_with_parent", lambda: None)
    loops: list[Loop] = []

    def make(factory: FakeFactory | None = None, slots: int = 4) -> Loop:
        loops.append(Loop(factory or FakeFactory(), slots))
        return loops[-1]

    yield make
    for loop in loops:
        if loop._thread.is_alive():
            loop.stop()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_ticket_becomes_a_group_of_its_position_in_one_piece_after_the_news_of_its_rollouts(
    start: Callable[..., Loop],
) -> None:
    loop = start()
    for number, position in enumerate((7, 2)):
        loop.channel.tickets.put(Ticket(number, position))
    messages = [loop.channel.next() for _ in range(2 * (SIZE + 1))]
    loop.stop()
    assert loop.failed.empty()
    for number, position in enumerate((7, 2)):
        of_ticket = [message for message in messages if message.ticket == number]
        assert [type(message) for message in of_ticket] == [RolloutEnded] * SIZE + [ScoredGroup]
        assert [message.version for message in of_ticket[:-1]] == [position + 1] * SIZE
        group = of_ticket[-1]
        assert (group.position, len(group.rollouts)) == (position, SIZE)
        assert {rollout.rows[0].versions[-1] for rollout in group.rollouts} == {position + 1}
        assert sorted(rollout.truncated for rollout in group.rollouts) == [False, False, True]
        assert sorted(rollout.reward for rollout in group.rollouts) == [0.0, 0.0, 1.0]
    assert sorted(loop.factory.asked) == [("task 2", 2)] * SIZE + [("task 3", 7)] * SIZE


def test_nothing_is_made_without_a_ticket(start: Callable[..., Loop]) -> None:
    loop = start(slots=SIZE + 1)
    loop.channel.tickets.put(Ticket(0, 0))
    messages = [loop.channel.next() for _ in range(SIZE + 1)]
    assert isinstance(messages[-1], ScoredGroup)
    time.sleep(0.3)
    assert len(loop.factory.asked) == SIZE


def test_a_loop_that_is_stopped_while_it_waits_for_a_ticket_ends_without_a_word(start: Callable[..., Loop]) -> None:
    """All rollouts of a group that was never asked for are there at once, and empty."""
    loop = start(slots=2 * SIZE)
    until(lambda: bool(loop.loop._inflight))
    time.sleep(0.2)  # TRL's score loop waits for a group
    loop.stop()
    assert loop.failed.empty(), loop.failed.get()
    assert loop.channel.messages.empty()


def test_a_stop_does_not_make_a_small_group_of_the_rollouts_that_were_quick(start: Callable[..., Loop]) -> None:
    """The slow ones are closed and count as unscorable: such a group is made again, not trained, and not counted."""
    loop = start(FakeFactory(lambda agent: agent.number < SIZE - 1), slots=SIZE)
    loop.channel.tickets.put(Ticket(0, 0))
    ended = [loop.channel.next() for _ in range(SIZE - 1)]
    assert all(isinstance(message, RolloutEnded) for message in ended)
    time.sleep(0.2)
    loop.stop()
    assert loop.failed.empty(), loop.failed.get()
    assert loop.channel.messages.empty(), loop.channel.next()


def test_a_rollout_that_cannot_be_scored_is_missing_from_its_group(start: Callable[..., Loop]) -> None:
    class Failing(FakeFactory):
        """FAKE: the second rollout of a group fails."""

        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> FakeAgent:
            agent = super().create(task, seed, episode_id)
            if agent.number == 1:
                agent.close()
                agent.wait_for_completion = lambda timeout_s=None: 1 / 0  # type: ignore[method-assign]
            return agent

    loop = start(Failing())
    loop.channel.tickets.put(Ticket(0, 0))
    *ended, group = [loop.channel.next() for _ in range(SIZE)]
    assert len(ended) == SIZE - 1 and isinstance(group, ScoredGroup)
    assert sorted(rollout.reward for rollout in group.rollouts) == [0.0, 1.0]


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0, 0.0], [1.0, None, 0.0], [0.25, 1.0, 1.25, 0.0], [None, 2.0], [None, None], [1.0, 1.0]]
)
def test_advantages_are_those_of_trl_s_own_scoring(start: Callable[..., Loop], rewards: list[float | None]) -> None:
    loop = start()
    group = RolloutGroup(
        prompts=[[]] * len(rewards), reward_kwargs={}, completions=[[]] * len(rewards),
        completions_ids=[[]] * len(rewards),
        completions_sequences=[[TrainingSequence([5, 6], [0, 1], [0.0, -1.0], str(i))] for i in range(len(rewards))],
        tool_call_counts=[0] * len(rewards), tool_failure_counts=[0] * len(rewards), model_version=1, group_id=0,
        env_rewards=[], rollout_rewards=list(rewards),
    )  # fmt: skip
    scoring = _HarnessRolloutLoop._score_group(loop.loop, group)
    with pytest.raises(StopIteration) as done:
        scoring.send(None)  # it awaits nothing here: there is no reward function
    assert [sample.advantage for sample in done.value.value] == pytest.approx(advantages(rewards, "std"), abs=1e-7)
