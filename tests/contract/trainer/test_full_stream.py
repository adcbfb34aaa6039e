"""``weight_sync.mode = "full"``: TRL's own client, wired from the recipe.

The server's HTTP side is a stub and NCCL's two functions are FAKES, because NCCL needs GPUs; TRL's client, its order of
calls and PEFT's merge are the real ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from tiny_models import tiny_lfm2
from trl.experimental.async_grpo import weight_transfer as trl_weight_transfer
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

from services.common import recipe, run_dir
from services.common.errors import StoppedError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.policy.argv import argv
from services.trainer import sampling_check, sync
from services.trainer.policy_versions import FILE
from services.weight_sync import canary, names
from services.weight_sync.errors import WeightSyncError

RECIPES = Path(__file__).parents[3] / "data/recipes"


class Server(ThreadingHTTPServer):
    """STUB of vLLM's control plane: says yes to all and remembers the calls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.failing: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path.partition("?")[0] for path, _ in self.asked]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, json.loads(body) if body else None))
        data = json.dumps({"is_paused": False, "world_size": 1}).encode()
        self.send_response(500 if self.path.partition("?")[0] in self.server.failing else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What reached the wire, through FAKES of NCCL's rendezvous and broadcast."""
    found: dict[str, torch.Tensor] = {}

    def broadcast(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        found.update((name, weight.clone()) for name, weight in iterator)

    PartialState(cpu=True)  # TRL's logger wants it; a trainer has one
    monkeypatch.setattr(trl_weight_transfer, "open_trainer_endpoint", lambda info: object())
    monkeypatch.setattr(trl_weight_transfer, "packed_nccl_broadcast_producer", broadcast)
    monkeypatch.setattr(sampling_check, "check", lambda *_arguments: None)
    return found


def full() -> Recipe:
    changes = {
        "weight_sync.mode": "full", "weight_sync.transport": "nccl", "weight_sync.transfer_timeout_s": 5,
        "weight_sync.init_timeout_s": 5, "weight_sync.canary_every": 2, "trainer.forward": "adapter",
    }  # fmt: skip
    return recipe.load(RECIPES / "smoke.toml", changes)


def trained(seed: int) -> Any:
    model = tiny_lfm2()
    for i, (_, tensor) in enumerate(names.lora_factors(model)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + i)) * 0.05)
    return model


def send(found: Any, model: Any) -> None:
    """In the order of ``AsyncGRPOTrainer._sync_weight_merged``."""
    found.pause()
    model.merge_adapter()
    try:
        found.send_weights((name, weight.detach()) for name, weight in _iter_vllm_named_params(model))
    finally:
        model.unmerge_adapter()
    found.resume()


def test_the_recipe_chooses_trls_stream_on_both_sides(server, tmp_path):
    cfg = full()
    assert isinstance(sync.weight_transfer(RunDir(tmp_path), cfg, server.url, "cpu"), sync.FullStreamSync)
    command = argv(cfg, "train", "cuda")
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}
    factors = recipe.load(RECIPES / "smoke.toml")
    assert isinstance(sync.weight_transfer(RunDir(tmp_path), factors, server.url, "cpu"), sync.RecordedSync)


def test_all_merged_weights_are_streamed_between_pause_and_resume_and_each_version_is_noted(server, streamed, tmp_path):
    run, model = RunDir(tmp_path), trained(1)
    found = sync.weight_transfer(run, full(), server.url, "cpu")
    found.describe(model)
    found.init_weight_transfer()
    connecting = len(server.asked)
    send(found, model)
    assert server.paths()[connecting:] == [
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume",
    ]  # fmt: skip
    announced = next(body for path, body in server.asked if path == "/update_weights")["update_info"]
    assert announced["names"] == list(streamed)
    assert announced["shapes"] == [list(weight.shape) for weight in streamed.values()]

    merged = {name: weight for name, weight in model.merge_and_unload().named_parameters()}
    assert streamed.keys() == merged.keys()
    assert all(torch.allclose(streamed[name], merged[name], atol=1e-6) for name in merged)
    lines = run_dir.read_lines(run.path / FILE)
    assert [("begins_s" in line, line["version"]) for line in lines] == [(True, 1), (False, 1)]
    metrics = found.metrics()
    assert metrics["weight_sync/bytes"] == sum(weight.numel() * 4 for weight in streamed.values())
    assert metrics["weight_sync/paused_s"] > metrics["weight_sync/transfer_s"] > 0


def test_the_canary_is_scored_on_the_first_and_each_nth_sync_and_stops_the_run(server, streamed, tmp_path, monkeypatch):
    found = sync.weight_transfer(RunDir(tmp_path), full(), server.url, "cpu")
    model = trained(1)
    found.describe(model)
    scored: list[int] = []

    class Probe:
        def check(self, _server: Any, version: int, _timeout_s: float) -> canary.CanaryResult:
            scored.append(version)
            if version == 4:
                raise StoppedError("the canary disagrees")
            return canary.CanaryResult(0.125, 0.25, 1, -1.0, -1.25)

    found.prove_with(canary=Probe())
    for _ in range(3):
        send(found, model)
    assert scored == [1, 2] and found.metrics().get("weight_sync/canary_max_abs_logprob_diff") is None
    with pytest.raises(StoppedError, match="the canary disagrees"):
        send(found, model)


def test_a_server_that_fails_in_mid_transfer_is_named_with_the_phase(server, streamed, tmp_path):
    found = sync.weight_transfer(RunDir(tmp_path), full(), server.url, "cpu")
    model = trained(1)
    found.describe(model)
    found.init_weight_transfer()
    server.failing.add("/update_weights")
    with pytest.raises(WeightSyncError, match=r"failed in phase 'transfer'") as caught:
        send(found, model)
    assert caught.value.peer == server.url
