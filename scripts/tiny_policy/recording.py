"""Record what OpenCode sends to its model: run the real program once against a server that answers by rote.

Everything is permitted in the recorded configuration, so that the recording holds every tool; what the stack's own
configuration denies is taken out again by ``prompts``. Variable parts become marks.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.tiny_policy import prompts
from services.common.errors import NotReadyError

TIMEOUT_S = 120
PROVIDER, MODEL = "intercepted", "policy"
QUESTION = "Write the number of lines of a.csv to answer.txt."
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "OPENCODE_FAKE_VCS": "git",  # as Harbor's agent sets it
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_PURE": "1",
}


def record(opencode: Path) -> dict[str, Any]:
    """One session of ``opencode``. Raises: NotReadyError: it does not run, or sent no agent and no title request."""
    version = run([opencode, "--version"], Path("/"))
    with tempfile.TemporaryDirectory() as home, answering() as (url, bodies):
        config = Path(home, ".config/opencode/opencode.json")
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps(configuration(url)), encoding="utf-8")
        workdir = Path(home, "workdir")
        workdir.mkdir()
        run([opencode, f"--model={PROVIDER}/{MODEL}", "run", "--format=json", "--", QUESTION], workdir, home)
        return marked(bodies, version, workdir)


def configuration(url: str) -> dict[str, Any]:
    model = {"name": MODEL, "limit": {"context": 32768, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "recorder",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {MODEL: model},
    }
    return {"provider": {PROVIDER: provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}


def run(command: list[Any], workdir: Path, home: str = "/nonexistent") -> str:
    environment = {**ENVIRONMENT, "HOME": home}
    try:
        return subprocess.run(
            command, cwd=workdir, env=environment, check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise NotReadyError(f"{command[0]} did not run: {error}; --opencode must name the opencode program") from None


def marked(bodies: list[dict[str, Any]], version: str, workdir: Path) -> dict[str, Any]:
    """The recording from the request bodies."""
    agent = next((body for body in bodies if body.get("tools")), None)
    title = next((body for body in bodies if not body.get("tools")), None)
    if agent is None or title is None:
        raise NotReadyError(f"{len(bodies)} requests recorded; expected one with tools and one, for a title, without")
    system = agent["messages"][0]["content"].replace(str(workdir), prompts.WORKDIR)
    system = re.sub(r"(Today's date: ).*", rf"\g<1>{prompts.DATE}", system)
    question = prompts.user_text(QUESTION)
    return {
        "opencode_version": version,
        "agent": {"system": system, "tools": agent["tools"]},
        "title": [
            {**message, "content": message["content"].replace(question, prompts.INSTRUCTION)}
            for message in title["messages"]
        ],
    }


@contextmanager
def answering() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that ends every conversation at once; gives its URL and the list that fills with request bodies."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            chunk = {"id": "0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
            for delta, reason in (({"role": "assistant", "content": "Done."}, None), ({}, "stop")):
                choice = {"index": 0, "delta": delta, "finish_reason": reason}
                self.wfile.write(f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
