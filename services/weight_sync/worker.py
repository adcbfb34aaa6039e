"""``--worker-extension-cls``: methods that vLLM's ``collective_rpc`` calls on every worker.

This seam was chosen over a response field or a file because vLLM offers it for exactly this, it reaches every
tensor- and data-parallel rank, and the answer comes from the process that holds the weights. The engine runs such a
call between two steps of generation.
"""

from __future__ import annotations

from typing import Any


class WeightSyncWorker:
    """Mixed into vLLM's worker class; adds names only, and each is prefixed to clash with none of its own.

    The methods are those of ``LoraFactorsEngine``, which says what they do.
    """

    weight_transfer_engine: Any
    vllm_config: Any

    def weight_sync_stage(self, version: int, layout: dict[str, Any] | None = None) -> None:
        self.weight_transfer_engine.stage(version, layout)

    def weight_sync_staged(self, version: int) -> bool:
        return bool(self.weight_transfer_engine.staged(version))

    def weight_sync_begin_merge(self, version: int) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):  # packing a layer's weight asks for it
            self.weight_transfer_engine.begin_merge(version)

    def weight_sync_end_merge(self) -> dict[str, Any]:
        found: dict[str, Any] = self.weight_transfer_engine.end_merge()
        return found

    def weight_sync_report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.weight_transfer_engine.report()
        return report
