"""How the policy samples, asked of a FAKE engine that applies what it is told as vLLM does."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from services.common.errors import NotReadyError
from services.trainer import sampling_check

LOGITS = {f"token_id:{number}": 4.0 - 0.3 * number for number in range(40)}
SEEN = {"token_id:0", "token_id:2", "token_id:5"}
"""Tokens of the prompt, which a repetition penalty makes less likely."""


class Engine(BaseHTTPRequestHandler):
    defaults: ClassVar[dict[str, float]] = {}
    processed: ClassVar[bool] = True

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = {**sampling_check.NEUTRAL, **self.defaults, **asked}
        found = top(sampling if self.processed else sampling_check.NEUTRAL, asked["logprobs"])
        body = json.dumps({"choices": [{"logprobs": {"top_logprobs": [found]}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass


def top(sampling: dict[str, Any], count: int) -> dict[str, float]:
    penalty = sampling["repetition_penalty"]
    logits = {t: (x / penalty if x > 0 else x * penalty) if t in SEEN else x for t, x in LOGITS.items()}
    logits = {t: x / sampling["temperature"] for t, x in logits.items()}
    kept = sorted(logits, key=lambda token: -logits[token])
    if sampling["top_k"] > 0:
        kept = kept[: int(sampling["top_k"])]
    likeliest = max(logits.values())
    kept = [t for t in kept if logits[t] >= likeliest + math.log(sampling["min_p"] or 1e-300)]
    total = math.log(sum(math.exp(logits[t]) for t in kept))
    return {t: logits[t] - total for t in kept[:count]}


@pytest.fixture
def engine() -> Iterator[Callable[..., str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()

    def start(processed: bool = True, **defaults: float) -> str:
        Engine.processed, Engine.defaults = processed, defaults
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    server.shutdown()
    server.server_close()


def test_an_engine_that_adds_nothing_passes(engine: Callable[..., str]) -> None:
    report = sampling_check.check(engine(), "policy")
    assert report.without_parameters == 0
    assert report.half_temperature > 0.1


@pytest.mark.parametrize(
    "defaults", [{"temperature": 0.95}, {"repetition_penalty": 1.05}, {"top_k": 5}, {"min_p": 0.15}]
)
def test_a_default_that_bends_the_distribution_is_refused(
    engine: Callable[..., str], defaults: dict[str, float]
) -> None:
    with pytest.raises(NotReadyError, match=r"applies penalties, truncation .*differ by .* nats, allowed 0\.02"):
        sampling_check.check(engine(**defaults), "policy")


def test_log_probabilities_from_before_the_sampling_parameters_are_refused(engine: Callable[..., str]) -> None:
    with pytest.raises(NotReadyError, match="from before the sampling parameters"):
        sampling_check.check(engine(processed=False), "policy")


def test_no_answer_is_one_clear_message() -> None:
    with pytest.raises(NotReadyError, match=r"the policy at http://127\.0\.0\.1:1 gives no log-probabilities"):
        sampling_check.check("http://127.0.0.1:1", "policy")
