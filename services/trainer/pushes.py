"""Checkpoints go to the Hub while training goes on: transformers 5 has no callback for that any more."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from services.common.health import Pulse
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.hub.client import connect
from services.hub.pushes import BackgroundPushes, Pusher

logger = logging.getLogger("trainer")


class CheckpointPushes(TrainerCallback):
    """Wakes the pushing thread at every save. Must come after the callback that completes the checkpoint.

    Without ADAPTER_REPO it does nothing and has no metrics.
    """

    def __init__(self, cfg: Recipe, run: RunDir) -> None:
        self._flush_s = cfg.push.flush_s
        self._pushes: BackgroundPushes | None = None
        if repo := os.environ.get("ADAPTER_REPO"):
            self._pushes = BackgroundPushes(Pusher(connect(), repo, run, cfg.push), run)
            logger.info("checkpoints are pushed", extra={"repo": repo})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any) -> None:
        if self._pushes is not None:
            self._pushes.wake()

    def metrics(self) -> dict[str, float]:
        return {} if self._pushes is None else self._pushes.metrics()

    def flush(self, pulse: Pulse, *, wait: bool = True) -> None:
        """At the end of training: wait for what is left, ``push.flush_s`` at most.

        Args: wait: False where this process is asked to end; its parent pushes what is left.
        """
        if self._pushes is not None and wait:
            pulse.set("pushing")
            self._pushes.close(self._flush_s)
