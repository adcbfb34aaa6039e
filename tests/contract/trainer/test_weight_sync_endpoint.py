"""``POST /weight_sync/apply``: the order of its calls on vLLM's engine client, and what it leaves when one fails.

The engine here is a FAKE that notes the calls; test_weight_sync_vllm.py drives the real one.
"""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, Gauge
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.v1.engine.async_llm import AsyncLLM

from services.weight_sync import endpoint, plugin
from services.weight_sync.endpoint import ApplyRequest, WeightSyncEndpoint
from services.weight_sync.worker import WeightSyncWorker


class FakeEngine:
    """Two workers, of which the second has the factors after ``late`` questions."""

    def __init__(self, late: int = 0, failing: str = "") -> None:
        self.calls: list[str] = []
        self._late, self._failing = late, failing

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._failing:
            raise RuntimeError(f"{name} failed")

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep"), "anything else frees memory or ends requests"
        self._called("pause")

    async def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self._called("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests and reset_connector
        self._called("reset")
        return self._failing != "reset quietly"

    async def update_weight_version(self, new_version: str) -> None:
        self._called(f"version {new_version}")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert callable(getattr(WeightSyncWorker, method))
        self._called(method.removeprefix("weight_sync_"))
        if method == "weight_sync_staged":
            self._late -= 1
            return [True, self._late < 0]
        return [{"merge_s": 0.25}, {"merge_s": 0.5}]


def apply(engine: FakeEngine, **options: Any) -> dict[str, Any]:
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)))
    return asyncio.run(endpoint.apply(ApplyRequest(**{"version": 3, "timeout_s": 5.0, **options}), request))


def test_the_server_stands_still_from_pause_to_resume_and_drops_its_caches_while_the_gpu_merges():
    engine = FakeEngine()
    found = apply(engine)
    assert engine.calls == ["staged", "pause", "begin_merge", "reset", "end_merge", "version 3", "resume"]
    assert found["merge_s"] == 0.5, "of the slowest worker"
    assert found["paused_s"] == pytest.approx(found["drain_s"] + found["reset_s"] + found["end_s"])


def test_it_says_how_many_requests_it_puts_back():
    gauge = Gauge(endpoint.RUNNING, "As vLLM's own, an engine each.", ["engine"])
    try:
        gauge.labels("0").set(3)
        gauge.labels("1").set(2)
        assert apply(FakeEngine())["put_back"] == 5
    finally:
        REGISTRY.unregister(gauge)
    assert apply(FakeEngine())["put_back"] == 0


def test_nothing_is_paused_before_all_workers_have_the_factors():
    engine = FakeEngine(late=2)
    apply(engine)
    assert engine.calls[:4] == ["staged", "staged", "staged", "pause"]


def test_factors_that_never_come_are_an_error_and_pause_nothing():
    engine = FakeEngine(late=10**9)
    with pytest.raises(TimeoutError, match=r"factors of version 3 were not complete after 0\.05 s"):
        apply(engine, timeout_s=0.05)
    assert set(engine.calls) == {"staged"}


@pytest.mark.parametrize("failing", ["pause", "begin_merge", "reset", "reset quietly", "end_merge", "version 3"])
def test_whatever_fails_the_server_goes_on(failing):
    engine = FakeEngine(failing=failing)
    with pytest.raises(RuntimeError):
        apply(engine)
    assert engine.calls[-1] == "resume"


def test_a_caller_that_paused_the_server_resumes_it_itself():
    engine = FakeEngine()
    apply(engine, resume=False)
    assert "resume" not in engine.calls


# -- what it relies on in vLLM 0.31 ----------------------------------------------------------------------------


def test_vllm_takes_the_plugin_and_serves_its_route():
    found = WeightSyncEndpoint()
    assert isinstance(found, EndpointPlugin) and found.name == plugin.PLUGIN
    app = FastAPI()
    found.attach_router(app)
    assert app.url_path_for("apply") == "/weight_sync/apply"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("sleep", {"level", "mode"}),
        ("wake_up", {"tags"}),
        ("reset_prefix_cache", {"reset_running_requests", "reset_connector"}),
        ("collective_rpc", {"method", "args"}),
        ("update_weight_version", {"new_version"}),
    ],
)
def test_the_engine_clients_methods_that_it_calls(method, arguments):
    assert arguments <= set(inspect.signature(getattr(AsyncLLM, method)).parameters)


def test_vllms_own_pause_still_sleeps():
    """Why ``sleep`` of level 0 is used. Should it stop, ``pause_generation`` is the plainer call."""
    assert "asyncio.sleep(0.02)" in inspect.getsource(AsyncLLM.pause_generation)
