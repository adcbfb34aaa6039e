"""ASGI and engine-side parts of the two servers that OpenEnv leaves to its host."""

from __future__ import annotations

import asyncio
import functools
import json as json_
from typing import Any

import aiohttp
import httpx
import orjson
from openenv.core.harness.capture.server import UpstreamPool
from openenv.core.harness.capture.upstream import InferenceClient, auth_headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

MAX_REQUEST_BYTES = 64 * 1024 * 1024
"""Of one model call; a long conversation is below 2 MB."""


class DataPlane:
    """Only what an agent needs of the capture proxy: model calls with a session's key, and the liveness probe.

    OpenEnv's admin routes ask for a key. In this port they do not exist: the rollouts use the registry in process.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := _refusal(scope)) is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    call = (scope["method"], scope["path"])
    if call == ("GET", "/health"):
        return None
    if call != ("POST", "/v1/chat/completions"):
        return PlainTextResponse("not found", status_code=404)
    length = dict(scope["headers"]).get(b"content-length", b"")
    if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
        return PlainTextResponse(f"content-length is needed, at most {MAX_REQUEST_BYTES}", status_code=413)
    return None


class CancelOnDisconnect:
    """End a websocket's work when its client is gone.

    OpenEnv looks at the socket between two messages only, so the rollouts of a killed trainer would go on, hold
    their sandboxes, and count against the concurrency that its successor needs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        messages: asyncio.Queue[Message] = asyncio.Queue()
        session = asyncio.ensure_future(self._app(scope, messages.get, send))

        async def pump() -> None:
            while True:
                message = await receive()
                await messages.put(message)
                if message["type"] == "websocket.disconnect":
                    # An idle session reads the message and ends by itself; a busy one does not come to read it.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    if not messages.empty():
                        session.cancel()
                    return

        pumping = asyncio.ensure_future(pump())
        try:
            await asyncio.wait([session])
        finally:
            pumping.cancel()
            session.cancel()
        if not session.cancelled():
            session.result()


class FreshUpstreamPool(UpstreamPool):
    """OpenEnv's pool of probed engines, which forgets an engine that did not answer with tokens.

    OpenEnv keeps the first verdict for good: one probe while the policy restarts, and no later rollout can train. Its
    client, one an engine, holds back all calls but 100: httpx's default, less than rollouts may be in flight.
    """

    async def resolve(self, upstream: Any) -> Any:
        client, level = await super().resolve(upstream)
        if level != "tokens":
            self.forget(upstream)
        elif client._client is None:
            client._client = engine_client(client)
        return client, level


def engine_client(client: InferenceClient) -> EngineConnections:
    """Connections of OpenEnv's client to its engine, as many as there are calls."""
    return EngineConnections(
        base_url=client.base_url,
        headers=auth_headers(client.api_key, client.auth_header),
        transport=EngineTransport(read_s=client._LIVENESS_TIMEOUT_S, connect_s=client._CONNECT_TIMEOUT_S),
    )


class EngineConnections(httpx.AsyncClient):
    """httpx with orjson: an answer carries the ids of the whole prompt, 10,000 of them in a first call."""

    @override
    async def post(self, url: Any, *, json: Any = None, **kwargs: Any) -> httpx.Response:
        response = await super().post(url, content=_dumps(json), headers=JSON_HEADERS, **kwargs)
        response.json = functools.partial(_loads, response)  # type: ignore[method-assign]
        return response


class EngineTransport(httpx.AsyncBaseTransport):
    """httpx's requests over aiohttp: its parser is C, and its pool does not look at every connection for each call."""

    def __init__(self, read_s: float, connect_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(sock_read=read_s, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:  # here, on the event loop that it belongs to
            # vLLM closes a connection that was idle for 5 s; a call that is sent just then would be lost.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, auto_decompress=False)
        try:
            async with self._session.request(
                request.method, str(request.url), headers=request.headers, data=request.content, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"{request.url} did not answer in time", request=request) from error
        except aiohttp.ClientError as error:
            raise httpx.NetworkError(str(error) or type(error).__name__, request=request) from error
        return httpx.Response(answer.status, headers=answer.raw_headers, content=content, request=request)

    @override
    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


JSON_HEADERS = {"content-type": "application/json"}


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, which the standard library lets through
        return json_.dumps(value).encode()


def _loads(response: httpx.Response) -> Any:
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:  # NaN or Infinity, likewise
        return json_.loads(response.content)
