"""Entry point of group ``vllm.general_plugins``: vLLM calls ``register`` in every process that it starts.

``endpoint`` is the entry point of group ``vllm.endpoint_plugins``.
"""

from __future__ import annotations

import contextlib

PLUGIN = "lora_factor_sync"
"""Name of both entry points (images/policy/distributions/plugin), for ``VLLM_PLUGINS``."""

ENGINE = "lora_factors"
"""Name of the engine in ``--weight-transfer-config '{"backend": ...}'``."""

WORKER_EXTENSION = "services.weight_sync.worker.WeightSyncWorker"
"""For ``--worker-extension-cls``: what ``/collective_rpc`` can ask the workers."""


def register() -> None:
    """Add our engine to vLLM's registry, and on the CPU build the layer that LFM2 needs there.

    A second call changes nothing: vLLM may load plugins more than once in a process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    with contextlib.suppress(ValueError):  # "already registered"
        WeightTransferEngineFactory.register_engine(ENGINE, "services.weight_sync.engine", "LoraFactorsEngine")
    if current_platform.is_cpu():
        from services.weight_sync import short_conv

        short_conv.register()
