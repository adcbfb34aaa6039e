"""Stand-ins for the parts of TRL 1.15's async trainer that need CUDA, used only on a machine without it.

Three parts, each reached through a name that TRL looks up in one of its modules:

* ``get_peak_flops_per_device`` asks ``torch.cuda`` for the device's name, to report MFU. Here: unknown, no MFU.
* ``_ChunkedLogProbFunction`` is a Triton kernel, and Triton has no CPU backend. Here: the same numbers in plain torch.
* The model is always loaded with a FlashAttention kernel from the Hub. Here: ``services.trainer.attention``.

A CPU run trains the same loss on the same rows. It shows that the loop works, not how fast it is.
"""

from __future__ import annotations

import torch
import trl.trainer.utils
from torch.utils.checkpoint import checkpoint
from trl.experimental.async_grpo import async_grpo_trainer

from services.common.errors import NotReadyError
from services.trainer import attention

TILE_BYTES = 4 * 2**20
"""Of one tile of float32 logits. Small enough for the cache: 64 MiB took twice the time."""

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What can be asked for besides the log-probabilities, in the order of the result."""


def install() -> None:
    """Bind the stand-ins in TRL's modules, for this process.

    Raises: NotReadyError: CUDA is here, where the real parts must be used.
    """
    if torch.cuda.is_available():
        raise NotReadyError(
            f"CUDA is available ({torch.cuda.get_device_name()}); the CPU stand-ins would replace TRL's GPU kernels. "
            "Hide the device (CUDA_VISIBLE_DEVICES='') to run on the CPU on purpose"
        )
    async_grpo_trainer.get_peak_flops_per_device = _unknown_peak_flops
    trl.trainer.utils._ChunkedLogProbFunction = ChunkedLogProb
    attention.install("sdpa")


def _unknown_peak_flops(accelerator: object, dtype: str) -> None:
    """TRL reports no MFU for a device whose peak it does not know."""


class ChunkedLogProb:
    """TRL's ``ChunkedLogProbFunction`` in plain torch: ``apply`` takes and returns the same."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[torch.Tensor | None, ...]:
        """Log-probabilities of ``targets``, and per token what ``outputs`` names.

        The [N, V] logits never exist at once: tokens go through in tiles, and the backward pass computes each tile
        again instead of keeping it.

        Args: hidden: [N, H]. weight: [V, H]. bias: [V]. targets: [N]. chunk_size: the kernel's tile width in the
            vocabulary, not needed here.
        Returns: log-probabilities, entropy, log(sum p^2), mean logit, is-top-1; each [N] float32 (the last bool), or
            None if not asked for. Only the first two carry gradients.
        """
        tile = max(1, TILE_BYTES // (4 * weight.shape[0]))
        tiles = [
            checkpoint(
                _tile, h, weight, bias, t, temperature, final_logit_softcapping, logit_scale, outputs,
                use_reentrant=False, preserve_rng_state=False,
            )
            for h, t in zip(hidden.split(tile), targets.split(tile), strict=True)
        ]  # fmt: skip
        return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*tiles, strict=True))


def _tile(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[torch.Tensor | None, ...]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_z = logits.logsumexp(dim=-1)
    target_logit = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    log_probs = target_logit - log_z
    frozen = logits.detach()
    entropy = None
    if "entropy" in outputs:
        entropy = log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return (
        log_probs,
        entropy,
        (2 * (frozen - log_z.detach().unsqueeze(-1))).logsumexp(dim=-1) if "log_sum_sq_probs" in outputs else None,
        frozen.mean(dim=-1) if "mean_logits" in outputs else None,
        # ``argmax`` takes the first of equals, as the kernel does.
        frozen.argmax(dim=-1) == targets if "is_top1" in outputs else None,
    )
