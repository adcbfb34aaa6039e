"""A rollout's sandbox: Harbor's docker environment with the run's network, limits, label and ledger.

What runs in it was written by a model in training and is treated as hostile: bounded in memory, processes, CPU and
file size, without capabilities that it does not need, alone with the capture proxy on its network.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harbor.environments.base import ExecResult
from harbor.environments.docker.docker import DockerEnvironment, _sanitize_docker_compose_project_name
from harbor.models.environment_type import EnvironmentType
from harbor.models.trial.config import TrialConfig
from harbor.trial.errors import EnvironmentStartTimeoutError
from typing_extensions import override

from services.common import run_dir
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env.docker import inspect
from services.env.ledger import Ledger
from services.env.sweep import LABEL

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
"""Kept of one command's output, from its start; a command that writes gigabytes must not fill our memory."""
MAX_LOG_FILE_BYTES = 64 * 1024 * 1024
"""A larger file that the agent left in a mounted folder is removed unread."""
MAX_FILE_BYTES = 2 * 1024 * 1024 * 1024
"""Largest file that a process in the sandbox can write."""


class Sandbox(DockerEnvironment):
    """One container on the sandboxes' network. Harbor finds the class by its import path."""

    def __init__(self, *args: Any, run_path: str, start_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._project = _sanitize_docker_compose_project_name(self.session_id)
        self._container = f"{self._project}-main-1"
        self._ledger = Ledger(RunDir(Path(run_path)).ledger)
        self._start_timeout_s = start_timeout_s
        self.image_id = ""

    @override
    async def start(self, force_build: bool) -> None:
        self._ledger.record("intent", self._project, backend="docker", image=self.task_env_config.docker_image)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await super().start(force_build)
        except TimeoutError:
            raise EnvironmentStartTimeoutError(
                f"the sandbox did not start in rollout.setup_timeout_s = {self._start_timeout_s:g} s"
            ) from None
        # The content that the sandbox runs on; a tag can move while we serve.
        container = await asyncio.to_thread(inspect, "container", self._container) or {}
        self.image_id = container.get("Image", "")
        self._ledger.record("created", self._project, container=container.get("Id", self._container))

    @override
    async def stop(self, delete: bool) -> None:
        await super().stop(delete)
        # `compose down` succeeds when it is interrupted too; the line must mean that the container is gone.
        if await self._docker("container", "rm", "--force", "--volumes", self._container) != 0:
            self.logger.warning("container %s could not be removed; the next sweep will", self._container)
            return
        self._ledger.record("closed", self._project)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """``docker exec``, with bounded output, and ended with its caller.

        Harbor's own goes through ``docker compose`` (four times the start-up time), keeps all output, and leaves the
        command running when the rollout is cancelled.
        """
        arguments = ["docker", "exec"]
        if directory := cwd or self.task_env_config.workdir:
            arguments += ["--workdir", directory]
        for name, value in (self._merge_env(env) or {}).items():
            arguments += ["--env", f"{name}={value}"]
        if (name := self._resolve_user(user)) is not None:
            arguments += ["--user", str(name)]
        process = await asyncio.create_subprocess_exec(
            *arguments, self._container, "bash", "-c", command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_sec):
                output = await _read_bounded(process.stdout)
                code = await process.wait()
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        finally:
            if process.returncode is None:
                process.kill()
        return ExecResult(stdout=output.decode(errors="replace") or None, stderr=None, return_code=code)

    @override
    async def prepare_logs_for_host(self) -> None:
        """Nothing to do as root, who reads files of any owner; Harbor's own is six commands in the sandbox."""
        if os.getuid() != 0:
            await super().prepare_logs_for_host()

    async def end_agent_phase(self) -> None:
        """Leave nothing of the agent running, and nothing for the host to trip over, before anything is graded.

        A restart ends every process from outside, which no process in the sandbox can outrun. Then the mounted folders
        cannot change any more and are made safe to read: a link would lead the host's reader, who is root, anywhere,
        and a pipe would block it. Rewards written ahead of the verifier go too.
        """
        if not await self._only_root_runs():
            await self._docker("container", "restart", "--time", "1", self._container)
        await asyncio.to_thread(clear, self.trial_paths.verifier_dir)
        for folder in (self.trial_paths.agent_dir, self.trial_paths.artifacts_dir):
            await asyncio.to_thread(make_plain, folder)
        # OpenCode's database and caches, ten times the size of what is read afterwards.
        await asyncio.to_thread(shutil.rmtree, self.trial_paths.agent_dir / "opencode", True)

    async def _only_root_runs(self) -> bool:
        """Whether the engine sees no process of another user than root: the agent and its children are gone."""
        process = await asyncio.create_subprocess_exec(
            "docker", "container", "top", self._container, "-eo", "pid,uid",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode == 0 and {line.split()[1] for line in output.splitlines()[1:]} <= {b"0"}

    async def _docker(self, *arguments: str) -> int:
        process = await asyncio.create_subprocess_exec(
            "docker", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait()


async def _read_bounded(stream: asyncio.StreamReader | None) -> bytes:
    kept = bytearray()
    while stream is not None and (chunk := await stream.read(65536)):
        kept += chunk[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)


def clear(folder: Path) -> None:
    """Remove everything in the folder, following no link."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def make_plain(folder: Path) -> None:
    """Remove links, pipes, sockets, devices and files above ``MAX_LOG_FILE_BYTES`` below the folder."""
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(root, name)
            status = os.lstat(path)
            plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
            if not plain or (stat.S_ISREG(status.st_mode) and status.st_size > MAX_LOG_FILE_BYTES):
                os.unlink(path)


# --- What every trial of the run gets -----------------------------------------------------------------------------


OVERLAY = """\
# Written by the env server and merged last into every sandbox's Compose file: !override replaces what a task says.
services:
  main:
    labels: {{{label}: "{run}"}}
    init: true # without it "sleep infinity" ignores SIGTERM, and teardown waits 10 s for the kill
    networks: !override {{sandbox: {{}}}}
    ports: !override []
    privileged: false
    cpus: {cpus}
    mem_limit: {memory_mb}m
    memswap_limit: {memory_mb}m
    pids_limit: {pids}
    ulimits: {{core: 0, fsize: {max_file_bytes}, nofile: 4096}}
    security_opt: !override ["no-new-privileges:true"]
    cap_drop: !override [ALL]
    # For root's part: set-up, tests and the verifier. The agent is another user and gets none.
    cap_add: !override [CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID]
networks:
  sandbox: {{external: true, name: "{network}"}}
"""


def write_overlay(cfg: Recipe, run: RunDir, network: str) -> Path:
    """Write the Compose file with the run's network, label and limits; return its path."""
    path = run.path / "sandbox-compose.yaml"
    run_dir.write_text(path, overlay(cfg, run.path.name, network))
    return path


def overlay(cfg: Recipe, run_name: str, network: str) -> str:
    return OVERLAY.format(
        label=LABEL,
        run=run_name,
        network=network,
        cpus=cfg.env.sandbox_cpus,
        memory_mb=cfg.env.sandbox_memory_mb,
        pids=cfg.env.sandbox_pids,
        max_file_bytes=MAX_FILE_BYTES,
    )


def bounded(
    build: Callable[..., TrialConfig], cfg: Recipe, run: RunDir, overlay_path: Path
) -> Callable[..., TrialConfig]:
    """OpenEnv's ``build_trial_config`` with the recipe's time bounds and, for docker, our sandbox."""

    def build_bounded(**kwargs: Any) -> TrialConfig:
        trial = build(**kwargs)
        trial.agent.override_setup_timeout_sec = cfg.rollout.setup_timeout_s
        trial.verifier.override_timeout_sec = cfg.rollout.verifier_timeout_s
        if trial.environment.type is EnvironmentType.DOCKER:
            trial.environment.import_path = f"{__name__}:{Sandbox.__name__}"
            trial.environment.kwargs = {"run_path": str(run.path), "start_timeout_s": cfg.rollout.setup_timeout_s}
            trial.environment.extra_docker_compose = [overlay_path]
        return trial

    return build_bounded
