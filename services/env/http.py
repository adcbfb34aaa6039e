"""ASGI and engine-side parts of the two servers that OpenEnv leaves to its host."""

from __future__ import annotations

import asyncio
import functools
import json as json_
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import orjson
from openenv.core.harness.capture.server import UpstreamPool
from openenv.core.harness.capture.sessions import extract_api_key
from openenv.core.harness.capture.upstream import InferenceClient, auth_headers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.env import model_call

MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Of one model call, and of all that a session has in flight; a long conversation is below 2 MB."""
MAX_CALLS = 4
"""Of one session at a time; OpenCode, without sub-agents and titles, makes one."""


PATH = "/v1/chat/completions"


class DataPlane:
    """Only what an agent needs of the capture proxy: model calls with a session's key, and the liveness probe.

    OpenEnv's admin routes ask for a key. In this port they do not exist: the rollouts use the registry in process.
    Model calls go straight to OpenEnv's handler: FastAPI's layers around it have nothing to do for this one route, and
    with them, and an answer in four writes, a call cost a third more.

    That handler parses the body before it looks at the key, and JSON takes many times its size in memory. So the key is
    asked for first, and what a session has in flight is bounded. What it then gets is a call that was built here.
    """

    def __init__(self, app: Starlette) -> None:
        """Raises: RuntimeError: the application has no handler of model calls where OpenEnv's has it."""
        self._app = app
        self._model_call = _handler(app)
        self._inflight: dict[str, list[int]] = {}
        """Session -> bytes of each of its calls that are open. Used on the server's event loop only."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, self._closing(send))
        elif (refusal := _refusal(scope)) is not None:
            await refusal(scope, receive, send)
        elif scope["method"] == "GET":
            await self._app(scope, receive, send)
        else:
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        key = extract_api_key(dict(request.headers))
        if key is None or self._app.state.registry.get(key) is None:
            await _error(401, "unknown API key; a rollout's key ends with its session")(scope, receive, send)
            return
        size, sizes = int(request.headers["content-length"]), self._inflight.setdefault(key, [])
        if len(sizes) >= MAX_CALLS or sum(sizes) + size > MAX_REQUEST_BYTES:
            allowed = f"{MAX_CALLS} calls and {MAX_REQUEST_BYTES} bytes"
            await _error(429, f"this session has {len(sizes)} calls open; allowed: {allowed}")(scope, receive, send)
            return
        sizes.append(size)
        try:
            await (await self._answer(request, key))(scope, receive, send)
        finally:
            sizes.remove(size)
            if not sizes:
                del self._inflight[key]

    async def _answer(self, request: Request, key: str) -> Response:
        try:
            call = model_call.build(await request.body(), self._app.state.max_output_tokens)
        except model_call.MalformedCallError as error:
            return _error(400, str(error))
        return await in_one_piece(await self._model_call(PATH.lstrip("/"), BuiltRequest(call, key)))

    def _closing(self, send: Send) -> Send:
        """Close the connections to engines when the server ends, on the loop that they belong to; OpenEnv does not."""

        async def closing(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._app.state.upstreams.aclose()
            await send(message)

        return closing


class BuiltRequest(Request):
    """The call that was built, as OpenEnv's handler reads a request: no header or query of the agent's is in it."""

    def __init__(self, call: model_call.ModelCall, key: str) -> None:
        headers = [(b"x-api-key", key.encode("latin-1"))]
        super().__init__({"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers})
        self._call = call

    async def json(self) -> Any:
        return self._call


def _handler(app: Starlette) -> Callable[[str, Request], Awaitable[Response]]:
    for route in app.routes:
        if isinstance(route, Route) and route.path == "/{path:path}" and "POST" in (route.methods or ()):
            return route.endpoint
    raise RuntimeError("this OpenEnv has no handler of model calls at /{path:path}; services.env.http calls it")


async def in_one_piece(response: Response) -> Response:
    """A streamed answer that is complete already, which OpenEnv's are unless the engine took long, as one body.

    One that OpenEnv keeps alive while the engine works is another class, and stays a stream.
    """
    if type(response) is not StreamingResponse:
        return response
    parts = [part.encode() if isinstance(part, str) else bytes(part) async for part in response.body_iterator]
    return Response(b"".join(parts), response.status_code, dict(response.headers))


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    call = (scope["method"], scope["path"])
    if call == ("GET", "/health"):
        return None
    if call != ("POST", PATH):
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
    client, one an engine, holds back all calls but 100: httpx's default, less than rollouts may be in flight. And it
    takes advice out of an engine's error messages ("set X to 'Y'"), for all later calls of all sessions. Those messages
    repeat what a caller wrote, so it would be any sandbox's advice: here a call that is refused is refused.
    """

    async def resolve(self, upstream: Any) -> Any:
        client, level = await super().resolve(upstream)
        client.param_fixes = ()  # nothing can be added to it
        client._post = client._post_with_retries  # and nothing is: _post is what asks for advice
        if level != "tokens":
            self.forget(upstream)
        elif client._client is None:
            client._client = engine_client(client)
        return client, level

    async def aclose(self) -> None:
        with self._lock:
            clients = [client for client, _ in self._by_engine.values()]
        for client in clients:
            await client.aclose()


def engine_client(client: InferenceClient) -> Any:
    """Connections of OpenEnv's client to its engine, as many as there are calls."""
    return EngineConnections(
        client.base_url,
        auth_headers(client.api_key, client.auth_header),
        read_s=client._LIVENESS_TIMEOUT_S,
        connect_s=client._CONNECT_TIMEOUT_S,
    )


class EngineConnections:
    """What OpenEnv's client uses of httpx's, over aiohttp and orjson.

    An answer carries the ids of the whole prompt, 10,000 of them in a first call; aiohttp's parser is C, and its pool
    does not look at every connection for each call.
    """

    is_closed = False

    def __init__(
        self, base_url: str, headers: dict[str, str], *, read_s: float = 900.0, connect_s: float = 30.0
    ) -> None:
        self._base_url = base_url
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=read_s, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> httpx.Response:
        return await self._request("GET", path, None, {})

    async def post(self, path: str, *, json: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """Raises: httpx.RequestError: no whole answer came."""
        return await self._request("POST", path, _dumps(json), {**JSON_HEADERS, **(headers or {})})

    async def _request(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> httpx.Response:
        if self._session is None:  # here, on the event loop that it belongs to
            # vLLM closes a connection that was idle for 5 s; a call that is sent just then would be lost.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # httpx's answer does it
            )
        url = self._base_url + path
        call = self._session.request(method, url, headers=headers, data=content, allow_redirects=False)
        try:
            async with call as answer:
                body = await answer.read()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"{url} did not answer in time") from error
        except aiohttp.ClientError as error:
            raise httpx.NetworkError(str(error) or type(error).__name__) from error
        response = httpx.Response(answer.status, headers=answer.raw_headers, content=body)
        response.json = functools.partial(_loads, response)  # type: ignore[method-assign]
        return response

    async def aclose(self) -> None:
        self.is_closed = True
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
