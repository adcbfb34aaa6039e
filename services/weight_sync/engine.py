"""vLLM's side: keeps the pristine base of the targets, receives factors, serves the merge.

Registered as a weight-transfer engine (``plugin``), so vLLM's own endpoints drive it. One sync is

    /start_weight_update                                   open a session
    /update_weights {phase: stage, version, layout?}       begin to receive, on a thread: generation goes on
    (the trainer broadcasts)
    /update_weights {phase: apply, version}                wait for the buffer, merge, serve; the caller paused first
    /finish_weight_update                                  close the session

A session that is finished or broken before ``apply`` changes nothing: the last adapter stays served.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from services.weight_sync import transport
from services.weight_sync.checksum import checksum
from services.weight_sync.factors import Layout
from services.weight_sync.merge import merged
from services.weight_sync.served import Place, ServedLayer, locate, place

log = logging.getLogger("vllm.weight_sync")  # below vLLM's logger, so that it reaches vLLM's handlers


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


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of ``/update_weights``."""

    phase: Literal["stage", "apply"]
    version: int
    layout: dict[str, Any] | None = None
    """Only when it differs from the one sent last on this connection."""


@dataclass
class _Received:
    version: int
    layout: Layout
    buffer: torch.Tensor
    checksum: str
    seconds: float


class LoraFactorsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._transport: transport.Transport | None = None
        self._timeout_s = 0.0
        self._layout: Layout | None = None
        self._receiving: Future[_Received] | None = None
        self._session_open = False
        self._layers: dict[str, ServedLayer] = {}
        self._targets: dict[str, tuple[str, Place]] = {}
        self._by_layer: dict[str, list[tuple[str, Place]]] = defaultdict(list)
        self._base: dict[str, Any] = {}
        self._served: dict[str, Any] = {"version": None, "factors": None, "receive_s": None, "merge_s": None}

    # -- what vLLM calls -------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group; a trainer that starts again replaces the group it left behind."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._timeout_s = init_info.transfer_timeout_s
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

    def start_weight_update(self) -> None:
        if self._transport is None:
            raise RuntimeError("no trainer is connected; call /init_weight_transfer_engine first")
        self._session_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator here, which a CPU build does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            if update_info.phase == "stage":
                self._stage(update_info)
            else:
                self._apply(update_info.version)
        except BaseException:
            self._session_open = False  # as vLLM's worker does
            raise

    def finish_weight_update(self) -> None:
        """Close the session. A buffer that was staged and not applied is dropped."""
        self._session_open = False
        if self._receiving is not None:
            # Its sender gave up. The group may be out of step now, so only a new connection may use one.
            log.warning("a staged transfer was never applied; the last adapter stays served")
            self.shutdown()

    def shutdown(self) -> None:
        self._receiving = self._layout = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- one sync --------------------------------------------------------------------------------------------

    def _stage(self, info: UpdateInfo) -> None:
        assert self._transport is not None
        if info.layout is not None:
            self._layout = Layout.from_json(info.layout)
        if self._layout is None:
            raise RuntimeError("the first sync of a connection must bring the layout of the factors")
        self._keep_base(self._layout)
        group, layout, version, device = self._transport, self._layout, info.version, self.device

        def receive() -> _Received:
            started = time.perf_counter()
            buffer = layout.empty(group.device)
            group.broadcast(buffer)
            buffer = buffer.to(device)
            seconds = time.perf_counter() - started
            return _Received(version, layout, buffer, f"{checksum(buffer):016x}", seconds)

        self._receiving = transport.background(receive)

    def _apply(self, version: int) -> None:
        if self._receiving is None:
            raise RuntimeError(f"version {version} was never staged")
        receiving, self._receiving = self._receiving, None
        try:
            received = receiving.result(self._timeout_s)
        except BaseException as error:
            self.shutdown()
            raise RuntimeError(f"the factors of version {version} did not arrive: {error!r}") from error
        if received.version != version:
            raise RuntimeError(f"version {received.version} is staged, and version {version} was to be applied")
        self._merge(received)

    @torch.no_grad()
    def _merge(self, received: _Received) -> None:
        started = time.perf_counter()
        self._served = dict.fromkeys(self._served)  # no version is whole until all layers are written
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
                if served.is_packed:
                    yield at, merged(base, a, b, scale)
                else:
                    merged(base, a, b, scale, out=served.weight[at.here])  # where it is served, without a copy

        for name, layer in self._layers.items():
            layer.write(parts(name))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._served = {
            "version": received.version,
            "factors": received.checksum,
            "receive_s": received.seconds,
            "merge_s": time.perf_counter() - started,
        }

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
            self._base[name] = self._slice_checksum(name, self._layers[self._targets[name][0]].w0)

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

    def _slice_checksum(self, target: str, weight: torch.Tensor) -> list[int | str]:
        _, at = self._targets[target]
        value = checksum(weight[at.here], at.rows.start, at.columns.start)
        return [at.rows.start, at.rows.stop, at.columns.start, at.columns.stop, f"{value:016x}"]

    def report(self) -> dict[str, Any]:
        """What this worker serves, read back from the weights themselves.

        Returns: ``version`` of the adapter, checksum of its ``factors`` as received, and for each target
        ``[first row, stop row, first column, stop column, checksum]`` of this rank's slice, served and base.
        """
        served = {
            name: self._slice_checksum(name, self._layers[layer].weight) for name, (layer, _) in self._targets.items()
        }
        return {**self._served, "session_open": self._session_open, "targets": served, "base": self._base}
