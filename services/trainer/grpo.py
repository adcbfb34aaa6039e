"""TRL's ``AsyncGRPOTrainer``, narrowed where this stack must differ, and nowhere else.

Two seams, both pinned by a contract test: how weights reach the policy server (LoRA factors instead of an
adapter merged in place, which drifts a bf16 base), and where a stop request can break the wait for rollouts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from services.common.health import Pulse
from services.common.signals import StopFlag
from services.trainer.staleness import StalenessTrainer
from services.weight_sync.names import lora_factors


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived while the trainer waited for rollouts."""


class StoppableWorker(HarnessRolloutWorker):
    """A rollout worker whose health check, which TRL calls while it waits, also sees a stop request."""

    def __init__(self, *, stop: StopFlag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._stop_flag = stop

    def check_health(self, stale_after_s: float) -> None:
        if self._stop_flag.is_set():
            raise StopRequested
        super().check_health(stale_after_s)


class FactorSyncTrainer(StalenessTrainer):
    """The trainer that sends LoRA factors and never touches the base weights."""

    def __init__(self, *args: Any, pulse: Pulse, **kwargs: Any) -> None:
        self._pulse = pulse
        super().__init__(*args, **kwargs)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Send A and B; the merge happens out of place on the server, which pauses only for it.

        Returns: the times at which TRL's pause, barrier and transfer end. The first two are not phases here:
        ``LoraFactorSync.metrics`` has the real ones.
        """
        self._pulse.set("first_sync" if self.model_version == 0 else "sync")
        self.weight_transfer.send_weights(lora_factors(self.accelerator.unwrap_model(self.model)))
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)
        self._pulse.set("rollout", model_version=self.model_version)
        return t0, t0, time.time()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._pulse.set("training")
        return super().training_step(*args, **kwargs)
