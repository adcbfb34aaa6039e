"""What env alone can see and do for others: the engine's view of the run, and a sweep of what nobody uses.

Two routes beside the control plane, for the watchdog: ``GET /state`` for its incident bundles, ``POST /sweep`` after it
stopped a run. Nothing here takes an argument. Sandboxes do not reach this port; ``WithKey`` stands before all of it.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common import control, run_dir
from services.common.run_dir import RunDir
from services.env.docker import DockerError, docker
from services.env.ledger import Ledger
from services.env.sweep import LABEL, PROJECT_LABEL

STACK_PROJECT = "opencode-rl"


class OperatorRoutes:
    """An ASGI application with the two routes in front of it.

    Args: sweep: removes what nobody uses, and returns how many.
    """

    def __init__(self, app: ASGIApp, run: RunDir, sweep: Callable[[], int]) -> None:
        self._app = app
        self._run = run
        self._sweep = sweep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = (scope.get("method"), scope.get("path"))
        if call == ("GET", "/state"):
            answer = JSONResponse(await run_in_threadpool(state, self._run))
        elif call == ("POST", "/sweep"):
            answer = await run_in_threadpool(self._swept)
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)

    def _swept(self) -> JSONResponse:
        try:
            return JSONResponse({"removed": self._sweep()})
        except (DockerError, OSError) as error:
            return JSONResponse({"error": str(error)}, status_code=503)


class WithKey:
    """An ASGI application for callers with the run's key; ``GET /health`` is for all."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "lifespan" or (scope.get("method"), scope["path"]) == ("GET", "/health")
        if is_open or control.is_right(dict(scope["headers"]), self._key):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            text = f"this needs the run's key: user {control.USER}, password from control.key in the run's folder\n"
            headers = {"WWW-Authenticate": 'Basic realm="control.key of the run"'}
            await PlainTextResponse(text, status_code=401, headers=headers)(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "this needs the run's key"})


def state(run: RunDir) -> dict[str, Any]:
    """Containers and networks of the stack and the run's sandboxes, the ledger's open entries, and our own stacks."""
    found: dict[str, Any] = {"at": run_dir.utc_now()}
    for what, kind, label in (
        ("stack", "container", f"{PROJECT_LABEL}={STACK_PROJECT}"),
        ("sandboxes", "container", f"{LABEL}={run.path.name}"),
        ("networks", "network", f"{PROJECT_LABEL}={STACK_PROJECT}"),
    ):
        try:
            found[what] = _listed(kind, label)
        except DockerError as error:
            found[what] = str(error)
    found["ledger_open"] = Ledger(run.ledger).open_projects()
    found["env_stacks"] = stacks()
    return found


def _listed(kind: str, label: str) -> list[dict[str, Any]]:
    extra = ["--all", "--size"] if kind == "container" else []
    out = docker(kind, "ls", *extra, "--no-trunc", "--filter", f"label={label}", "--format", "{{json .}}")
    return [json.loads(line) for line in out.splitlines()]


def stacks() -> dict[str, list[str]]:
    """Thread name -> its stack, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): traceback.format_stack(frame) for ident, frame in sys._current_frames().items()
    }
