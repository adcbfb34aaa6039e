"""What the contract tests of the env image share: a recipe, a run, and the fake policy behind a real socket."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common import recipe
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from tests.fakes import policy

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cfg() -> Recipe:
    return recipe.load(ROOT / "data" / "recipes" / "smoke.toml")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "mine")


@pytest.fixture
def environment() -> Iterator[None]:
    """Put the process environment back afterwards."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Start the fake policy; returns its URL. ``fault`` bends what it answers to a call with tools."""
    servers = []

    def start(*commands: str, fault: str = "", port: int = 0) -> str:
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setattr(policy.Handler, "commands", list(commands))
        server = ThreadingHTTPServer(("127.0.0.1", port), policy.Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
