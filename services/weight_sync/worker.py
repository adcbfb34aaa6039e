"""``--worker-extension-cls``: methods that vLLM's ``/collective_rpc`` can call on every worker.

This seam was chosen over a response field or a file because vLLM offers it for exactly this, it reaches every
tensor- and data-parallel rank, and the answer comes from the process that holds the weights.
"""

from __future__ import annotations

from typing import Any


class WeightSyncWorker:
    """Mixed into vLLM's worker class; adds names only, and each is prefixed to clash with none of its own."""

    weight_transfer_engine: Any

    def weight_sync_report(self) -> dict[str, Any]:
        """See ``LoraFactorsEngine.report``."""
        report: dict[str, Any] = self.weight_transfer_engine.report()
        return report
