"""What must be true before anything is started: each check gives one message and an exit code.

Order matters only in that the cheap ones come first; ``check`` raises the first failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound

from services.common import recipe, tasks
from services.common.errors import MachineError, NotReadyError, RecipeError
from services.common.recipe import Recipe

MIN_DISK_GB = 10
MIN_MEMORY_GB = 12
MIN_COMPOSE = (2, 24)
IMAGES = ("policy", "trainer", "env", "tools")


def check(cfg: Recipe, *, variant: str, tag: str, runs_dir: Path, tasks_dir: Path, models_dir: Path, port: int) -> None:
    """Raise the first failed precondition. Raises: RecipeError, NotReadyError, MachineError."""
    check_tasks(cfg, tasks_dir)
    check_model(cfg, models_dir)
    check_cpu(variant)
    check_memory()
    check_disk(runs_dir)
    check_port(port)
    client = engine()
    check_compose()
    check_images(client, cfg, variant, tag)


def check_tasks(cfg: Recipe, tasks_dir: Path) -> None:
    """Both suites are there, complete, unchanged, without a shared or doubled instruction."""
    train = tasks.load_suite(tasks_dir, cfg.tasks.train)
    heldout = tasks.load_suite(tasks_dir, cfg.tasks.heldout)
    tasks.check_disjoint(train, heldout)
    tasks.check_image((*train, *heldout), cfg.env.sandbox_image)


def check_model(cfg: Recipe, models_dir: Path) -> None:
    if cfg.model.source == "hub":
        if cfg.model.revision is None:
            raise RecipeError("model.revision is missing; a Hub model needs its full 40-character commit")
        return
    folder = models_dir / cfg.model.id
    if not (folder / "config.json").is_file():
        have = sorted(path.parent.name for path in models_dir.glob("*/config.json")) or ["none"]
        raise RecipeError(f"model.id is {cfg.model.id!r} but {folder} holds no config.json; there: {', '.join(have)}")
    if cfg.model.revision is not None:
        found = "sha256:" + recipe.file_sha256(folder / "model.safetensors")
        if found != cfg.model.revision:
            raise RecipeError(
                f"model.revision is {cfg.model.revision} and the weights in {folder} have {found}; "
                "restore the file or correct the recipe"
            )


def check_cpu(variant: str, cpuinfo: str | None = None) -> None:
    """The cpu images run vLLM's AVX2 or AVX-512 library; another processor dies of an illegal instruction."""
    if variant != "cpu":
        return
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    if "avx2" not in flags:
        raise MachineError("this processor has no AVX2, which the cpu images need; use a machine with AVX2 or a GPU")


def check_memory(meminfo: str | None = None) -> None:
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    available_gb = next(int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("MemAvailable"))
    if available_gb < MIN_MEMORY_GB:
        raise MachineError(f"{available_gb:.1f} GB of memory are available; the stack needs {MIN_MEMORY_GB} GB")


def check_disk(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < MIN_DISK_GB:
        raise MachineError(f"{free_gb:.1f} GB are free below {folder}; a run needs {MIN_DISK_GB} GB")


def check_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise MachineError(
                f"port {port} on 127.0.0.1 is taken; stop what uses it (`make down`, if it is this stack) "
                "or set ENV_PORT to a free one"
            ) from None


def engine() -> docker.DockerClient:
    try:
        client = docker.from_env(timeout=20)
        client.ping()
    except DockerException as error:
        raise NotReadyError(
            f"no Docker engine answers ({error}); start it, or run `make docker`, which installs one on Debian"
        ) from None
    return client


def check_compose() -> None:
    found = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True, check=False)
    version = tuple(
        int(part) for part in found.stdout.strip().lstrip("v").split("-")[0].split(".")[:2] if part.isdigit()
    )
    if version < MIN_COMPOSE:
        raise NotReadyError(
            f"docker compose is {found.stdout.strip() or 'missing'}; 2.24 or newer is needed: run `make docker`"
        )


def check_images(client: docker.DockerClient, cfg: Recipe, variant: str, tag: str) -> None:
    registry = os.environ.get("REGISTRY", "local")
    names = [f"{registry}/opencode-rl-{name}:{tag}" for name in IMAGES]
    if cfg.env.backend == "docker":
        names.append(cfg.env.sandbox_image)
    for name in names:
        try:
            labels = client.images.get(name).labels
        except ImageNotFound:
            raise NotReadyError(f"image {name} is not there; build it with `make images VARIANT={variant}`") from None
        if (built := labels.get("opencode-rl.variant", variant)) != variant:
            raise MachineError(f"image {name} was built for {built} and this run wants {variant}; set TAG or VARIANT")
