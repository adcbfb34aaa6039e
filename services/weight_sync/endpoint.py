"""``POST /weight_sync/apply``: pause, drop the caches, merge, resume, in one call inside vLLM's API server.

vLLM loads it as an endpoint plugin. From the trainer the same takes four calls, and vLLM's own ``/pause`` sleeps 20 ms
after the engine has stopped. It also means that a trainer that dies in between cannot leave the server paused.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.datastructures import State
from vllm.v1.metrics.prometheus import get_prometheus_registry

POLL_S = 0.002
RUNNING = "vllm:num_requests_running"

router = APIRouter()


class ApplyRequest(BaseModel):
    version: int
    timeout_s: float
    """How long the factors may take to be complete on all workers; generation goes on meanwhile."""
    resume: bool = True
    """False leaves the server paused, for a caller that paused it."""


class WeightSyncEndpoint:
    """vLLM's ``EndpointPlugin``. Its name is also the general plugin's: VLLM_PLUGINS allows both."""

    name = "lora_factor_sync"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Nothing: the route finds the engine where vLLM's own routes do."""


@router.post("/weight_sync/apply")
async def apply(body: ApplyRequest, raw_request: Request) -> dict[str, Any]:
    """Serve the staged version from the next step on. Requests in flight are kept and computed again from their tokens.

    Returns: ``paused_s``, in which no token was sampled, and its parts: ``drain_s`` (the running steps), ``reset_s``
        (vLLM visits every block of its cache; the GPU merges meanwhile), ``end_s`` (what was left of the merge).
        ``merge_s``: the merge of the slowest worker. ``waited_s``: before the pause, for the factors. ``put_back``:
        requests that were running, which vLLM counts as preempted.
    """
    engine = raw_request.app.state.engine_client
    waiting = time.perf_counter()
    await _wait_until_staged(engine, body.version, body.timeout_s)
    put_back = _running()  # takes milliseconds, so before the pause; the last step may still end one of them
    marks = [time.perf_counter()]
    try:
        # Level 0 stops the scheduler and frees nothing; it returns when the running steps are done.
        await engine.sleep(level=0, mode="keep")
        marks.append(time.perf_counter())
        await engine.collective_rpc("weight_sync_begin_merge", args=(body.version,))
        # Also puts the running requests back: no block, and no state, of the old policy is used by the new one.
        if not await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM could not reset its prefix cache, which may hold blocks of the old policy")
        marks.append(time.perf_counter())
        workers = await engine.collective_rpc("weight_sync_end_merge")
        await engine.update_weight_version(str(body.version))
    finally:
        if body.resume:
            await engine.wake_up(tags=["scheduling"])
    marks.append(time.perf_counter())
    drain_s, reset_s, end_s = (b - a for a, b in itertools.pairwise(marks))
    return {
        "paused_s": marks[-1] - marks[0], "drain_s": drain_s, "reset_s": reset_s, "end_s": end_s,
        "merge_s": max(worker["merge_s"] for worker in workers), "waited_s": marks[0] - waiting,
        "put_back": put_back,
    }  # fmt: skip


def _running() -> int:
    """Requests that ran in the last step, of all engines, by vLLM's own metrics."""
    samples = (sample for metric in get_prometheus_registry().collect() for sample in metric.samples)
    return round(sum(sample.value for sample in samples if sample.name == RUNNING))


async def _wait_until_staged(engine: Any, version: int, timeout_s: float) -> None:
    """Before anything is paused. Raises: what a worker says if the factors will not come; TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not all(await engine.collective_rpc("weight_sync_staged", args=(version,))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the factors of version {version} were not complete after {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
