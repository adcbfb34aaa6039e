"""Sandboxes as Jobs: Harbor's environment on a FAKE Sandbox, which runs its commands in this container, as root.

The Jobs API is tests/hub's. What a real Job adds is listed in docs/hf-jobs.md as not run here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pwd
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from harbor.environments.base import ExecResult
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.errors import EnvironmentStartTimeoutError
from huggingface_hub.errors import SandboxError
from openenv.harbor import rollout as openenv_rollout

from services.common import recipe, run_dir
from services.common.run_dir import RunDir
from services.env import agent, agent_phase, hub_sandbox
from services.env.hub_sandbox import LABEL, TRIAL_LABEL, HubSandbox, StartRate
from services.env.sandbox import SandboxLostError
from services.hub.client import connect
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "data/recipes/smoke.toml"
UID = 10002
USER = "agent"


class FakeSandbox:
    """In place of huggingface_hub.Sandbox: starts its Job on the local Hub; commands run here."""

    created: list[dict[str, Any]]

    def __init__(self, job: str) -> None:
        self.id = job
        self.files = self
        self.closed = False

    @classmethod
    def create(cls, **asked: Any) -> FakeSandbox:
        cls.created.append(asked)
        job = connect().run_job(
            image=asked["image"], command=["server"], labels=asked["labels"], flavor=asked["flavor"], timeout=60
        )
        return cls(job.id)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def write(self, path: str, content: bytes) -> None:
        Path(path).write_bytes(content)

    def run(self, command: list[str], *, cwd: str | None, env: Any, timeout: Any, on_stdout: Any, **_rest: Any) -> Any:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        on_stdout(done.stdout)
        return type("Result", (), {"exit_code": done.returncode})()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub() as started:
        for name, value in started.environment().items():
            monkeypatch.setenv(name, value)
        hub_sandbox._api.cache_clear()
        FakeSandbox.created = []
        monkeypatch.setattr(hub_sandbox, "Sandbox", FakeSandbox)
        monkeypatch.setattr(HubSandbox, "rate", StartRate(6000), raising=False)
        monkeypatch.setattr(HubSandbox, "live", set())
        yield started
    hub_sandbox._api.cache_clear()
    huggingface_hub.close_session()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "smoke")


@pytest.fixture
def make(tmp_path: Path, run: RunDir) -> Callable[..., HubSandbox]:
    def sandbox(name: str = "trial-1") -> HubSandbox:
        paths = TrialPaths(tmp_path / name)
        paths.mkdir()
        environment = tmp_path / "environment"
        environment.mkdir(exist_ok=True)
        (environment / "data.csv").write_text("1")
        config = EnvironmentConfig(docker_image="what-the-task-names", workdir=str(tmp_path / "work"))
        return HubSandbox(
            environment, "task", name, paths, config,
            run_path=str(run.path), start_timeout_s=30.0, agent_uid=UID, image="registry/sandbox@sha256:1",
            flavor="cpu-basic", job_timeout=1800.0,
        )  # fmt: skip

    return sandbox


@pytest.fixture
def user() -> None:
    """The agent's user, as agent.install makes it in every sandbox."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        with open("/etc/passwd", "a") as stream:
            stream.write(f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n")


def events(run: RunDir) -> list[str]:
    return [line["event"] for line in run_dir.read_lines(run.ledger)]


def stages(server: LocalHub) -> list[str]:
    return [job.stage for job in server.jobs.values()]


def test_a_sandbox_is_a_labelled_job_without_a_token_that_ends_with_its_rollout(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir
) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        assert events(run) == ["intent", "created"] and stages(server) == ["RUNNING"]
        assert (await sandbox.exec("cat data.csv")).stdout == "1"
        await sandbox.stop(delete=True)

    asyncio.run(work())
    assert FakeSandbox.created == [
        {
            "image": "registry/sandbox@sha256:1", "flavor": "cpu-basic", "idle_timeout": 1800,
            "forward_hf_token": False, "labels": {LABEL: "smoke", TRIAL_LABEL: "trial-1"}, "start_timeout": 30.0,
        }
    ]  # fmt: skip
    assert stages(server) == ["CANCELED"]
    assert events(run) == ["intent", "created", "closed"]


def test_a_hub_that_is_busy_is_waited_for(server: LocalHub, make: Callable[..., HubSandbox]) -> None:
    server.fail(Fault("POST", "/api/jobs/local$", status=429, headers={"Retry-After": "1"}))
    began_s = time.monotonic()
    asyncio.run(make().start(force_build=False))
    assert time.monotonic() - began_s >= 1
    assert stages(server) == ["RUNNING"]


def test_a_start_whose_answer_was_lost_is_not_repeated_and_its_job_is_ended(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir
) -> None:
    asyncio.run(make("trial-2").start(force_build=False))
    server.fail(Fault("POST", "/api/jobs/local$", status=500, after_effect=True))
    with pytest.raises(EnvironmentStartTimeoutError, match="500"):
        asyncio.run(make().start(force_build=False))
    assert stages(server) == ["RUNNING", "CANCELED"]
    assert events(run) == ["intent", "created", "intent", "closed"]


def test_a_failed_start_stays_open_in_the_ledger_while_nobody_knows_whether_a_job_is_left(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir
) -> None:
    server.fail(Fault("POST", "/api/jobs/local$", status=500, after_effect=True))
    server.fail(Fault("GET", "/api/jobs/local", status=403))
    with pytest.raises(EnvironmentStartTimeoutError):
        asyncio.run(make().start(force_build=False))
    assert stages(server) == ["RUNNING"] and events(run) == ["intent"]
    other = connect().run_job(image="x", command=["y"], labels={LABEL: "another-run"}, timeout=60)
    assert hub_sandbox.sweep(run) == 1
    assert {job.id: job.stage for job in server.jobs.values()}[other.id] == "RUNNING"
    assert sorted(stages(server)) == ["CANCELED", "RUNNING"]
    assert events(run) == ["intent", "closed"]


def test_a_sweep_spares_what_a_rollout_is_using(server: LocalHub, make: Callable[..., HubSandbox], run: RunDir) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        assert hub_sandbox.sweep(run, HubSandbox.live) == 0 and stages(server) == ["RUNNING"]
        await sandbox.stop(delete=True)

    asyncio.run(work())
    assert events(run) == ["intent", "created", "closed"]


def test_a_sweep_spares_a_job_whose_start_has_not_been_answered(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = FakeSandbox.create.__func__  # type: ignore[attr-defined]
    swept: list[int] = []

    def swept_meanwhile(cls: type, **asked: Any) -> Any:
        made = create(cls, **asked)
        swept.append(hub_sandbox.sweep(run, HubSandbox.live))
        return made

    monkeypatch.setattr(FakeSandbox, "create", classmethod(swept_meanwhile))
    asyncio.run(make().start(force_build=False))
    assert swept == [0] and stages(server) == ["RUNNING"]


def test_a_start_has_the_recipes_time_and_no_more(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(FakeSandbox, "mkdir", lambda _self, _path: go.wait(30))
    sandbox = make()
    sandbox._start_timeout_s = 4.0
    try:
        with pytest.raises(EnvironmentStartTimeoutError, match=r"build_timeout_s = 4 s"):
            asyncio.run(sandbox.start(force_build=False))
    finally:
        go.set()
    assert stages(server) == ["CANCELED"] and events(run) == ["intent", "created", "closed"]


def test_agents_that_work_do_not_hold_up_the_end_of_another(
    server: LocalHub, make: Callable[..., HubSandbox], user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ran = threading.Event(), FakeSandbox.run

    def run_or_wait(self: FakeSandbox, command: list[str], **kwargs: Any) -> Any:
        return (go.wait(60), kwargs["on_stdout"](""))[1] if "setpriv" in command[-1] else ran(self, command, **kwargs)

    monkeypatch.setattr(FakeSandbox, "run", run_or_wait)
    monkeypatch.setattr(HubSandbox, "agents", HubSandbox.agents)
    monkeypatch.setattr(HubSandbox, "calls", HubSandbox.calls)
    HubSandbox.configure(recipe.load(RECIPE))

    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        agents = [asyncio.create_task(sandbox.exec("work", user=USER)) for _ in range(40)]
        await asyncio.sleep(0)  # each has asked for its thread
        try:
            await asyncio.wait_for(sandbox.end_agent_phase(), 20)
        finally:
            go.set()
        await asyncio.gather(*agents)

    asyncio.run(work())


def test_a_machine_that_does_not_answer_is_a_lost_sandbox(
    server: LocalHub, make: Callable[..., HubSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)

        def gone(*_args: Any, **_kwargs: Any) -> Any:
            raise SandboxError("connection lost while running command")

        monkeypatch.setattr(FakeSandbox, "run", gone)
        await sandbox.exec("true")

    with pytest.raises(SandboxLostError, match="does not answer: connection lost"):
        asyncio.run(work())


def test_a_rollout_that_is_cancelled_while_its_sandbox_starts_leaves_none(
    server: LocalHub, make: Callable[..., HubSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = threading.Event(), threading.Event()
    create = FakeSandbox.create.__func__  # type: ignore[attr-defined]

    def slow(cls: type, **kwargs: Any) -> Any:
        asked.set()
        go.wait(10)
        return create(cls, **kwargs)

    monkeypatch.setattr(FakeSandbox, "create", classmethod(slow))

    async def work() -> None:
        starting = asyncio.create_task(make().start(force_build=False))
        await asyncio.to_thread(asked.wait, 10)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        go.set()
        for _ in range(100):
            if stages(server) == ["CANCELED"]:
                return
            await asyncio.sleep(0.05)

    asyncio.run(work())
    assert stages(server) == ["CANCELED"]


def test_a_sandbox_that_never_gets_ready_is_a_failed_start(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(**_asked: Any) -> Any:
        raise SandboxError("not ready after 30 s")

    monkeypatch.setattr(FakeSandbox, "create", never)
    with pytest.raises(EnvironmentStartTimeoutError, match="not ready after 30 s"):
        asyncio.run(make().start(force_build=False))
    assert events(run) == ["intent", "closed"]


def test_a_job_that_cannot_be_ended_stays_open_in_the_ledger(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir
) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        server.fail(Fault("POST", "/cancel$", status=403, times=9))
        await sandbox.stop(delete=True)

    asyncio.run(work())
    assert events(run) == ["intent", "created"]
    server.heal()
    assert hub_sandbox.sweep(run) == 1 and events(run)[-1] == "closed"


def test_the_agent_is_an_unprivileged_user_and_cannot_become_another(
    server: LocalHub, make: Callable[..., HubSandbox], user: None
) -> None:
    async def work() -> tuple[str, str]:
        sandbox = make()
        await sandbox.start(force_build=False)
        with sandbox.with_default_user(USER):
            command = 'id -u; id -G; echo "it\'s $NAME"; grep NoNewPrivs /proc/self/status; exit 3'
            mine = await sandbox.exec(command, env={"NAME": "x"})
            root = await sandbox.exec("id -u", user="root")
        assert mine.return_code == 3
        return str(mine.stdout), str(root.stdout)

    mine, root = asyncio.run(work())
    assert mine.split("\n")[:4] == [str(UID), str(UID), "it's x", "NoNewPrivs:\t1"]
    assert root.strip() == "0"


def test_nothing_of_the_agent_is_left_when_its_phase_ends(
    server: LocalHub, make: Callable[..., HubSandbox], user: None
) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        os.makedirs("/logs/verifier", exist_ok=True)
        os.chmod("/logs/verifier", 0o777)
        forge = (
            "nohup bash -c 'trap \"\" TERM; while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &"
        )
        await sandbox.exec(forge, user=USER)
        async with asyncio.timeout(60):
            while not os.path.exists("/logs/verifier/reward.txt"):
                await asyncio.sleep(0.05)
        await sandbox.end_agent_phase()

    asyncio.run(work())
    assert os.listdir("/logs/verifier") == []
    assert [path.name for path in Path("/proc").glob("[0-9]*") if path.stat().st_uid == UID] == []


def test_only_what_the_host_can_take_is_left_of_the_agents_folders(
    server: LocalHub, make: Callable[..., HubSandbox], user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_phase, "MAX_LOG_FILE_BYTES", 100)
    monkeypatch.setattr(agent_phase, "MAX_LOG_FOLDER_BYTES", 150)
    logs = Path("/logs/agent")

    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        (logs / "opencode").mkdir(parents=True)
        (logs / "opencode" / "database").write_bytes(b"x" * 90)
        for name, size in (("log", 10), ("line\nbreak and 'quote'", 80), ("big", 90), ("huge", 101), ("small", 50)):
            (logs / name).write_bytes(b"x" * size)
        (logs / "link").symlink_to("/etc/passwd")
        os.mkfifo(logs / "pipe")
        await sandbox.end_agent_phase()

    try:
        asyncio.run(work())
        assert sorted(path.name for path in logs.iterdir()) == ["line\nbreak and 'quote'", "log", "small"]
    finally:
        shutil.rmtree(logs)


def test_another_environment_of_harbors_ends_its_agent_too(user: None, tmp_path: Path) -> None:
    """A backend that neither of our classes serves, with commands that run here."""

    class Elsewhere:
        code = 0

        async def exec(self, command: str, *, cwd: str, user: str, timeout_sec: int) -> ExecResult:
            assert user == "root" and timeout_sec > 0
            done = subprocess.run(["sh", "-c", command], cwd=cwd, capture_output=True, text=True, check=False)
            return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode or self.code)

        def with_default_user(self, _name: str) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    class Harness(agent.OpenCode):
        async def run(self, *_args: Any) -> None:
            as_agent = ["setpriv", "--reuid", str(UID), "--clear-groups", "sleep", "600"]
            left.append(subprocess.Popen(as_agent, start_new_session=True))
            reward.write_text("1")

    left: list[subprocess.Popen[bytes]] = []
    reward = Path("/logs/verifier/reward.txt")
    reward.parent.mkdir(parents=True, exist_ok=True)
    mine = type("Mine", (agent.BakedOpenCode, Harness), {})
    ours = object.__new__(mine)
    asyncio.run(ours.run("", Elsewhere(), None))
    assert not reward.exists() and left[0].wait(10) == -signal.SIGKILL
    Elsewhere.code = 1
    with pytest.raises(SandboxLostError, match=r"could not be ended \(exit code 1\)"):
        asyncio.run(ours.run("", Elsewhere(), None))
    left[1].wait(10)


def test_output_is_kept_up_to_a_bound(server: LocalHub, make: Callable[..., HubSandbox]) -> None:
    async def work() -> int:
        sandbox = make()
        await sandbox.start(force_build=False)
        result = await sandbox.exec(f"head -c {hub_sandbox.MAX_OUTPUT_BYTES + 999} /dev/zero | tr '\\0' a")
        return len(result.stdout or "")

    assert asyncio.run(work()) == hub_sandbox.MAX_OUTPUT_BYTES


def test_starts_are_spread_over_the_minute() -> None:
    now = [100.0]
    rate = StartRate(60, clock=lambda: now[0])
    assert [rate.turn_s() for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
    now[0] = 110.0
    assert [rate.turn_s() for _ in range(2)] == [0.0, 1.0]


def test_a_trial_of_this_backend_gets_our_class_and_the_recipe_s_limits(tmp_path: Path, run: RunDir) -> None:
    cfg = recipe.load(
        RECIPE,
        {"env.backend": "hf-sandbox", "env.sandbox_image": "r/s@sha256:1", "env.hf_sandbox_flavor": "cpu-upgrade"},
    )
    build = hub_sandbox.bounded(openenv_rollout.build_trial_config, cfg, run, agent.UID, "r/s@sha256:1")
    agent.register(cfg)
    common = {
        "task_dir": ROOT / "data/tasks/smoke/train/first-c", "harness": "opencode", "intercept_url": "http://x",
        "session_id": "s", "model": "policy", "trial_name": "t", "trials_dir": tmp_path,
    }  # fmt: skip
    trial = build(sandbox="hf-sandbox", **common)
    assert trial.environment.type is EnvironmentType.HF_SANDBOX
    assert trial.environment.import_path == "services.env.hub_sandbox:HubSandbox"
    assert trial.environment.kwargs == {
        "run_path": str(run.path), "start_timeout_s": 50.0, "agent_uid": UID, "flavor": "cpu-upgrade",
        "job_timeout": 1800.0, "image": "r/s@sha256:1",
    }  # fmt: skip
    assert build(sandbox="docker", **common).environment.import_path is None


def test_the_real_sandbox_takes_what_we_give_it() -> None:
    created = set(inspect.signature(huggingface_hub.Sandbox.create).parameters)
    assert created >= {"image", "flavor", "idle_timeout", "forward_hf_token", "labels", "start_timeout"}
    ran = set(inspect.signature(huggingface_hub.Sandbox.run).parameters)
    assert ran >= {"cmd", "shell", "cwd", "env", "timeout", "check", "capture_output", "on_stdout", "on_stderr"}
    assert hub_sandbox.LABEL not in huggingface_hub._sandbox.RESERVED_SANDBOX_LABELS
