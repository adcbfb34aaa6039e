"""A rollout's sandbox: Harbor's docker environment with the run's network, limits, label and ledger.

What runs in it was written by a model in training and is treated as hostile: bounded in memory, processes, CPU and
file size, without capabilities that it does not need, alone with the capture proxy on its network.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import ExecResult, HealthcheckError
from harbor.environments.docker.docker import DockerEnvironment, _sanitize_docker_compose_project_name
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import HealthcheckConfig
from harbor.models.trial.config import TrialConfig
from harbor.trial.errors import EnvironmentStartTimeoutError
from typing_extensions import override

from services.common import run_dir
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env.docker import DockerError, docker, inspect
from services.env.hand_over import hand_over
from services.env.ledger import Ledger
from services.env.start_rate import StartRate
from services.env.sweep import LABEL

MAX_OUTPUT_BYTES = 8 * 1024 * 1024
"""Kept of one command's output, from its start; a command that writes gigabytes must not fill our memory."""
MAX_LOG_FILE_BYTES = 64 * 1024 * 1024
"""A larger file that the agent left in a mounted folder is removed unread."""
MAX_LOG_FOLDER_BYTES = 128 * 1024 * 1024
"""Kept of one mounted folder, which stays in the run for ever; the largest files go first."""
MAX_FILE_BYTES = 2 * 1024 * 1024 * 1024
"""Largest file that a process in the sandbox can write."""
KILLED = 137
"""Exit code of a command that SIGKILL ended."""
KILLED_LOOKS, KILLED_LOOK_S = 25, 0.2
DISK_LOOK_S = 3.0
"""Between two looks at how much a sandbox has written: the engine walks its files for it."""


class SandboxLostError(RuntimeError):
    """The sandbox ended before its rollout did: killed, out of memory, or over its bound on disk."""


class Sandbox(DockerEnvironment):
    """One container on the sandboxes' network. Harbor finds the class by its import path."""

    live: ClassVar[set[str]] = set()
    """Compose projects whose rollout runs in this process now; a sweep spares them."""
    rate: ClassVar[StartRate] = StartRate(math.inf)
    """One for the process: ``configure`` sets the recipe's before the first rollout."""

    @classmethod
    def configure(cls, cfg: Recipe) -> None:
        cls.rate = StartRate(cfg.env.docker_starts_per_minute)

    def __init__(
        self,
        *args: Any,
        run_path: str,
        start_timeout_s: float,
        image: str,
        disk_mb: int,
        setup_network: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Args: setup_network: a Docker network with a way out, for the task's own set-up and no longer."""
        super().__init__(*args, **kwargs)
        self._image = image
        self._disk_bytes = disk_mb * 1024 * 1024
        self._disk_watch: asyncio.Task[None] | None = None
        self._over_disk = False
        self._setup_network = setup_network
        self._project = _sanitize_docker_compose_project_name(self.session_id)
        self._container = f"{self._project}-main-1"
        self._ledger = Ledger(RunDir(Path(run_path)).ledger)
        self._host_user = run_dir.host_user(Path(run_path).parent)
        self._start_timeout_s = start_timeout_s
        self.image_id = ""

    @override
    async def start(self, force_build: bool) -> None:
        self.live.add(self._project)
        await asyncio.sleep(self.rate.turn_s())
        self._ledger.record("intent", self._project, backend="docker", image=self._image)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await super().start(force_build)
        except TimeoutError:
            raise EnvironmentStartTimeoutError(
                f"the sandbox did not start in rollout.build_timeout_s = {self._start_timeout_s:g} s"
            ) from None
        # The content that the sandbox runs on; a tag can move while we serve.
        container = await asyncio.to_thread(inspect, "container", self._container) or {}
        self.image_id = container.get("Image", "")
        self._ledger.record("created", self._project, container=container.get("Id", self._container))
        self._disk_watch = asyncio.create_task(self._watch_disk())

    @override
    async def stop(self, delete: bool) -> None:
        if self._disk_watch is not None:
            self._disk_watch.cancel()
        try:
            await super().stop(delete)
        finally:
            self.live.discard(self._project)
        # `compose down` succeeds when it is interrupted too; the line must mean that the container is gone.
        if await self._docker("container", "rm", "--force", "--volumes", self._container) != 0:
            self.logger.warning("container %s could not be removed; the next sweep will", self._container)
            return
        if os.getuid() == 0:
            await asyncio.to_thread(hand_over, self.trial_paths.trial_dir, self._host_user)
        self._ledger.record("closed", self._project)

    @staticmethod
    @override
    async def _collect_buffered_output(
        process: asyncio.subprocess.Process, *, timeout_sec: int | None, stdin_data: bytes | None = None
    ) -> ExecResult:
        """Harbor's own leaves `docker compose up` running when its caller is cancelled: it would make the container
        after ``stop`` looked for it."""
        try:
            return await DockerEnvironment._collect_buffered_output(
                process, timeout_sec=timeout_sec, stdin_data=stdin_data
            )
        except asyncio.CancelledError:
            await DockerEnvironment._terminate_process(process)
            raise

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
        if code != 0 and (self._over_disk or await self._has_ended(code)):
            raise SandboxLostError(
                f"the sandbox wrote more than env.sandbox_disk_mb = {self._disk_bytes >> 20} and was ended"
                if self._over_disk
                else f"the sandbox's container {self._container} ended while a command ran in it (exit code {code})"
            )
        return ExecResult(stdout=output.decode(errors="replace") or None, stderr=None, return_code=code)

    @override
    async def run_healthcheck(self, healthcheck: HealthcheckConfig | None = None) -> None:
        """The task's own set-up, before there is an agent: it alone may have a way out, to fetch its data.

        Args: healthcheck: of a later step, when the agent has run already; it has no way out.
        """
        fetches = healthcheck is None and self.task_env_config.healthcheck is not None
        if self._setup_network is None or not fetches:
            await super().run_healthcheck(healthcheck)
            return
        if await self._docker("network", "connect", self._setup_network, self._container) != 0:
            raise HealthcheckError(f"network {self._setup_network} could not be attached for the task's set-up")
        try:
            await super().run_healthcheck()
        finally:
            await self._docker("network", "disconnect", "--force", self._setup_network, self._container)
        # Asked of the engine, not believed: with a way out left, nothing of the agent may start.
        container = await asyncio.to_thread(inspect, "container", self._container) or {}
        if self._setup_network in container.get("NetworkSettings", {}).get("Networks", {self._setup_network: None}):
            raise HealthcheckError(f"network {self._setup_network} is still attached after the task's set-up")

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

        Raises: SandboxLostError: that could not be done; nothing that the agent could touch is graded.
        """
        if not await self._only_root_runs():
            code = await self._docker("container", "restart", "--time", "1", self._container)
            if code != 0:
                raise SandboxLostError(
                    f"the agent's processes could not be ended by a restart of {self._container} (exit code {code})"
                )
        try:
            await asyncio.to_thread(self._make_safe)
        except OSError as error:
            raise SandboxLostError(f"what the agent left cannot be made safe to read: {error}") from None

    def _make_safe(self) -> None:
        clear(self.trial_paths.verifier_dir)
        # OpenCode's database and caches, ten times the size of what is read afterwards: not for them a log goes.
        shutil.rmtree(self.trial_paths.agent_dir / "opencode", ignore_errors=True)
        for folder in (self.trial_paths.agent_dir, self.trial_paths.artifacts_dir):
            make_plain(folder)

    async def _only_root_runs(self) -> bool:
        """Whether the engine sees no process of another user than root: the agent and its children are gone."""
        process = await asyncio.create_subprocess_exec(
            "docker", "container", "top", self._container, "-eo", "pid,uid",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode == 0 and {line.split()[1] for line in output.splitlines()[1:]} <= {b"0"}

    async def _has_ended(self, code: int) -> bool:
        """Whether the container is gone. Args: code: of a command that failed in it."""
        # The command of a killed container returns before the engine knows of the container's end.
        for _ in range(KILLED_LOOKS if code == KILLED else 1):
            if not await self._is_running():
                return True
            await asyncio.sleep(KILLED_LOOK_S if code == KILLED else 0)
        return False

    async def _is_running(self) -> bool:
        process = await asyncio.create_subprocess_exec(
            "docker", "container", "inspect", "--format", "{{.State.Running}}", self._container,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate()
        return output.strip() == b"true"

    async def _watch_disk(self) -> None:
        """End the sandbox when it has written more than it may, in its own layer and in the mounted folders.

        The engine's own quota needs a file system with project quotas, which most hosts do not have.
        """
        while True:
            await asyncio.sleep(DISK_LOOK_S)
            container = await asyncio.to_thread(self._measured)
            written = container + await asyncio.to_thread(size_bytes, self.trial_paths.trial_dir)
            if written > self._disk_bytes:
                self._over_disk = True
                self.logger.warning("%s has written %d bytes and is ended", self._container, written)
                await self._docker("container", "kill", self._container)
                return

    def _measured(self) -> int:
        try:
            return int(docker("container", "inspect", "--size", "--format", "{{.SizeRw}}", self._container))
        except (DockerError, ValueError):  # it is gone already, or the engine is busy: the next look tells
            return 0

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


def size_bytes(folder: Path) -> int:
    """Bytes on disk of all files below the folder, following no link; what vanishes meanwhile counts nothing."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def clear(folder: Path) -> None:
    """Remove everything in the folder, following no link."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def make_plain(folder: Path) -> None:
    """Remove links, pipes, sockets, devices and files above ``MAX_LOG_FILE_BYTES`` below the folder.

    Of what is left the largest files go, until the rest is within ``MAX_LOG_FOLDER_BYTES``.
    """
    kept: list[tuple[int, str]] = []
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(root, name)
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_LOG_FILE_BYTES:
                kept.append((status.st_size, path))
            else:
                os.unlink(path)
    room = MAX_LOG_FOLDER_BYTES
    for size, path in sorted(kept):
        room -= size
        if room < 0:
            os.unlink(path)


# --- What every trial of the run gets -----------------------------------------------------------------------------


OVERLAY = """\
# Written by the env server and merged last into every sandbox's Compose file: !override replaces what a task says.
services:
  main:
    image: "{image}"
    pull_policy: never # it is on this engine, or env had not started; nobody else's image of that name is fetched
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


def write_overlay(cfg: Recipe, run: RunDir, network: str, image: str) -> Path:
    """Write the Compose file with the run's image, network, label and limits; return its path."""
    path = run.path / "sandbox-compose.yaml"
    run_dir.write_text(path, overlay(cfg, run.path.name, network, image))
    return path


def overlay(cfg: Recipe, run_name: str, network: str, image: str) -> str:
    return OVERLAY.format(
        image=image,
        label=LABEL,
        run=run_name,
        network=network,
        cpus=cfg.env.sandbox_cpus,
        memory_mb=cfg.env.sandbox_memory_mb,
        pids=cfg.env.sandbox_pids,
        max_file_bytes=MAX_FILE_BYTES,
    )


def bounded(
    build: Callable[..., TrialConfig],
    cfg: Recipe,
    run: RunDir,
    overlay_path: Path,
    image: str,
    setup_network: str | None = None,
) -> Callable[..., TrialConfig]:
    """OpenEnv's ``build_trial_config`` with the recipe's time bounds and, for docker, our sandbox.

    Args: setup_network: a Docker network with a way out, for the tasks' own set-up.
    """

    def build_bounded(**kwargs: Any) -> TrialConfig:
        trial = build(**kwargs)
        trial.agent.override_setup_timeout_sec = cfg.rollout.setup_timeout_s
        trial.verifier.override_timeout_sec = cfg.rollout.verifier_timeout_s
        if trial.environment.type is EnvironmentType.DOCKER:
            trial.environment.import_path = f"{__name__}:{Sandbox.__name__}"
            trial.environment.kwargs = {
                "run_path": str(run.path),
                "start_timeout_s": cfg.rollout.build_timeout_s,
                "image": image,
                "disk_mb": cfg.env.sandbox_disk_mb,
                "setup_network": setup_network,
            }
            trial.environment.extra_docker_compose = [overlay_path]
        return trial

    return build_bounded
