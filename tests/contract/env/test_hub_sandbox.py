"""Sandboxes as Jobs: Harbor's environment on a FAKE Sandbox, which runs its commands in this container, as root.

The Jobs API is tests/hub's. What a real Job adds is listed in docs/hf-jobs.md as not run here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pwd
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.errors import EnvironmentStartTimeoutError
from huggingface_hub.errors import SandboxError
from openenv.harbor import rollout as openenv_rollout

from services.common import recipe, run_dir
from services.common.run_dir import RunDir
from services.env import agent, hub_sandbox
from services.env.hub_sandbox import LABEL, HubSandbox, StartRate
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
        monkeypatch.setattr(HubSandbox, "live", {})
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
        config = EnvironmentConfig(docker_image="registry/sandbox@sha256:1", workdir=str(tmp_path / "work"))
        return HubSandbox(
            environment, "task", name, paths, config,
            run_path=str(run.path), start_timeout_s=30.0, agent_uid=UID, flavor="cpu-basic", job_timeout=1800.0,
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
            "forward_hf_token": False, "labels": {LABEL: "smoke"}, "start_timeout": 30.0,
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


def test_a_start_whose_answer_was_lost_is_not_repeated_and_the_sweep_ends_it(
    server: LocalHub, make: Callable[..., HubSandbox], run: RunDir
) -> None:
    server.fail(Fault("POST", "/api/jobs/local$", status=500, after_effect=True))
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        asyncio.run(make().start(force_build=False))
    assert stages(server) == ["RUNNING"]
    other = connect().run_job(image="x", command=["y"], labels={LABEL: "another-run"}, timeout=60)
    assert hub_sandbox.sweep(run) == 1
    assert {job.id: job.stage for job in server.jobs.values()}[other.id] == "RUNNING"
    assert sorted(stages(server)) == ["CANCELED", "RUNNING"]
    assert events(run) == ["intent", "closed"]


def test_a_sweep_spares_what_a_rollout_is_using(server: LocalHub, make: Callable[..., HubSandbox], run: RunDir) -> None:
    async def work() -> None:
        sandbox = make()
        await sandbox.start(force_build=False)
        assert hub_sandbox.sweep(run) == 0 and stages(server) == ["RUNNING"]
        await sandbox.stop(delete=True)

    asyncio.run(work())
    assert events(run) == ["intent", "created", "closed"]


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
    server: LocalHub, make: Callable[..., HubSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(**_asked: Any) -> Any:
        raise SandboxError("not ready after 30 s")

    monkeypatch.setattr(FakeSandbox, "create", never)
    with pytest.raises(EnvironmentStartTimeoutError, match="not ready after 30 s"):
        asyncio.run(make().start(force_build=False))


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
    build = hub_sandbox.bounded(openenv_rollout.build_trial_config, cfg, run, agent.UID)
    agent.register(cfg)
    common = {
        "task_dir": ROOT / "data/tasks/smoke/train/first-c", "harness": "opencode", "intercept_url": "http://x",
        "session_id": "s", "model": "policy", "trial_name": "t", "trials_dir": tmp_path,
    }  # fmt: skip
    trial = build(sandbox="hf-sandbox", **common)
    assert trial.environment.type is EnvironmentType.HF_SANDBOX
    assert trial.environment.import_path == "services.env.hub_sandbox:HubSandbox"
    assert trial.environment.kwargs == {
        "run_path": str(run.path), "start_timeout_s": 90.0, "agent_uid": UID, "flavor": "cpu-upgrade",
        "job_timeout": 1800.0,
    }  # fmt: skip
    assert build(sandbox="docker", **common).environment.import_path is None


def test_the_real_sandbox_takes_what_we_give_it() -> None:
    created = set(inspect.signature(huggingface_hub.Sandbox.create).parameters)
    assert created >= {"image", "flavor", "idle_timeout", "forward_hf_token", "labels", "start_timeout"}
    ran = set(inspect.signature(huggingface_hub.Sandbox.run).parameters)
    assert ran >= {"cmd", "shell", "cwd", "env", "timeout", "check", "capture_output", "on_stdout", "on_stderr"}
    assert hub_sandbox.LABEL not in huggingface_hub._sandbox.RESERVED_SANDBOX_LABELS
