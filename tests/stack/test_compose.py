"""The stacks as Compose resolves them: every service is checked, bounded, unprivileged and off the internet."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"policy", "env", "trainer", "watchdog", "policy-eval", "evaluator"}


def config(*files: str, **environment: str) -> dict:
    command = ["docker", "compose", *(part for name in files for part in ("--file", name)), "--profile", "*"]
    out = subprocess.run(
        [*command, "config", "--format", "json"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(out.stdout)


CDI = ("compose.yaml", "compose.cdi.yaml")
STACKS = {
    "two-gpu": ("compose.yaml",),
    "one-gpu": ("compose.yaml", "compose.one-gpu.yaml"),
    "cpu": ("compose.yaml", "compose.cpu.yaml"),
}


@pytest.fixture(params=STACKS.values(), ids=STACKS)
def stack(request: pytest.FixtureRequest) -> dict:
    return config(*request.param)


def test_every_service_has_image_health_and_no_privilege(stack: dict) -> None:
    assert set(stack["services"]) == SERVICES
    for name, service in stack["services"].items():
        assert service["image"], name
        assert service["pull_policy"] == "never", f"{name}: anybody may own the name local/ in a public registry"
        assert service["healthcheck"]["test"], name
        assert service["init"] is True, name
        # What waiting does not make better (a recipe, tasks or weights that are not there) is not tried for ever.
        assert service["restart"] == "on-failure:5", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "container_name" not in service, name
        assert not service.get("privileged"), name


def test_every_image_follows_registry_and_tag_the_sandboxes_too() -> None:
    for files in STACKS.values():
        services = config(*files, REGISTRY="localhost:5000/me", TAG="mine", PULL_POLICY="missing")["services"]
        assert {service["pull_policy"] for service in services.values()} == {"missing"}
        for name, service in services.items():
            assert re.fullmatch(r"localhost:5000/me/opencode-rl-\w+:mine", service["image"]), name
        for name in ("env", "evaluator"):
            assert services[name]["environment"]["IMAGE_PATTERN"] == "localhost:5000/me/opencode-rl-{}:mine"


def test_only_env_has_the_docker_socket(stack: dict) -> None:
    holders = {
        name
        for name, service in stack["services"].items()
        if any("docker.sock" in volume["source"] for volume in service.get("volumes", []))
    }
    assert holders == {"env"}


def test_sandboxes_share_a_network_with_env_alone_and_have_no_way_out(stack: dict) -> None:
    on_it = {name for name, service in stack["services"].items() if "sandboxes" in service["networks"]}
    assert on_it == {"env"}
    assert stack["networks"]["sandboxes"]["internal"] is True
    assert stack["networks"]["train"]["internal"] is True


def test_published_ports_are_on_loopback(stack: dict) -> None:
    published = [port for service in stack["services"].values() for port in service.get("ports", [])]
    assert published
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_the_dashboard_is_a_project_of_its_own_that_meets_no_service_and_sees_no_run() -> None:
    found = config("compose.dash.yaml")
    (dash,) = found["services"].values()
    assert dash["pull_policy"] == "never"
    assert found["name"] == "opencode-rl-dash" and dash["profiles"] == ["dash"]
    assert [Path(volume["source"]).name for volume in dash["volumes"]] == [".trackio"]
    assert {port["host_ip"] for port in dash["ports"]} == {"127.0.0.1"}
    assert dash["cap_drop"] == ["ALL"] and dash["security_opt"] == ["no-new-privileges:true"]
    assert dash["healthcheck"]["test"]


def test_trainer_waits_for_policy_env_and_watchdog(stack: dict) -> None:
    needs = {name: rule["condition"] for name, rule in stack["services"]["trainer"]["depends_on"].items()}
    assert needs == {
        "policy": "service_healthy", "env": "service_healthy", "watchdog": "service_started",
    }  # fmt: skip


def test_run_directory_and_tasks_have_one_path_inside_and_out(stack: dict) -> None:
    for name in ("env", "trainer", "evaluator"):
        same = [
            v
            for v in stack["services"][name]["volumes"]
            if v["target"] in (str(ROOT / "runs"), str(ROOT / "data/tasks"))
        ]
        assert len(same) == 2, name
        assert all(volume["source"] == volume["target"] for volume in same)


def test_each_stack_has_its_gpus() -> None:
    def gpus(stack: dict) -> list:
        reservations = [
            stack["services"][name]["deploy"]["resources"].get("reservations", {})
            for name in ("trainer", "policy", "policy-eval")
        ]
        return [[d["device_ids"] for d in found.get("devices", [])] for found in reservations]

    found = {name: gpus(config(*files)) for name, files in STACKS.items()}
    assert found == {
        "two-gpu": [[["0"]], [["1"]], [["1"]]],
        "one-gpu": [[["0"]], [["0"]], [["0"]]],
        "cpu": [[], [], []],
    }
    other = config(*STACKS["two-gpu"], TRAINER_GPU="4", POLICY_GPU="5", EVAL_GPU="6")
    assert gpus(other) == [[["4"]], [["5"]], [["6"]]]


def test_a_host_with_cdi_gets_its_gpus_by_it_alone() -> None:
    def devices(*files: str, **environment: str) -> list[list[tuple[str, list[str]]]]:
        services = config(*files, **environment)["services"]
        reservations = [
            services[name]["deploy"]["resources"]["reservations"] for name in ("trainer", "policy", "policy-eval")
        ]
        return [[(device["driver"], device["device_ids"]) for device in found["devices"]] for found in reservations]

    assert devices(*CDI) == [[("cdi", [f"nvidia.com/gpu={number}"])] for number in (0, 1, 1)]
    other = devices(*CDI, TRAINER_GPU="4", POLICY_GPU="5", EVAL_GPU="6")
    assert other == [[("cdi", [f"nvidia.com/gpu={number}"])] for number in (4, 5, 6)]
    one = devices("compose.yaml", "compose.one-gpu.yaml", "compose.cdi.yaml", GPU="0")
    assert one == [[("cdi", ["nvidia.com/gpu=0"])]] * 3


def test_each_stack_has_a_recipe_that_fits_it() -> None:
    def recipes(stack: dict) -> set:
        mounts = [volume for service in stack["services"].values() for volume in service.get("volumes", [])]
        return {Path(mount["source"]).name for mount in mounts if mount["target"] == "/run/recipe.toml"}

    assert recipes(config(*STACKS["two-gpu"])) == {"lfm2.5-2.6b.toml"}
    assert recipes(config(*STACKS["one-gpu"])) == {"lfm2.5-2.6b-one-gpu.toml"}
    for files in STACKS.values():
        assert recipes(config(*files, RECIPE="./data/recipes/smoke.toml")) == {"smoke.toml"}


def test_gpu_stacks_give_weights_time_to_load_and_nccl_shared_memory() -> None:
    for name in ("two-gpu", "one-gpu"):
        services = config(*STACKS[name])["services"]
        for service in (services["policy"], services["trainer"]):
            assert service["healthcheck"]["start_period"] == "20m0s"
            assert int(service["shm_size"]) == 8 * 2**30
            assert service["environment"]["NCCL_NVLS_ENABLE"] == "0"
            assert "NCCL_SOCKET_IFNAME" not in service["environment"], "services.common.network finds it"


def test_no_secret_is_written_into_the_configuration() -> None:
    planted = "hf_planted_secret_value"
    assert planted not in json.dumps(config("compose.yaml", "compose.cpu.yaml", HF_TOKEN=planted))
