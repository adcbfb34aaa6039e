"""What is sent to a tracker: each step once, also over restarts, and never a failure into the run."""

import logging
from pathlib import Path
from typing import Any

import pytest

from services.common import recipe
from services.common.run_dir import RunDir
from services.trainer import tracker
from tests.fakes import run as fake

ROOT = Path(__file__).resolve().parents[3]


class FakeTracker:
    """FAKE of a trackio or W&B run."""

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = False

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.sent.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.prepare()
    return run


def test_a_step_is_sent_with_its_numbers(run: RunDir) -> None:
    found = FakeTracker()
    fake.step(run, 1, 0.5)
    tracker.Sender(run, found).send()
    ((step, numbers),) = found.sent
    assert step == 1 and numbers["reward"] == 0.5 and numbers["perf/rollout_wait_s"] == 20.0
    assert not {"step", "time_s"} & set(numbers)


def test_a_step_is_sent_once_also_after_a_restart_that_trains_it_again(run: RunDir) -> None:
    found = FakeTracker()
    for step in (1, 2, 3):
        fake.step(run, step, 0.5)
    tracker.Sender(run, found).send()
    again = tracker.Sender(run, found)
    for step in (2, 3, 4):
        fake.step(run, step, 0.5)
    again.send()
    again.send()
    assert [step for step, _ in found.sent] == [1, 2, 3, 4]


def test_the_last_steps_are_sent_when_the_run_ends(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeTracker()
    monkeypatch.setattr(tracker, "open_tracker", lambda *_: found)
    with tracker.follow(run, recipe.load(ROOT / "data/recipes/smoke.toml")):
        fake.step(run, 1, 0.5)
    assert [step for step, _ in found.sent] == [1] and found.finished


def test_a_tracker_that_fails_is_logged_and_ends_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> FakeTracker:
        raise ConnectionError("no route to the tracker")

    monkeypatch.setattr(tracker, "open_tracker", broken)
    with caplog.at_level(logging.ERROR), tracker.follow(run, recipe.load(ROOT / "data/recipes/smoke.toml")):
        pass
    assert "no tracking from here on" in caplog.text


def test_none_tracks_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "open_tracker", lambda *_: pytest.fail("opened"))
    with tracker.follow(run, recipe.load(ROOT / "data/recipes/smoke.toml", {"trainer.report_to": "none"})):
        fake.step(run, 1, 0.5)
