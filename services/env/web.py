"""OpenEnv's own pages at ``/web`` on the control plane: for people on this machine, to read the run's tasks.

Read only: no rollout, no data set and no token can be given there. Sandboxes do not reach this port, and the host
publishes it on loopback alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openenv.harbor.serving import SameOrigin
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
    """The application without the routes that do something, and with the rest for pages of its own only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = SameOrigin(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").rstrip("/") not in CLOSED:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse("not found", status_code=404)(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
