"""The weight sync of a training run, as ``weight_sync.mode`` says; it notes when each policy version was served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.trainer import sampling_check
from services.trainer.policy_versions import VersionLog
from services.weight_sync import proof, transport
from services.weight_sync.canary import Canary, CanaryResult
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.errors import WeightSyncError
from services.weight_sync.policy_server import PolicyServer


class RecordedSync(LoraFactorSync):
    """``LoraFactorSync`` of a run. Versions count on over all attempts; 1 is B = 0."""

    merges_in_trainer = False

    def __init__(self, run: RunDir, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = VersionLog(run)

    def describe(self, model: torch.nn.Module) -> None:
        """Nothing: the first sync brings the layout of the factors."""

    def init_weight_transfer(self) -> None:
        super().init_weight_transfer()
        # Not before: a policy that was left paused answers nothing until it is resumed here.
        sampling_check.check(self._server.url, self._server.model)

    def _apply(self) -> None:
        # Staging before it took no version away: what was sampled meanwhile is of the old one alone.
        self._log.begins(self.version + 1)
        super()._apply()
        if self._paused_at is None:
            self._log.served(self.version)

    def resume(self) -> None:
        was_paused = self._paused_at is not None
        super().resume()
        if was_paused:
            self._log.served(self.version)


class FullStreamSync:
    """``weight_sync.mode = "full"``: TRL's own stream of all merged weights, to compare with.

    TRL merges the adapter in place, streams, and unmerges: in bf16 the frozen base drifts a little at each sync, which
    is why it is not the default. Proved by the canary alone.
    """

    merges_in_trainer = True
    put_back = 0.0
    """TRL's pause does not say how many requests it put back."""

    def __init__(self, run: RunDir, recipe: Recipe, policy_url: str) -> None:
        self.version = 0
        self.last_timings: dict[str, float] = {}
        """Of the last sync: ``pause_s``, ``transfer_s``, ``resume_s``, ``paused_s`` with the merge in it, ``bytes``."""
        self.last_canary: CanaryResult | None = None
        self._settings = recipe.weight_sync
        self._server = PolicyServer(policy_url, recipe.policy.served_model_name)
        self._http = _Vllm(policy_url, recipe)
        self._log = VersionLog(run)
        self._client: WeightTransferClient | None = None
        self._canary: Canary | None = None
        self._bytes = 0
        self._paused_at = 0.0
        self._proved = False

    def describe(self, model: torch.nn.Module) -> None:
        """The weights that will be streamed; vLLM sizes its buffers by it. Before ``init_weight_transfer``."""
        weights = list(_iter_vllm_named_params(model))
        self._bytes = sum(weight.numel() * weight.element_size() for _, weight in weights)
        info = {
            "names": [name for name, _ in weights],
            "dtype_names": [str(weight.dtype).split(".")[-1] for _, weight in weights],
            "shapes": [list(weight.shape) for _, weight in weights],
        }
        limit_s = max(self._settings.init_timeout_s, self._settings.transfer_timeout_s)  # TRL has one for both
        self._client = WeightTransferClient(self._http, info, int(limit_s))

    def prove_with(self, *, base_weight: proof.BaseWeight | None = None, canary: Canary | None = None) -> None:
        self._canary = canary

    def metrics(self) -> dict[str, float]:
        found = {f"weight_sync/{key}": value for key, value in self.last_timings.items()}
        if self.last_canary is not None:
            found["weight_sync/canary_mean_abs_logprob_diff"] = self.last_canary.mean_abs_logprob_diff
            found["weight_sync/canary_max_abs_logprob_diff"] = self.last_canary.max_abs_logprob_diff
        return found

    # -- TRL's protocol --------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Raises: WeightSyncError: the policy is not there, or NCCL did not connect."""
        server = self._server
        server.wait_until_healthy(self._settings.init_timeout_s)
        if server.is_paused():
            server.resume()
        # TRL gives vLLM's idea of this machine's address, which in a container with several networks is any of them.
        os.environ.setdefault("VLLM_HOST_IP", transport.advertised_host(server.host, server.port))
        self._call("connect", self._described.init_weight_transfer)
        sampling_check.check(server.url, server.model)

    def pause(self) -> None:
        self.last_timings, self.last_canary, self._paused_at = {"bytes": self._bytes}, None, time.perf_counter()
        self._log.begins(self.version + 1)
        self._server.pause(self._settings.pause_timeout_s)
        self.last_timings["pause_s"] = time.perf_counter() - self._paused_at

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        started = time.perf_counter()
        self._call("transfer", lambda: self._described.send_weights(iterator))
        self.last_timings["transfer_s"] = time.perf_counter() - started

    def resume(self) -> None:
        started = time.perf_counter()
        self._server.resume()
        now = time.perf_counter()
        self.version += 1
        self._log.served(self.version)
        self.last_timings |= {
            "resume_s": now - started, "paused_s": now - self._paused_at, "version": self.version,
        }  # fmt: skip
        if self._canary is not None and (not self._proved or self.version % self._settings.canary_every == 0):
            self.last_canary = self._canary.check(self._server, self.version, self._settings.transfer_timeout_s)
            self._proved = True

    def destroy(self) -> None:
        if self._client is not None:
            self._client.destroy()
        self._server.close()

    @property
    def _described(self) -> WeightTransferClient:
        if self._client is None:
            raise RuntimeError("describe was not called")
        return self._client

    def _call(self, phase: str, function: Any) -> None:
        try:
            function()
        except (RuntimeError, OSError) as error:
            cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise WeightSyncError(self._server.url, phase, cause) from error


class _Vllm(VLLMClient):
    """TRL's HTTP client, which asks ``/server_info`` for the type that the server holds its weights in. That endpoint
    needs pip, which the image does not have; and both sides have the type from one recipe."""

    def __init__(self, url: str, recipe: Recipe) -> None:
        super().__init__(url, recipe.weight_sync.init_timeout_s)
        self._dtype = recipe.model.dtype

    def get_dtype(self) -> str:
        return f"torch.{self._dtype}"


def weight_transfer(run: RunDir, recipe: Recipe, policy_url: str, device: str) -> RecordedSync | FullStreamSync:
    """What the recipe asks for."""
    if recipe.weight_sync.mode == "full":
        return FullStreamSync(run, recipe, policy_url)
    return RecordedSync(run, recipe, policy_url, device=device)
