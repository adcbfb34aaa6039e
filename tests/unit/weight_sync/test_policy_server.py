"""The HTTP side of a weight sync against a stub server: each failure names the peer, the phase and the cause."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.common.errors import StoppedError
from services.weight_sync import canary, names
from services.weight_sync.errors import WeightSyncError
from services.weight_sync.policy_server import PolicyServer
from services.weight_sync.worker import WeightSyncWorker


class Stub(ThreadingHTTPServer):
    """Answers each path with a fixed (status, body), or never; remembers what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.answers: dict[str, tuple[int, object]] = {}
        self.silent: set[str] = set()
        self.released = threading.Event()
        self.asked: list[tuple[str, str, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, json.loads(body) if body else None))
        if path in self.server.silent:
            self.server.released.wait(30)
        status, value = self.server.answers.get(path, (404, {}))
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def policy(stub: Stub) -> Iterator[PolicyServer]:
    found = PolicyServer(stub.url, "policy")
    yield found
    found.close()


def test_pause_keeps_requests_and_asks_for_the_caches_to_be_cleared(stub, policy):
    stub.answers["/pause"] = 200, {}
    policy.pause(5)
    assert stub.asked == [("POST", "/pause?mode=keep&clear_cache=true", None)]


def test_no_answer_within_the_limit_names_peer_phase_and_limit(stub, policy):
    stub.silent.add("/pause")
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        policy.pause(0.2)
    assert time.monotonic() - started < 5
    assert str(caught.value) == (
        f"weight sync with {stub.url} failed in phase 'pause': no answer to /pause within 0.2 s"
    )


def test_an_error_of_the_server_is_passed_on(stub, policy):
    stub.answers["/weight_sync/apply"] = 500, {"error": "W0 is (2, 3)"}
    with pytest.raises(WeightSyncError, match=r"phase 'apply': /weight_sync/apply answered 500: .*W0 is \(2, 3\)"):
        policy.apply(1, staged_timeout_s=1, timeout_s=5)


def test_staging_and_reports_are_calls_of_the_worker_extension(stub, policy):
    stub.answers["/collective_rpc"] = 200, {"results": [{"version": 3}]}
    policy.stage({"version": 3}, 5)
    assert policy.reports(5) == [{"version": 3}]
    assert stub.asked == [
        ("POST", "/collective_rpc", {"method": "weight_sync_stage", "kwargs": {"version": 3}}),
        ("POST", "/collective_rpc", {"method": "weight_sync_report", "kwargs": {}}),
    ]
    assert all(callable(getattr(WeightSyncWorker, body["method"])) for _, _, body in stub.asked)


def test_apply_is_one_call_that_says_what_it_may_wait_for(stub, policy):
    stub.answers["/weight_sync/apply"] = 200, {"merge_s": 0.1}
    assert policy.apply(7, staged_timeout_s=20, timeout_s=5, resume=False) == {"merge_s": 0.1}
    assert stub.asked == [("POST", "/weight_sync/apply", {"version": 7, "timeout_s": 20, "resume": False})]


def test_a_server_without_development_mode_is_told_apart(policy):
    with pytest.raises(WeightSyncError, match="it has no /resume; the policy must run with VLLM_SERVER_DEV_MODE=1"):
        policy.resume()


def test_a_server_that_is_not_there_is_named_after_the_wait():
    gone = PolicyServer("http://127.0.0.1:9", "policy")
    with pytest.raises(WeightSyncError, match=r"http://127\.0\.0\.1:9 .*'wait for the server': not there after 0\.1 s"):
        gone.wait_until_healthy(0.1)


def test_waiting_ends_when_the_server_is_there(stub, policy):
    stub.answers["/health"] = 503, {}
    threading.Timer(0.3, stub.answers.__setitem__, ("/health", (200, {}))).start()
    policy.wait_until_healthy(10)


def test_a_score_is_read_for_each_token_but_the_first(stub, policy):
    scored = [None, {"7": {"logprob": -1.5}, "9": {"logprob": -0.5}}, {"8": {"logprob": -2.5}}]
    stub.answers["/v1/completions"] = 200, {"choices": [{"prompt_logprobs": scored}]}
    assert policy.score([5, 7, 8], 5) == [-1.5, -2.5]
    assert stub.asked[0][2]["prompt"] == [5, 7, 8]


# -- canary ----------------------------------------------------------------------------------------------------


class FakePolicy:
    """Scores every token as ``served`` says."""

    url = "http://policy:8000"

    def __init__(self, served: list[float], cached: list[float]) -> None:
        self.served, self.cached = served, cached

    def complete(self, _prompt: list[int], _count: int, _timeout_s: float) -> tuple[list[int], list[float]]:
        return [1] * len(self.cached), self.cached

    def score(self, _token_ids: list[int], _timeout_s: float) -> list[float]:
        return self.served


def check(
    served: list[float], cached: list[float], trainer: list[float], warn_above: float = 9.0
) -> canary.CanaryResult:
    probe = canary.Canary([5, 6, 7], lambda _token_ids: trainer, bound=0.1, warn_above=warn_above)
    return probe.check(FakePolicy(served, cached), 3, 1)


def test_canary_within_the_bound_reports_the_mean_and_the_largest_difference_and_where():
    result = check(served=[-1, -2, -3], cached=[-3], trainer=[-1, -2.06, -3])
    assert (result.position, result.trainer, result.policy) == (2, -2.06, -2)
    assert result.max_abs_logprob_diff == pytest.approx(0.06)
    assert result.mean_abs_logprob_diff == pytest.approx(0.02)


def test_one_token_that_rounding_moved_far_is_a_warning_and_stops_nothing(caplog):
    result = check(served=[-1] * 20, cached=[-1], trainer=[-1] * 10 + [-2.5] + [-1] * 9, warn_above=1.0)
    assert result.mean_abs_logprob_diff == pytest.approx(1.5 / 20)
    (warning,) = caplog.messages
    assert "token 11 has log-probability -2.500000 in the trainer and -1.000000 in the policy" in warning
    assert "canary_max_abs_logprob_diff = 1.00e+00" in warning


def test_a_stale_block_behind_the_continuation_is_not_lost_among_the_scored_tokens():
    with pytest.raises(StoppedError, match=r"differ by 2\.00e-01 in the mean"):
        check(served=[-1] * 1000, cached=[-1.2] * 4, trainer=[-1] * 1000)


@pytest.mark.parametrize(
    ("served", "cached"),
    [([-1, -2.4, -3], [-3]), ([-1, -2, -3], [-3.2]), ([-1, float("nan"), -3], [-3]), ([-1, -2, -3], [float("nan")])],
    ids=["weights", "stale cache", "nan", "nan from the cache"],
)
def test_canary_stops_on_wrong_weights_on_a_stale_cache_and_on_nan(served, cached):
    with pytest.raises(
        StoppedError, match=r"canary after weight sync 3: .* in the mean, .* in the trainer and .* in the policy"
    ) as caught:
        check(served, cached, trainer=[-1, -2, -3])
    assert caught.value.exit_code == 4


def test_canary_refuses_a_scorer_that_leaves_tokens_out():
    with pytest.raises(ValueError, match="2 log-probabilities of the trainer, 3 of the policy and 1"):
        check(served=[-1, -2, -3], cached=[-3], trainer=[-1, -2])


def test_canary_prompt_is_longer_than_the_cache_block_it_must_fill():
    class Characters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(c) for c in text]

    assert 600 <= len(canary.prompt_ids(Characters(), 600)) < 1200


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight",
            ("model.layers.2.self_attn.q_proj", "A"),
        ),
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight", ("model.layers.2.self_attn.q_proj", "B")),
        ("base_model.model.model.layers.0.conv.out_proj.lora_B.other.weight", ("model.layers.0.conv.out_proj", "B")),
    ],
)
def test_a_factors_name_gives_its_target(name, expected):
    assert names.parse_factor(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A.default",
        "base_model.model.model.layers.0.w1.lora_magnitude_vector.default.weight",
        "base_model.model.model.layers.0.w1.lora_B.default.bias",
    ],
)
def test_what_is_no_factor_of_a_linear_layer_is_refused(name):
    with pytest.raises(ValueError, match="is not a LoRA factor"):
        names.parse_factor(name)


def test_base_names_are_hugging_faces_own():
    assert names.base_name("base_model.model.model.layers.0.w1.base_layer.weight") == "model.layers.0.w1.weight"
    assert names.base_name("base_model.model.model.embedding_norm.weight") == "model.embedding_norm.weight"
    assert names.base_name("base_model.model.model.layers.0.w1.lora_A.default.weight") is None
