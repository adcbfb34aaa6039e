"""Our sandbox on Harbor's real class, with a FAKE engine: a docker CLI that writes down what it is told."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from harbor.environments.base import HealthcheckError
from harbor.models.task.config import EnvironmentConfig, HealthcheckConfig
from harbor.models.trial.paths import TrialPaths
from starlette.testclient import TestClient

from services.common import run_dir
from services.common.run_dir import RunDir
from services.env import sandbox
from services.env.sandbox import Sandbox, SandboxLostError, size_bytes
from services.env.state import OperatorRoutes

FAKE = """#!/bin/sh
# FAKE of the docker CLI: notes its arguments, and answers as the files beside it say.
cd "$(dirname "$0")"
echo "$*" >> calls
case "$*" in
  "container inspect --format {{.State.Running}}"*) cat running ;;
  "container inspect --size"*) cat size ;;
  "container inspect "*) cat inspected ;;
  "exec "*) exit "$(cat code)" ;;
  "container top "*) cat top; [ ! -e top.next ] || mv top.next top ;;
  "container restart "*) exit "$(cat restart)" ;;
  "compose "*" up "*) [ ! -e slow ] || { echo $$ > slow; exec sleep 60; } ;;
  *) cat listed ;;
esac
"""


TOP = "PID UID\n1 0\n"
TOP_WITH_AGENT = TOP + "7 10002\n"


class Engine:
    """What the fake answers, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "docker").write_text(FAKE)
        (folder / "docker").chmod(0o755)
        self.says(running="true", size="0", code="0", inspected=self.networks("sandboxes"), listed="", top=TOP)

    def says(self, **answers: str) -> None:
        for name, text in answers.items():
            (self._folder / name).write_text(text)

    def read(self, name: str) -> str:
        return (self._folder / name).read_text()

    @staticmethod
    def networks(*names: str) -> str:
        return json.dumps([{"NetworkSettings": {"Networks": dict.fromkeys(names, None)}}])

    @property
    def calls(self) -> list[str]:
        path = self._folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return engine


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "mine")


def make(run: RunDir, setup_network: str | None = None, disk_mb: int = 10) -> Sandbox:
    paths = TrialPaths(run.trials / "trial")
    paths.mkdir()
    task = run.path / "task"
    task.mkdir(parents=True, exist_ok=True)
    config = EnvironmentConfig(docker_image="image", healthcheck=HealthcheckConfig(command="fetch", retries=1))
    return Sandbox(
        task, "task", "trial", paths, config, run_path=str(run.path), start_timeout_s=5.0, image="image",
        disk_mb=disk_mb, setup_network=setup_network,
    )  # fmt: skip


def test_a_way_out_is_there_for_the_tasks_own_set_up_and_gone_before_the_agent(engine: Engine, run: RunDir) -> None:
    asyncio.run(make(run, "setup").run_healthcheck())
    assert [call for call in engine.calls if not call.startswith("exec")] == [
        "network connect setup trial-main-1",
        "network disconnect --force setup trial-main-1",
        "container inspect trial-main-1",
    ]
    assert "fetch" in engine.calls[1]


def test_a_way_out_that_is_still_there_fails_the_rollout(engine: Engine, run: RunDir) -> None:
    engine.says(inspected=engine.networks("sandboxes", "setup"))
    with pytest.raises(HealthcheckError, match="setup is still attached"):
        asyncio.run(make(run, "setup").run_healthcheck())


def test_a_set_up_that_fails_leaves_no_way_out_either(engine: Engine, run: RunDir) -> None:
    engine.says(code="1")
    with pytest.raises(HealthcheckError, match="failed after 1"):
        asyncio.run(make(run, "setup").run_healthcheck())
    assert "network disconnect --force setup trial-main-1" in engine.calls


def test_no_way_out_without_the_recipes_word_nor_in_a_later_step(engine: Engine, run: RunDir) -> None:
    asyncio.run(make(run).run_healthcheck())
    asyncio.run(make(run, "setup").run_healthcheck(HealthcheckConfig(command="later")))
    assert not any("network" in call for call in engine.calls)


def test_a_command_that_fails_in_a_sandbox_that_lives_is_the_agents_own_failure(engine: Engine, run: RunDir) -> None:
    engine.says(code="3")
    assert asyncio.run(make(run).exec("false")).return_code == 3


def test_a_command_whose_sandbox_is_gone_is_a_lost_sandbox(engine: Engine, run: RunDir) -> None:
    engine.says(code="137", running="false")
    with pytest.raises(SandboxLostError, match=r"trial-main-1 ended while a command ran in it \(exit code 137\)"):
        asyncio.run(make(run).exec("work"))


def test_a_sandbox_that_has_written_too_much_is_ended_and_says_so(
    engine: Engine, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "DISK_LOOK_S", 0.01)
    engine.says(size=str(6 * 2**20))
    one = make(run, disk_mb=10)

    async def watch() -> None:
        await asyncio.wait_for(one._watch_disk(), 20)

    watching = asyncio.wait_for(one._watch_disk(), 0.5)
    with pytest.raises(TimeoutError):
        asyncio.run(_await(watching))
    (one.trial_paths.agent_dir / "log").write_bytes(b"x" * 5 * 2**20)  # in a mounted folder: it counts too
    asyncio.run(watch())
    assert "container kill trial-main-1" in engine.calls
    engine.says(code="137", running="false")
    with pytest.raises(SandboxLostError, match=r"more than env\.sandbox_disk_mb = 10"):
        asyncio.run(one.exec("work"))


async def _await(something: object) -> None:
    await something  # type: ignore[misc]


def test_what_the_agent_left_running_is_ended_before_anything_is_graded(engine: Engine, run: RunDir) -> None:
    one = make(run)
    (one.trial_paths.verifier_dir / "reward.txt").write_text("1")
    (one.trial_paths.agent_dir / "opencode").mkdir()
    engine.says(restart="0", **{"top": TOP_WITH_AGENT, "top.next": TOP})
    asyncio.run(one.end_agent_phase())
    assert "container restart --time 1 trial-main-1" in engine.calls
    assert list(one.trial_paths.verifier_dir.iterdir()) == list(one.trial_paths.agent_dir.iterdir()) == []


def test_an_agent_that_a_restart_does_not_end_is_a_lost_sandbox(engine: Engine, run: RunDir) -> None:
    engine.says(restart="1", top=TOP_WITH_AGENT)
    with pytest.raises(SandboxLostError, match=r"not be ended by a restart of trial-main-1 \(exit code 1\)"):
        asyncio.run(make(run).end_agent_phase())


def test_folders_that_cannot_be_made_safe_are_a_lost_sandbox(engine: Engine, run: RunDir) -> None:
    one = make(run)
    one.trial_paths.verifier_dir.rmdir()
    with pytest.raises(SandboxLostError, match="cannot be made safe to read"):
        asyncio.run(one.end_agent_phase())


def test_a_start_that_is_cancelled_ends_its_docker_command(engine: Engine, run: RunDir) -> None:
    engine.says(slow="")

    async def scene() -> None:
        starting = asyncio.create_task(make(run).start(force_build=False))
        async with asyncio.timeout(30):
            while not engine.read("slow"):
                await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not Path("/proc", engine.read("slow").strip()).exists()

    asyncio.run(scene())


def test_size_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 100_000)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "own").write_bytes(b"x" * 5000)
    assert 5000 <= size_bytes(inside) < 20_000


def test_state_tells_containers_networks_ledger_and_stacks(engine: Engine, run: RunDir) -> None:
    engine.says(listed='{"Names": "a", "Status": "Up"}\n')
    run_dir.append_line(run.ledger, {"event": "intent", "project": "open"})
    with TestClient(OperatorRoutes(_nothing, run, lambda: 3)) as client:
        found = client.get("/state").json()
        assert client.post("/sweep").json() == {"removed": 3}
        assert client.get("/other").status_code == 404
    assert found["sandboxes"] == found["stack"] == found["networks"] == [{"Names": "a", "Status": "Up"}]
    assert found["ledger_open"] == ["open"]
    assert any("format_stack" in line for lines in found["env_stacks"].values() for line in lines)


def test_an_engine_that_does_not_answer_is_named_and_no_error_of_ours(engine: Engine, run: RunDir) -> None:
    (Path(os.environ["PATH"].split(os.pathsep)[0]) / "docker").write_text("#!/bin/sh\necho no engine >&2; exit 1\n")

    def fail() -> int:
        raise OSError("no engine")

    with TestClient(OperatorRoutes(_nothing, run, fail)) as client:
        assert "no engine" in client.get("/state").json()["stack"]
        answer = client.post("/sweep")
    assert (answer.status_code, answer.json()) == (503, {"error": "no engine"})


async def _nothing(scope: dict, receive: object, send: object) -> None:
    from starlette.responses import PlainTextResponse

    if scope["type"] == "http":
        await PlainTextResponse("none", status_code=404)(scope, receive, send)  # type: ignore[arg-type]
    else:
        await receive()  # type: ignore[operator]
        await send({"type": "lifespan.startup.complete"})  # type: ignore[operator]
        await receive()  # type: ignore[operator]
        await send({"type": "lifespan.shutdown.complete"})  # type: ignore[operator]
