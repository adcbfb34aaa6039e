"""Faults on purpose, the recipe's section ``control``: runs that must learn nothing, or must be stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from services.trainer.sync import RecordedSync


class DroppedSyncs(RecordedSync):
    """Sends B = 0 once, and afterwards only says that the adapter is served. The canary is asked as always."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises: StoppedError: the canary saw that the policy is not the one that was trained."""
        if self.version == 0:
            super().send_weights(iterator)
            return
        self.version += 1
        if self._canary is not None and self.version % self._settings.canary_every == 0:
            self.last_canary = self._canary.check(self._server, self.version, self._settings.transfer_timeout_s)


def shuffled(rewards: Sequence[float | None], group: int) -> list[float | None]:
    """The same rewards, each given to some rollout of the group that was scored; equal for equal ``group``."""
    scored = [reward for reward in rewards if reward is not None]
    random.Random(group).shuffle(scored)
    left = iter(scored)
    return [None if reward is None else next(left) for reward in rewards]
