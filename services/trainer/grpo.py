"""TRL's ``AsyncGRPOTrainer``, narrowed where this stack must differ, and nowhere else.

Three seams, pinned by a contract test: how weights reach the policy server (LoRA factors instead of an adapter merged
in place, which drifts a bf16 base), where a stop request can break the wait for rollouts, and what a checkpoint says of
the rollouts (``groups``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from services.common import run_dir
from services.common.health import Pulse
from services.common.run_dir import RunDir
from services.common.signals import StopFlag
from services.trainer import resume
from services.trainer.groups import GroupBook
from services.trainer.resume import Cursor, Start
from services.trainer.rollout_loop import RolloutLoop
from services.trainer.staleness import StalenessTrainer
from services.weight_sync.names import lora_factors

HAND_OVER_S = 15.0
"""As long as TRL waits for the worker's process to end."""


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived while the trainer waited for rollouts."""


class StoppableWorker(HarnessRolloutWorker):
    """A worker with our loop, whose health check, which TRL calls while it waits, also sees a stop request."""

    _loop_cls = RolloutLoop

    def __init__(self, *, stop: StopFlag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._stop_flag = stop
        self.book: GroupBook | None = None
        """Gets what the child hands over at its end."""

    def check_health(self, stale_after_s: float) -> None:
        if self._stop_flag.is_set():
            raise StopRequested
        super().check_health(stale_after_s)

    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def stop(self) -> None:
        """TRL's, which waits for a child that cannot end before all that it scored is read, then kills it in the middle
        of a sample: half a message, for which a checkpoint that reads the queue waits for ever. So it is read here."""
        child = self._process
        if child is not None and child.pid is not None and self.book is not None:
            self._stop_event_mp.set()
            until = time.monotonic() + HAND_OVER_S
            while child.is_alive() and time.monotonic() < until:
                self.book.receive(timeout=0.2)
            if child.is_alive():
                child.terminate()
            elif child.exitcode == 0:
                while self.book.receive(timeout=0.2):
                    pass
            self.book.detach()
        super().stop()


class FactorSyncTrainer(StalenessTrainer):
    """The trainer that sends LoRA factors and never touches the base weights, unless the recipe wants TRL's stream."""

    def __init__(self, *args: Any, pulse: Pulse, **kwargs: Any) -> None:
        self._pulse = pulse
        self._synced = False
        super().__init__(*args, **kwargs)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Send A and B; the merge happens out of place on the server, which pauses only for it.

        Returns: the times at which TRL's pause, barrier and transfer end. The first two are not phases here:
        ``LoraFactorSync.metrics`` has the real ones.
        """
        self._pulse.set("sync" if self._synced else "first_sync")
        self._synced = True
        if self.weight_transfer.merges_in_trainer:  # weight_sync.mode = "full"
            marks: tuple[float, float, float] = super()._sync_weight_merged(t0)
        else:
            self.weight_transfer.send_weights(lora_factors(self.accelerator.unwrap_model(self.model)))
            self.model_version += 1
            self.rollout_worker.update_model_version(self.model_version)
            marks = t0, t0, time.time()
        self._pulse.set("rollout", model_version=self.model_version)
        return marks

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._pulse.set("training")
        return super().training_step(*args, **kwargs)


class ResumableTrainer(FactorSyncTrainer):
    """The trainer whose checkpoints say exactly which tasks are done, and which goes on from one.

    Args:
        start: where this attempt goes on; its cursor must also be the worker's.
        save_state: called with (folder, cursor, model version, pending samples) to add to a checkpoint.
    """

    def __init__(
        self,
        *args: Any,
        run: RunDir,
        start: Start,
        save_state: Callable[[Path, Cursor, int, list[RolloutSample]], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._run = run
        self._save_state = save_state
        self._start = start
        self._random_numbers_due = start.checkpoint
        # The first sync serves the checkpoint's adapter again, under the next version that was never used.
        later = start.served_version + 1 - start.saved_version
        pending = [RolloutSample(**sample) for sample in start.pending]
        for sample in pending:
            sample.model_version += later
        self.rollout_queue = self.rollout_worker.book = self.book = GroupBook(self.rollout_queue, start.cursor, pending)
        # Before TRL's own: its on_train_begin makes the first sync, and its on_step_end the others.
        self.callback_handler.callbacks.insert(0, _Books(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._start.checkpoint
        return super().train(*args, resume_from_checkpoint=str(checkpoint.path) if checkpoint else None, **kwargs)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        inner = loader.base_dataloader
        inner.collate_fn = self.book.collator(inner.collate_fn)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._random_numbers_due:
            # transformers has restored them before the data loader drew its seed from them.
            self._load_rng_state(str(self._random_numbers_due.path))
            self._random_numbers_due = None
        loss = super().training_step(*args, **kwargs)
        self.book.trained_row()
        return loss

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # whose learning rate would win over the recipe's
            rates = self.args.learning_rate, self.args.adam_beta1, self.args.adam_epsilon
            resume.obey(self.optimizer, self.lr_scheduler, *rates)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._pulse.set("saving")
        super()._save_checkpoint(model, trial)
        alive = getattr(self.rollout_worker, "alive", lambda: False)
        cursor, pending = self.book.position(alive)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        # A sync that was served and then failed its proof has not counted up TRL's.
        version = max(self.model_version, self.weight_transfer.version)
        self._save_state(folder, cursor, version, pending)

    def count_versions_from(self, version: int) -> None:
        """The next sync serves ``version + 1``."""
        self.model_version = self.weight_transfer.version = version
        self.rollout_worker.update_model_version(version)


class _Books(TrainerCallback):
    """Calls that only a callback gets: the start of training, and the end of each optimizer step."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # TRL has just set the checkpoint's version.
        self._trainer.count_versions_from(self._trainer._start.served_version)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        trained = trainer.book.step_ended()
        run_dir.append_line(
            trainer._run.trained,
            {
                "step": state.global_step,
                "time_s": time.time(),
                "samples": trained.samples,
                "stale": trained.stale,
                "dropped": trained.dropped,
            },
        )
