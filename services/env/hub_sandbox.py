"""A rollout's sandbox as a Hugging Face Job of its own: Harbor's environment with the run's label, ledger and limits.

The agent runs as an unprivileged user here too, and nothing of it is left when the verifier starts. Starts are spread
over time, because the Hub limits how often Jobs are started, and 429 is waited out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import ExecResult
from harbor.environments.hf_sandbox import HFSandboxEnvironment
from harbor.models.environment_type import EnvironmentType
from harbor.models.trial.config import TrialConfig
from harbor.trial.errors import EnvironmentStartTimeoutError
from huggingface_hub import HfApi, Sandbox
from huggingface_hub.errors import HfHubHTTPError, SandboxError
from tenacity import Retrying, retry_if_exception, stop_after_delay
from typing_extensions import override

from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env.ledger import Ledger
from services.env.sandbox import MAX_OUTPUT_BYTES
from services.env.start_rate import StartRate
from services.hub.client import connect, patiently, status
from services.hub.commits import MAX_RETRY_AFTER_S, retry_after_s

LABEL = "opencode-rl-run"
"""On the Job of every sandbox; the value is the run's name."""
BUSY = (429, 503)
"""Answers to a start that say that nothing was started. A 500 may hide a Job that was: it is not tried again."""
OPEN_STAGES = ["RUNNING", "SCHEDULING"]

END_AGENT = """
for try in $(seq 50); do
  left=
  for process in /proc/[0-9]*; do
    if [ "$(stat -c %u "$process" 2> /dev/null)" = {uid} ]; then left=yes; kill -9 "${{process#/proc/}}"; fi
  done 2> /dev/null
  [ "$left" ] || break
done
find /logs/verifier -mindepth 1 -delete 2> /dev/null
[ -z "$left" ]
"""
"""Ends every process of the agent's user and removes rewards that were written ahead of the verifier."""

logger = logging.getLogger("env.hub_sandbox")


class HubSandbox(HFSandboxEnvironment):
    """One Job. Harbor finds the class by its import path."""

    rate: ClassVar[StartRate]
    """One for the process: ``configure`` sets it before the first rollout."""
    live: ClassVar[dict[str, str]] = {}
    """Trial -> Job of the sandboxes that rollouts of this process use now; a sweep spares them."""

    @classmethod
    def configure(cls, cfg: Recipe) -> None:
        cls.rate = StartRate(cfg.env.hf_sandbox_starts_per_minute)

    def __init__(self, *args: Any, run_path: str, start_timeout_s: float, agent_uid: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = RunDir(Path(run_path))
        self._run_name = run.path.name
        self._ledger = Ledger(run.ledger)
        self._start_timeout_s = start_timeout_s
        self._agent_uid = agent_uid

    @override
    async def start(self, force_build: bool) -> None:
        image = self.task_env_config.docker_image
        assert image is not None, "Harbor's own check refuses a task without docker_image"
        await asyncio.sleep(self.rate.turn_s())
        self._ledger.record("intent", self.session_id, backend="hf-sandbox", image=image)
        creating = asyncio.ensure_future(asyncio.to_thread(self._create, image))
        try:
            self._sandbox = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The thread goes on; the Job that it starts is nobody's any more.
            creating.add_done_callback(self._end_orphan)
            raise
        except SandboxError as error:
            raise EnvironmentStartTimeoutError(f"the sandbox did not start: {error}") from None
        self.live[self.session_id] = self._sandbox.id
        self._ledger.record("created", self.session_id, job=self._sandbox.id)
        try:
            if workdir := self.task_env_config.workdir:
                await asyncio.to_thread(self._sandbox.files.mkdir, workdir)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    def _create(self, image: str) -> Sandbox:
        for attempt in Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, HfHubHTTPError) and status(error) in BUSY),
            stop=stop_after_delay(self._start_timeout_s),
            wait=lambda state: _wait_s(state.outcome.exception() if state.outcome else None),
            reraise=True,
        ):
            with attempt:
                return Sandbox.create(
                    image=image,
                    flavor=self._flavor,
                    idle_timeout=self._idle_timeout,
                    forward_hf_token=False,
                    labels={LABEL: self._run_name},
                    start_timeout=self._start_timeout_s,
                )
        raise AssertionError("tenacity ends with a result or an exception")

    def _end_orphan(self, creating: asyncio.Future[Sandbox]) -> None:
        if not creating.cancelled() and creating.exception() is None:
            threading.Thread(target=self._close, args=(creating.result(),), daemon=True).start()

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None  # type: ignore[assignment]  # the base class allows None
        if sandbox is not None:
            await asyncio.shield(asyncio.to_thread(self._close, sandbox))
        self.live.pop(self.session_id, None)

    def _close(self, sandbox: Sandbox) -> None:
        """End the Job, and say so only then; the next sweep ends what is left here."""
        try:
            patiently(cancel)(sandbox.id)
        except (HfHubHTTPError, OSError) as error:
            logger.warning("sandbox could not be ended; the next sweep will", extra={"job": sandbox.id, "error": error})
        else:
            self._ledger.record("closed", self.session_id)
        with contextlib.suppress(OSError):
            sandbox.close()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command, as another user where one is named, with bounded output. Harbor's own runs all as root."""
        name = self._resolve_user(user)
        if name is not None and str(name) not in ("root", "0"):
            command = as_user(str(name), command)
        output = bytearray()

        def keep(text: str) -> None:
            output.extend(text.encode(errors="replace")[: max(0, MAX_OUTPUT_BYTES - len(output))])

        result = await asyncio.to_thread(
            self._require_sandbox().run,
            ["/bin/bash", "-c", command],
            shell=False,
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env) or None,
            timeout=timeout_sec,
            check=False,
            capture_output=False,
            on_stdout=keep,
            on_stderr=keep,
        )
        code = getattr(result, "exit_code", None)
        return ExecResult(
            stdout=output.decode(errors="replace") or None, stderr=None, return_code=-1 if code is None else code
        )

    async def end_agent_phase(self) -> None:
        """Leave nothing of the agent running before anything is graded. Raises: RuntimeError: it cannot be ended."""
        result = await self.exec(END_AGENT.format(uid=self._agent_uid), cwd="/", user="root", timeout_sec=60)
        if result.return_code != 0:
            raise RuntimeError("processes of the agent outlive its phase; nothing that they could touch is graded")


def as_user(name: str, command: str) -> str:
    """The command as another user of the sandbox, who can become nobody else. setpriv is in every Debian."""
    quoted = shlex.quote(name)
    return (
        f'exec setpriv --reuid "$(id -u {quoted})" --regid "$(id -g {quoted})" --clear-groups --no-new-privs '
        f"/bin/bash -c {shlex.quote(command)}"
    )


def _wait_s(error: BaseException | None) -> float:
    asked_s = retry_after_s(error) if error else None
    return min(5.0 if asked_s is None else asked_s, MAX_RETRY_AFTER_S)


def bounded(build: Callable[..., TrialConfig], cfg: Recipe, run: RunDir, agent_uid: int) -> Callable[..., TrialConfig]:
    """``build_trial_config`` that has Harbor start a ``HubSandbox`` with the recipe's limits, for this backend."""

    def build_bounded(**kwargs: Any) -> TrialConfig:
        trial = build(**kwargs)
        if trial.environment.type is EnvironmentType.HF_SANDBOX:
            trial.environment.import_path = f"{__name__}:{HubSandbox.__name__}"
            trial.environment.kwargs = {
                "run_path": str(run.path),
                "start_timeout_s": cfg.rollout.setup_timeout_s,
                "agent_uid": agent_uid,
                "flavor": cfg.env.hf_sandbox_flavor,
                "job_timeout": cfg.env.hf_sandbox_idle_timeout_s,  # Harbor's name for the idle timeout
            }
        return trial

    return build_bounded


@functools.cache
def _api() -> tuple[HfApi, str]:
    api = connect()
    return api, str(api.whoami()["name"])


def cancel(job: str) -> None:
    api, namespace = _api()
    try:
        api.cancel_job(job_id=job, namespace=namespace)
    except HfHubHTTPError as error:
        if status(error) != 404:
            raise


def sweep(run: RunDir) -> int:
    """End the run's sandboxes that are not in use, found by label and by the ledger; return how many.

    Raises: HfHubHTTPError: the Hub does not answer.
    """
    api, namespace = _api()

    def labelled_jobs() -> list[str]:
        labels = {LABEL: run.path.name}
        return [job.id for job in api.list_jobs(namespace=namespace, labels=labels, status=OPEN_STAGES, timeout=30)]

    ledger, in_use = Ledger(run.ledger), dict(HubSandbox.live)
    labelled = [job for job in patiently(labelled_jobs)() if job not in in_use.values()]
    for job in labelled:
        patiently(cancel)(job)
    for project in ledger.open_projects():
        if project not in in_use:
            ledger.record("closed", project, by="sweep")
    if labelled:
        logger.info("swept", extra={"jobs": len(labelled)})
    return len(labelled)
