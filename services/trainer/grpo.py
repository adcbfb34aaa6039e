"""TRL's ``AsyncGRPOTrainer``, narrowed where this stack must differ, and nowhere else.

* **Data.** A step is whole groups: ``GroupScheduler`` picks them, ``packed_rows`` cuts them into forward passes, and
  ``training_step`` runs all of them before the optimizer steps. TRL's data loader is not used: it counts rows, and
  fetches the next step's while this one waits.
* **Objective.** ``objective.policy_loss``, whose defaults are TRL's formula.
* **Weight sync.** LoRA factors, instead of an adapter merged in place, which drifts a bf16 base.
* **Stop and resume.** A stop request ends the wait for rollouts; a checkpoint says what is done and what waits.

The seams are pinned by tests/contract/trainer/test_trl_seams.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from services.common import run_dir
from services.common.health import Pulse
from services.common.recipe import Algorithm
from services.common.run_dir import RunDir
from services.common.signals import StopFlag
from services.trainer import objective, resume, resume_points, step_metrics
from services.trainer.groups import ScoredGroup
from services.trainer.resume import Cursor, Start
from services.trainer.rollout_loop import RolloutLoop
from services.trainer.scheduler import GroupScheduler, Limits, RolloutEnded
from services.trainer.step_batch import packed_rows
from services.weight_sync.names import lora_factors

HAND_OVER_S = 15.0
"""For the worker's process to end by itself and hand over what it has scored."""
TERMINATE_S = 5.0
"""For it to end when told to, before it is killed."""
POLL_S = 5.0
"""Between two looks at the worker's health while the trainer waits for rollouts."""


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived while the trainer waited for rollouts."""


class WorkerChannel:
    """``scheduler.Channel`` between processes. As the worker's ``rollout_buffer`` it is handed to the child by TRL.

    The queues have no bound of their own: the number of open groups is theirs.
    """

    def __init__(self, context: Any) -> None:
        self._groups = context.Queue()
        self.tickets: Any = context.Queue()
        # Tickets that nobody reads any more must not keep this process from ending.
        self.tickets.cancel_join_thread()

    def put_nowait(self, item: ScoredGroup | RolloutEnded) -> None:
        self._groups.put_nowait(item)

    def get(self, timeout: float | None = None) -> ScoredGroup | RolloutEnded:
        found: ScoredGroup | RolloutEnded = self._groups.get(timeout=timeout)
        return found

    def qsize(self) -> int:
        return int(self._groups.qsize())


class StoppableWorker(HarnessRolloutWorker):
    """A worker with our loop, which makes the groups that the scheduler asks for."""

    _loop_cls = RolloutLoop
    _process: Any

    def __init__(self, *, stop: StopFlag, **kwargs: Any) -> None:
        """Args: stop: set by SIGTERM and SIGINT. kwargs: of TRL's worker and of ``RolloutLoop``."""
        super().__init__(**kwargs)
        self.rollout_buffer = WorkerChannel(self._mp_ctx)
        self._stop_flag = stop
        self.scheduler: GroupScheduler | None = None
        """Gets what the child hands over at its end."""

    def check_health(self, stale_after_s: float) -> None:
        if self._stop_flag.is_set():
            raise StopRequested
        super().check_health(stale_after_s)
        if self._process is not None and not self._process.is_alive():
            # One that was killed has set no event, and TRL would wait for its heartbeat to grow old.
            raise RuntimeError(f"the rollout worker's process ended with exit code {self._process.exitcode}")

    def stop(self) -> None:
        """End the child; what it has scored is in the scheduler then.

        TRL's ``stop`` has two ways to hang: a child that blocks on a full pipe is killed in the middle of a group, and
        half a message stays in the queue; and setting the event waits for ever for a child that died while one of its
        threads waited for it.
        """
        child: Any = self._process
        self._process = None
        if child is None:
            return
        threading.Thread(target=self._stop_event_mp.set, daemon=True).start()
        ended = self.scheduler.drain(child.is_alive, HAND_OVER_S) if self.scheduler else False
        for end in (child.terminate, child.kill):
            if child.is_alive():
                end()
                child.join(TERMINATE_S)
        if self.scheduler is not None:
            self.scheduler.worker_ended(whole=ended and child.exitcode == 0)


class WholeGroupTrainer(AsyncGRPOTrainer):
    """See the module.

    Args:
        algorithm, limits, samples_per_row: from the recipe.
        start: where this attempt goes on.
        resume_steps: steps between resume points; None: there are none.
        save_state: called with (folder, cursor, model version, pending groups) to add to a checkpoint.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: Algorithm,
        limits: Limits,
        samples_per_row: int,
        resume_steps: int | None,
        pulse: Pulse,
        run: RunDir,
        start: Start,
        save_state: Callable[[Path, Cursor, int, Sequence[ScoredGroup]], None],
        **kwargs: Any,
    ) -> None:
        self._pulse = pulse
        self._synced = False
        self._resume_steps = resume_steps
        self._output_dir: Path | None = None
        super().__init__(*args, **kwargs)
        self._algorithm = algorithm
        self._samples_per_row = samples_per_row
        self._run = run
        self._save_state = save_state
        self._start = start
        # The first sync serves the checkpoint's adapter again, under the next version that was never used.
        later = start.served_version + 1 - start.saved_version
        pending = [ScoredGroup.from_json(group).counted_on(later) for group in start.pending]
        self.scheduler = GroupScheduler(self.rollout_worker.rollout_buffer, limits, start.cursor, pending)
        self.rollout_worker.scheduler = self.scheduler
        # Before TRL's own: its on_train_begin makes the first sync, and its on_step_end the others.
        self.callback_handler.callbacks.insert(0, _Accounts(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._start.checkpoint
        return super().train(*args, resume_from_checkpoint=str(checkpoint.path) if checkpoint else None, **kwargs)

    # --- Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Steps, each made when it is asked for: nothing is fetched ahead."""
        self._rollout_dataset = self._steps = _Steps(self)
        return self._steps

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of every packed row of a step."""
        self._pulse.set("training")
        loss = torch.zeros((), device=self.args.device)
        for row in inputs["rows"]:
            if row["needs_gradient"]:
                loss += super().training_step(model, row, num_items_in_batch)
            else:
                self._look_at(model, row)
        # Adam passes over a parameter without a gradient, momentum and all; one with a gradient of 0 it does not.
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return loss

    def _look_at(self, model: Any, row: dict[str, Any]) -> None:
        """Only the metrics of a packed row that nothing can be learned from: no backward pass."""
        started = time.perf_counter()
        model.train()
        with torch.no_grad(), self.compute_loss_context_manager():
            self.compute_loss(model, self._prepare_inputs(row))
        self._current_train_step_time += time.perf_counter() - started

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return sum(super(WholeGroupTrainer, self).floating_point_ops(row) for row in inputs["rows"])

    # --- Objective --------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Loss of one packed row; the loss of a step is the sum over its rows."""
        started = time.perf_counter()
        outputs = self._forward(model, inputs)
        self._step_forward_s += time.perf_counter() - started
        reference = None
        if self._algorithm.kl_coef:
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                reference = self._forward(model, inputs).log_probs[0]
        terms = objective.Terms(
            log_probs=outputs.log_probs[0],
            old_log_probs=inputs["old_log_probs"][0, 1:],
            advantages=inputs["advantages"][0, 1:],
            weights=inputs["weights"][0, 1:],
            staleness=self.model_version - inputs["model_version"][0, 1:],
            ref_log_probs=reference,
        )
        sampled = inputs["completion_mask"][0, 1:].bool()
        step_metrics.of_tokens(self._metrics["train"], terms, sampled, outputs.entropy[0], self._algorithm)
        step_metrics.of_row(self, inputs)
        return objective.policy_loss(terms, self._algorithm)

    @staticmethod
    def _forward(model: Any, inputs: dict[str, Any]) -> Any:
        input_ids = inputs["input_ids"]
        return model(
            input_ids=input_ids,
            position_ids=inputs["position_ids"],
            labels=input_ids.masked_fill(inputs["completion_mask"] == 0, -100),
            fused_lm_head=True,
        )

    # --- Weight sync ------------------------------------------------------------------------------------------------

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
        self.scheduler.admit(self.model_version)
        self._pulse.set("rollout", model_version=self.model_version)
        return marks

    # --- Checkpoints and resume points ------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        saves = self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step = self.state.global_step
        if saves:
            resume_points.keep_only(self._run, None)
        elif self._resume_steps and step % self._resume_steps == 0:
            with self._saving_to(self._run.resume_points):
                self._save_checkpoint(self.model, trial=None)
            resume_points.keep_only(self._run, step)
            self._pulse.set("rollout")

    @contextlib.contextmanager
    def _saving_to(self, folder: Path) -> Iterator[None]:
        self._output_dir = folder
        try:
            yield
        finally:
            self._output_dir = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._output_dir or super()._get_output_dir(trial))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # whose learning rate would win over the recipe's
            rates = self.args.learning_rate, self.args.adam_beta1, self.args.adam_epsilon
            resume.obey(self.optimizer, self.lr_scheduler, *rates)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._pulse.set("saving")
        super()._save_checkpoint(model, trial)
        cursor, pending = self.scheduler.position()
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        # A sync that was served and then failed its proof has not counted up TRL's.
        version = max(self.model_version, self.weight_transfer.version)
        self._save_state(folder, cursor, version, pending)

    def count_versions_from(self, version: int) -> None:
        """The next sync serves ``version + 1``."""
        self.model_version = self.weight_transfer.version = version
        self.rollout_worker.update_model_version(version)


class _Steps:
    """The endless iterable of steps that transformers' loop takes its batches from."""

    def __init__(self, trainer: WholeGroupTrainer) -> None:
        self._trainer = trainer
        self.wait_s = 0.0
        """Since TRL last logged and reset it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self._next()

    def _next(self) -> dict[str, Any]:
        trainer, started = self._trainer, time.monotonic()
        while not (groups := trainer.scheduler.take(trainer.model_version)):
            trainer.scheduler.admit(trainer.model_version)
            if not trainer.scheduler.receive(POLL_S):
                trainer.rollout_worker.check_health(trainer.args.heartbeat_stale_after_s)
        waited_s = time.monotonic() - started
        self.wait_s += waited_s
        trainer._trained_groups.update(group.position for group in groups)
        step_metrics.of_groups(trainer._metrics["train"], groups, trainer.model_version)
        return {"rows": packed_rows(groups, trainer._algorithm, trainer._samples_per_row)}


class _Accounts(TrainerCallback):
    """Calls that only a callback gets: the start of training, and the end of each optimizer step."""

    def __init__(self, trainer: WholeGroupTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # TRL has just set the checkpoint's version.
        self._trainer.count_versions_from(self._trainer._start.served_version)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        account = self._trainer.scheduler.step_ended()
        step_metrics.of_account(self._trainer._metrics["train"], account)
        line = {"step": state.global_step, "time_s": time.time(), **dataclasses.asdict(account)}
        run_dir.append_line(self._trainer._run.trained, line)
