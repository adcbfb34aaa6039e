"""Sends the lines of ``metrics.jsonl`` to the tracker that ``trainer.report_to`` names: trackio (local) or W&B.

A thread of the supervisor follows the file, so a tracker that is slow, offline or broken costs no training step, and a
resumed training goes on in the same tracker run. ``tracker.json`` says which step was sent last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from services.common import run_dir
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.tail import Tail

PROJECT = "opencode-rl"
POLL_S = 5.0
STATE = "tracker.json"
NOT_SENT = ("step", "time_s")
OPEN_LIMIT_S, FLUSH_LIMIT_S = 90.0, 30.0
"""How long the end of a run waits: offline, W&B waits longer. The numbers are in ``metrics.jsonl``."""
logger = logging.getLogger("trainer-supervisor")


class Tracker(Protocol):
    """A run of trackio or W&B, which have the same interface."""

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


@contextmanager
def follow(run: RunDir, cfg: Recipe) -> Iterator[None]:
    """Send every line as it appears, the last ones at the end."""
    if cfg.trainer.report_to == "none":
        yield
        return
    opened, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=_follow, args=(run, cfg, opened, stop), name="tracker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        opened.wait(OPEN_LIMIT_S)
        thread.join(timeout=FLUSH_LIMIT_S)


def _follow(run: RunDir, cfg: Recipe, opened: threading.Event, stop: threading.Event) -> None:
    try:
        try:
            tracker = open_tracker(run, cfg)
        finally:
            opened.set()
        sender = Sender(run, tracker)
        while not stop.wait(POLL_S):
            sender.send()
        sender.send()
        tracker.finish()
    except Exception as error:  # whatever a tracker raises, the run goes on
        logger.error("no tracking from here on", extra={"tracker": cfg.trainer.report_to, "error": repr(error)})


class Sender:
    """Sends each step once, in order."""

    def __init__(self, run: RunDir, tracker: Tracker) -> None:
        self._path = run.path / STATE
        self._tail = Tail(run.metrics)
        self._tracker = tracker
        self._step: int = (run_dir.read_json(self._path) or {}).get("step", 0)

    def send(self) -> None:
        for line in self._tail.new_lines():
            if line["step"] > self._step:
                numbers = {key: value for key, value in line.items() if key not in NOT_SENT}
                self._tracker.log(numbers, step=line["step"])
                self._step = line["step"]
                run_dir.write_json(self._path, {"step": self._step})


def open_tracker(run: RunDir, cfg: Recipe) -> Tracker:
    """The tracker's run, named like ours; one that is there already goes on."""
    config = cfg.model_dump(mode="json")
    if cfg.trainer.report_to == "trackio":
        return _trackio(run, config)
    import wandb

    return wandb.init(project=PROJECT, name=run.path.name, id=run.path.name, config=config, resume="allow")


def _trackio(run: RunDir, config: Mapping[str, Any]) -> Tracker:
    # All runs beside each other, so that the dashboard compares them; env made the folder.
    folder = run.path.parent / run_dir.TRACKIO
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    with contextlib.redirect_stdout(None):  # advertisement; our stdout is JSON lines
        import trackio

        return trackio.init(
            project=PROJECT,
            name=run.path.name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
