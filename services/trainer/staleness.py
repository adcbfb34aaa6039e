"""TRL's async trainer, which also logs importance ratio and KL by staleness.

TRL logs one ratio over all tokens of a step. What it knows of a sample's policy version it uses to drop old samples
and then forgets, before the samples become a batch. Here the version travels on, through what TRL offers for it: the
worker's queue (a protocol), the ``metrics`` dict of a sample, the data loader's collate function, and the inputs of
``compute_loss``. Staleness is taken when a token is trained, not when its sample is fetched: a data loader fetches
one batch ahead, and a weight sync can lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.trainer.utils import pad

from services.trainer.ratio import ratio_stats

MODEL_VERSION = "model_version"
STALE_LENGTHS = (1024, 4096, 16384, 65536)
"""Upper bounds, in tokens, of the counters of dropped samples."""


class StalenessTrainer(AsyncGRPOTrainer):
    """``AsyncGRPOTrainer`` that logs ``ratio/staleness_N`` and ``kl/staleness_N``; the loss is TRL's, unchanged."""

    rollout_queue: Any

    def get_train_dataloader(self) -> Any:
        if self.rollout_queue is not None:
            self.rollout_queue = VersionedQueue(self.rollout_queue, self._count_stale)
        loader = super().get_train_dataloader()
        # accelerate iterates the loader that it wraps.
        inner = loader.base_dataloader
        inner.collate_fn = VersionedCollator(inner.collate_fn)
        return loader

    def _count_stale(self, sample: Any) -> None:
        """Count a sample that TRL is about to drop, by its length: long rollouts are the ones that come too late."""
        if self.model_version - sample.model_version > self.args.max_staleness:
            self._metrics["train"][stale_key(len(sample.input_ids))].append(1.0)

    def compute_loss(self, model: Callable[..., Any], inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_probs: list[torch.Tensor] = []

        def recorded(**forward_kwargs: Any) -> Any:
            outputs = model(**forward_kwargs)
            log_probs.append(outputs.log_probs.detach())
            return outputs

        loss = super().compute_loss(recorded, inputs, *args, **kwargs)
        real = inputs["attention_mask"].bool()  # TRL strips the padding between ranks in the same way
        old_log_probs, mask, versions = (
            inputs[name][real][1:] for name in ("old_log_probs", "completion_mask", MODEL_VERSION)
        )
        for key, value in ratio_stats(log_probs[0][0] - old_log_probs, mask, self.model_version - versions).items():
            self._metrics["train"][key].append(value)
        return loss


def stale_key(num_tokens: int) -> str:
    """Name of the counter for dropped samples of this length; TRL sums what has ``total`` in its name."""
    bound = next((str(bound) for bound in STALE_LENGTHS if num_tokens <= bound), "inf")
    return f"sample/dropped_stale_le_{bound}_total"


class VersionedQueue:
    """A rollout queue as the trainer sees it, which notes each sample's policy version in the sample's metrics."""

    def __init__(self, queue: Any, seen: Callable[[Any], None]) -> None:
        """Args: seen: called with each sample before the trainer gets it."""
        self._queue = queue
        self._seen = seen

    def get(self, timeout: float | None = None) -> Any:
        sample = self._queue.get(timeout=timeout)
        sample.metrics = {**sample.metrics, MODEL_VERSION: sample.model_version}
        self._seen(sample)
        return sample

    def qsize(self) -> int:
        return int(self._queue.qsize())


class VersionedCollator:
    """TRL's collator, plus the policy version of every token: ``model_version``, [rows, T] like ``input_ids``."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        (rows,) = examples  # one micro-batch, already split into rows
        versions = []
        for row in rows:
            # Taken out again: a mean of version numbers is no metric.
            found = [torch.full((len(sample["input_ids"]),), sample["metrics"].pop(MODEL_VERSION)) for sample in row]
            versions.append(torch.cat(found))
        return {**self._collate(examples), MODEL_VERSION: pad(versions, padding_value=0)}
