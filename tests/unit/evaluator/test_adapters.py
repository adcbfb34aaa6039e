"""Snapshots of adapters, and their way into the FAKE policy-eval."""

import struct
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint
from services.evaluator import adapters
from services.evaluator.adapters import AdapterNotReadyError, PolicyEval
from tests.fakes.evaluation import write_adapter, write_safetensors
from tests.fakes.policy_eval import BASE_NAME, FakePolicyEval

AddCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def policy(policy_eval: FakePolicyEval, http: httpx.Client) -> PolicyEval:
    return PolicyEval(policy_eval.url, http)


def test_a_snapshot_is_a_copy_with_its_hash_in_its_name(
    add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    checkpoint = add_checkpoint(300)
    adapter = adapters.snapshot(checkpoint, tmp_path, cfg.lora)
    assert adapter.name == f"checkpoint-300-{adapter.sha256[:12]}"
    assert adapter.path == tmp_path / adapter.name
    before = (adapter.path / adapters.WEIGHTS).read_bytes()
    (checkpoint.path / adapters.WEIGHTS).unlink()  # rotation, in the middle of an evaluation
    assert (adapter.path / adapters.WEIGHTS).read_bytes() == before


def test_other_weights_under_the_same_step_get_another_name_and_path(
    add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    first = adapters.snapshot(add_checkpoint(2, fill=1), tmp_path, cfg.lora)
    second = adapters.snapshot(add_checkpoint(2, fill=2), tmp_path, cfg.lora)
    assert first.name != second.name and first.path != second.path


@pytest.mark.parametrize("kept", [0, 5, 100, 1800, -1])
def test_truncated_weights_are_left_for_later_and_leave_no_snapshot(
    add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe, kept: int
) -> None:
    checkpoint = add_checkpoint(2)
    weights = checkpoint.path / adapters.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:kept])
    into = tmp_path / "adapters"
    with pytest.raises(AdapterNotReadyError, match="truncated"):
        adapters.snapshot(checkpoint, into, cfg.lora)
    assert list(into.iterdir()) == []


def test_weights_that_change_while_they_are_read_are_left_for_later(
    add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = add_checkpoint(2, fill=1)
    real = adapters.shutil.copyfile

    def copy_after_a_write(source: Path, target: Path) -> None:
        write_adapter(checkpoint.path, cfg, fill=9)
        real(source, target)

    monkeypatch.setattr(adapters.shutil, "copyfile", copy_after_a_write)
    with pytest.raises(AdapterNotReadyError, match="changed while it was read"):
        adapters.snapshot(checkpoint, tmp_path, cfg.lora)


@pytest.mark.parametrize("file", [adapters.WEIGHTS, adapters.CONFIG])
def test_a_missing_file_is_named(add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe, file: str) -> None:
    checkpoint = add_checkpoint(2)
    (checkpoint.path / file).unlink()
    with pytest.raises(AdapterNotReadyError, match=file):
        adapters.snapshot(checkpoint, tmp_path, cfg.lora)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tensors: tensors.pop("m.layers.0.q_proj.lora_B.weight"),
            "1 modules lack their A or B, m.layers.0.q_proj",
        ),
        (lambda tensors: tensors.update({"m.layers.0.q_proj.weight": b"1234"}), "is no LoRA factor"),
        (
            lambda tensors: [tensors.pop(key) for key in list(tensors) if ".w3." in key],
            r"its modules are .*'w2'\], the recipe has .*'w3'\]",
        ),
        (lambda tensors: tensors.clear(), "truncated"),
    ],
)
def test_an_adapter_that_is_not_the_recipe_s_is_named(
    tmp_path: Path, cfg: Recipe, spoil: Callable[[dict[str, bytes]], object], message: str
) -> None:
    write_adapter(tmp_path, cfg)
    tensors = {
        f"m.layers.0.{module}.lora_{factor}.weight": b"1234" for module in cfg.lora.target_modules for factor in "AB"
    }
    spoil(tensors)
    write_safetensors(tmp_path / adapters.WEIGHTS, tensors)
    with pytest.raises(AdapterNotReadyError, match=message):
        adapters.inspect(tmp_path, cfg.lora)


def test_an_adapter_of_another_rank_is_refused_with_both_numbers(tmp_path: Path, cfg: Recipe) -> None:
    write_adapter(tmp_path, cfg, r=16)
    with pytest.raises(AdapterNotReadyError, match="16 and 16, the recipe has 8 and 16"):
        adapters.inspect(tmp_path, cfg.lora)


@pytest.mark.parametrize("data", [b"\xff" * 40, struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 4) + b"nope"])
def test_bytes_that_are_no_safetensors_are_refused(tmp_path: Path, cfg: Recipe, data: bytes) -> None:
    write_adapter(tmp_path, cfg)
    (tmp_path / adapters.WEIGHTS).write_bytes(data)
    with pytest.raises(AdapterNotReadyError):
        adapters.inspect(tmp_path, cfg.lora)


def test_an_adapter_of_which_every_b_is_zero_is_known_as_such(tmp_path: Path, cfg: Recipe) -> None:
    write_adapter(tmp_path, cfg, fill=0)
    assert adapters.inspect(tmp_path, cfg.lora) is True
    write_adapter(tmp_path, cfg, fill=1)
    assert adapters.inspect(tmp_path, cfg.lora) is False


def test_minus_zero_is_zero_too(tmp_path: Path, cfg: Recipe) -> None:
    write_adapter(tmp_path, cfg, fill=0)
    weights = tmp_path / adapters.WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:-4] + struct.pack("<f", -0.0))
    assert adapters.inspect(tmp_path, cfg.lora) is True
    weights.write_bytes(data[:-4] + struct.pack("<f", -1e-12))
    assert adapters.inspect(tmp_path, cfg.lora) is False


def test_loading_tells_the_server_name_and_path_and_returns_the_canary_s_difference(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    difference = policy.load(adapter)
    assert policy_eval.loads == [{"lora_name": adapter.name, "lora_path": str(adapter.path)}]
    assert difference > 0
    assert policy.models() == {BASE_NAME: None, adapter.name: BASE_NAME}


def test_an_adapter_that_answers_as_the_base_does_is_refused_and_unloaded(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    policy_eval.deaf.add(adapter.name)
    with pytest.raises(AdapterNotReadyError, match="not in effect"):
        policy.load(adapter)
    assert policy_eval.adapters == {}


def test_a_difference_no_larger_than_the_base_s_own_noise_proves_nothing(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    policy_eval.deaf.add(adapter.name)
    policy_eval.noise = 1e-3
    with pytest.raises(AdapterNotReadyError, match="not in effect"):
        policy.load(adapter)


def test_an_adapter_of_zeros_is_loaded_although_it_answers_as_the_base(
    policy: PolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2, fill=0), tmp_path, cfg.lora)
    assert policy.load(adapter) == 0.0
    assert adapter.name in policy.models()


def test_an_adapter_that_is_already_loaded_is_not_loaded_again(
    policy: PolicyEval, policy_eval: FakePolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    policy.load(adapter)
    policy.load(adapter)
    assert len(policy_eval.loads) == 1


def test_the_server_s_refusal_is_passed_on(
    policy: PolicyEval, add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    adapter = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    (adapter.path / adapters.WEIGHTS).unlink()
    with pytest.raises(AdapterNotReadyError, match="No adapter found"):
        policy.load(adapter)


def test_unloading_what_is_not_loaded_is_no_error(policy: PolicyEval, policy_eval: FakePolicyEval) -> None:
    policy.unload("checkpoint-9-abc")
    assert policy_eval.unloads == ["checkpoint-9-abc"]


def test_a_server_with_two_base_models_is_refused(
    policy: PolicyEval, policy_eval: FakePolicyEval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_eval, "cards", lambda: [{"id": "a"}, {"id": "b", "parent": None}])
    with pytest.raises(NotReadyError, match="2 base models"):
        policy.base_name()


@pytest.mark.parametrize(("running", "idle"), [(0, True), (1, False), (12, False)])
def test_requests_in_flight_are_read_from_the_server_s_metrics(
    policy: PolicyEval, policy_eval: FakePolicyEval, running: int, idle: bool
) -> None:
    policy_eval.requests_running = running
    assert policy.is_idle() is idle


def test_a_whole_snapshot_is_not_written_over_while_the_server_may_read_it(
    add_checkpoint: AddCheckpoint, tmp_path: Path, cfg: Recipe
) -> None:
    first = adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora)
    before = _identity(first.path / adapters.WEIGHTS)
    assert adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora) == first
    assert _identity(first.path / adapters.WEIGHTS) == before
    (first.path / adapters.WEIGHTS).write_bytes(b"cut")
    assert adapters.snapshot(add_checkpoint(2), tmp_path, cfg.lora) == first


def _identity(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def test_answers_are_compared_up_to_the_token_in_which_they_part() -> None:
    base = [("a", [-0.1, -2.0]), ("b", [-0.2, -1.5]), ("c", [-0.3, -1.0])]
    near = [("a", [-0.1, -2.0]), ("x", [-0.5, -1.5]), ("y", [-9.0, -9.5])]
    assert adapters._distance(base, base) == 0
    assert adapters._distance(base, near) == pytest.approx(0.3)
