"""Harbor itself reads our tasks as we mean them, and sets the variables that we say it sets."""

import shutil
from pathlib import Path

import pytest
from harbor.environments.definition import should_use_prebuilt_docker_image
from harbor.environments.docker.compose_env import ComposeInfraEnvVars, legacy_log_mount_env_vars
from harbor.models.task.task import Task
from harbor.models.trial.config import ServiceVolumeConfig

from services.common.tasks import HARBOR_VARIABLES, load_suite

TASKS = Path(__file__).resolve().parents[3] / "data" / "tasks"


@pytest.mark.parametrize("suite", ["smoke/train", "smoke/heldout", "learn/train", "learn/heldout"])
def test_every_shipped_task_is_valid_and_reads_the_same(suite: str) -> None:
    for ours in load_suite(TASKS, suite):
        assert Task.is_valid_dir(ours.folder)
        task = Task(ours.folder)
        environment = task.config.environment
        assert task.instruction == ours.instruction
        assert environment.docker_image == ours.docker_image
        assert (environment.cpus, environment.memory_mb, environment.workdir) == (1, 4096, "/workdir")
        assert environment.healthcheck is not None and "cat > a.csv" in environment.healthcheck.command
        assert should_use_prebuilt_docker_image(
            task.paths.environment_dir, docker_image=environment.docker_image, force_build=False
        )
        assert task.paths.discovered_solve_path is not None


def test_harbors_own_compose_variables_are_the_allowed_ones() -> None:
    fields = {name.upper() for name in ComposeInfraEnvVars.model_fields if not name.startswith("egress_control")}
    mounts: list[ServiceVolumeConfig] = [
        {"type": "bind", "source": "/host", "target": f"/logs/{name}"} for name in ("agent", "verifier", "artifacts")
    ]
    assert fields | set(legacy_log_mount_env_vars(mounts, host_value="source")) == HARBOR_VARIABLES


def test_instruction_reaches_harbor_with_the_space_that_openenv_strips(tmp_path: Path) -> None:
    """Why tasks are found by ``prompt_key``, which ignores it."""
    first = load_suite(TASKS, "smoke/train")[0]
    copy = Path(shutil.copytree(first.folder, tmp_path / "task"))
    assert Task(copy).instruction == first.instruction != first.instruction.strip()
