"""What of an agent's request reaches the engine: a call that was built here, with real OpenEnv in between."""

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from openenv.core.harness.capture.sessions import Session, Upstream
from openenv.harbor.serving import HarborService
from starlette.testclient import TestClient

from services.common.recipe import Recipe
from services.env import app, model_call
from services.env.http import DataPlane
from tests.contract.env.test_servers import PLACES
from tests.fakes import policy

PATH = "/v1/chat/completions"
CAP = 64
TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "runs it", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
OPENCODE = {
    "model": "policy",
    "max_tokens": 2048,
    "messages": [
        {"role": "system", "content": "You are opencode"},
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "hm", "reasoning_content": "I think ", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.csv"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""A second call of OpenCode 1.18.33, as its stand-in server received it; texts shortened."""
TRAINING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


class Advisor(policy.Handler):
    """The FAKE policy, which refuses a call that says "refuse: ..." with that text, as vLLM repeats what it had."""

    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        said = next((text for text in _texts(request) if text.startswith("refuse: ")), None)
        if request.get("tools"):  # the probe of the engine has none
            self.requests.append(request)
        self._reply(policy.completion(request, []) if said is None else {"error": {"message": said}}, said)

    def _reply(self, value: Any, refused: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _texts(request: dict[str, Any]) -> list[str]:
    values = [*request.values(), *(message.get("content") for message in request["messages"])]
    return [value for value in values if isinstance(value, str)]


class Rig:
    """The data plane between agents and the engine."""

    def __init__(self, cfg: Recipe, client: TestClient, service: HarborService, url: str) -> None:
        self._client, self._service, self._url = client, service, url
        self.upstreams = service.capture.app.state.upstreams

    def session(self, **settings: Any) -> Session:
        upstream = Upstream(llm_url=self._url, model="policy")
        settings = settings or {"purpose": "train", "sampling": TRAINING}
        return self._service.capture.registry.create(upstream=upstream, capture_level="tokens", **settings)

    def ask(self, session: Session, **differs: Any) -> int:
        body = {**OPENCODE, "stream": False, **differs}
        return self._client.post(PATH, json=body, headers={"x-api-key": session.session_id}).status_code

    def sent(self, session: Session, **differs: Any) -> dict[str, Any]:
        """What reached the engine of a call that was answered."""
        assert self.ask(session, **differs) == 200
        return Advisor.requests[-1]


@pytest.fixture
def rig(cfg: Recipe) -> Iterator[Rig]:
    Advisor.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Advisor)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    capped = cfg.model_copy(update={"sampling": cfg.sampling.model_copy(update={"max_completion_tokens": CAP})})
    service = app.capture_service(capped, PLACES)
    with TestClient(DataPlane(service.capture.app)) as client:
        yield Rig(capped, client, service, f"http://127.0.0.1:{server.server_port}/v1")
    server.shutdown()
    server.server_close()


def test_all_that_opencode_says_reaches_the_engine() -> None:
    built = model_call.build(json.dumps(OPENCODE).encode(), 4096)
    for field in ("messages", "tools", "tool_choice", "max_tokens", "model", "stream"):
        assert built[field] == OPENCODE[field]
    assert set(built) - set(OPENCODE) == set(TRAINING) - {"temperature"}


def test_nothing_that_an_agent_may_add_reaches_the_engine(rig: Rig) -> None:
    plain = rig.sent(rig.session())
    added = {
        "seed": 7, "n": 1, "use_beam_search": True, "bad_words": ["a"], "ignore_eos": True, "prompt_logprobs": 20,
        "priority": -5, "request_id": "other", "thinking_token_budget": 9, "logit_bias": {"5": 100}, "min_tokens": 9,
        "max_completion_tokens": 60000, "max_output_tokens": 60000, "chat_template": "{{ x }}", "stop": ["."],
        "response_format": {"type": "json_object"}, "echo": True, "add_generation_prompt": False, "top_logprobs": 20,
        "temperature": 0.1, "top_p": "0.5", "repetition_penalty": 9, "return_token_ids": False, "user": "x",
        "mm_processor_kwargs": {}, "kv_transfer_params": {}, "vllm_xargs": {}, "_served_model": "qwen3.5", "input": "x",
        "parallel_tool_calls": False, "functions": [{}],
    }  # fmt: skip
    assert rig.sent(rig.session(), **added) == plain
    messages = [{**message, "audio": {}, "reasoning": "x", "refusal": "y"} for message in OPENCODE["messages"]]
    tools = [{**TOOL, "strict": True, "function": {**TOOL["function"], "strict": True}}]
    assert rig.sent(rig.session(), messages=messages, tools=tools) == plain


@pytest.mark.parametrize(
    "asked", ["60000", 60000.0, 60000, 10**30, -1, 0, None, True, [], {}, "1", "set max_tokens to '1'"]
)
def test_output_cap_is_a_number_of_ours_whatever_is_asked(rig: Rig, asked: Any) -> None:
    sent = rig.sent(rig.session(), max_tokens=asked)
    assert type(sent["max_tokens"]) is int and sent["max_tokens"] == CAP


def test_agent_may_ask_for_less_than_the_cap(rig: Rig) -> None:
    assert rig.sent(rig.session(), max_tokens=CAP - 1)["max_tokens"] == CAP - 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"purpose": "train", "sampling": TRAINING}, TRAINING),
        (
            {"purpose": "eval", "eval_sampling": {"temperature": 0.0, "top_p": 0.9, "top_k": 5}},
            {**TRAINING, "temperature": 0.0, "top_p": 1.0, "top_k": -1},  # OpenEnv holds both open for exact tokens
        ),
    ],
)
def test_sampling_is_the_sessions_in_training_and_in_evaluation(
    rig: Rig, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    bent = {"temperature": 2.0, "top_p": 0.1, "top_k": 1, "min_p": 0.9, "presence_penalty": 2, "frequency_penalty": "2"}
    sent = rig.sent(rig.session(**settings), **bent)
    assert {name: sent[name] for name in TRAINING} == expected
    assert all(type(sent[name]) in (int, float) for name in TRAINING)


@pytest.mark.parametrize(
    "differs",
    [
        {"messages": None}, {"messages": []}, {"messages": {}}, {"messages": ["x"]}, {"messages": [{"role": "root"}]},
        {"messages": [{"role": "user", "content": 1}]}, {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://policy/"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": {}}}]}]},
        {"messages": [{"role": "user", "content": "x"}] * (model_call.MAX_MESSAGES + 1)},
        {"tools": "bash"}, {"tools": [1]}, {"tools": [{"function": {"name": 1}}]},
        {"tools": [{"function": {"name": "x", "parameters": []}}]}, {"tools": [TOOL] * (model_call.MAX_TOOLS + 1)},
        {"tool_choice": "required"}, {"tool_choice": {"type": "function"}}, {"tool_choice": ["auto"]},
        {"stream": "yes"}, {"stream": 1},
    ],
)  # fmt: skip
def test_malformed_call_is_refused_and_never_reaches_the_engine(rig: Rig, differs: dict[str, Any]) -> None:
    session = rig.session()
    assert rig.ask(session, **differs) == 400
    assert Advisor.requests == []
    assert session.model_calls == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b'{"messages": NaN}', b"[" * 100_000, b"\xff\xfe"])
def test_body_that_is_no_call_is_refused(body: bytes) -> None:
    with pytest.raises(model_call.MalformedCallError):
        model_call.build(body, CAP)


def test_half_a_surrogate_pair_which_javascript_writes_is_a_text() -> None:
    built = model_call.build(b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', CAP)
    assert built["messages"] == [{"role": "user", "content": "\ud83d"}]


@pytest.mark.parametrize("advice", ["set max_tokens to '1'", "set temperature to 'hot'", "'temperature' is deprecated"])
def test_refused_call_of_one_session_changes_no_call_of_another(rig: Rig, advice: str) -> None:
    victim = rig.session(purpose="eval", eval_sampling={"temperature": 1.0})
    before, attacker = rig.sent(victim), rig.session()
    assert rig.ask(attacker, messages=[{"role": "user", "content": f"refuse: {advice}"}]) == 400
    # Nor is the refused call sent again in another shape.
    assert Advisor.requests[-2] == before
    assert rig.sent(victim) == before
    for client, _level in rig.upstreams._by_engine.values():
        assert list(client.param_fixes) == []
        with pytest.raises(AttributeError):
            client.param_fixes.append("x")
