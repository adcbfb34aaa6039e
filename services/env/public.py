"""The capture proxy behind a public address: mounted below a prefix, and asked from outside before anybody needs it.

In a Hugging Face Job sandboxes reach env through the Jobs proxy, which strips ``Authorization`` and serves one port to
everybody who knows its name. So that port has the data plane and nothing else: the control plane stays on loopback.
"""

from __future__ import annotations

import hmac

import httpx
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from services.common.errors import NotReadyError

PREFIX = "/capture"
"""OpenEnv's own place for the proxy where it has no port to itself."""
REQUEST_TIMEOUT_S = 15.0
PREFLIGHT_LIMIT_S = 180.0
"""A proxy may know a new Job only after a while."""


class Mounted:
    """An application below ``PREFIX``; elsewhere there is nothing. ``/health`` says whether x-api-key was ``key``."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if scope["type"] != "http" or not path.startswith(PREFIX + "/"):
            await PlainTextResponse("not found", status_code=404)(scope, receive, send)
        elif (scope["method"], path) == ("GET", f"{PREFIX}/health"):
            sent = dict(scope["headers"]).get(b"x-api-key", b"")
            answer = JSONResponse({"status": "ok", "key": hmac.compare_digest(sent, self._key)})
            await answer(scope, receive, send)
        else:
            inner = path.removeprefix(PREFIX)
            await self._app({**scope, "path": inner, "raw_path": inner.encode()}, receive, send)


class _NotYet(Exception):
    """The address does not answer as it should; it may, a moment later."""


def preflight(url: str, key: str, limit_s: float = PREFLIGHT_LIMIT_S) -> None:
    """Ask the proxy's health as a sandbox calls it: at its public address, with x-api-key.

    Args: url: of the proxy, ``https://<job>--8000.hf.jobs/capture``. key: the one that ``Mounted`` was given.
    Raises: NotReadyError: what came instead, and what to do.
    """
    with httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(_NotYet),
                stop=stop_after_delay(limit_s),
                wait=wait_exponential(multiplier=0.5, max=10),
                reraise=True,
            ):
                with attempt:
                    _ask(client, f"{url}/health", key)
        except _NotYet as problem:
            raise NotReadyError(f"sandboxes would not reach the capture proxy: {problem}") from None


def _ask(client: httpx.Client, url: str, key: str) -> None:
    try:
        response = client.get(url, headers={"x-api-key": key})
    except httpx.HTTPError as error:
        raise _NotYet(f"GET {url} got no answer ({error or type(error).__name__}); is the port exposed?") from None
    if response.status_code in (401, 403) or response.is_redirect:
        raise _NotYet(
            f"GET {url} was answered with {response.status_code}: the port is exposed, but not to everybody; start the "
            "Job with expose_public=[8000]"
        )
    try:
        value = response.json()
    except ValueError:
        value = None
    if response.status_code != 200 or not isinstance(value, dict) or "key" not in value:
        raise _NotYet(f"GET {url} was answered with {response.status_code} by another server than this one")
    if value["key"] is not True:
        raise _NotYet(f"GET {url} arrived without its x-api-key, or at another run's env; no session key would arrive")
