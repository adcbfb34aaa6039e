"""How the capture proxy talks to the engine and to sandboxes: nothing waits that need not, and odd content survives."""

import asyncio
import contextlib
import gzip
import json
import math
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from openenv.core.harness.capture.sessions import Upstream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from services.common.recipe import Recipe
from services.env.app import Server, bind, capture_service
from services.env.http import DataPlane, EngineConnections, FreshUpstreamPool
from tests.contract.env.test_servers import PLACES
from tests.fakes import policy

AT_ONCE = 128


class HoldsBack(policy.Handler):
    """The FAKE policy, which answers a call with tools when ``AT_ONCE`` of them have arrived."""

    barrier = threading.Barrier(AT_ONCE)

    def _reply(self, value: Any) -> None:
        if "choices" in value and value["choices"][0]["message"]["content"] == "hold":
            self.barrier.wait(timeout=60)
        super()._reply(value)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    real = policy.completion

    def completion(request: dict[str, Any], commands: list[str], fault: str = "") -> dict[str, Any]:
        response = real(request, commands, fault)
        if request["messages"][-1]["content"] == "hold":
            response["choices"][0]["message"]["content"] = "hold"
        return response

    monkeypatch.setattr(policy, "completion", completion)
    server = ThreadingHTTPServer(("127.0.0.1", 0), HoldsBack)
    server.request_queue_size = AT_ONCE
    server.socket.listen(AT_ONCE)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def serving(answer: Callable[[Request], Awaitable[Response]]) -> Iterator[str]:
    """A real HTTP server in an engine's place. Yields: its URL."""
    listener = bind("127.0.0.1", 0)
    server = Server("engine", Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]), listener)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.ask_to_stop()
    server.join()


def ask(content: str) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": content}]}


async def client_of(url: str) -> Any:
    client, level = await FreshUpstreamPool(default_client=None, default_level="text").resolve(
        Upstream(llm_url=url, model="policy")
    )
    assert level == "tokens"
    return client


def test_as_many_calls_are_at_the_engine_as_rollouts_make(engine: str) -> None:
    """More than httpx's 100: each call here is answered only when all have arrived."""

    async def calls() -> list[dict[str, Any]]:
        client = await client_of(engine)
        return await asyncio.gather(*(client.completion(ask("hold")) for _ in range(AT_ONCE)))

    answers = asyncio.run(calls())
    assert len(answers) == AT_ONCE
    assert all(answer["prompt_token_ids"] for answer in answers)


def test_connections_end_with_the_server(engine: str, cfg: Recipe) -> None:
    service = capture_service(cfg, PLACES)
    pool = service.capture.app.state.upstreams
    with TestClient(DataPlane(service.capture.app)) as client:
        resolved, _ = client.portal.call(pool.resolve, Upstream(llm_url=engine, model="policy"))
        client.portal.call(resolved.completion, ask("open a connection"))
        session = resolved._client._session
        assert not session.closed
    assert session.closed


def test_half_a_character_and_a_number_that_is_none_pass_as_they_did() -> None:
    """What orjson refuses and the standard library takes: a model samples anything."""
    seen: list[Any] = []

    async def engine(request: Request) -> Response:
        seen.append(json.loads(await request.body()))
        return Response(b'{"text": "\\ud800", "logprob": NaN, "ids": [1, 65535]}')

    async def call(url: str) -> Any:
        connections = EngineConnections(url, {})
        try:
            return (await connections.post("/v1", json={"content": "half \ud800"})).json()
        finally:
            await connections.aclose()

    with serving(engine) as url:
        answer = asyncio.run(call(url))
    assert seen == [{"content": "half \ud800"}]
    assert (answer["text"], answer["ids"]) == ("\ud800", [1, 65535])
    assert math.isnan(answer["logprob"])


def test_errors_of_a_connection_are_those_that_openenvs_client_knows() -> None:
    async def slow(_request: Request) -> Response:
        await asyncio.sleep(5)
        return Response(b"{}")

    async def post(url: str) -> None:
        connections = EngineConnections(url, {}, read_s=0.2)
        try:
            await connections.post("/v1", json={})
        finally:
            await connections.aclose()

    with serving(slow) as url, pytest.raises(httpx.ReadTimeout, match="did not answer in time"):
        asyncio.run(post(url))
    with pytest.raises(httpx.NetworkError, match="Cannot connect"):
        asyncio.run(post("http://127.0.0.1:9"))


def test_an_answer_is_read_whatever_its_encoding_and_status() -> None:
    async def engine(request: Request) -> Response:
        return Response(
            gzip.compress(json.dumps({"key": request.headers["authorization"]}).encode()),
            503,
            {"content-encoding": "gzip", "retry-after": "7"},
        )

    async def get(url: str) -> httpx.Response:
        connections = EngineConnections(url, {"Authorization": "Bearer of-the-engine"})
        try:
            return await connections.get("/models")
        finally:
            await connections.aclose()

    with serving(engine) as url:
        answer = asyncio.run(get(url))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json() == {"key": "Bearer of-the-engine"}


def test_replies_to_sandboxes_leave_at_once() -> None:
    """Nagle's algorithm is off on what a listener of ours accepts: with it each reply is 40 ms late."""

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket")
            found.set_result(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(on_connection, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await found
            writer.close()
            return option

    assert asyncio.run(accepted()) != 0
