"""The two stacks as Compose resolves them: every service is checked, bounded, unprivileged and off the internet."""

import json
import os
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


@pytest.fixture(params=[("compose.yaml",), ("compose.yaml", "compose.cpu.yaml")], ids=["gpu", "cpu"])
def stack(request: pytest.FixtureRequest) -> dict:
    return config(*request.param)


def test_every_service_has_image_health_and_no_privilege(stack: dict) -> None:
    assert set(stack["services"]) == SERVICES
    for name, service in stack["services"].items():
        assert service["image"], name
        assert service["healthcheck"]["test"], name
        assert service["init"] is True, name
        assert service["restart"] == "no", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "container_name" not in service, name
        assert not service.get("privileged"), name


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


def test_trainer_and_policy_are_on_different_gpus_and_the_cpu_stack_asks_for_none() -> None:
    def gpus(stack: dict, name: str) -> list:
        reservations = stack["services"][name]["deploy"]["resources"].get("reservations", {})
        return [device["device_ids"] for device in reservations.get("devices", [])]

    gpu, cpu = config("compose.yaml"), config("compose.yaml", "compose.cpu.yaml")
    assert gpus(gpu, "trainer") == [["0"]]
    assert gpus(gpu, "policy") == [["1"]]
    assert [gpus(cpu, name) for name in ("trainer", "policy", "policy-eval")] == [[], [], []]


def test_no_secret_is_written_into_the_configuration() -> None:
    planted = "hf_planted_secret_value"
    assert planted not in json.dumps(config("compose.yaml", "compose.cpu.yaml", HF_TOKEN=planted))
