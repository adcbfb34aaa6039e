"""Where a step's time goes, from TRL's numbers and from a FAKE of vLLM's metrics page on a real socket."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from services.trainer.throughput import PolicyLoad, own_cpu_s, step_shares


def page(running: int, tokens: int, queries: int = 0, hits: int = 0) -> str:
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="policy"}} {running}.0
vllm:num_requests_running{{engine="1",model_name="policy"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="policy"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0
vllm:generation_tokens_total{{engine="0",model_name="policy"}} {tokens}.0
vllm:request_inference_time_seconds_sum{{engine="0",model_name="policy"}} {tokens}.0
vllm:request_inference_time_seconds_bucket{{engine="0",le="1.0"}} 9.0
vllm:generation_tokens_created{{engine="0",model_name="policy"}} 1.8e+09
vllm:prefix_cache_queries_total{{engine="0",model_name="policy"}} {queries}.0
vllm:prefix_cache_hits_total{{engine="0",model_name="policy"}} {hits}.0
process_cpu_seconds_total 1.5
"""


class Handler(BaseHTTPRequestHandler):
    pages: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.send_response(200 if self.pages else 503)
        self.end_headers()
        if self.pages:
            self.wfile.write(self.pages.pop(0).encode())

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def load() -> Iterator[PolicyLoad]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield PolicyLoad(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_parts_of_a_step_add_up_to_it() -> None:
    found = step_shares(
        {
            "perf/step_s": 20.0,
            "perf/rollout_wait_s": 12.0,
            "perf/fwd_bwd_s": 4.0,
            "perf/optimizer_s": 1.0,
            "perf/weight_sync_s": 2.0,
        }
    )
    assert found == pytest.approx(
        {"time/rollout_wait": 0.6, "time/train": 0.25, "time/sync": 0.1, "time/other": 0.05, "idle/trainer": 0.75}
    )


def test_first_step_has_no_shares() -> None:
    assert step_shares({"perf/fwd_bwd_s": 4.0, "perf/rollout_wait_s": 30.0}) == {}


def test_idle_share_is_that_of_samples_without_a_running_request(load: PolicyLoad) -> None:
    Handler.pages[:] = [page(running, 100) for running in (4, 0, 0, 2)]
    for _ in range(3):
        load.sample()
    found = load.metrics()
    assert found == {"idle/policy": 0.5, "policy/waiting": 1.0}


def test_counters_are_those_of_the_step(load: PolicyLoad) -> None:
    Handler.pages[:] = [page(1, 100, 1000, 100), page(1, 400, 3000, 1600)]
    load.metrics()
    found = load.metrics()
    assert found["policy/prefix_cache_hit_share"] == 0.75
    assert found["policy/generated_tok_s"] == found["policy/running"] > 0  # the same counts in this page
    assert found["cpu/policy_cores"] == 0
    assert found["policy/preemptions"] == 0


def test_what_a_sync_put_back_is_no_preemption_whenever_vllm_counts_it(load: PolicyLoad) -> None:
    counted, put_back = [0, 5, 8, 8, 10, 13], iter([0.0, 5.0, 9.0, 9.0, 9.0, 12.0])
    Handler.pages[:] = [f'{page(1, 1)}vllm:num_preemptions_total{{engine="0"}} {count}.0\n' for count in counted]
    load._put_back = lambda: next(put_back)
    found = [load.metrics().get("policy/preemptions") for _ in counted]
    # Third: one of four is counted a step later, or never; it is waited for one step. Fifth: two for want of cache.
    assert found == [None, 0, 0, 0, 2, 0]


def test_policy_that_was_started_again_gives_no_rates(load: PolicyLoad) -> None:
    Handler.pages[:] = [page(1, 400), page(1, 100)]
    load.metrics()
    assert "policy/generated_tok_s" not in load.metrics()


def test_policy_that_does_not_answer_gives_no_number(load: PolicyLoad) -> None:
    Handler.pages[:] = []
    assert load.metrics() == {}


def test_cpu_seconds_count_living_children() -> None:
    import subprocess
    import sys

    before = own_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert own_cpu_s() - before >= 0.25  # counted in ticks of 10 ms
        finally:
            child.kill()
