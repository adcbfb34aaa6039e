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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from harbor.environments.base import ExecResult
from harbor.environments.hf_sandbox import HFSandboxEnvironment
from harbor.models.environment_type import EnvironmentType
from harbor.models.trial.config import TrialConfig
from harbor.trial.errors import EnvironmentStartTimeoutError
from huggingface_hub import HfApi, JobInfo, Sandbox
from huggingface_hub.errors import HfHubHTTPError, SandboxError
from tenacity import Retrying, retry_if_exception, stop_after_delay
from typing_extensions import override

from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env import agent_phase
from services.env.ledger import Ledger
from services.env.sandbox import MAX_OUTPUT_BYTES, SandboxLostError
from services.env.start_rate import StartRate
from services.hub.client import connect, http, patiently, status
from services.hub.commits import MAX_RETRY_AFTER_S, retry_after_s

LABEL = "opencode-rl-run"
"""On the Job of every sandbox; the value is the run's name."""
TRIAL_LABEL = "opencode-rl-trial"
"""On the same Job; the value is the trial's name. It tells whose a Job is before the answer to its start has come."""
UNAVAILABLE = (SandboxError, HfHubHTTPError, http.HTTPError)
"""What a call to the Hub, or to a sandbox's own server, fails with."""
SPARE_THREADS = 8
BUSY = (429, 503)
"""Answers to a start that say that nothing was started. A 500 may hide a Job that was: it is not tried again."""
OPEN_STAGES = ["RUNNING", "SCHEDULING"]

logger = logging.getLogger("env.hub_sandbox")
T = TypeVar("T")


class HubSandbox(HFSandboxEnvironment):
    """One Job. Harbor finds the class by its import path."""

    rate: ClassVar[StartRate]
    """One for the process: ``configure`` sets it before the first rollout."""
    live: ClassVar[set[str]] = set()
    """Trials whose rollout runs in this process now, from before their Job exists; a sweep spares them."""
    agents: ClassVar[ThreadPoolExecutor] = ThreadPoolExecutor(SPARE_THREADS)
    """Where agents run, a thread each. asyncio's own pool has a few threads: agents would queue while their time
    runs, and hold up what ends them."""
    calls: ClassVar[ThreadPoolExecutor] = ThreadPoolExecutor(SPARE_THREADS)
    """Where all else of a sandbox runs: its start, root's commands, its end."""

    @classmethod
    def configure(cls, cfg: Recipe) -> None:
        cls.rate = StartRate(cfg.env.hf_sandbox_starts_per_minute)
        # Twice: what a cancelled rollout asked for ends a while after it.
        threads = 2 * (cfg.rollout.max_inflight + cfg.evaluator.max_inflight) + SPARE_THREADS
        cls.agents = ThreadPoolExecutor(threads, "sandbox-agent")
        cls.calls = ThreadPoolExecutor(threads, "sandbox-call")

    def __init__(
        self, *args: Any, run_path: str, start_timeout_s: float, agent_uid: int, image: str, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._image = image
        run = RunDir(Path(run_path))
        self._run_name = run.path.name
        self._ledger = Ledger(run.ledger)
        self._start_timeout_s = start_timeout_s
        self._agent_uid = agent_uid

    @override
    async def start(self, force_build: bool) -> None:
        image = self._image
        self.live.add(self.session_id)
        await asyncio.sleep(self.rate.turn_s())
        self._ledger.record("intent", self.session_id, backend="hf-sandbox", image=image)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._start(image)
        except TimeoutError:
            raise EnvironmentStartTimeoutError(
                f"the sandbox did not start in rollout.build_timeout_s = {self._start_timeout_s:g} s"
            ) from None
        except (*UNAVAILABLE, SandboxLostError) as error:
            raise EnvironmentStartTimeoutError(f"the sandbox did not start: {error}") from None

    async def _start(self, image: str) -> None:
        creating = _on(self.calls, self._create, image)
        try:
            self._sandbox = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The thread goes on; the Job that it starts is nobody's any more.
            creating.add_done_callback(self._end_orphan)
            raise
        except Exception:
            await asyncio.shield(_on(self.calls, self._end_lost))
            raise
        self._ledger.record("created", self.session_id, job=self._sandbox.id)
        try:
            if workdir := self.task_env_config.workdir:
                await _on(self.calls, self._sandbox.files.mkdir, workdir)
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
                    labels=self._labels,
                    start_timeout=self._start_timeout_s,
                )
        raise AssertionError("tenacity ends with a result or an exception")

    @property
    def _labels(self) -> dict[str, str]:
        return {LABEL: self._run_name, TRIAL_LABEL: self.session_id}

    def _end_orphan(self, creating: asyncio.Future[Sandbox]) -> None:
        if creating.cancelled():
            return
        end = self._end_lost if creating.exception() else functools.partial(self._close, creating.result())
        threading.Thread(target=end, daemon=True).start()

    def _end_lost(self) -> None:
        """End what a failed start may have left, and say so; where the Hub does not answer, the next sweep does."""
        try:
            for job in open_jobs(self._labels):
                patiently(cancel)(job.id)
        except (*UNAVAILABLE, OSError) as error:
            logger.warning("a failed start could not be cleared up", extra={"error": str(error)})
        else:
            self._ledger.record("closed", self.session_id)

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None  # type: ignore[assignment]  # the base class allows None
        try:
            if sandbox is not None:
                await asyncio.shield(_on(self.calls, self._close, sandbox))
        finally:
            self.live.discard(self.session_id)

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
        """Run a command, as another user where one is named, with bounded output. Harbor's own runs all as root.

        Raises: SandboxLostError: its machine does not answer.
        """
        name, pool = self._resolve_user(user), self.calls
        if name is not None and str(name) not in ("root", "0"):
            command, pool = as_user(str(name), command), self.agents
        output = bytearray()

        def keep(text: str) -> None:
            output.extend(text.encode(errors="replace")[: max(0, MAX_OUTPUT_BYTES - len(output))])

        sandbox = self._require_sandbox()
        try:
            result = await _on(
                pool,
                sandbox.run,
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
        except UNAVAILABLE as error:
            raise SandboxLostError(f"the sandbox's Job {sandbox.id} does not answer: {error}") from None
        code = getattr(result, "exit_code", None)
        return ExecResult(
            stdout=output.decode(errors="replace") or None, stderr=None, return_code=-1 if code is None else code
        )

    async def end_agent_phase(self) -> None:
        """Leave nothing of the agent running before anything is graded. Raises: SandboxLostError: it goes on."""
        await agent_phase.end(self, self._agent_uid)


def _on(pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(pool, functools.partial(call, *args, **kwargs))


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


def bounded(
    build: Callable[..., TrialConfig], cfg: Recipe, run: RunDir, agent_uid: int, image: str
) -> Callable[..., TrialConfig]:
    """``build_trial_config`` that has Harbor start a ``HubSandbox`` with the run's image and the recipe's limits."""

    def build_bounded(**kwargs: Any) -> TrialConfig:
        trial = build(**kwargs)
        if trial.environment.type is EnvironmentType.HF_SANDBOX:
            trial.environment.import_path = f"{__name__}:{HubSandbox.__name__}"
            trial.environment.kwargs = {
                "run_path": str(run.path),
                "start_timeout_s": cfg.rollout.build_timeout_s,
                "agent_uid": agent_uid,
                "image": image,
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


@patiently
def open_jobs(labels: Mapping[str, str]) -> list[JobInfo]:
    """Jobs with all of these labels that run or will. Raises: HfHubHTTPError: the Hub does not answer."""
    api, namespace = _api()
    return list(api.list_jobs(namespace=namespace, labels=dict(labels), status=OPEN_STAGES, timeout=30))


def sweep(run: RunDir, keep: Collection[str] = ()) -> int:
    """End the run's sandboxes, found by label, and close its ledger's entries; return how many.

    Args: keep: trials that are in use and stay. Read after the Hub has listed what is there: a trial is in use before
        its Job exists, so one that starts meanwhile is spared.
    Raises: HfHubHTTPError: the Hub does not answer.
    """
    ledger = Ledger(run.ledger)
    opened, found = ledger.open_projects(), open_jobs({LABEL: run.path.name})
    in_use = frozenset(keep)
    left = [job for job in found if (job.labels or {}).get(TRIAL_LABEL) not in in_use]
    for job in left:
        patiently(cancel)(job.id)
    for project in opened:
        if project not in in_use:
            ledger.record("closed", project, by="sweep")
    if left:
        logger.info("swept", extra={"jobs": len(left)})
    return len(left)
