"""Following a FAKE run that moves, with a FAKE clock, on a pipe and on a terminal."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from scripts import progress
from scripts.progress import follow
from services.common import recipe, run_dir
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from tests.fakes import run as fake

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cfg() -> Recipe:
    return recipe.load(ROOT / "data/recipes/smoke.toml")


class Film:
    """What happens to the run, second by second; ``follow`` sleeps, so the film goes on."""

    def __init__(self, cfg: Recipe, run: RunDir, scenes: dict[int, Callable[[], None]], length_s: int) -> None:
        self.cfg, self.run, self.scenes, self.length_s = cfg, run, scenes, length_s
        self.now_s = 0
        self.asked_ended = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += round(seconds)
        self.scenes.get(self.now_s, lambda: None)()

    def ended(self) -> bool:
        self.asked_ended += 1
        return self.now_s >= self.length_s

    def show(self, *, terminal: bool = False) -> str:
        console = Console(file=io.StringIO(), width=140, force_terminal=terminal)
        follow(self.run, self.cfg, ended=self.ended, console=console, sleep=self.sleep, clock=lambda: float(self.now_s))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def _training(run: RunDir) -> dict[int, Callable[[], None]]:
    return {
        2: lambda: fake.beat(run, "trainer", "compiling"),
        5: lambda: fake.beat(run, "trainer", "rollout"),
        6: lambda: fake.beat(run, "env", "serving", inflight=4),
        10: lambda: fake.rollout(run),
        11: lambda: fake.rollout(run, reward=None, cause="policy"),
        12: lambda: fake.step(run, 1, 0.5, ratio=0.9995),
        20: lambda: fake.step(run, 2, 0.75),
        22: lambda: fake.beat(run, "trainer", "done", 2),
    }


def test_without_a_terminal_there_is_one_line_a_step_and_one_a_phase(cfg: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    lines = Film(cfg, run, _training(run), 25).show().splitlines()
    assert lines == [
        "trainer: waiting for the policy",
        "trainer: compiling",
        "step 1/4: reward 0.500, ratio 0.9995, sync 0.25 s, rollouts: 4 in flight, 1 scored, 1 unscorable",
        "step 2/4: reward 0.750, ratio 1.0000, sync 0.50 s, rollouts: 4 in flight, 1 scored, 1 unscorable",
        "trainer: done",
    ]


def test_a_quiet_run_says_once_a_minute_that_it_lives(cfg: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    scenes = {1: lambda: fake.beat(run, "trainer", "rollout"), 100: lambda: fake.step(run, 1, 0.5)}
    lines = Film(cfg, run, scenes, 200).show().splitlines()
    quiet = [line for line in lines if "at step" in line]
    assert quiet == [f"trainer: rollout at step {step}, rollouts: 0 scored, 0 unscorable" for step in (0, 1)]


def test_a_step_that_comes_with_the_end_is_still_shown(cfg: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    film = Film(cfg, run, {}, 9)
    real_ended = film.ended

    def last_step_before_the_end() -> bool:
        if film.now_s >= 9:
            fake.step(run, 4, 1.0)
        return real_ended()

    film.ended = last_step_before_the_end  # type: ignore[method-assign]
    assert "step 4/4: reward 1.000" in film.show()


def test_the_costly_question_is_asked_seldom_until_the_result_is_there(cfg: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    film = Film(cfg, run, {90: lambda: run_dir.write_json(run.result, {"exit_code": 0})}, 91)
    film.show()
    assert film.now_s == 91
    assert film.asked_ended <= 91 / progress.ENDED_EVERY_S + 4


def test_on_a_terminal_there_is_a_bar_with_step_reward_sync_and_rollouts_in_flight(cfg: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    text = Film(cfg, run, _training(run), 25).show(terminal=True)
    assert "\x1b[" in text
    for part in ("done", "reward 0.750", "sync 0.50 s", "4 in flight", "2/4"):
        assert part in text, part


def test_a_step_without_reward_shows_none(cfg: Recipe) -> None:
    assert progress.describe_step({"step": 1}) == "reward -, ratio -, sync -"
    assert progress.describe_step({"reward": float("nan"), "ratio": 1}) == "reward -, ratio 1.0000, sync -"
