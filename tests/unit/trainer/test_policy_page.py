"""The policy's pages, from a FAKE server on a real socket; the contract tests ask the real one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from services.common.errors import NotReadyError
from services.trainer import policy_page

METRICS = """# HELP lfm2_tool_calls_total Tool calls
# TYPE lfm2_tool_calls_total counter
lfm2_tool_calls_total{outcome="parsed"} 12.0
lfm2_tool_calls_total{outcome="repaired"} 3.0
lfm2_tool_calls_total{outcome="unparsed"} 0.0
lfm2_tool_calls_created{outcome="parsed"} 1.8e+09
vllm:num_requests_running{engine="0"} 3.0
"""
NEUTRAL = {"generation_config": "vllm", "override_generation_config": {}, "logprobs_mode": "processed_logprobs"}


class Handler(BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    Handler.pages = {}
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def settings(**model_config: Any) -> str:
    return json.dumps({"vllm_config": {"model_config": {**NEUTRAL, **model_config}}})


def test_counters_of_the_parser_are_read(url: str) -> None:
    Handler.pages = {"/metrics": METRICS}
    found = policy_page.ToolCallCounts(url).metrics()
    assert found == {"tool_calls/parsed": 12, "tool_calls/repaired": 3, "tool_calls/unparsed": 0}


def test_policy_that_does_not_answer_gives_no_number_and_no_error(url: str) -> None:
    assert policy_page.ToolCallCounts(url).metrics() == {}
    assert policy_page.ToolCallCounts("http://127.0.0.1:1").metrics() == {}


def test_neutral_settings_are_let_through(url: str) -> None:
    Handler.pages = {"/server_info": settings()}
    policy_page.require_neutral_sampling(url)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"generation_config": "auto"}, r"model_config\.generation_config = 'auto', not 'vllm'"),
        (
            {"override_generation_config": {"repetition_penalty": 1.05}},
            r"override_generation_config = \{'repetition_penalty': 1\.05\}, not \{\}",
        ),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode = 'raw_logprobs', not 'processed_logprobs'"),
    ],
)
def test_a_penalty_or_truncation_of_the_server_is_refused_with_its_value(
    url: str, found: dict[str, Any], message: str
) -> None:
    Handler.pages = {"/server_info": settings(**found)}
    with pytest.raises(NotReadyError, match=message):
        policy_page.require_neutral_sampling(url)


def test_server_that_does_not_tell_its_settings_is_refused(url: str) -> None:
    with pytest.raises(NotReadyError, match=r"/server_info does not tell the policy's settings: .*404"):
        policy_page.require_neutral_sampling(url)
    Handler.pages = {"/server_info": json.dumps({"vllm_config": {"model_config": {}}})}
    with pytest.raises(NotReadyError, match="does not tell the policy's settings: KeyError"):
        policy_page.require_neutral_sampling(url)
