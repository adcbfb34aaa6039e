"""The machine: engine, Compose, socket, processor, memory, disk, ports, address pools, GPUs."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.checks import Check, not_ready, ok, skipped, unfit, warn
from scripts.doctor.setup import Setup, output_of
from scripts.stack import compose_files

MIN_DISK_GB = 10
MIN_MEMORY_GB = 12
MIN_COMPOSE = (2, 24)
MIN_ENGINE = (25, 0)
"""start_interval of a health check."""
MIN_DRIVER = {"13": 580, "12": 525}
"""CUDA's major version -> first NVIDIA driver that runs it."""
NETWORKS_NEEDED = 4
"""Of the compose project; sandboxes share one of them."""
DEFAULT_POOLS: list[dict[str, Any]] = [{"Base": f"172.{number}.0.0/16", "Size": 16} for number in range(17, 32)] + [
    {"Base": "192.168.0.0/16", "Size": 20}
]
"""Of an engine that has no pools of its own configured."""
SOCKET = Path("/var/run/docker.sock")


def engine(setup: Setup) -> Check:
    if setup.engine is None:
        mend = "start it, or run `make docker`, which installs one on Debian"
        return not_ready("engine", "no Docker engine answers", mend)
    answer = setup.engine.version()
    if kind := unsupported(answer.get("Components") or (), setup.engine.info()):
        return unfit("engine", f"the engine that answers is {kind}", "use a Docker engine that root runs")
    version = str(answer["Version"])
    if _numbers(version) < MIN_ENGINE:
        return not_ready("engine", f"Docker engine {version}", "25.0 or newer is needed: run `make docker`")
    return ok("engine", f"Docker engine {version}")


def unsupported(components: Iterable[dict[str, Any]], info: dict[str, Any]) -> str:
    """Which engine this is, of those on which env cannot start sandboxes as it must; empty for none of them."""
    if any("podman" in str(part.get("Name", "")).lower() for part in components):
        return "Podman"
    return "rootless Docker" if any("rootless" in option for option in info.get("SecurityOptions") or ()) else ""


def readable(setup: Setup) -> Check:
    """The services' user enters and reads the checkout: as the host's other users do, and below no folder that only
    the containers' root may enter."""
    name, places = "readable", (setup.recipe_path.resolve(), setup.tasks_dir, setup.models_dir)
    for place in (*places, setup.runs_dir):
        if place.is_relative_to("/root"):
            mend = "move the checkout (and RUNS_DIR, TASKS_DIR) to a folder such as /srv or /home/<you>"
            return unfit(name, f"{place} is below /root, which the services' user may not enter", mend)
    for place in places:
        needed = stat.S_IROTH | (stat.S_IXOTH if place.is_dir() else 0)
        if place.exists() and place.stat().st_mode & needed != needed:
            mend = f"chmod --recursive o+rX {place}"
            return unfit(name, f"{place} cannot be read by other users, and the services run as one", mend)
    return ok(name, "the services' user reads recipe, tasks and models")


def compose(_setup: Setup) -> Check:
    code, found = output_of("docker", "compose", "version", "--short")
    if code or _numbers(found) < MIN_COMPOSE:
        mend = "2.24 or newer is needed: run `make docker`"
        return not_ready("compose", f"docker compose is {found if code == 0 else 'missing'}", mend)
    return ok("compose", f"Docker Compose {found}")


def docker_socket(setup: Setup, path: Path = SOCKET, endpoint: str | None = None) -> Check:
    """env mounts the socket at this path, wherever this shell's client finds its engine.

    Args: endpoint: of the client's context.
    """
    if setup.cfg.env.backend != "docker":
        return skipped("socket", f"backend {setup.cfg.env.backend} starts no container on this machine")
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        mend = f"make the engine listen on {path}; env starts sandboxes through it"
        return not_ready("socket", f"{path} is no socket", mend)
    if endpoint is None:
        endpoint = output_of("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")[1]
    elsewhere = setup.environment.get("DOCKER_HOST") or endpoint
    if elsewhere.startswith(("unix:", "tcp:", "ssh:", "fd:")) and elsewhere != f"unix://{path}":
        mend = f"unset DOCKER_HOST, `docker context use default`: env starts its sandboxes on the engine behind {path}"
        return not_ready("socket", f"this shell's Docker client uses {elsewhere}", mend)
    return ok("socket", str(path))


def processor(setup: Setup, cpuinfo: str | None = None) -> Check:
    """The cpu images run vLLM's AVX2 or AVX-512 library; another processor dies of an illegal instruction."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "neither AVX")
    if setup.variant == "cpu" and "avx2" not in flags:
        mend = "use a machine with AVX2, which the cpu images need, or a GPU (VARIANT=cuda)"
        return unfit("processor", f"this processor has no AVX2 ({widest})", mend)
    return ok("processor", f"{text.count('processor')} cores, {widest}")


def memory(_setup: Setup, meminfo: str | None = None) -> Check:
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    available_gb = next(int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("MemAvailable"))
    if available_gb < MIN_MEMORY_GB:
        mend = f"end other programs: the stack needs {MIN_MEMORY_GB} GB"
        return unfit("memory", f"{available_gb:.1f} GB of memory are available", mend)
    return ok("memory", f"{available_gb:.1f} GB available")


def shared_memory(setup: Setup, services: dict[str, Any] | None = None, meminfo: str | None = None) -> Check:
    """NCCL and torch's data loaders use /dev/shm; a container's is memory of the host."""
    if services is None:
        code, found = output_of("docker", "compose", *_files(setup), "config", "--format", "json")
        if code:
            return skipped("shm", f"the compose files cannot be read: {found.splitlines()[-1]}")
        services = json.loads(found)["services"]
    sizes = {name: int(value["shm_size"]) / 1e9 for name, value in services.items() if "shm_size" in value}
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    total_gb = next(int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("MemTotal"))
    asked = ", ".join(f"{name} {size:.1f} GB" for name, size in sorted(sizes.items()))
    if not {"policy", "trainer"} <= set(sizes):
        return not_ready("shm", f"shm_size is set for {asked or 'no service'}", "policy and trainer need it too")
    if sum(sizes.values()) > total_gb:
        return unfit("shm", f"{asked}, of {total_gb:.0f} GB of memory", "lower shm_size in compose.yaml")
    return ok("shm", asked)


def _files(setup: Setup) -> list[str]:
    return [part for name in compose_files(setup.variant) for part in ("--file", name)]


def disk(setup: Setup) -> Check:
    setup.runs_dir.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(setup.runs_dir).free / 1e9
    if free_gb < MIN_DISK_GB:
        mend = f"free some, or set RUNS_DIR elsewhere: a run needs {MIN_DISK_GB} GB"
        return unfit("disk", f"{free_gb:.1f} GB are free below {setup.runs_dir}", mend)
    return ok("disk", f"{free_gb:.1f} GB free below {setup.runs_dir}")


def port(setup: Setup) -> Check:
    """The one port that a start publishes. A stack that runs holds it rightly."""
    number = setup.env_port
    if setup.container("env"):
        return ok("port", f"{number} is this stack's own env")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            mend = "stop what uses it, or set ENV_PORT to a free one"
            return unfit("port", f"port {number} on 127.0.0.1 is taken", mend)
    return ok("port", f"{number} on 127.0.0.1 is free")


def address_pools(setup: Setup, subnets: list[str] | None = None, pools: list[dict[str, Any]] | None = None) -> Check:
    """Networks that a dead run left behind use the engine's address pools up; then nothing starts any more."""
    if subnets is None:
        if setup.engine is None:
            return skipped("address-pools", "no Docker engine answers")
        subnets = _subnets(network.attrs for network in setup.engine.networks.list())
        pools = setup.engine.info().get("DefaultAddressPools")
    used = [ipaddress.ip_network(subnet) for subnet in subnets]
    free = total = 0
    for pool in pools or DEFAULT_POOLS:
        base = ipaddress.ip_network(pool["Base"])
        if base.version != 4:
            continue
        step = 2 ** (32 - pool["Size"])
        for start in range(int(base.network_address), int(base.broadcast_address), step):
            block = ipaddress.ip_network((start, pool["Size"]))
            total += 1
            free += not any(block.overlaps(other) for other in used if other.version == 4)
    if free < NETWORKS_NEEDED:
        mend = "`docker network prune` removes those that nothing uses"
        return unfit("address-pools", f"{free} of {total} subnets are free, {NETWORKS_NEEDED} are needed", mend)
    return ok("address-pools", f"{free} of {total} subnets are free")


def _subnets(networks: Iterable[dict[str, Any]]) -> list[str]:
    configs = [item for network in networks for item in (network.get("IPAM") or {}).get("Config") or ()]
    return [item["Subnet"] for item in configs if item.get("Subnet")]


def gpus(setup: Setup, listing: str | None = None, peers: str | None = None, cuda_major: str = "13") -> Check:
    """Args: listing: of nvidia-smi, ``index, name, MiB, driver`` a line. peers: its matrix of peer access."""
    if setup.variant == "cpu":
        return skipped("gpus", "the cpu images use none")
    if listing is None:
        fields = "--query-gpu=index,name,memory.total,driver_version"
        code, listing = output_of("nvidia-smi", fields, "--format=csv,noheader,nounits")
        if code:
            return unfit("gpus", f"nvidia-smi: {listing}", "install the NVIDIA driver, or use VARIANT=cpu")
        peers = output_of("nvidia-smi", "topo", "-p2p", "r")[1]
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.strip()]
    found = ", ".join(f"{row[1]} {int(row[2]) / 1024:.0f} GB" for row in rows) or "none"
    driver = int(rows[0][3].split(".")[0]) if rows else 0
    if driver < MIN_DRIVER[cuda_major]:
        mend = f"install driver {MIN_DRIVER[cuda_major]} or newer: torch is built for CUDA {cuda_major}"
        return unfit("gpus", f"{found}; driver {driver}", mend)
    if len(rows) < 2:
        mend = "COMPOSE_FILE=compose.yaml:compose.one-gpu.yaml with the one-GPU recipe; else the policy needs GPU 1"
        return warn("gpus", f"{found}; one GPU", mend)
    if peers is not None and not re.search(r"\bOK\b", peers):
        mend = "NCCL goes through host memory then: weight sync is slower, nothing else"
        return warn("gpus", f"{found}; no peer access between GPUs", mend)
    return ok("gpus", f"{found}; driver {driver}, peer access")


def container_gpus(setup: Setup, cdi_kinds: set[str] | None = None) -> Check:
    """Which of the two ways to give GPUs to containers this host has, and whether the compose files use it.

    Args: cdi_kinds: of the CDI specifications on this machine, such as ``nvidia.com/gpu``.
    """
    name = "gpu-runtime"
    if setup.variant == "cpu":
        return skipped(name, "the cpu images use none")
    if setup.engine is None:
        return skipped(name, "no Docker engine answers")
    info = setup.engine.info()
    spec_folders = info.get("CDISpecDirs") or []
    kinds = _cdi_kinds(map(Path, spec_folders)) if cdi_kinds is None else cdi_kinds
    runtime, cdi = "nvidia" in (info.get("Runtimes") or {}), bool(spec_folders) and "nvidia.com/gpu" in kinds
    files = (setup.environment.get("COMPOSE_FILE") or "compose.yaml").split(":")
    asked = any(Path(file).name == "compose.cdi.yaml" for file in files)
    if not runtime and not cdi:
        mend = "install nvidia-container-toolkit, then `nvidia-ctk runtime configure` (or `nvidia-ctk cdi generate`, "
        mend += 'and "features": {"cdi": true} in /etc/docker/daemon.json), and restart the engine'
        return unfit(name, "the engine gives no GPU to containers: it has neither the nvidia runtime nor CDI", mend)
    if asked and not cdi:
        return unfit(name, "COMPOSE_FILE has compose.cdi.yaml, and the engine has the nvidia runtime", "leave it out")
    if cdi and not runtime and not asked:
        mend = f"COMPOSE_FILE={':'.join([*files, 'compose.cdi.yaml'])}"
        return unfit(name, "the engine gives GPUs to containers by CDI, and COMPOSE_FILE lacks compose.cdi.yaml", mend)
    return ok(name, "GPUs by CDI" if asked else "GPUs by the nvidia runtime")


def _cdi_kinds(folders: Iterable[Path]) -> set[str]:
    specs = [path for folder in folders for path in (*folder.glob("*.yaml"), *folder.glob("*.json"))]
    return {kind for path in specs for kind in re.findall(r"""kind["']?:\s*["']?([\w./-]+)""", path.read_text())}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.lstrip("v").split("-")[0].split("+")[0].split(".")[:2] if part.isdigit())
