"""The weight sync of a training run: it also asks how the policy samples, and notes when each version was served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from services.common.run_dir import RunDir
from services.trainer import sampling_check
from services.trainer.policy_versions import VersionLog
from services.weight_sync.client import LoraFactorSync


class RecordedSync(LoraFactorSync):
    """``LoraFactorSync`` of a run. Version N is the adapter after N - 1 syncs of this process; 1 is B = 0."""

    def __init__(self, run: RunDir, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = VersionLog(run)

    def init_weight_transfer(self) -> None:
        super().init_weight_transfer()
        # Not before: a policy that was left paused answers nothing until it is resumed here.
        sampling_check.check(self._server.url, self._server.model)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._log.begins(self.version + 1)
        super().send_weights(iterator)
        self._log.served(self.version)
