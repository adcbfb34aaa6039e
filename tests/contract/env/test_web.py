"""OpenEnv's pages at ``/web``: there to read, and nothing to start, add or send."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import CallToolAction, CallToolObservation
from openenv.harbor import ui_settings
from openenv.harbor.models import HarborState
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from services.common.recipe import Recipe
from services.env import web
from services.env.rollouts import RolloutEnvironment, Scoreboard
from services.env.suites import load
from tests.contract.env.test_servers import ALLOWED

TASKS = Path(__file__).resolve().parents[3] / "data/tasks"


@pytest.fixture
def client(cfg: Recipe, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    RolloutEnvironment.serve(load(cfg, TASKS), Scoreboard(), Path("/nowhere"), cfg.rollout.outer_timeout_s, ALLOWED)
    app = create_app(
        RolloutEnvironment, CallToolAction, CallToolObservation, state_cls=HarborState, env_name="harbor_env",
        **web.pages(TASKS, [cfg.tasks.train, cfg.tasks.heldout]),
    )  # fmt: skip
    with TestClient(web.ReadOnlyPages(app)) as client:
        yield client


def test_the_page_is_there_and_so_is_the_task_api(client: TestClient, cfg: Recipe) -> None:
    page = client.get("/web/")
    assert page.status_code == 200 and "OpenCode RL: tasks of this run" in page.text
    assert client.get("/harbor_env/splits").json()[0]["name"] == cfg.tasks.train
    assert client.get("/health").status_code == 200


def test_nothing_can_be_started_added_or_sent_from_the_page(client: TestClient) -> None:
    settings = ui_settings.load()
    allowed = {
        name: getattr(settings, name)
        for name in ("rollouts", "server_endpoint", "visitor_endpoints", "private_urls", "local_token", "add_datasets")
    }
    assert allowed == dict.fromkeys(allowed, False)
    assert not settings.run_history


@pytest.mark.parametrize("path", ["/web/step", "/web/reset", "/web/step/", "/web/state"])
def test_routes_that_drive_an_environment_do_not_exist(client: TestClient, path: str) -> None:
    assert client.post(path, json={"action": {}}).status_code == 404
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws/ui"):
        pass


OTHERS = [
    {"Origin": "https://example.org"},
    {"Origin": "null"},
    {"Host": "rebound.example.org:8100", "Origin": "http://rebound.example.org:8100"},
]


@pytest.mark.parametrize("headers", OTHERS, ids=["cross-site", "sandboxed", "rebound"])
def test_another_sites_page_can_neither_use_the_pages_nor_drive_an_environment(
    client: TestClient, headers: dict[str, str]
) -> None:
    for path in ("/web/gradio_api/queue/join", "/harbor_env/task_range", "/reset"):
        assert client.post(path, json={}, headers=headers).status_code == 403
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers=headers):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1:8100", "localhost:8100", "env-control:8100", "[::1]:8100"])
def test_our_own_clients_and_pages_pass(client: TestClient, host: str, cfg: Recipe) -> None:
    body = {"split": cfg.tasks.train, "start": 0, "stop": 1}
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
        assert client.post("/harbor_env/task_range", json=body, headers=headers).status_code == 200
        with client.websocket_connect("/ws", headers=headers) as socket:
            socket.close()
