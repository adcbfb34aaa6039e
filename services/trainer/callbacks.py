"""What the trainer writes while it trains: heartbeat, ``metrics.jsonl``, complete checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from services.common import run_dir
from services.common.health import Pulse
from services.common.signals import StopFlag
from services.trainer import checkpoint
from services.trainer.ratio import RATIO_AT_0, RatioGuard
from services.trainer.throughput import step_shares

logger = logging.getLogger("trainer")


class RunRecorder(TrainerCallback):
    """Heartbeat and one line of ``metrics.jsonl`` a step; ends training at a step when a stop was asked for."""

    def __init__(
        self,
        run: run_dir.RunDir,
        pulse: Pulse,
        stop: StopFlag,
        guard: RatioGuard,
        extra_metrics: Sequence[Callable[[], dict[str, float]]],
        keep_checkpoints: int,
    ) -> None:
        self._run = run
        self._pulse = pulse
        self._stop = stop
        self._guard = guard
        self._extra_metrics = extra_metrics
        self._keep_checkpoints = keep_checkpoints

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._pulse.set("rollout", step=state.global_step)
        last = state.global_step >= state.max_steps
        if last or self._stop.is_set():
            control.should_save = True
        if self._stop.is_set():
            control.should_training_stop = True
        if control.should_save or state.global_step % args.save_steps == 0:
            self._pulse.set("saving")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        # TRL logs once more after the last step, with the run's totals and no reward: not a step.
        if logs is None or "train_runtime" in logs:
            return
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        numbers |= step_shares(numbers)
        for extra in self._extra_metrics:
            numbers |= extra()
        run_dir.append_line(self._run.metrics, {"step": state.global_step, "time_s": time.time(), **numbers})
        if self._guard.observe(logs.get(RATIO_AT_0)):
            logger.error("importance ratio out of bounds", extra={"step": state.global_step, "ratio": logs[RATIO_AT_0]})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any) -> None:
        checkpoint.complete(self._run.checkpoints / f"checkpoint-{state.global_step}")
        checkpoint.rotate(self._run, self._keep_checkpoints)
        self._pulse.set("rollout")
