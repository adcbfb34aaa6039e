"""Where a target lives inside vLLM: its rows and columns in a fused, possibly sharded, possibly packed weight.

No shard arithmetic of our own: vLLM's name mapper says which layer and which shard, and the layer's own weight
loader, given row or column numbers instead of weights, says which of them it keeps and where it puts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.parameter import ModelWeightParameter


@dataclass(frozen=True)
class Span:
    """One dimension: positions [start, stop) of the whole matrix lie from ``local`` on in this rank's weight."""

    start: int
    stop: int
    local: int

    @property
    def whole(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def here(self) -> slice:
        return slice(self.local, self.local + self.stop - self.start)


@dataclass(frozen=True)
class Place:
    """Rows and columns of one target, in the whole matrix and in this rank's fused weight."""

    rows: Span
    columns: Span

    @property
    def here(self) -> tuple[slice, slice]:
        return self.rows.here, self.columns.here


class ServedLayer:
    """A vLLM linear layer: its pristine weight W0, and the only way to write a new one.

    On CUDA and on CPUs without a packed kernel the parameter itself is served, and is written in place (captured
    CUDA graphs hold its address). vLLM's CPU build packs the weight for oneDNN or AMX and drops the parameter; the
    new weight is then given to the layer's own ``process_weights_after_loading``, which packs it again.
    """

    def __init__(self, module: LinearBase) -> None:
        self._module = module
        weight = module.weight
        self.is_packed = weight.numel() == 0
        shape = (module.output_size_per_partition, module.input_size_per_partition)
        if not self.is_packed and tuple(weight.shape) != shape:
            raise ValueError(
                f"layer {module.prefix} serves a weight of shape {tuple(weight.shape)} and type {weight.dtype} where "
                f"{shape} is expected; quantised or repacked weights cannot take a merged adapter"
            )
        empty = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.w0 = empty if self.is_packed else empty.copy_(weight.data)
        """Pristine, fused, this rank's part. For a packed layer the caller fills it from the checkpoint."""
        self._packed_from = self.w0

    @property
    def weight(self) -> torch.Tensor:
        """The weight that is served; for a packed layer the one that was packed last."""
        return self._packed_from if self.is_packed else self._module.weight.data

    def write(self, parts: Iterable[tuple[Place, torch.Tensor]]) -> None:
        """Serve ``parts`` in their places, and W0 everywhere else."""
        if not self.is_packed:
            for place, part in parts:
                self._module.weight.data[place.here].copy_(part)
            return
        fused = self.w0.clone()
        for place, part in parts:
            fused[place.here] = part
        self._packed_from = fused
        self._module.weight = torch.nn.Parameter(fused.clone(), requires_grad=False)
        self._module.quant_method.process_weights_after_loading(self._module)


def locate(model: torch.nn.Module, name: str) -> tuple[str, Any]:
    """Name of the vLLM layer that holds the Hugging Face module ``name``, and the shard (None: the whole).

    Raises: KeyError: the model has no such layer on this rank, or it is not a linear one.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    weight_name, shard = name + ".weight", None
    if mapper is not None:
        mapped = list(mapper.apply([(weight_name, torch.empty(0))]))
        if len(mapped) != 1:
            raise KeyError(f"LoRA target {name} is {len(mapped)} weights in vLLM; only one can take the merge")
        weight_name, marker = mapped[0]
        shard = getattr(marker, "shard_id", None)  # the mapper hangs it on the tensor that it passes on
    layer_name = weight_name.removesuffix(".weight")
    try:
        module = model.get_submodule(layer_name)
    except AttributeError:
        raise KeyError(f"vLLM's model has no layer {layer_name} for LoRA target {name}") from None
    if not isinstance(module, LinearBase):
        raise KeyError(f"LoRA target {name} is {type(module).__name__} in vLLM; only linear layers can be merged")
    return layer_name, shard


def place(module: LinearBase, shard: Any, name: str, out_features: int, in_features: int) -> Place:
    """The part of the matrix ``name`` that this rank's layer holds, and where.

    Raises: ValueError: the layer's sizes are not the matrix's.
    """
    try:
        if isinstance(module, RowParallelLinear):
            rows = _unsplit(out_features, module.output_size_per_partition)
            return Place(rows, _split(module, None, in_features, module.input_size_per_partition, dimension=1))
        rows = _split(module, shard, out_features, module.output_size_per_partition, dimension=0)
        return Place(rows, _unsplit(in_features, module.input_size_per_partition))
    except _DoesNotFitError:
        raise ValueError(
            f"{name} is a matrix of ({out_features}, {in_features}), which vLLM's layer {module.prefix} does not "
            "hold; trainer and policy serve different models"
        ) from None


class _DoesNotFitError(Exception):
    """A dimension of the matrix is not the layer's."""


def _unsplit(size: int, here: int) -> Span:
    if size != here:
        raise _DoesNotFitError
    return Span(0, size, 0)


def _split(module: LinearBase, shard: Any, size: int, here: int, dimension: int) -> Span:
    """Load the numbers 0..size-1 as if they were weights, and see which arrive where."""
    shape = [1, 1]
    shape[dimension] = here
    probe = ModelWeightParameter(
        data=torch.full(shape, -1, dtype=torch.int64, device="cpu"),
        input_dim=1, output_dim=0, weight_loader=module.weight_loader_v2,
    )  # fmt: skip
    shape[dimension] = size
    numbers = torch.arange(size, device="cpu").view(shape)
    try:
        module.weight_loader_v2(probe, numbers, *([] if shard is None else [shard]))
    except (AssertionError, RuntimeError):  # too small; one that is too large is cut without a word
        raise _DoesNotFitError from None
    arrived = probe.data.flatten()
    local = (arrived >= 0).nonzero().flatten()
    first, last = int(local[0]), int(local[-1])
    start, stop = int(arrived[first]), int(arrived[last]) + 1
    if last - first + 1 != stop - start:
        raise ValueError(f"vLLM's layer {module.prefix} scatters its shards; only contiguous ones can be merged")
    # Key and value heads are held by several ranks when there are fewer of them than ranks.
    replicas = module.num_kv_head_replicas if shard in ("k", "v") else 1
    if (stop - start) * (module.tp_size // replicas) != size:
        raise _DoesNotFitError
    return Span(start, stop, first)
