"""OpenEnv's own pages at ``/web`` on the control plane: for people on this machine, to read the run's tasks.

Read only: no rollout, no data set and no token can be given there. Sandboxes do not reach this port, and the host
publishes it on loopback alone. What is left is the browser of a person on that host, which any website can send there:
``ReadOnlyPages`` refuses what a page of another site asks for.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SETTINGS = {
    "ENABLE_WEB_INTERFACE": "true",
    "OPENENV_HARBOR_UI_ROLLOUTS": "false",
    "OPENENV_HARBOR_UI_SERVER_ENDPOINT": "false",
    "OPENENV_HARBOR_UI_VISITOR_ENDPOINTS": "false",
    "OPENENV_HARBOR_UI_PRIVATE_URLS": "false",
    "OPENENV_HARBOR_UI_LOCAL_TOKEN": "false",
    "OPENENV_HARBOR_UI_ADD_DATASETS": "false",
    "OPENENV_HARBOR_RUN_HISTORY": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""OpenEnv reads its pages' settings from the environment, when the page is built and again later."""
CLOSED = ("/web/step", "/web/reset", "/web/state", "/ws/ui")
"""Routes by which OpenEnv's generic page drives an environment, run_rollout among its tools."""


def pages(tasks_dir: Path, suites: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``create_app`` for OpenEnv's Harbor page over the run's suites."""
    from openenv.harbor.ui import harbor_gradio_builder

    os.environ.update(SETTINGS)
    folders = [str(tasks_dir / suite) for suite in suites]

    def build(*_web_interface: Any) -> Any:
        return harbor_gradio_builder(datasets=folders, title="OpenCode RL: tasks of this run")

    return {"gradio_builder": build, "show_default_tab": False}


class ReadOnlyPages:
    """The control plane without the pages' routes that do something, and for no other site's pages.

    Trainer, evaluator and scripts are no browsers: they send no Origin, and pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif is_foreign(scope):
            await _refuse(scope, receive, send, "asked for by another site's page", 403)
        elif scope["path"].rstrip("/") in CLOSED:
            await _refuse(scope, receive, send, "not found", 404)
        else:
            await self._app(scope, receive, send)


def is_foreign(scope: Scope) -> bool:
    """Whether a browser asks for a page that is not ours: it names another origin, or a public name for our address
    (a site that rebinds its name to 127.0.0.1 would count as the same origin)."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    host, origin = headers.get("host", ""), headers.get("origin")
    if _is_public_name(urlsplit(f"//{host}").hostname or ""):
        return True
    changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD", "OPTIONS")
    return changes and origin is not None and urlsplit(origin).netloc != host


def _is_public_name(name: str) -> bool:
    if "." not in name:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


async def _refuse(scope: Scope, receive: Receive, send: Send, reason: str, status: int) -> None:
    if scope["type"] == "http":
        await PlainTextResponse(reason, status_code=status)(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
