"""Checks before vLLM starts, each one message; then vLLM, with its log and heartbeat in the run."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path

from services.common import log, recipe, run_dir
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.policy.argv import PORT, Device, Role, argv, environment, hub_revision
from services.policy.attend import attend
from services.policy.reasoning import reasoning_flags

SAMPLING_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "do_sample",
)  # fmt: skip
"""What a generation_config.json may ask for and ``--generation-config vllm`` ignores."""


def serve(role: Role) -> int:
    """Check the machine and the model, record what is served, and run vLLM to its end. Returns: the exit code."""
    cfg = recipe.from_environment()
    name = "policy" if role == "train" else "policy-eval"
    logger = log.setup(name)
    device = installed_device()
    check_machine(device, Path("/proc/cpuinfo"))
    folder = check_model(cfg)
    reasoning = reasoning_flags(cfg.model_location(), hub_revision(cfg))
    host, port = listen_address()
    command = argv(cfg, role, device, reasoning=reasoning, python=sys.executable, listen=(host, port))
    variables = environment(cfg, role, device)
    record(cfg, role, device, folder, logger)
    logger.info("starting vLLM", extra={"argv": command[1:], "environment": variables})
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    return attend(command, {**os.environ, **variables}, name, run_of(cfg), url)


def run_of(cfg: Recipe) -> RunDir | None:
    """The run's directory; None where RUNS_DIR names none, for a policy that serves no run."""
    runs = Path(os.environ.get("RUNS_DIR", ""))
    return RunDir(runs / cfg.run.name) if runs.is_absolute() else None


def listen_address() -> tuple[str, int]:
    """POLICY_LISTEN, ``host:port``; where it is not set, all addresses of a container of our own.

    Raises: RecipeError: another form.
    """
    value = os.environ.get("POLICY_LISTEN") or f"0.0.0.0:{PORT}"
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit():
        raise RecipeError(f"POLICY_LISTEN is {value!r}; it must be host:port, such as 127.0.0.1:8001")
    return host, int(port)


def installed_device() -> Device:
    """The variant of this image. vLLM tells it the same way: by ``cpu`` in its version.

    Raises: NotReadyError: no distribution called ``vllm``.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise NotReadyError("no distribution `vllm` is installed; run this in the policy image") from None
    return "cpu" if "cpu" in version else "cuda"


def check_machine(device: Device, cpuinfo: Path) -> None:
    """Raises: NotReadyError: this image's variant cannot run here; vLLM itself would die of an illegal instruction."""
    if device == "cuda":
        if not any(Path("/dev").glob("nvidia[0-9]*")):
            raise NotReadyError(
                "this is the cuda image and the container has no NVIDIA GPU; use the cpu images "
                "(VARIANT=cpu, compose.cpu.yaml) or start Docker with the NVIDIA container toolkit"
            )
        return
    if os.uname().machine != "x86_64":
        return
    flags = next((line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), [])
    if "avx2" not in flags:
        raise NotReadyError("the cpu image needs a processor with AVX2 or AVX-512; this one has neither")


def check_model(cfg: Recipe) -> Path:
    """Folder that holds the model's config.json: below MODELS_DIR, or in the mounted Hub cache.

    Raises: RecipeError: it is not there, or vLLM could not serve what it holds.
    """
    folder = local_folder(cfg) if cfg.model.source == "local" else cached_folder(cfg)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"{folder}/config.json is not valid JSON: {error}") from None
    if config.get("model_type") == "lfm2" and "conv_dim" not in config:
        raise RecipeError(f"{folder}/config.json has no conv_dim, which vLLM's LFM2 needs and transformers leaves out")
    return folder


def local_folder(cfg: Recipe) -> Path:
    folder = Path(cfg.model_location())
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"model.id is {cfg.model.id!r} with source local, and {folder}/config.json does not exist; "
            "MODELS_DIR must hold that folder (data/models in the project)"
        )
    return folder


def cached_folder(cfg: Recipe) -> Path:
    from huggingface_hub import try_to_load_from_cache

    revision = hub_revision(cfg)
    found = try_to_load_from_cache(cfg.model.id, "config.json", revision=revision)
    if not isinstance(found, str):
        raise RecipeError(
            f"model {cfg.model.id} at {revision} is not in the Hub cache (HF_HOME); a starting container downloads "
            "nothing, so run `make prepare` on the host first"
        )
    return Path(found).parent


def ignored_sampling(folder: Path) -> dict[str, object]:
    """Sampling that the model's generation_config.json asks for and that is not applied."""
    value = run_dir.read_json(folder / "generation_config.json")
    return {key: value[key] for key in SAMPLING_KEYS if key in value} if value else {}


def record(cfg: Recipe, role: Role, device: Device, folder: Path, logger: logging.Logger) -> None:
    """Write ``runs/<run>/policy.json`` where the run directory is mounted, else log it."""
    value = {
        "role": role,
        "device": device,
        "vllm": importlib.metadata.version("vllm"),
        "recipe_sha256": cfg.sha256(),
        "recipe": cfg.model_dump(mode="json"),
        "ignored_generation_config": ignored_sampling(folder),
    }
    name = "policy.json" if role == "train" else "policy-eval.json"
    path = Path(os.environ.get("RUNS_DIR", "")) / cfg.run.name / name
    try:
        if path.is_absolute() and path.parent.parent.is_dir():
            run_dir.write_json(path, value)
            return
    except PermissionError:
        pass
    logger.info("resolved recipe", extra=value)
