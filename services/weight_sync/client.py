"""The trainer's side: TRL's ``WeightTransferProtocol`` that sends LoRA factors and proves their delivery.

``AsyncGRPOTrainer(weight_transfer=LoraFactorSync(...))`` calls ``init_weight_transfer`` once and, after each
step, ``send_weights`` with the factors that ``names.lora_factors`` yields. Called on its own, ``send_weights``
has the server pause itself and only for the merge: the buffer travels while generation goes on. After ``pause``
(TRL's own order) it leaves the server paused for ``resume``. Either way a sync that fails resumes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from services.common.recipe import Recipe
from services.weight_sync import factors, proof, transport
from services.weight_sync.canary import Canary, CanaryResult
from services.weight_sync.checksum import checksum
from services.weight_sync.errors import WeightSyncError
from services.weight_sync.policy_server import MARGIN_S, PolicyServer

log = logging.getLogger(__name__)


class LoraFactorSync:
    """Sends A and B of every target; the policy serves ``W0 + scale * B @ A``.

    Args:
        recipe: its model, lora, policy and weight_sync sections.
        policy_url: as ``http://policy:8000``.
        device: where the trainer's factors lie; NCCL needs a GPU of its own there.
    """

    def __init__(self, recipe: Recipe, policy_url: str, device: torch.device | str = "cpu") -> None:
        self.version = 0
        """Of the adapter that is served; each sync adds one."""
        self.last_timings: dict[str, float] = {}
        """Of the last sync, in seconds but for ``bytes``, ``version`` and ``put_back`` (requests). ``transfer_s``:
        asking the workers to receive, and the broadcast, ``wire_s``. ``apply_s``: the request to serve it, in which
        nothing was sampled for ``paused_s``; parts of that as ``endpoint.apply`` gives them. ``verify_s``: the proof,
        afterwards."""
        self.last_change: dict[str, float] = {}
        """Of the last sync: ``lora/b_rms`` and, unless B is 0, ``weight_sync/kept_share``."""
        self.put_back = 0.0
        """Running requests that all syncs so far have put back."""
        self.last_canary: CanaryResult | None = None
        self._server = PolicyServer(policy_url, recipe.policy.served_model_name)
        self._settings = recipe.weight_sync
        self._scale = recipe.lora_scale
        self._dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._device = torch.device(device)
        self._base_weight: proof.BaseWeight | None = None
        self._canary: Canary | None = None
        self._transport: transport.Transport | None = None
        self._layout: factors.Layout | None = None
        self._layout_sent = False
        self._pause_first = False
        self._proved = False
        self._buffer: torch.Tensor | None = None
        self._paused_at: float | None = None

    def prove_with(self, *, base_weight: proof.BaseWeight | None = None, canary: Canary | None = None) -> None:
        """What syncs are checked against, besides what was sent.

        Args:
            base_weight: target -> the trainer's pristine weight. After each sync the merge is then computed here too,
                and its checksums are compared with those of the served weights; on the first sync of a connection
                and each ``canary_every``-th the bases are compared as well.
            canary: a prompt and the trainer's scorer: log-probabilities are compared on the first sync of a
                connection and each ``canary_every``-th.
        """
        self._base_weight, self._canary = base_weight, canary

    def metrics(self) -> dict[str, float]:
        """Of the last sync, for ``metrics.jsonl``: ``weight_sync/<phase>_s``, bytes, version, canary difference, and
        ``last_change``."""
        found = {f"weight_sync/{key}": value for key, value in self.last_timings.items()} | self.last_change
        if self.last_canary is not None:
            found["weight_sync/canary_mean_abs_logprob_diff"] = self.last_canary.mean_abs_logprob_diff
            found["weight_sync/canary_max_abs_logprob_diff"] = self.last_canary.max_abs_logprob_diff
        return found

    # -- TRL's protocol --------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Connect to the policy; also after a trainer that died and left it paused.

        Raises: WeightSyncError: the policy is not there, or the group was not formed in time.
        """
        self._leave_group()
        settings, server = self._settings, self._server
        server.wait_until_healthy(settings.init_timeout_s)
        if server.is_paused():
            log.warning("the policy was left paused; resuming it")
            server.resume()
        self._join_group(server.world_size() + 1)

    def pause(self) -> None:
        """Stop generation. Requests in flight are kept and go on after ``resume``, recomputed from their tokens."""
        started = time.perf_counter()
        self._paused_at = started  # before the call: one that times out may still take effect
        self._server.pause(self._settings.pause_timeout_s)
        self.last_timings["pause_s"] = time.perf_counter() - started

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Serve the adapter whose PEFT-named factors ``iterator`` yields, and prove that it is served.

        Raises:
            ValueError: not LoRA factors.
            WeightSyncError: a phase failed or timed out; the server was resumed and keeps the last adapter.
            StoppedError: the policy does not serve what was sent.
        """
        paused_by_caller = self._paused_at is not None
        self.last_canary = None
        self.last_timings = {key: value for key, value in self.last_timings.items() if paused_by_caller}
        try:
            self._pack(iterator)
            if self._pause_first and not paused_by_caller:
                self.pause()
            self._stage()
            self._apply()
        except BaseException:
            self._abandon()
            raise
        if not paused_by_caller:
            self.resume()
        self._verify()

    def resume(self) -> None:
        """Go on generating. Does nothing unless ``pause`` was called, so it is safe after a sync that failed."""
        if self._paused_at is None:
            return
        started = time.perf_counter()
        self._server.resume()
        now = time.perf_counter()
        self.last_timings["resume_s"] = now - started
        self.last_timings["paused_s"] = now - self._paused_at
        self._paused_at = None

    def destroy(self) -> None:
        self._leave_group()
        self._server.close()

    # -- connection ------------------------------------------------------------------------------------------

    def _join_group(self, world_size: int) -> None:
        settings, server = self._settings, self._server
        phase = "connect"
        try:
            host = transport.advertised_host(server.host, server.port)
            store = transport.open_store(host, settings.port, world_size, settings.init_timeout_s)
        except OSError as error:
            raise WeightSyncError(
                server.url, phase,
                f"cannot listen on weight_sync.port {settings.port}: {error}; another trainer may hold it",
            ) from error  # fmt: skip
        joining = transport.background(
            lambda: transport.join(
                settings.transport,
                host=host,
                port=settings.port,
                rank=0,
                world_size=world_size,
                device=self._device,
                init_timeout_s=settings.init_timeout_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                store=store,
            )
        )
        info = {
            "transport": settings.transport,
            "master_address": host,
            "master_port": settings.port,
            "rank_offset": 1,
            "world_size": world_size,
            "init_timeout_s": settings.init_timeout_s,
            "transfer_timeout_s": settings.transfer_timeout_s,
        }
        server.init_transfer(info, settings.init_timeout_s + MARGIN_S)
        try:
            self._transport = joining.result(settings.init_timeout_s)
        except (transport.TransportError, TimeoutError) as error:
            raise WeightSyncError(server.url, phase, str(error) or "the group was not formed in time") from error
        # Two NCCL groups at work on the same GPUs at once, ours and the server's own, may deadlock.
        self._pause_first = settings.transport == "nccl" and world_size > 2
        self._layout_sent = False
        self._proved = False

    def _leave_group(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- one sync --------------------------------------------------------------------------------------------

    def _pack(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._transport is None:
            raise WeightSyncError(self._server.url, "pack", "not connected; call init_weight_transfer first")
        started = time.perf_counter()
        pairs = factors.collect(iterator)
        layout = factors.Layout.of(pairs, self._dtype, self._scale, self._settings.rounding)
        if layout != self._layout or self._buffer is None:
            self._layout, self._layout_sent = layout, False
            self._buffer = layout.empty(self._device)
        layout.pack(pairs, self._buffer)
        self.last_timings["bytes"] = self._buffer.numel() * self._buffer.element_size()
        self.last_timings["pack_s"] = time.perf_counter() - started

    def _stage(self) -> None:
        assert self._layout is not None and self._buffer is not None and self._transport is not None
        started = time.perf_counter()
        info: dict[str, Any] = {"version": self.version + 1}
        settings = self._settings
        if not self._layout_sent:
            info["layout"] = self._layout.to_json()
            # This one also reads and keeps the base and gets the longer limit, which no frozen server shall use up.
            self._server.check_health()
        self._server.stage(info, settings.transfer_timeout_s if self._layout_sent else settings.init_timeout_s)
        self._layout_sent = True
        staged = time.perf_counter()
        try:
            self._transport.broadcast(self._buffer)
        except transport.TransportError as error:
            raise WeightSyncError(self._server.url, "transfer", str(error)) from error
        now = time.perf_counter()
        self.last_timings |= {"transfer_s": now - started, "wire_s": now - staged}

    def _apply(self) -> None:
        started = time.perf_counter()
        settings, version = self._settings, self.version + 1
        timeout_s = max(settings.pause_timeout_s, settings.transfer_timeout_s)
        found = self._server.apply(
            version, settings.transfer_timeout_s, timeout_s + MARGIN_S, resume=self._paused_at is None
        )
        self.version = version
        self.put_back += found["put_back"]
        self.last_timings |= {**found, "version": version, "apply_s": time.perf_counter() - started}

    def _abandon(self) -> None:
        """After a failure: let the server go on with the last adapter."""
        self._leave_group()  # out of step with the server; only a new connection may be used
        try:
            self.resume()
        except WeightSyncError as error:  # the server is gone: the cause is on its way up
            log.warning("while giving up a weight sync: %s", error)
        self._paused_at = None

    # -- proof -----------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        assert self._layout is not None and self._buffer is not None
        started = time.perf_counter()
        server, url = self._server, self._server.url
        timeout_s = self._settings.transfer_timeout_s
        merged = None
        self.last_change = {"lora/b_rms": proof.b_rms(self._layout, self._buffer)}
        if self._base_weight is not None:
            merged = proof.merged_again(self._layout, self._buffer, self._base_weight)
            if merged.kept_share is not None:
                self.last_change["weight_sync/kept_share"] = merged.kept_share
        reports = server.reports(timeout_s)
        proof.received(reports, self.version, f"{checksum(self._buffer):016x}", url)
        served = proof.whole_checksums(reports, "targets")
        in_full = not self._proved or self.version % self._settings.canary_every == 0
        if in_full and self._base_weight is not None:
            base = proof.base_checksums(served, self._base_weight, self._dtype)
            proof.same("base weights", base, proof.whole_checksums(reports, "base"), url)
        if merged is not None:
            proof.same("merged weights", merged.checksums, served, url)
        if in_full and self._canary is not None:
            self.last_canary = self._canary.check(server, self.version, timeout_s)
        self._proved = True
        self.last_timings["verify_s"] = time.perf_counter() - started
