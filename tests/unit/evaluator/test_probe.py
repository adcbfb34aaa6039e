"""Every kind of layer must take effect in the server: real files, a FAKE policy-eval that can be deaf to one."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint
from services.evaluator import adapters, probe
from services.evaluator.adapters import AdapterNotReadyError, PolicyEval
from services.evaluator.app import Evaluator
from services.evaluator.tensors import TensorFile
from services.evaluator.watch import watch
from tests.fakes.evaluation import FakeEnv, write_safetensors
from tests.fakes.policy_eval import FakePolicyEval

AddCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def policy(policy_eval: FakePolicyEval, http: httpx.Client) -> PolicyEval:
    return PolicyEval(policy_eval.url, http)


def test_modules_of_one_name_in_two_kinds_of_block_are_two_kinds(tmp_path: Path) -> None:
    names = [f"m.layers.{i}.{block}.out_proj" for i, block in enumerate(["conv", "self_attn", "conv"])]
    write_safetensors(tmp_path / "w", {f"{name}.lora_{x}.weight": b"1234" for name in names for x in "AB"})
    assert probe.kinds(TensorFile.open(tmp_path / "w")) == {
        "m.layers.*.conv.out_proj": [f"{names[0]}.lora_B.weight", f"{names[2]}.lora_B.weight"],
        "m.layers.*.self_attn.out_proj": [f"{names[1]}.lora_B.weight"],
    }


def test_each_kind_is_probed_alone_and_nothing_is_left_behind(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    adapter = adapters.snapshot(add_checkpoint(2, fill=0), tmp_path, cfg.lora)
    original = TensorFile.open(adapter.path / adapters.WEIGHTS)
    seen: list[str] = []
    load = policy.load

    def look(found: adapters.Adapter) -> float:
        weights = TensorFile.open(found.path / adapters.WEIGHTS)
        assert list(weights.header) == list(original.header)
        changed = [name for name in weights.header if weights.read(name) != original.read(name)]
        seen.extend(changed)
        assert {name.split(".")[-3] for name in changed} == {found.label.rpartition(".")[2]}
        assert all(weights.read(name) == probe.HALF["F32"] * 4 for name in changed)
        return load(found)

    monkeypatch.setattr(policy, "load", look)
    probe.check_every_kind(policy, adapter)
    assert sorted(seen) == sorted(name for name in original.header if ".lora_B." in name)
    assert len(policy_eval.probes) == len(cfg.lora.target_modules)
    assert policy_eval.adapters == {} and list(tmp_path.glob("probe-*")) == []


def test_a_kind_that_the_server_passes_over_is_named_and_ends_the_evaluation(
    policy_eval: FakePolicyEval, make_evaluator: Callable[..., Evaluator], add_checkpoint: AddCheckpoint, env: FakeEnv
) -> None:
    add_checkpoint(2)
    policy_eval.deaf_to = ".w2."
    with pytest.raises(NotReadyError, match=r"does not apply adapters to .*layers\.\*\.block\.w2"):
        watch(make_evaluator())
    assert env.calls == [] and policy_eval.adapters == {}


def test_a_server_that_refuses_the_adapter_is_no_server_that_passes_layers_over(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    monkeypatch.setattr(policy_eval, "post", lambda *_: ({"error": "out of memory"}, 500))
    with pytest.raises(AdapterNotReadyError, match="out of memory"):
        probe.check_every_kind(policy, adapter)


def test_a_server_is_probed_once(
    policy_eval: FakePolicyEval, make_evaluator: Callable[..., Evaluator], add_checkpoint: AddCheckpoint, cfg: Recipe
) -> None:
    evaluator = make_evaluator()
    for step in (2, 4):
        evaluator.evaluate(add_checkpoint(step), evaluator.watch_question)
    assert len(policy_eval.probes) == len(cfg.lora.target_modules)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_one_half_is_written_in_the_adapter_s_own_type(dtype: str) -> None:
    data = probe.HALF[dtype]
    if dtype == "BF16":  # the upper half of a float32
        data = b"\0\0" + data
    assert struct.unpack("<e" if dtype == "F16" else "<f", data) == (0.5,)


def test_other_bytes_for_some_tensors_leave_header_and_order_as_they_are(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"x": b"1111", "y": b"2222", "z": b"3333"})
    TensorFile.open(tmp_path / "a").copy(tmp_path / "b", {"y": b"9999"})
    before, after = (tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()
    assert after == before.replace(b"2222", b"9999") and json.loads(after[8:-12])
