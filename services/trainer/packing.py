"""Packed rows without leaks: each sample computes exactly what it computes alone.

TRL packs several samples into one row and tells the model where they start by ``position_ids`` alone. Attention
respects that; LFM2's short convolutions do not: the first ``conv_L_cache - 1`` tokens of a sample read the last ones
of the sample before it. The loss is then taken on other log-probabilities than those that were sampled (4 nats off on
a small model with large weights), and gradients flow between unrelated samples.

transformers has an argument for this, ``seq_idx``, but TRL does not pass it and transformers' torch convolution takes
it and ignores it; only the ``causal_conv1d`` package honours it. ``install`` closes both gaps with forward hooks:

* before each layer that holds a convolution, ``seq_idx`` is made from the ``position_ids`` that the layer is given;
* after the convolution, the first tokens of each sample are computed once more, from that sample alone, with the very
  same module, and written over the leaked ones. All other tokens are right already, as everything but the
  convolution works token by token. Overwriting also cuts the gradient: what was overwritten receives none.

No state is kept, so nothing can be stale when gradient checkpointing replays a layer. The hooks know nothing of the
convolution's kernel (torch, ``causal_conv1d`` or the Hub's), change no module or parameter name (PEFT, checkpoints),
and cost one pass of the convolution's projections over two tokens a sample.

``check`` proves it on the loaded model before anything is trained.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from packaging.version import Version
from torch.utils.hooks import RemovableHandle
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer, Lfm2ShortConv

from services.common.errors import NotReadyError, RecipeError

SUPPORTED_MODEL_TYPES = ("lfm2",)
SUPPORTED_TRL = "1.15"
MAX_REL_GRADIENT_DIFF = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""By dtype of the weights: above what rounding makes, far below what a leak makes (tests/contract measures both)."""

Bounds = tuple[tuple[tuple[int, int], ...], ...]


def require_supported(trl_version: str, model_type: str) -> None:
    """Refuse a TRL release or an architecture for which packed rows are not known to be right.

    Args: trl_version: ``trl.__version__``. model_type: ``model.config.model_type``.
    Raises: NotReadyError: another TRL than 1.15. RecipeError: another architecture than LFM2.
    """
    release = Version(trl_version)
    if f"{release.major}.{release.minor}" != SUPPORTED_TRL:
        reason = (
            "since 1.16 it packs rows as prefix trees, which only attention can follow, and refuses models with "
            "convolution layers such as LFM2"
            if release >= Version("1.16.dev0")
            else "its trainer differs where this stack replaces parts of it"
        )
        raise NotReadyError(
            f"TRL {trl_version} is installed and only {SUPPORTED_TRL} is supported: {reason}; "
            f"build the trainer image from its lock, which pins trl=={SUPPORTED_TRL}.0"
        )
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise RecipeError(
            f"model.id names a model of type {model_type!r}; allowed: {', '.join(SUPPORTED_MODEL_TYPES)}. Its layers "
            "may read across packed samples in ways that this stack does not correct"
        )


def sample_bounds(position_ids: torch.Tensor) -> Bounds:
    """Start and end of every sample of every row.

    Args: position_ids: [rows, T]; a sample starts where it is 0, and at the row's first token.
    Returns: for each row its (start, end) pairs, in order; together they cover the row.
    """
    return _sample_bounds(position_ids, _version(position_ids))


def install(model: torch.nn.Module) -> list[RemovableHandle]:
    """Stop leaks between packed samples in ``model``: bare, wrapped by PEFT, and before or after DDP wraps it.

    Returns: the hooks, so that a check can take them away; none for a model without convolution layers.
    """
    hooks = []
    for layer in model.modules():
        if isinstance(layer, Lfm2DecoderLayer) and not layer.is_attention_layer:
            hooks.append(layer.register_forward_pre_hook(_pass_seq_idx, with_kwargs=True))
            hooks.append(layer.conv.register_forward_hook(_recompute_heads, with_kwargs=True))
    return hooks


def _pass_seq_idx(
    _layer: Lfm2DecoderLayer, args: tuple[torch.Tensor], kwargs: dict[str, Any]
) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    """Pre-forward hook of a layer: number the samples of each row, [rows, T] int32, for its convolution."""
    position_ids = kwargs["position_ids"]
    # transformers' default for rows that hold one sample each is [1, T], whatever their number. With a cache the model
    # generates, and its rows are not packed.
    if position_ids.shape[0] == args[0].shape[0] and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "seq_idx": _seq_idx(position_ids, _version(position_ids))}
    return args, kwargs


def _recompute_heads(conv: Lfm2ShortConv, _args: tuple[()], kwargs: dict[str, Any], output: torch.Tensor) -> None:
    """Forward hook of a convolution: give the first tokens of each sample but a row's first what they are alone."""
    seq_idx = kwargs["seq_idx"]
    if seq_idx is None:
        return
    heads = _heads(seq_idx, conv.conv_kernel_size - 1)
    if heads is None:
        return
    # ``forward``, not a call: the hooks are running already.
    alone = conv.forward(kwargs["hidden_states"].flatten(0, 1)[heads.gather])
    # In place: a linear layer made the output, which does not keep it, and a copy would be as large as the row.
    output.view(-1, output.shape[-1]).index_copy_(0, heads.scatter, alone.flatten(0, 1)[heads.kept])


@dataclass(frozen=True)
class _Heads:
    """Index of the first ``width`` tokens of every sample but a row's first, tokens counted through all rows."""

    gather: torch.Tensor
    """[samples, width]: the tokens; beyond the end of a shorter sample, some token that is then not kept."""
    kept: torch.Tensor
    """[kept]: those of ``samples * width`` that lie in their sample."""
    scatter: torch.Tensor
    """[kept]: where they go."""


# These caches hold the last row only: all layers of a forward pass ask for the same one, and bounds and heads wait for
# the device. A tensor is known by identity, and by its version in case it is written in place.
@functools.lru_cache(maxsize=1)
def _seq_idx(position_ids: torch.Tensor, version: int) -> torch.Tensor:
    starts = position_ids == 0
    starts[:, 0] = False
    return starts.cumsum(dim=1, dtype=torch.int32)


@functools.lru_cache(maxsize=1)
def _sample_bounds(position_ids: torch.Tensor, version: int) -> Bounds:
    return _bounds(position_ids[:, 1:] == 0)


@functools.lru_cache(maxsize=1)
def _heads(seq_idx: torch.Tensor, width: int) -> _Heads | None:
    length = seq_idx.shape[1]
    samples = [
        (row * length + start, row * length + end)
        for row, bounds in enumerate(_bounds(seq_idx.diff(dim=1) != 0))
        for start, end in bounds[1:]
    ]
    if not samples or width == 0:
        return None
    gather = [[min(start + i, end - 1) for i in range(width)] for start, end in samples]
    kept, scatter = zip(
        *(
            (sample * width + offset, start + offset)
            for sample, (start, end) in enumerate(samples)
            for offset in range(min(width, end - start))
        ),
        strict=True,
    )
    return _Heads(*(torch.tensor(index, device=seq_idx.device) for index in (gather, kept, scatter)))


def _bounds(starts: torch.Tensor) -> Bounds:
    """Args: starts: [rows, T - 1] bool, true where the next token starts a sample."""
    rows = [[0] for _ in range(starts.shape[0])]
    for row, column in starts.nonzero().tolist():
        rows[row].append(column + 1)
    return tuple(tuple(zip(row, [*row[1:], starts.shape[1] + 1], strict=True)) for row in rows)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class PackingReport:
    """How far samples packed into one row are from the same samples alone."""

    sample_tokens: tuple[int, ...]
    max_abs_logprob_diff: float
    """Over all tokens that have a context, in nats."""
    max_rel_gradient_diff: float
    """Largest of: per trainable parameter, ``|g - g0| / |g0|`` (Frobenius); for the input embeddings the largest
    difference of one token over the largest gradient of one token, which is the sharpest sign of a leak."""
    worst_gradient: str
    """Name of the parameter, or ``input embeddings``, that has it."""


def measure(model: torch.nn.Module, samples: Sequence[Sequence[int]]) -> PackingReport:
    """Compare log-probabilities and gradients of ``samples`` packed with those of each sample alone.

    The forward pass is the trainer's own (``position_ids``, ``fused_lm_head=True``), in whatever mode the model is in.

    Args: model: as ``AsyncGRPOTrainer`` holds it. samples: token ids, at least two samples of at least two tokens.
    """
    parts = [_scores(model, [sample]) for sample in samples]
    packed = _scores(model, samples)
    logprobs = torch.cat([part.logprobs for part in parts])
    differences = {}
    for name, found in packed.gradients.items():
        alone = [part.gradients[name] for part in parts]
        by_row = name == _EMBEDDINGS
        expected = torch.cat(alone) if by_row else torch.stack(alone).sum(dim=0)
        differences[name] = _relative_difference(found, expected, by_row=by_row)
    worst = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    return PackingReport(
        sample_tokens=tuple(len(sample) for sample in samples),
        max_abs_logprob_diff=(packed.logprobs - logprobs).abs().max().item(),
        max_rel_gradient_diff=differences[worst],
        worst_gradient=worst,
    )


def check(
    model: torch.nn.Module,
    samples: Sequence[Sequence[int]],
    max_abs_logprob_diff: float,
    max_rel_gradient_diff: float | None = None,
) -> PackingReport:
    """``measure``, and refuse to train on a difference beyond float noise.

    Args: max_rel_gradient_diff: None: ``MAX_REL_GRADIENT_DIFF`` of the weights' type.
    Raises: NotReadyError: with both numbers and both bounds.
    """
    report = measure(model, samples)
    if max_rel_gradient_diff is None:
        max_rel_gradient_diff = MAX_REL_GRADIENT_DIFF[next(extract_model_from_parallel(model).parameters()).dtype]
    # Not ``>``: a NaN must fail.
    if not (
        report.max_abs_logprob_diff <= max_abs_logprob_diff and report.max_rel_gradient_diff <= max_rel_gradient_diff
    ):
        raise NotReadyError(
            f"samples of {' and '.join(map(str, report.sample_tokens))} tokens packed into one row differ from the "
            f"same samples alone: log-probabilities by up to {report.max_abs_logprob_diff:.3g} nats (allowed "
            f"{max_abs_logprob_diff:.3g}), gradients by up to {report.max_rel_gradient_diff:.3g} of their size, at "
            f"{report.worst_gradient} (allowed {max_rel_gradient_diff:.3g}). The bounds are "
            "trainer.packing_max_abs_logprob_diff and packing_max_rel_gradient_diff. Training would leak between "
            "samples; check that services.trainer.packing.install ran and that the attention respects position_ids"
        )
    return report


@dataclass(frozen=True)
class _Scores:
    logprobs: torch.Tensor
    """[tokens - samples], float32, samples one after the other."""
    gradients: dict[str, torch.Tensor]
    """Of the sum of log-probabilities, float32: per trainable parameter, and per input embedding [tokens, hidden]."""


_EMBEDDINGS = "input embeddings"


def _scores(model: torch.nn.Module, samples: Sequence[Sequence[int]]) -> _Scores:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    input_ids = torch.tensor([[token for sample in samples for token in sample]], device=device)
    position_ids = torch.cat([torch.arange(len(sample), device=device) for sample in samples]).unsqueeze(0)
    has_context = position_ids[0, 1:] > 0
    kept = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        with _recorded_embeddings(model) as embeddings:
            outputs = model(
                input_ids=input_ids,
                position_ids=position_ids,
                labels=input_ids.masked_fill(position_ids == 0, -100),
                fused_lm_head=True,
            )
            logprobs = outputs.log_probs[0, has_context]
            logprobs.sum().backward()
        gradients = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
        gradients[_EMBEDDINGS] = embeddings[0].grad[0].float()
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]
    return _Scores(logprobs.detach().float(), gradients)


@contextmanager
def _recorded_embeddings(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The input embeddings of the forward passes within, each with its gradient kept."""
    seen: list[torch.Tensor] = []

    def record(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)
        output.retain_grad()
        seen.append(output)

    with extract_model_from_parallel(model).get_input_embeddings().register_forward_hook(record):
        yield seen


def _relative_difference(found: torch.Tensor, expected: torch.Tensor, *, by_row: bool) -> float:
    def size(x: torch.Tensor) -> float:
        return float(x.norm(dim=-1).max() if by_row else x.norm())

    difference, scale = size(found - expected), size(expected)
    if scale == 0:  # LoRA's A before the first step: B is zero, and so is A's gradient
        return 0.0 if difference == 0 else math.inf
    return difference / scale
