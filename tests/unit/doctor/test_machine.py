"""The machine and the images, each broken in turn: what was found, how to mend it, and the exit code."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from docker.errors import ImageNotFound

from scripts.checks import Check
from scripts.doctor import images, machine
from scripts.doctor.setup import Setup, pinned
from services.common import recipe

Broken = Callable[..., Setup]


class FakeEngine:
    """FAKE of docker.DockerClient: the parts that the checks ask."""

    def __init__(
        self,
        found: dict[str, dict[str, Any]],
        version: str = "26.1.5",
        runtimes: tuple[str, ...] = (),
        components: tuple[str, ...] = ("Engine",),
        security: tuple[str, ...] = (),
        cdi: tuple[str, ...] = (),
    ) -> None:
        self._version = {"Version": version, "Components": [{"Name": name} for name in components]}
        self._info = {"Runtimes": dict.fromkeys(runtimes), "SecurityOptions": list(security), "CDISpecDirs": list(cdi)}

        def get(name: str) -> SimpleNamespace:
            if name not in found:
                raise ImageNotFound(name)
            return SimpleNamespace(labels={}, attrs={}, **{}) if not found[name] else SimpleNamespace(**found[name])

        self.images = SimpleNamespace(get=get)
        self.networks = SimpleNamespace(list=list)
        self.containers = SimpleNamespace(list=lambda filters: [])

    def version(self) -> dict[str, Any]:
        return self._version

    def info(self) -> dict[str, Any]:
        return self._info


def with_engine(setup: Setup, engine: FakeEngine) -> Setup:
    vars(setup)["engine"] = engine
    return setup


def built(setup: Setup, **labels: str) -> dict[str, dict[str, Any]]:
    """Every image of the set-up, made from the locks of this checkout."""
    names = {name: setup.image(name) for name in ("policy", "trainer", "env", "tools")}
    names["sandbox"] = setup.sandbox_image
    return {
        reference: {
            "labels": {
                images.VARIANT_LABEL: "cpu", images.LOCK_LABEL: f"sha256:{recipe.file_sha256(setup.lock_of[name])}",
                **labels,
            },
            "attrs": {"RepoDigests": [f"{reference}@sha256:{name}"]},
        }
        for name, reference in names.items()
    }  # fmt: skip


def fails(check: Check, exit_code: int, *words: str) -> None:
    assert check.state == "fail", check
    assert check.error.exit_code == exit_code
    text = f"{check.found} {check.mend}"
    assert all(word in text for word in words), text


# --- Engine -------------------------------------------------------------------------------------------------------


def test_no_engine_or_an_old_one_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(machine.engine(setup), 3, "make docker")
    fails(machine.engine(with_engine(setup, FakeEngine({}, version="20.10.24"))), 3, "20.10.24", "25.0")
    assert machine.engine(with_engine(setup, FakeEngine({}))).state == "ok"


def test_an_engine_that_refuses_is_none(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = broken()
    del vars(setup)["engine"]

    def refuse(**_: Any) -> None:
        raise docker.errors.DockerException("connection refused")

    monkeypatch.setattr(docker, "from_env", refuse)
    assert setup.engine is None


@pytest.mark.parametrize(("code", "said"), [(127, "docker is not installed"), (0, "1.29.2"), (0, "v2.23.3")])
def test_no_compose_or_an_old_one_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    monkeypatch.setattr(machine, "output_of", lambda *_: (code, said))
    fails(machine.compose(setup), 3, "2.24")
    monkeypatch.setattr(machine, "output_of", lambda *_: (0, "2.26.1-4"))
    assert machine.compose(setup).state == "ok"


def test_a_socket_that_is_none_or_another_one_fails(broken: Broken, setup: Setup, tmp_path: Path) -> None:
    fails(machine.docker_socket(setup, tmp_path / "docker.sock"), 3, "no socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
        own = f"unix://{tmp_path}/docker.sock"
        assert machine.docker_socket(setup, tmp_path / "docker.sock", own).state == "ok"
        rootless = "unix:///run/user/1000/docker.sock"
        fails(machine.docker_socket(setup, tmp_path / "docker.sock", rootless), 3, rootless, "docker context use")
        elsewhere = broken(environment={"DOCKER_HOST": "tcp://10.0.0.1:2375"})
        fails(machine.docker_socket(elsewhere, tmp_path / "docker.sock"), 3, "tcp://10.0.0.1:2375", "unset DOCKER_HOST")


def test_an_engine_that_is_not_supported_is_named(setup: Setup) -> None:
    podman = FakeEngine({}, version="5.4.0", components=("Podman Engine", "Conmon"))
    fails(machine.engine(with_engine(setup, podman)), 5, "Podman")
    rootless = FakeEngine({}, security=("name=seccomp,profile=builtin", "name=rootless"))
    fails(machine.engine(with_engine(setup, rootless)), 5, "rootless")
    assert machine.engine(with_engine(setup, FakeEngine({}))).state == "ok"


def test_a_checkout_that_the_services_user_cannot_enter_or_read_fails(broken: Broken, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir(mode=0o755)
    assert machine.readable(broken(tasks_dir=tasks)).state == "ok"
    tasks.chmod(0o750)
    fails(machine.readable(broken(tasks_dir=tasks)), 5, str(tasks), "chmod")
    fails(machine.readable(broken(runs_dir=Path("/root/project/runs"))), 5, "/root/project/runs", "move")


# --- Processor, memory, disk, port -----------------------------------------------------------------------------------


def test_a_processor_without_avx2_fails_for_the_cpu_images_only(setup: Setup, broken: Broken) -> None:
    old = "processor\t: 0\nflags\t\t: fpu sse4_2 avx\n"
    fails(machine.processor(setup, old), 5, "AVX2")
    assert machine.processor(broken(variant="cuda"), old).state == "ok"
    assert machine.processor(setup, "flags\t\t: fpu avx avx2\n").state == "ok"


def test_too_little_memory_names_both_numbers(setup: Setup) -> None:
    fails(machine.memory(setup, "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n"), 5, "4.0 GB", "12 GB")


def test_too_little_disk_names_both_numbers(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**9))
    fails(machine.disk(setup), 5, "1.0 GB", "10 GB", "RUNS_DIR")


def test_shared_memory_must_be_asked_for_and_fit(setup: Setup) -> None:
    small, large = {"shm_size": str(10**9)}, {"shm_size": str(8 * 10**9)}
    memory = "MemTotal: 12000000 kB\n"
    assert machine.shared_memory(setup, {"policy": small, "trainer": small}, memory).state == "ok"
    fails(machine.shared_memory(setup, {"policy": large, "trainer": large}, memory), 5, "8.0 GB", "12 GB")
    fails(machine.shared_memory(setup, {"policy": small, "trainer": {}}, memory), 3, "trainer")


def test_a_taken_port_is_named_with_the_way_out(broken: Broken) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        fails(machine.port(broken(env_port=port)), 5, str(port), "ENV_PORT")


def test_used_up_address_pools_fail(setup: Setup) -> None:
    pools = [{"Base": "10.210.0.0/16", "Size": 24}]
    assert machine.address_pools(setup, ["10.210.3.0/24", "fd00::/64"], pools).found == "255 of 256 subnets are free"
    used = [f"10.210.{number}.0/24" for number in range(254)]
    fails(machine.address_pools(setup, used, pools), 5, "2 of 256", "docker network prune")
    assert machine.address_pools(setup, ["172.18.0.0/16"], None).state == "ok"


# --- GPUs -----------------------------------------------------------------------------------------------------------

TWO = "0, NVIDIA H200, 143771, 580.82\n1, NVIDIA H200, 143771, 580.82\n"
PEERS = " \tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n"


def test_two_gpus_with_peer_access_are_ok(broken: Broken) -> None:
    found = machine.gpus(broken(variant="cuda"), TWO, PEERS)
    assert found.state == "ok" and "NVIDIA H200 140 GB" in found.found


@pytest.mark.parametrize(
    ("listing", "peers", "state", "words"),
    [
        ("", PEERS, "fail", "driver 0"),
        (TWO.replace("580.82", "535.10"), PEERS, "fail", "driver 535"),
        (TWO.splitlines()[0], PEERS, "warn", "one GPU"),
        (TWO, PEERS.replace("OK", "NS"), "warn", "no peer access"),
    ],
)
def test_missing_old_or_parted_gpus_are_told(broken: Broken, listing: str, peers: str, state: str, words: str) -> None:
    found = machine.gpus(broken(variant="cuda"), listing, peers)
    assert found.state == state and words in found.found


def test_an_engine_that_hands_out_no_gpu_fails(broken: Broken, tmp_path: Path) -> None:
    setup = with_engine(broken(variant="cuda"), FakeEngine({}))
    fails(machine.container_gpus(setup), 5, "nvidia-container-toolkit")
    found = machine.container_gpus(with_engine(setup, FakeEngine({}, runtimes=("nvidia",))))
    assert (found.state, found.found) == ("ok", "GPUs by the nvidia runtime")


def test_a_host_with_cdi_wants_its_compose_file_and_one_with_the_runtime_does_not(
    broken: Broken, tmp_path: Path
) -> None:
    (tmp_path / "nvidia.yaml").write_text('cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ndevices: []\n')
    (tmp_path / "other.json").write_text('{"cdiVersion": "0.5.0", "kind": "vendor.com/net", "devices": []}')
    by_cdi, by_runtime = FakeEngine({}, cdi=(str(tmp_path),)), FakeEngine({}, runtimes=("nvidia",))
    without = broken(variant="cuda", environment={"COMPOSE_FILE": "compose.yaml:compose.one-gpu.yaml"})
    mend = "COMPOSE_FILE=compose.yaml:compose.one-gpu.yaml:compose.cdi.yaml"
    fails(machine.container_gpus(with_engine(without, by_cdi)), 5, "CDI", mend)
    asked = broken(variant="cuda", environment={"COMPOSE_FILE": "compose.yaml:compose.cdi.yaml"})
    assert machine.container_gpus(with_engine(asked, by_cdi)).found == "GPUs by CDI"
    fails(machine.container_gpus(with_engine(asked, by_runtime)), 5, "nvidia runtime", "leave it out")
    (tmp_path / "nvidia.yaml").unlink()
    fails(machine.container_gpus(with_engine(asked, by_cdi)), 5, "neither the nvidia runtime nor CDI")


def test_the_cpu_variant_skips_gpus(setup: Setup) -> None:
    assert [machine.gpus(setup).state, machine.container_gpus(setup).state] == ["skipped", "skipped"]


# --- Images ---------------------------------------------------------------------------------------------------------


def test_a_missing_image_is_named(setup: Setup) -> None:
    found = built(setup)
    assert images.present(with_engine(setup, FakeEngine(found))).state == "ok"
    del found[setup.image("tools")]
    fails(images.present(with_engine(setup, FakeEngine(found))), 3, "opencode-rl-tools:cpu", "make images VARIANT=cpu")


def test_a_sandbox_image_on_another_base_than_the_tasks_want_is_refused(setup: Setup, broken: Broken) -> None:
    def on(base: str) -> FakeEngine:
        return FakeEngine({setup.sandbox_image: {"labels": {images.BASE_LABEL: base}}})

    assert images.sandbox_base(with_engine(setup, on("opencode-rl/base:bookworm"))).state == "ok"
    wants = broken(env__sandbox_base="example/tasks@sha256:0a")
    assert images.sandbox_base(with_engine(wants, on("example/tasks@sha256:0a"))).state == "ok"
    fails(images.sandbox_base(with_engine(wants, on("opencode-rl/base:bookworm"))), 3, "example/tasks", "make images")


def test_an_image_of_the_other_variant_is_refused(setup: Setup) -> None:
    found = built(setup, **{images.VARIANT_LABEL: "cuda"})
    fails(images.present(with_engine(setup, FakeEngine(found))), 5, "built for cuda", "VARIANT")


def test_an_image_from_another_lock_is_a_warning(setup: Setup) -> None:
    assert images.made_from_these_locks(with_engine(setup, FakeEngine(built(setup)))).state == "ok"
    found = built(setup)
    found[setup.image("env")]["labels"][images.LOCK_LABEL] = "sha256:0a"
    check = images.made_from_these_locks(with_engine(setup, FakeEngine(found)))
    assert check.state == "warn" and check.found.startswith("env: ")


def test_a_pushed_image_is_the_one_that_was_pushed(broken: Broken, tmp_path: Path) -> None:
    setup = broken(registry="ghcr.io/you")
    with_engine(setup, FakeEngine(built(setup)))
    path = tmp_path / "digests.json"
    assert images.digests(setup, path).state == "warn"
    path.write_text('{"all": ["sha256:policy", "sha256:trainer", "sha256:env"]}')
    assert "tools" in images.digests(setup, path).found
    path.write_text('{"all": ["sha256:policy", "sha256:trainer", "sha256:env", "sha256:tools"]}')
    assert images.digests(setup, path).state == "ok"


def test_without_an_engine_images_are_skipped_and_not_ok(setup: Setup) -> None:
    assert {check(setup).state for check in (images.present, images.made_from_these_locks)} == {"skipped"}


@pytest.mark.parametrize(
    ("image", "package", "version", "words"),
    [
        ("policy", "torch", "2.12.0", "torch is 2.12.0 in policy, 2.13.0+cpu in trainer"),
        ("tools", "openenv", "0.9.0", "openenv is"),
        ("trainer", "trl", "1.16.0", "trl is 1.16.0 in trainer, written against 1.15"),
        ("env", "mcp", "2.3.0", "mcp is 2.3.0 in env, fastmcp needs 1"),
    ],
)
def test_versions_that_conflict_are_named(setup: Setup, image: str, package: str, version: str, words: str) -> None:
    locks = {name: pinned(path) for name, path in setup.lock_of.items()}
    assert images.versions(setup, locks).state == "ok"
    locks[image][package] = version
    fails(images.versions(setup, locks), 3, words, "make lock")
