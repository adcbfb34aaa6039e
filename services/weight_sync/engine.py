"""vLLM's side: keeps the pristine base of the targets, receives factors, serves the merge.

Registered as a weight-transfer engine (``plugin``), so vLLM gives it the model and ``/init_weight_transfer_engine``.
One sync is

    /collective_rpc weight_sync_stage      begin to receive, on a thread: generation goes on
    (the trainer broadcasts)
    /weight_sync/apply                     ``endpoint``: when the factors are there: pause, merge, resume
    /collective_rpc weight_sync_report     what is served, read back from the weights

vLLM's own start, update and finish are not used: each of them is a call of its own that waits for a running step,
and between them the server would stand still. A sync that breaks before ``apply`` changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from services.weight_sync import transport
from services.weight_sync.checksum import HAS_TRITON, checksum
from services.weight_sync.factors import Layout
from services.weight_sync.merge import merged
from services.weight_sync.served import Place, ServedLayer, locate, place

log = logging.getLogger("vllm.weight_sync")  # below vLLM's logger, so that it reaches vLLM's handlers

NOTHING_SERVED: dict[str, Any] = {"version": None, "factors": None, "receive_s": None, "merge_s": None}


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):
    """Body of ``/init_weight_transfer_engine``."""

    transport: transport.Kind
    master_address: str
    master_port: int
    rank_offset: int
    """Rank of the first vLLM worker: the trainer's processes come before."""
    world_size: int
    init_timeout_s: float
    transfer_timeout_s: float


@dataclass
class _Received:
    version: int
    layout: Layout
    buffer: torch.Tensor
    checksum: str
    seconds: float


@dataclass
class _Merging:
    received: _Received
    seconds: float
    """Until it was begun, which without a GPU is all of it."""


class LoraFactorsEngine(WeightTransferEngine[InitInfo, WeightTransferUpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._transport: transport.Transport | None = None
        self._layout: Layout | None = None
        self._buffer: torch.Tensor | None = None
        self._receiving: Future[_Received] | None = None
        self._merging: _Merging | None = None
        self._layers: dict[str, ServedLayer] = {}
        self._targets: dict[str, tuple[str, Place]] = {}
        self._by_layer: dict[str, list[tuple[str, Place]]] = defaultdict(list)
        self._base: dict[str, Any] = {}
        self._served = dict(NOTHING_SERVED)
        self._gpu: _GpuMerge | None = None

    # -- what vLLM calls -------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group; a trainer that starts again replaces the group it left behind."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._transport = transport.join(
            init_info.transport,
            host=init_info.master_address,
            port=init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            device=self.device,
            init_timeout_s=init_info.init_timeout_s,
            transfer_timeout_s=init_info.transfer_timeout_s,
        )

    def shutdown(self) -> None:
        self._receiving = self._layout = self._buffer = self._gpu = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def start_weight_update(self) -> NoReturn:
        raise RuntimeError("LoRA factors are staged with /collective_rpc and served with /weight_sync/apply")

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> NoReturn:
        self.start_weight_update()

    def finish_weight_update(self) -> NoReturn:
        self.start_weight_update()

    # -- one sync, called through ``worker`` -----------------------------------------------------------------

    def stage(self, version: int, layout: dict[str, Any] | None = None) -> None:
        """Begin to receive the factors of ``version``; returns at once.

        Args: layout: only when it differs from the one sent last on this connection.
        """
        if self._transport is None:
            raise RuntimeError("no trainer is connected; call /init_weight_transfer_engine first")
        if self._receiving is not None and not self._receiving.done():
            raise RuntimeError("another transfer is under way; a trainer that gave one up must connect anew")
        if layout is not None:
            self._prepare(Layout.from_json(layout))
        if self._layout is None or self._buffer is None:
            raise RuntimeError("the first sync of a connection must bring the layout of the factors")
        group, known, buffer = self._transport, self._layout, self._buffer

        def receive() -> _Received:
            started = time.perf_counter()
            group.broadcast(buffer)
            seconds = time.perf_counter() - started
            with _side_stream(self._gpu):
                return _Received(version, known, buffer, f"{checksum(buffer):016x}", seconds)

        self._receiving = transport.background(receive)

    def staged(self, version: int) -> bool:
        """Are the factors of ``version`` here? Never waits. Raises: RuntimeError: they will not come."""
        if self._receiving is None:
            raise RuntimeError(f"version {version} was never staged")
        if not self._receiving.done():
            return False
        if (error := self._receiving.exception()) is not None:
            self.shutdown()
            raise RuntimeError(f"the factors of version {version} did not arrive: {error!r}")
        if (found := self._receiving.result().version) != version:
            raise RuntimeError(f"version {found} is staged, and version {version} was to be applied")
        return True

    @torch.no_grad()
    def begin_merge(self, version: int) -> None:
        """Begin to serve what is staged; on a GPU it goes on while the caller does other things. The caller made sure
        that no forward pass runs."""
        if not self.staged(version):
            raise RuntimeError(f"the factors of version {version} are not here yet")
        assert self._receiving is not None
        received, self._receiving = self._receiving.result(), None
        self._served = dict(NOTHING_SERVED)  # no version is whole until all layers are written
        started = time.perf_counter()
        if self._gpu is None:
            self._merge(received)
        else:
            self._gpu.merge(received.layout.scale)
            self._restore_dropped(received.layout)
        self._merging = _Merging(received, time.perf_counter() - started)

    def end_merge(self) -> dict[str, Any]:
        """Wait until it is done. Returns: ``merge_s``, how long it took here."""
        if self._merging is None:
            raise RuntimeError("no merge was begun")
        merging, self._merging = self._merging, None
        seconds = merging.seconds if self._gpu is None else self._gpu.finish()
        self._served = {
            "version": merging.received.version, "factors": merging.received.checksum,
            "receive_s": merging.received.seconds, "merge_s": seconds,
        }  # fmt: skip
        return {"merge_s": seconds}

    def report(self) -> dict[str, Any]:
        """What this worker serves, read back from the weights themselves.

        Returns: ``version`` of the adapter, checksum of its ``factors`` as received, and for each target
        ``[first row, stop row, first column, stop column, checksum]`` of this rank's slice, served and base.
        """
        if self._gpu is None:
            sums = {name: self._slice_checksum(name, self._layers[at[0]].weight) for name, at in self._targets.items()}
        else:
            sums = self._gpu.sums()
        served = {name: self._spanned(name, value) for name, value in sums.items()}
        return {**self._served, "targets": served, "base": self._base}

    # -- merging ---------------------------------------------------------------------------------------------

    def _merge(self, received: _Received) -> None:
        """Without the grouped kernel: layer by layer, packed ones through vLLM's own packing."""
        factors = received.layout.unpack(received.buffer)

        def parts(layer: str) -> Iterator[tuple[Place, torch.Tensor]]:
            served = self._layers[layer]
            for name, at in self._by_layer[layer]:
                base = served.w0[at.here]
                if name not in factors:  # no longer part of the adapter
                    yield at, base
                    continue
                a, b = factors[name]
                a, b, scale = a[:, at.columns.whole], b[at.rows.whole], received.layout.scale
                dither = received.layout.dither(name, at.rows.start, at.columns.start)
                # Where it can be, it is written where it is served, without a copy.
                result = merged(base, a, b, scale, None if served.is_packed else served.weight[at.here], dither)
                if served.is_packed:
                    yield at, result

        for name, layer in self._layers.items():
            layer.write(parts(name))

    def _restore_dropped(self, layout: Layout) -> None:
        """Give back W0 to targets that are no longer part of the adapter."""
        kept = {target.name for target in layout.targets}
        for name, (layer, at) in self._targets.items():
            if name not in kept:
                self._layers[layer].weight[at.here].copy_(self._layers[layer].w0[at.here])

    def _prepare(self, layout: Layout) -> None:
        """All that takes long and is needed once: the base, the buffer, and on a GPU the compiled kernels."""
        self._keep_base(layout)
        buffer = layout.empty(self.device).zero_()
        self._gpu = None
        if self.device.type == "cuda" and HAS_TRITON and not any(layer.is_packed for layer in self._layers.values()):
            self._gpu = _GpuMerge(self._layers, self._targets, layout, buffer)
            if self._served["version"] is None:
                # Compiles it now, while generation goes on. B is 0, so W0 is written where W0 is served.
                self._gpu.merge(layout.scale)
            torch.cuda.synchronize(self.device)
        self._layout, self._buffer = layout, buffer

    # -- the base --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _keep_base(self, layout: Layout) -> None:
        """Copy W0 of every target that is new. It is still pristine: only kept layers are ever written."""
        packed, new = [], []
        for target in layout.targets:
            layer, shard = locate(self.model, target.name)
            module = self.model.get_submodule(layer)
            at = place(module, shard, target.name, target.out_features, target.in_features)
            if target.name in self._targets:
                continue
            if layer not in self._layers:
                self._layers[layer] = ServedLayer(module)
                if self._layers[layer].is_packed:
                    packed.append(layer)
            self._targets[target.name] = (layer, at)
            self._by_layer[layer].append((target.name, at))
            new.append(target.name)
        self._read_packed(packed)
        for name in new:
            w0 = self._layers[self._targets[name][0]].w0
            self._base[name] = self._spanned(name, self._slice_checksum(name, w0))

    def _read_packed(self, layers: list[str]) -> None:
        """Fill W0 of packed layers from the checkpoint, through vLLM's own loader: the parameter is gone."""
        if not layers:
            return
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(self.vllm_config.load_config)
        missing = {name: self._layers[name].w0.numel() for name in layers}
        for name, tensor in loader.get_all_weights(self.model_config, self.model):
            if not name.endswith(".weight") or tensor.ndim != 2:
                continue
            try:
                layer, shard = locate(self.model, name.removesuffix(".weight"))
            except KeyError:
                continue
            if layer not in missing:
                continue
            at = place(self.model.get_submodule(layer), shard, name, *tensor.shape)
            part = tensor[at.rows.whole, at.columns.whole]
            self._layers[layer].w0[at.here].copy_(part)
            missing[layer] -= part.numel()
        if unfilled := [name for name, count in missing.items() if count]:
            raise RuntimeError(f"the checkpoint does not hold all weights of {unfilled[0]}; found shapes do not add up")

    # -- proof -----------------------------------------------------------------------------------------------

    def _slice_checksum(self, target: str, weight: torch.Tensor) -> int:
        _, at = self._targets[target]
        return checksum(weight[at.here], at.rows.start, at.columns.start)

    def _spanned(self, target: str, value: int) -> list[int | str]:
        _, at = self._targets[target]
        return [at.rows.start, at.rows.stop, at.columns.start, at.columns.stop, f"{value:016x}"]


class _GpuMerge:
    """All served targets as one group, and their checksums on a stream beside generation."""

    def __init__(
        self,
        layers: dict[str, ServedLayer],
        targets: dict[str, tuple[str, Place]],
        layout: Layout,
        buffer: torch.Tensor,
    ) -> None:
        from services.weight_sync.grouped import Group, Matrix

        factors = layout.unpack(buffer)

        def merging(name: str, a: torch.Tensor, b: torch.Tensor) -> Matrix:
            layer, at = layers[targets[name][0]], targets[name][1]
            dither = layout.dither(name, at.rows.start, at.columns.start)
            a, b = a[:, at.columns.whole], b[at.rows.whole]
            return Matrix.of(layer.w0[at.here], a, b, layer.weight[at.here], dither)

        def summing(layer: ServedLayer, at: Place) -> Matrix:
            return Matrix(layer.w0[at.here], None, None, layer.weight[at.here], at.rows.start, at.columns.start)

        self._merging = Group([merging(name, a, b) for name, (a, b) in factors.items()])
        self._names = list(targets)
        self._summing = Group([summing(layers[layer], at) for layer, at in targets.values()])
        self._stream = torch.cuda.Stream(buffer.device)
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._on_host = torch.empty(len(targets), dtype=torch.int64, pin_memory=True)
        self._summed: torch.cuda.Event | None = None

    def merge(self, scale: float) -> None:
        self._began.record()
        self._merging.merge(scale)
        self._ended.record()

    def finish(self) -> float:
        """Wait for the merge, begin to sum up. Returns: seconds that the merge took on the GPU."""
        self._ended.synchronize()
        self.sum_up()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def sum_up(self) -> None:
        """Begin to read the served weights back; they do not change until the next merge."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._on_host.copy_(self._summing.checksums(), non_blocking=True)
            self._summed = torch.cuda.Event()
            self._summed.record()

    def sums(self) -> dict[str, int]:
        """Checksum of each target as it is served now."""
        if self._summed is None:
            self.sum_up()
        assert self._summed is not None
        self._summed.synchronize()
        self._summed = None  # asked again, they are read again
        return {name: value % (1 << 64) for name, value in zip(self._names, self._on_host.tolist(), strict=True)}

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream


def _side_stream(gpu: _GpuMerge | None) -> Any:
    """Beside the forward passes, which would have to end before work on their stream begins."""
    return contextlib.nullcontext() if gpu is None else torch.cuda.stream(gpu.stream)
