"""The order in which a run brings its services up and down, with a FAKE stack."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import run as script
from services.common import recipe
from services.common.run_dir import RunDir
from services.common.signals import StopFlag

ROOT = Path(__file__).resolve().parents[3]


class FakeStack:
    """FAKE of Stack: the trainer has ended with ``trainer_code``; a watcher that was started goes on for two looks."""

    def __init__(self, trainer_code: int = 0) -> None:
        self.trainer_code = trainer_code
        self.calls: list[tuple[str, ...]] = []
        self.watcher_looks_left = 0

    def __call__(self, *arguments: str, **_options: Any) -> int:
        self.calls.append(arguments)
        if "evaluator" in arguments:
            self.watcher_looks_left = 2
        return 0

    def exit_code(self, _service: str) -> int:
        return self.trainer_code

    def running(self) -> list[str]:
        self.watcher_looks_left -= 1
        return ["env", "evaluator"] if self.watcher_looks_left >= 0 else ["env"]

    def evaluator(self, *arguments: str) -> int:
        assert self.watcher_looks_left < 0, "the final evaluation began while the watcher ran"
        self.calls.append(("evaluator", *arguments))
        return 0

    def show_logs(self) -> None:
        self.calls.append(("logs",))


@pytest.fixture
def phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RECIPE", str(ROOT / "data/recipes/smoke.toml"))
    monkeypatch.setattr(script, "POLL_S", 0.01)
    monkeypatch.setattr(script.progress, "follow", lambda *_, **__: None)
    run = RunDir(tmp_path / "run")
    timings = script.Timings(run.path / "timings.json")

    def call(stack: FakeStack, *, evaluate: bool = True, watch: script.Watch = script.Watch.NO) -> int:
        cfg = recipe.load(Path(os.environ["RECIPE"]))
        return script._phases(cfg, stack, run, timings, StopFlag(), evaluate, watch)  # type: ignore[arg-type]

    yield call


def test_without_a_watcher_the_evaluation_has_the_machine_for_itself(phases: Any) -> None:
    stack = FakeStack()
    assert phases(stack) == 0
    assert stack.calls == [
        ("up", "--detach", "--wait", "policy", "env"),
        ("up", "--detach", "trainer"),
        ("stop", "policy", "watchdog"),
        ("up", "--detach", "--wait", "policy-eval"),
        ("evaluator", "final"),
    ]


def test_a_watcher_starts_with_the_trainer_and_is_waited_for_before_the_final_evaluation(phases: Any) -> None:
    stack = FakeStack()
    assert phases(stack, watch=script.Watch.BESIDE) == 0
    assert stack.calls[:2] == [
        ("up", "--detach", "--wait", "policy", "env", "policy-eval"),
        ("up", "--detach", "trainer", "evaluator"),
    ]
    assert stack.calls[-1] == ("evaluator", "final")


def test_checkpoints_can_be_evaluated_after_training_with_the_machine_for_themselves(phases: Any) -> None:
    stack = FakeStack()
    assert phases(stack, watch=script.Watch.AFTER) == 0
    assert stack.calls[1:3] == [("up", "--detach", "trainer"), ("stop", "policy", "watchdog")]
    assert stack.calls[-2:] == [("evaluator", "watch"), ("evaluator", "final")]


def test_a_run_that_was_stopped_is_not_evaluated(phases: Any) -> None:
    stack = FakeStack(trainer_code=4)
    assert phases(stack, watch=script.Watch.BESIDE) == 4
    assert stack.calls[-1] == ("logs",)
