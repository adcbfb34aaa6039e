"""The seams of OpenEnv 0.10 and Harbor 0.24 through which our parts come in: they exist, and they carry what we say."""

import asyncio
import importlib.metadata
import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.opencode import OpenCode
from harbor.environments.docker import COMPOSE_PREBUILT_PATH
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.environments.hf_sandbox import HFSandboxEnvironment
from harbor.models.task.task import Task
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.paths import TrialPaths
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.harness.capture.sessions import SessionRegistry, extract_api_key
from openenv.harbor import rollout as openenv_rollout
from openenv.harbor import seams
from openenv.harbor.environment import HarborEnvironment

from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env import agent, app, opencode, sandbox
from services.env.hub_sandbox import HubSandbox
from services.env.rollouts import Allowed, RolloutEnvironment, Scoreboard
from services.env.sandbox import Sandbox
from services.env.suites import load

ROOT = Path(__file__).resolve().parents[3]
TASK = ROOT / "data" / "tasks" / "smoke" / "train" / "first-c"


@pytest.fixture(autouse=True)
def own_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SEAMS", dict(seams.SEAMS))


def trial_config(cfg: Recipe, run: RunDir, backend: str = "docker") -> TrialConfig:
    agent.register(cfg)
    run.path.mkdir(parents=True, exist_ok=True)
    overlay = sandbox.write_overlay(cfg, run, "sandboxes", "of-the-run:1")
    build = sandbox.bounded(openenv_rollout.build_trial_config, cfg, run, overlay, "of-the-run:1")
    return build(
        task_dir=TASK, harness="opencode", sandbox=backend, intercept_url="http://capture:8101", session_id="key",
        model="org/policy", trial_name="trial-1", trials_dir=run.trials, training=True,
    )  # fmt: skip


def make_sandbox(cfg: Recipe, run: RunDir) -> Sandbox:
    """As Harbor's Trial makes it."""
    config = trial_config(cfg, run)
    paths = TrialPaths(run.trials / "trial-1")
    paths.mkdir()
    task = Task(TASK)
    made = EnvironmentFactory.create_environment_from_config(
        config=config.environment, environment_dir=task.paths.environment_dir, environment_name="first-c",
        session_id="trial-1__env", trial_paths=paths, task_env_config=task.config.environment,
    )  # fmt: skip
    assert isinstance(made, Sandbox)
    return made


def test_rollouts_are_bounded_by_the_recipe(cfg: Recipe, run: RunDir) -> None:
    config = trial_config(cfg, run)
    assert config.agent.override_setup_timeout_sec == cfg.rollout.setup_timeout_s
    assert config.verifier.override_timeout_sec == cfg.rollout.verifier_timeout_s
    assert config.trials_dir == run.trials
    # OpenEnv looks the function up in its module at every rollout.
    assert "build_trial_config" in openenv_rollout.run_rollout.__code__.co_names


def test_other_backends_keep_harbors_own_environment(cfg: Recipe, run: RunDir) -> None:
    config = trial_config(cfg, run, backend="hf-sandbox")
    assert config.environment.import_path is None
    assert config.environment.extra_docker_compose == []
    assert config.verifier.override_timeout_sec == cfg.rollout.verifier_timeout_s


def test_agent_is_ours_with_the_recipes_configuration(cfg: Recipe, run: RunDir) -> None:
    config = trial_config(cfg, run)
    made = AgentFactory.create_agent_from_config(config.agent, logs_dir=run.path)
    assert isinstance(made, agent.BakedOpenCode)
    assert made.version() == cfg.env.opencode_version
    assert config.agent.model_name == "intercepted/policy"
    # OpenEnv hands the model's own name to OpenCode without its owner.
    expected = opencode.config(cfg, "http://capture:8101", "key", "policy")
    assert config.agent.kwargs["opencode_config"] == expected
    assert config.agent.env["OPENCODE_DISABLE_AUTOUPDATE"] == "1"
    assert config.agent.env["HOME"] == agent.HOME


def test_training_and_evaluation_get_the_same_agent(cfg: Recipe) -> None:
    agent.register(cfg)
    seam = seams.get("opencode")
    ask = {"base_url": "http://capture:8101", "session": "key", "model": "policy"}
    assert seam.resolve(**ask, training=True) == seam.resolve(**ask, training=False)


def test_sandboxes_command_line_is_the_engines(cfg: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_sandbox(cfg, run)
    calls: list[tuple[str, ...]] = []

    async def spawn(*arguments: str, **options: Any) -> Any:
        calls.append(arguments)
        return await real(*(("printf", "out") if "exec" in arguments else ("true",)), **options)

    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    result = asyncio.run(made.exec("id", env={"A": "b c"}, user="agent"))
    assert (result.stdout, result.return_code) == ("out", 0)
    assert calls == [
        ("docker", "exec", "--workdir", "/workdir", "--env", "A=b c", "--user", "agent", "trial-1__env-main-1",
         "bash", "-c", "id")
    ]  # fmt: skip


def test_output_of_a_command_is_bounded(cfg: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_sandbox(cfg, run)
    monkeypatch.setattr(sandbox, "MAX_OUTPUT_BYTES", 1000)

    async def spawn(*_arguments: str, **options: Any) -> Any:
        return await real("sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x", **options)

    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    assert asyncio.run(made.exec("yes")).stdout == "x" * 1000


def test_command_past_its_time_is_killed_and_said_as_harbor_says_it(
    cfg: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_sandbox(cfg, run)
    started: list[asyncio.subprocess.Process] = []

    async def spawn(*_arguments: str, **options: Any) -> Any:
        started.append(await real("sleep", "60", **options))
        return started[0]

    async def overrun() -> int:
        with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
            await made.exec("sleep 60", timeout_sec=1)
        return await started[0].wait()

    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    assert asyncio.run(overrun()) == -9


def test_what_a_cancelled_start_and_a_model_call_go_through_is_there() -> None:
    ours, theirs = Sandbox._collect_buffered_output, DockerEnvironment._collect_buffered_output
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
    assert "_collect_buffered_output" in DockerEnvironment._run_docker_compose_command.__code__.co_names
    assert list(inspect.signature(DockerEnvironment._terminate_process).parameters) == ["process"]
    assert list(inspect.signature(SessionRegistry.get).parameters) == ["self", "session_id"]
    assert extract_api_key({"authorization": "Bearer a", "x-api-key": "b"}) == "a"
    assert extract_api_key({"x-api-key": "b"}) == "b"


def test_compose_sees_no_secret_of_ours(cfg: Recipe, run: RunDir, environment: None) -> None:
    os.environ["HF_TOKEN"] = "planted"
    os.environ["SANDBOX_NETWORK"] = "sandboxes"
    app.keep_only(app.KEPT_VARIABLES)
    variables = make_sandbox(cfg, run)._compose_env_vars()
    assert "planted" not in variables.values()
    assert variables["SANDBOX_NETWORK"] == "sandboxes"


HOSTILE = """
services:
  main:
    privileged: true
    cap_add: [SYS_ADMIN]
    security_opt: [seccomp=unconfined]
    pids_limit: -1
    ports: ["8080:80"]
    networks: [default, out]
networks:
  out: {}
"""


@pytest.mark.parametrize("says", ["what it ships with", "hostile"])
def test_overlay_has_the_last_word_over_a_tasks_compose_file(
    says: str, cfg: Recipe, run: RunDir, tmp_path: Path
) -> None:
    task = tmp_path / "task.yaml"
    shipped = (TASK / "environment" / "docker-compose.yaml").read_text()
    task.write_text(HOSTILE if says == "hostile" else shipped)
    run.path.mkdir(parents=True)
    overlay = sandbox.write_overlay(cfg, run, "the-network", "of-the-run:1")
    files = [str(path) for path in (COMPOSE_PREBUILT_PATH, task, overlay)]
    out = subprocess.run(
        ["docker", "compose", *(part for file in files for part in ("-f", file)), "config", "--format", "json"],
        env={**os.environ, "PREBUILT_IMAGE_NAME": "image", "SANDBOX_NETWORK": "other"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    resolved = json.loads(out.stdout)
    main = resolved["services"]["main"]
    assert (main["image"], main["pull_policy"]) == ("of-the-run:1", "never"), "whatever the task names"
    assert list(main["networks"]) == ["sandbox"]
    assert resolved["networks"]["sandbox"] == {"name": "the-network", "external": True, "ipam": {}}
    assert main["labels"] == {"opencode-rl.run": "mine"}
    assert main["cap_drop"] == ["ALL"]
    assert "SYS_ADMIN" not in main["cap_add"]
    assert main["security_opt"] == ["no-new-privileges:true"]
    assert not main.get("privileged")
    assert not main.get("ports")
    assert main["pids_limit"] == cfg.env.sandbox_pids
    assert main["init"] is True
    assert int(main["mem_limit"]) == cfg.env.sandbox_memory_mb * 2**20


@pytest.mark.parametrize(
    ("theirs", "ours", "methods"),
    [
        (DockerEnvironment, Sandbox, {"exec", "start", "stop", "prepare_logs_for_host", "run_healthcheck"}),
        (HFSandboxEnvironment, HubSandbox, {"exec", "start", "stop"}),
        (OpenCode, agent.BakedOpenCode, {"setup", "install", "run"}),
    ],
)
def test_overridden_methods_are_called_as_ours_are_declared(theirs: type, ours: type, methods: set[str]) -> None:
    found = {name for name, value in vars(ours).items() if inspect.iscoroutinefunction(value) and hasattr(theirs, name)}
    assert found == methods
    for name in methods:
        assert inspect.iscoroutinefunction(getattr(theirs, name)), name
        declared = [list(inspect.signature(getattr(side, name)).parameters) for side in (theirs, ours)]
        assert declared[0] == declared[1], name


def test_the_installed_versions_are_those_that_were_checked() -> None:
    for package, version in {"openenv": "0.10.", "harbor": "0.24."}.items():
        found = importlib.metadata.version(package)
        assert found.startswith(version), f"{package} {found}: docs/upstream.md was checked with {version}x only"


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ({"correctness": 1.0, "tool_efficiency": 0.8}, 1.0), ({"reward": 0.0, "correctness": 1.0}, 1.0),
        ({"reward": 0.0}, 0.0), ({"reward": 1.0, "speed": 0.2}, 1.0),
    ],
)  # fmt: skip
def test_verdict_of_a_task_with_several_numbers_is_picked_by_the_recipes_keys(
    rewards: dict[str, float], verdict: float, cfg: Recipe
) -> None:
    assert openenv_rollout._pick_reward(rewards, ",".join(cfg.reward.keys))[0] == verdict


def test_task_without_any_of_the_recipes_keys_has_no_verdict(cfg: Recipe) -> None:
    with pytest.raises(ValueError, match="not in"):
        openenv_rollout._pick_reward({"speed": 1.0}, ",".join(cfg.reward.keys))


def test_rollout_environment_overrides_what_openenv_calls(cfg: Recipe) -> None:
    assert inspect.iscoroutinefunction(HarborEnvironment._run_rollout)
    assert "timeout_s" in inspect.signature(MCPEnvironment.step_async).parameters
    provider = load(cfg, ROOT / "data" / "tasks")
    RolloutEnvironment.serve(provider, Scoreboard(), Path("/nowhere"), 5.0, Allowed("docker", frozenset()))
    assert RolloutEnvironment()._provider is provider
    assert "_provider" in HarborEnvironment.get_task.__code__.co_names


@pytest.mark.parametrize(
    ("prints", "refusal"),
    [("echo 1.18.33", None), ("echo 1.0.0", "carries OpenCode '1.0.0'"), ("exit 127", "has no OpenCode that starts")],
)
def test_sandbox_image_is_asked_for_its_opencode_before_any_rollout(
    prints: str, refusal: str | None, cfg: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{prints}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(agent.BakedOpenCode, "checked_images", set())
    if refusal is None:
        agent.check_image(cfg, "sandbox:1", "sha256:0a")
        assert agent.BakedOpenCode.checked_images == {"sha256:0a"}
    else:
        with pytest.raises(NotReadyError, match=refusal):
            agent.check_image(cfg, "sandbox:1", "sha256:0a")
        assert agent.BakedOpenCode.checked_images == set()
