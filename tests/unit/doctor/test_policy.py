"""The probe of the running policy against a FAKE vLLM, right and wrong in each way that matters."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts.checks import Check
from scripts.doctor import policy
from scripts.doctor.setup import Setup

Broken = Callable[..., Setup]


class FakeVllm(BaseHTTPRequestHandler):
    """FAKE: answers as vLLM does to the probe; ``wrong`` says what it gets wrong."""

    wrong: str = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self._completion(body) if "prompt" in body else self._chat(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["tool_choice"] == "auto" and {tool["type"] for tool in body["tools"]} == {"function"}
        assert "seed" not in body, "ends vLLM's engine on a CPU"
        if self.wrong == "no parser":
            return 400, {"error": '"auto" tool choice requires --enable-auto-tool-choice'}
        if body["messages"][-1]["role"] == "tool":
            return (500, {"error": "template"}) if self.wrong == "follow" else (200, {"choices": [{"message": {}}]})
        call = {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
        if self.wrong == "arguments":
            call["function"]["arguments"] = "{"
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.wrong == "no call":
            message = {"role": "assistant", "content": "I am done.", "tool_calls": []}
        if self.wrong == "raw call":
            message = {"role": "assistant", "content": "<|tool_call_start|>[bash(command='ls')]<|tool_call_end|>"}
        token = "bash" if self.wrong == "text tokens" else "token_id:10"
        logprobs = None if self.wrong == "no logprobs" else {"content": [{"token": token, "logprob": -0.5}]}
        return 200, {"choices": [{"message": message, "logprobs": logprobs}]}

    def _completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = {"token_id:1": -0.1, "token_id:2": -2.4}
        halved = body.get("temperature") == 0.5 and self.wrong != "raw logprobs"
        penalised = "temperature" not in body and self.wrong == "penalty"
        if halved or penalised:
            found = {"token_id:1": -0.01, "token_id:2": -4.6}
        return 200, {"choices": [{"logprobs": {"top_logprobs": [found]}}]}


@contextmanager
def fake_policy(wrong: str) -> Iterator[str]:
    handler = type("Handler", (FakeVllm,), {"wrong": wrong})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(broken: Broken, wrong: str) -> dict[str, Check]:
    with fake_policy(wrong) as url:
        found = policy.checks(policy.ask(broken(environment={"POLICY_URL": url})))
    return {check.name: check for check in found}


def test_a_right_policy_is_ok(broken: Broken) -> None:
    found = asked(broken, "")
    assert {name: check.state for name, check in found.items()} == dict.fromkeys(policy.NAMES, "ok")
    assert "bash" in found["policy-tool-call"].found


@pytest.mark.parametrize(
    ("wrong", "name", "state", "words"),
    [
        ("no parser", "policy-tool-call", "fail", "400"),
        ("raw call", "policy-tool-call", "fail", "came back as text"),
        ("arguments", "policy-tool-call", "fail", "no JSON object"),
        ("follow", "policy-tool-call", "fail", "answered with 500"),
        ("no call", "policy-tool-call", "warn", "not proved"),
        ("text tokens", "policy-tokens", "fail", "'bash'"),
        ("no logprobs", "policy-tokens", "fail", "no log-probabilities"),
        ("raw logprobs", "policy-logprobs", "fail", "before the sampling parameters"),
        ("penalty", "policy-logprobs", "fail", "2.2 nats"),
    ],
)
def test_a_wrong_policy_is_told_by_what_it_does(broken: Broken, wrong: str, name: str, state: str, words: str) -> None:
    check = asked(broken, wrong)[name]
    assert check.state == state and words in check.found, check


def test_without_a_running_policy_the_checks_are_skipped_with_the_reason(setup: Setup) -> None:
    found = policy.checks(policy.ask(setup))
    assert {(check.state, check.found) for check in found} == {("skipped", "policy is not running")}


def test_a_policy_that_died_is_a_failure_and_not_skipped(broken: Broken) -> None:
    found = policy.checks(policy.ask(broken(environment={"POLICY_URL": "http://127.0.0.1:9"})))
    assert [check.state for check in found] == ["fail", "skipped", "fail"]


def test_the_request_is_opencodes_own_with_the_tools_that_a_rollout_has(setup: Setup) -> None:
    request = policy.opencode_request(setup)
    names = {tool["function"]["name"] for tool in request["tools"]}
    assert {"bash", "read", "write"} <= names and not names & set(policy.DENIED_TOOLS)
    assert request["messages"][0]["content"].startswith("You are opencode")
