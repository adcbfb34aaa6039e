"""The command line and environment of vLLM, and what is refused before it starts."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe, load
from services.policy import app
from services.policy.argv import argv, environment

RECIPES = Path(__file__).parents[3] / "data/recipes"


def recipe(**changes: Any) -> Recipe:
    return load(RECIPES / "smoke.toml", {key.replace("__", "."): value for key, value in changes.items()})


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_training_policy_gets_the_loops_flags_and_the_recipes_numbers(monkeypatch):
    monkeypatch.setenv("MODELS_DIR", "/models")
    cfg = recipe()
    command = argv(cfg, "train", "cpu")
    assert command[:5] == ["python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/tiny-lfm2"]
    assert {"--return-tokens-as-token-ids", "--enable-auto-tool-choice", "--enforce-eager"} <= set(command)
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    assert option(command, "--generation-config") == "vllm"
    assert option(command, "--max-model-len") == str(cfg.model.max_model_len)
    assert option(command, "--served-model-name") == cfg.policy.served_model_name
    assert option(command, "--dtype") == "float32"
    assert json.loads(option(command, "--weight-transfer-config")) == {"backend": "lora_factors"}
    assert option(command, "--worker-extension-cls") == "services.weight_sync.worker.WeightSyncWorker"
    assert environment(cfg, "train", "cpu")["VLLM_SERVER_DEV_MODE"] == "1"


def test_our_endpoint_is_allowed_where_weights_are_replaced_and_only_there():
    """vLLM loads a plugin's endpoint only where VLLM_PLUGINS names it, and then no other general plugin."""
    project = tomllib.loads((RECIPES.parents[1] / "images/policy/distributions/plugin/pyproject.toml").read_text())
    groups = project["project"]["entry-points"]
    assert groups.keys() == {"vllm.general_plugins", "vllm.endpoint_plugins"}
    allowed = environment(recipe(), "train", "cpu")["VLLM_PLUGINS"]
    assert all(list(group) == [allowed] for group in groups.values())
    assert "VLLM_PLUGINS" not in environment(recipe(), "eval", "cpu")


def test_weight_updates_and_adapters_are_never_on_one_server():
    cfg = recipe()
    train, evaluation = (argv(cfg, role, "cpu") for role in ("train", "eval"))
    assert "--enable-lora" not in train and "--enable-lora" in evaluation
    assert "--weight-transfer-config" in train and "--weight-transfer-config" not in evaluation
    assert "VLLM_SERVER_DEV_MODE" not in environment(cfg, "eval", "cpu")
    assert environment(cfg, "eval", "cpu")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_full_mode_serves_trls_own_transfer():
    full = {"weight_sync__mode": "full", "weight_sync__transport": "nccl", "trainer__forward": "adapter"}
    command = argv(recipe(**full), "train", "cuda")
    assert json.loads(option(command, "--weight-transfer-config")) == {"backend": "nccl"}
    assert "--worker-extension-cls" not in command


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (8, 8), (9, 16), (32, 32), (48, 64), (512, 512)])
def test_adapter_rank_is_rounded_up_to_one_that_vllm_serves(rank, allowed):
    assert option(argv(recipe(lora__r=rank), "eval", "cpu"), "--max-lora-rank") == str(allowed)


def test_adapter_rank_above_vllms_largest_is_refused():
    with pytest.raises(RecipeError, match=r"lora\.r is 513; .* 512 at most"):
        argv(recipe(lora__r=513), "eval", "cpu")


def test_threads_and_cache_of_the_cpu_come_from_the_recipe():
    found = environment(recipe(policy__omp_threads=3, policy__cpu_kvcache_gb=2), "train", "cpu")
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "2")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in environment(recipe(), "train", "cuda")


def test_parallel_sizes_are_given_where_they_are_more_than_one():
    two = recipe(policy__tensor_parallel_size=2, policy__data_parallel_size=3)
    assert not any("parallel-size" in part for part in argv(recipe(), "train", "cuda"))
    train, evaluation = argv(two, "train", "cuda"), argv(two, "eval", "cuda")
    assert (option(train, "--tensor-parallel-size"), option(train, "--data-parallel-size")) == ("2", "3")
    assert option(evaluation, "--tensor-parallel-size") == "2"
    assert "--data-parallel-size" not in evaluation


@pytest.mark.parametrize("name", ["tensor", "data"])
def test_the_cpu_build_is_one_process(name):
    with pytest.raises(RecipeError, match=f"policy.{name}_parallel_size is 2; without a GPU"):
        argv(recipe(**{f"policy__{name}_parallel_size": 2}), "train", "cpu")


def test_memory_share_is_for_a_gpu_only():
    assert option(argv(recipe(), "train", "cuda"), "--gpu-memory-utilization") == "0.9"
    assert "--gpu-memory-utilization" not in argv(recipe(), "train", "cpu")


def test_a_hub_model_is_served_at_its_commit_and_not_without_one():
    revision = "0" * 40
    hub = recipe(model__source="hub", model__id="a/b", model__revision=revision)
    assert option(argv(hub, "train", "cuda"), "--revision") == revision
    assert "--revision" not in argv(recipe(), "train", "cpu"), "a local model's revision is the hash of its weights"
    with pytest.raises(RecipeError, match=r"model\.revision is missing"):
        argv(recipe(model__source="hub", model__id="a/b", model__revision=None), "train", "cuda")


# -- checks before the start -----------------------------------------------------------------------------------


def model_folder(monkeypatch: pytest.MonkeyPatch, root: Path, config: str) -> Path:
    monkeypatch.setenv("MODELS_DIR", str(root))
    folder = root / "tiny-lfm2"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    return folder


def test_a_missing_model_folder_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))
    with pytest.raises(RecipeError, match=r"tiny-lfm2/config\.json does not exist; MODELS_DIR must hold") as caught:
        app.check_model(recipe())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "message"), [("{", "is not valid JSON"), ('{"model_type": "lfm2"}', "has no conv_dim")]
)
def test_a_model_that_vllm_cannot_serve_is_refused(monkeypatch, tmp_path, config, message):
    model_folder(monkeypatch, tmp_path, config)
    with pytest.raises(RecipeError, match=message):
        app.check_model(recipe())


def test_a_hub_model_that_is_not_in_the_cache_is_refused_with_the_command_that_fetches_it(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = recipe(model__source="hub", model__id="a/b", model__revision="1" * 40)
    with pytest.raises(RecipeError, match=rf"model a/b at {'1' * 40} is not in .*run `make prepare`"):
        app.check_model(hub)


def test_sampling_that_the_model_asks_for_is_recorded_as_ignored(monkeypatch, tmp_path):
    folder = model_folder(monkeypatch, tmp_path, "{}")
    assert app.ignored_sampling(folder) == {}
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.1, "repetition_penalty": 1.05, "eos_token_id": 7}'
    )
    assert app.ignored_sampling(folder) == {"temperature": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize(("flags", "fits"), [("avx avx2 fma", True), ("avx avx2 avx512f", True), ("avx", False)])
def test_a_processor_without_avx2_is_refused(monkeypatch, tmp_path, flags, fits):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"machine": "x86_64"}))
    if fits:
        app.check_machine("cpu", cpuinfo)
        return
    with pytest.raises(NotReadyError, match="needs a processor with AVX2") as caught:
        app.check_machine("cpu", cpuinfo)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("version", "device"), [("0.31.0+cpu", "cpu"), ("0.31.0", "cuda")])
def test_the_variant_is_the_installed_build(monkeypatch, version, device):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert app.installed_device() == device


def test_what_is_served_is_written_to_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0+cpu")
    cfg = recipe()
    app.record(cfg, "train", "cpu", tmp_path, app.logging.getLogger("test"))
    written = json.loads((tmp_path / cfg.run.name / "policy.json").read_text())
    assert (written["role"], written["device"], written["vllm"]) == ("train", "cpu", "0.31.0+cpu")
    assert written["recipe_sha256"] == cfg.sha256()
