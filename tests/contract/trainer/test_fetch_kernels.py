"""The build step that fetches TRL's FlashAttention kernel: without a Hub the image has none, and the build says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers.integrations.hub_kernels import get_attn_kernel_version

from services.trainer.attention import FLASH

PROJECT = Path(__file__).parents[3] / "images/trainer"


class Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def refusing_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fetch(endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "fetch_kernels.py"), str(PROJECT), str(cache)]
    environment = {**os.environ, "HF_ENDPOINT": endpoint}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("hub", ["away", "refusing"])
def test_hub_that_gives_nothing_leaves_no_kernel_and_no_error(hub: str, refusing_hub: str, tmp_path: Path):
    endpoint = refusing_hub if hub == "refusing" else "http://127.0.0.1:9"
    done = fetch(endpoint, tmp_path / "kernels")
    assert done.returncode == 0, done.stderr
    assert f"{endpoint} does not answer" in done.stdout
    assert "the image has no Hub kernel" in done.stdout
    assert not (tmp_path / "kernels").exists()


def test_version_that_is_fetched_is_the_one_that_transformers_asks_for():
    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["kernels"]["dependencies"]
    assert wanted == {FLASH: get_attn_kernel_version(FLASH)}
