"""The capture proxy behind a public address: what is there, and what the preflight says of a proxy in the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.common import recipe
from services.common.errors import NotReadyError
from services.env.app import Places, Server, bind
from services.env.http import DataPlane, FreshUpstreamPool
from services.env.public import Mounted, preflight
from tests.fakes import jobs_proxy

ROOT = Path(__file__).resolve().parents[3]
KEY = "key-of-this-process"
CALL = {"messages": [{"role": "user", "content": "hi"}]}


async def echo(path: str, request: Request) -> JSONResponse:
    return JSONResponse({"path": path, "key": request.headers.get("x-api-key")})


class Everybody:
    """In place of OpenEnv's registry: each key has a session."""

    def get(self, key: str) -> str:
        return key


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An application in place of OpenEnv's, with every route, behind ours."""
    inner = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "DELETE"])])
    inner.state.registry = Everybody()
    inner.state.max_output_tokens = 64
    inner.state.upstreams = FreshUpstreamPool(default_client=None, default_level="text")
    listener = bind("127.0.0.1", 0)
    running = Server("public", Mounted(DataPlane(inner), KEY), listener)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.ask_to_stop()
    running.join()


@pytest.fixture
def proxy(server: str) -> Iterator[Any]:
    """A FAKE Jobs proxy; call it with the headers that it strips too."""
    started = []

    def start(*stripped: str, target: str = server) -> str:
        handler = type("Bound", (jobs_proxy.Handler,), {"target": target, "stripped": {"authorization", *stripped}})
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        started.append(proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{proxy.server_address[1]}/capture"

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def test_model_calls_and_health_are_there_and_nothing_else(server: str) -> None:
    with httpx.Client(base_url=server) as client:
        called = client.post("/capture/v1/chat/completions", json=CALL, headers={"x-api-key": "s1"})
        assert called.json() == {"path": "v1/chat/completions", "key": "s1"}
        assert client.get("/capture/health", headers={"x-api-key": KEY}).json() == {"status": "ok", "key": True}
        assert client.get("/capture/health", headers={"x-api-key": "other"}).json() == {"status": "ok", "key": False}
        for path in ("/", "/health", "/capture", "/capture/sessions", "/capture/v1/models", "/v1/chat/completions",
                     "/harbor_env/splits", "/ws", "/captured/health"):  # fmt: skip
            assert client.get(path).status_code == 404, path
        assert client.post("/v1/chat/completions", json={}).status_code == 404
        assert client.delete("/capture/sessions/s1").status_code == 404


def test_preflight_passes_through_a_proxy_that_strips_authorization(proxy: Any) -> None:
    preflight(proxy(), KEY, limit_s=5)


def test_preflight_names_a_proxy_that_strips_the_key(proxy: Any) -> None:
    with pytest.raises(NotReadyError, match="arrived without its x-api-key"):
        preflight(proxy("x-api-key"), KEY, limit_s=1)


def test_preflight_names_another_server_in_our_place(proxy: Any, server: str) -> None:
    with pytest.raises(NotReadyError, match="answered with 404 by another server"):
        preflight(f"{server}/elsewhere", KEY, limit_s=1)


def test_preflight_names_a_port_that_is_not_exposed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotReadyError, match=r"got no answer .* is the port exposed"):
        preflight(f"http://127.0.0.1:{port}/capture", KEY, limit_s=1)


def test_a_job_s_space_host_puts_the_capture_proxy_on_the_public_port(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = recipe.load(ROOT / "data/recipes/smoke.toml")
    for name, value in {"TASKS_DIR": "/tasks", "SANDBOX_NETWORK": "s", "CAPTURE_HOST": "0.0.0.0"}.items():
        monkeypatch.setenv(name, value)
    inside = Places.from_environment(cfg)
    assert (inside.capture_url, inside.capture_port, inside.is_public) == ("http://0.0.0.0:8101", 8101, False)
    monkeypatch.setenv("SPACE_HOST", "job1--8000.hf.jobs")
    outside = Places.from_environment(cfg)
    assert outside.capture_url == "https://job1--8000.hf.jobs/capture"
    assert (outside.capture_port, outside.is_public) == (8000, True)
