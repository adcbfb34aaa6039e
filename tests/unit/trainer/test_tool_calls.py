"""The policy's counters, from a FAKE of its page on a real socket."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.trainer.tool_calls import ToolCallCounts

PAGE = b"""# TYPE lfm2_tool_calls_total counter
lfm2_tool_calls_total{outcome="parsed"} 12.0
lfm2_tool_calls_total{outcome="repaired"} 3.0
lfm2_tool_calls_total{outcome="unparsed"} 0.0
lfm2_tool_calls_created{outcome="parsed"} 1.8e+09
vllm:num_requests_running{engine="0"} 3.0
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_counters_of_the_parser_are_read(url: str) -> None:
    found = ToolCallCounts(url).metrics()
    assert found == {"tool_calls/parsed": 12, "tool_calls/repaired": 3, "tool_calls/unparsed": 0}


def test_policy_that_does_not_answer_gives_no_number_and_no_error(url: str) -> None:
    assert ToolCallCounts(f"{url}/nowhere").metrics() == {}
    assert ToolCallCounts("http://127.0.0.1:1").metrics() == {}
