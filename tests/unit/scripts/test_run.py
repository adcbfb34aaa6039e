"""The order in which a run brings its services up and down, with a FAKE stack."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import run as script
from services.common import recipe, run_dir
from services.common.errors import MachineError, RecipeError
from services.common.recipe import Recipe
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


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of this machine is none of these tests' concern."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


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
        ("up", "--detach", "--wait", "--wait-timeout", "900", "policy", "env"),
        ("up", "--detach", "trainer"),
        ("stop", "policy", "watchdog"),
        ("up", "--detach", "--wait", "policy-eval"),
        ("evaluator", "final"),
    ]


def test_a_watcher_starts_with_the_trainer_and_is_waited_for_before_the_final_evaluation(phases: Any) -> None:
    stack = FakeStack()
    assert phases(stack, watch=script.Watch.BESIDE) == 0
    assert stack.calls[:2] == [
        ("up", "--detach", "--wait", "--wait-timeout", "900", "policy", "env", "policy-eval"),
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


# --- Beside another run -------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A FAKE docker on PATH, with these services running; or none at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def running(*services: str, code: int = 0) -> None:
        program = folder / "docker"
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(services)}\nexit {code}\n")
        program.chmod(0o755)

    return running


@pytest.mark.parametrize("services", [("policy", "env", "trainer"), ("policy-eval", "env"), ("evaluator",)])
def test_no_run_starts_beside_one_that_is_alive(docker: Any, services: tuple[str, ...]) -> None:
    docker(*services)
    live = ", ".join(name for name in services if name in script.LIVE)
    with pytest.raises(MachineError, match=rf"^{live} of this project run already; .*`make status`.*`make down`"):
        script.refuse_beside_a_run("cpu")


def test_a_policy_left_over_is_no_run_and_what_compose_cannot_say_is_the_doctor_s(docker: Any) -> None:
    script.refuse_beside_a_run("cpu")  # there is no docker
    docker("trainer", code=1)
    script.refuse_beside_a_run("cpu")
    docker("policy", "env", "watchdog")
    script.refuse_beside_a_run("cpu")


def test_a_live_run_is_not_taken_up(docker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker("trainer")
    run = RunDir(tmp_path / "runs" / "long")
    run_dir.write_json(run.stop_request, {"reason": "stall", "resume": True})
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    monkeypatch.setenv("RUN_NAME", "long")
    with pytest.raises(MachineError, match="trainer of this project run already"):
        script._run("cpu", True, script.Watch.NO, False, resume=True)
    assert run.stop_request.exists() and not run.attempts.exists()


# --- Checkpoints that rotation deletes ----------------------------------------------------------------------------


def cut(steps: int, every: int, keep: int) -> Recipe:
    return recipe.load(
        ROOT / "data/recipes/smoke.toml",
        {"trainer.max_steps": steps, "trainer.save_steps": every, "trainer.keep_checkpoints": keep},
    )


def test_checkpoints_that_are_gone_after_training_cannot_be_evaluated_then() -> None:
    script.check_watch(cut(8, 2, 4), script.Watch.AFTER)
    with pytest.raises(RecipeError, match=r"make 5 checkpoints, .* newest 4; set trainer\.keep_checkpoints = 5"):
        script.check_watch(cut(9, 2, 4), script.Watch.AFTER)
    script.check_watch(cut(9, 2, 4), script.Watch.NO)


def test_a_watcher_beside_training_is_told_what_it_may_miss(capsys: pytest.CaptureFixture[str]) -> None:
    script.check_watch(cut(8, 2, 4), script.Watch.BESIDE)
    assert capsys.readouterr().err == ""
    script.check_watch(cut(9, 2, 4), script.Watch.BESIDE)
    assert "a watcher that falls behind by more misses those that are gone" in " ".join(capsys.readouterr().err.split())


def test_the_learning_curve_s_checkpoints_are_all_kept() -> None:
    script.check_watch(recipe.load(ROOT / "data/recipes/learn.toml"), script.Watch.AFTER)


def test_a_run_that_cannot_be_watched_is_not_taken_up(
    docker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker()
    run = RunDir(tmp_path / "runs" / "long")
    run_dir.write_json(run.manifest, {"recipe": cut(9, 2, 4).model_dump(mode="json")})
    run_dir.write_json(run.result, {"exit_code": 6, "reason": "killed", "step": 3})
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    monkeypatch.setenv("RUN_NAME", "long")
    with pytest.raises(RecipeError, match="WATCH=after"):
        script._run("cpu", True, script.Watch.AFTER, False, resume=True)
    assert run.result.exists()
