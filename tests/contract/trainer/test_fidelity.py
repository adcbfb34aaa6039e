"""``make fidelity``'s checks against a real vLLM: an honest policy passes all of them, and each fault fails its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.common import run_dir
from services.common.errors import StoppedError
from services.common.run_dir import RunDir
from services.trainer import fidelity, packing, sampling_check
from services.trainer.policy_versions import FILE
from services.trainer.sync import RecordedSync
from services.trainer.tool_calls import ToolCallCounts
from services.weight_sync import names
from services.weight_sync.client import LoraFactorSync
from services.weight_sync.policy_server import PolicyServer

SYNCS = 3


def settings(vllm_server: Any) -> Any:
    """The server's recipe, with the attention that a CPU can run."""
    cfg = vllm_server.recipe
    bounds = {"attn_implementation": "sdpa", "packing_max_abs_logprob_diff": 1e-4, "ratio_bounds": (0.995, 1.005)}
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update=bounds)})


@contextlib.contextmanager
def bench_on(vllm_server: Any) -> Iterator[fidelity._Bench]:
    cfg = settings(vllm_server)
    model, tokenizer = fidelity.load(cfg)
    packing.install(model)
    sync = LoraFactorSync(cfg, vllm_server.url)
    server = PolicyServer(vllm_server.url, cfg.policy.served_model_name)
    try:
        yield fidelity._Bench(cfg, model, tokenizer, sync, server, SYNCS)
    finally:
        sync.destroy()
        server.close()


def failed(checks: list[fidelity.Check]) -> list[str]:
    return [check.check for check in checks if not check.passed]


def test_an_honest_policy_passes_every_check_and_every_control_shows(vllm_server: Any) -> None:
    with bench_on(vllm_server) as bench:  # another test may have left its adapter served: back to the base, B = 0
        bench.sync.init_weight_transfer()
        bench.sync.send_weights(names.lora_factors(bench.model))
    checks = fidelity.run(settings(vllm_server), vllm_server.url, SYNCS)
    assert failed(checks) == []
    assert len({check.check for check in checks}) == len(checks) >= 15
    assert sum(check.control for check in checks) == 4


def test_a_base_that_drifts_fails_its_own_checks(vllm_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_on(vllm_server) as bench:
        bench.sync.init_weight_transfer()
        send = fidelity._Bench.send
        sent = []

        def drifting(found: fidelity._Bench) -> None:
            send(found)
            sent.append(found)
            if len(sent) == SYNCS:  # after the last proof, or it would end there
                names.base_weight(found.model, "model.layers.0.feed_forward.w1")[0, 0] += 1e-6

        monkeypatch.setattr(fidelity._Bench, "send", drifting)
        checks = fidelity.many_sync_checks(bench)
    assert failed(checks) == [
        f"hash of all base weights after {SYNCS} syncs", f"trainer's base weights that {SYNCS} syncs changed"
    ]  # fmt: skip


def test_a_base_that_drifts_between_two_syncs_stops_the_run_at_the_next(vllm_server: Any) -> None:
    with bench_on(vllm_server) as bench:
        bench.sync.prove_with(base_weight=functools.partial(names.base_weight, bench.model))
        bench.sync.init_weight_transfer()
        for version in (1, 2):
            fidelity.randomise(bench.model, bench.cfg.lora_scale, seed=version)
            bench.send()
        with torch.no_grad():
            names.base_weight(bench.model, "model.layers.0.feed_forward.w1")[0, 0] += 1e-6
        with pytest.raises(StoppedError, match=r"1 of 22 merged weights differ .* first model\.layers\.0\.feed_forw"):
            bench.send()


def test_another_adapter_in_the_trainer_than_the_one_served_fails_its_own_checks(vllm_server: Any) -> None:
    with bench_on(vllm_server) as bench:
        bench.sync.init_weight_transfer()
        fidelity.randomise(bench.model, bench.cfg.lora_scale, seed=1)
        bench.send()
        fidelity.randomise(bench.model, bench.cfg.lora_scale, seed=2)
        served = fidelity.served_checks(bench.cfg, bench.model, bench.server.reports(60), "1 sync")
        ratio = fidelity.ratio_checks(bench)
    assert failed(served) == ["served weights unlike saved adapter + pristine base"]
    assert "importance ratio at staleness 0: max |log ratio|" in failed(ratio)


def test_packed_rows_that_leak_fail_the_ratio(vllm_server: Any) -> None:
    with bench_on(vllm_server) as bench:
        bench.sync.init_weight_transfer()
        fidelity.zero(bench.model)
        bench.send()
        assert failed(fidelity.ratio_checks(bench)) == []
        for module in bench.model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        assert "importance ratio at staleness 0: max |log ratio|" in failed(fidelity.ratio_checks(bench))


def test_the_real_policy_samples_as_the_recipe_says(vllm_server: Any) -> None:
    report = sampling_check.check(vllm_server.url, vllm_server.recipe.policy.served_model_name)
    assert report.without_parameters == 0
    assert report.half_temperature > 1


def test_the_real_policy_tells_its_tool_calls(vllm_server: Any) -> None:
    found = ToolCallCounts(vllm_server.url).metrics()
    assert set(found) == {"tool_calls/parsed", "tool_calls/repaired", "tool_calls/unparsed"}


def test_a_sync_notes_when_its_version_was_served(vllm_server: Any, tmp_path: Any) -> None:
    cfg, run = settings(vllm_server), RunDir(tmp_path)
    model, _ = fidelity.load(cfg)
    sync = RecordedSync(run, cfg, vllm_server.url)
    try:
        sync.init_weight_transfer()
        sync.send_weights(names.lora_factors(model))
    finally:
        sync.destroy()
    begun, done = run_dir.read_lines(run.path / FILE)
    assert (begun["version"], done["version"]) == (1, 1)
    assert begun["begins_s"] < done["served_s"]
