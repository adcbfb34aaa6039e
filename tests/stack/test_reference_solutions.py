"""Every shipped task in a real sandbox: nothing done scores 0, its reference solution scores 1.

A sandbox is started as Harbor's docker backend does it: the task's own compose file merged over the prebuilt image,
the healthcheck, then the verifier with /logs bind-mounted. One task of each split gets a sandbox of its own. All tasks
are graded one after another in one sandbox that is emptied in between: their sandboxes differ in nothing but the files
that the healthcheck writes, which is tested too.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.common.tasks import COMPOSE_FILE, load_task

TASKS = Path(__file__).resolve().parents[2] / "data" / "tasks"
SHIPPED = sorted(path.parent for suite in ("smoke", "learn") for path in (TASKS / suite).glob("*/*/task.toml"))
FIRST_OF_EACH_SPLIT = [next(group) for _, group in itertools.groupby(SHIPPED, key=lambda path: path.parent)]
EMPTIED = ("/workdir", "/tests", "/solution", "/logs/verifier", "/tmp")
MADE_BY_DOCKER = {"/shipped", "/logs", "/usr", "/usr/sbin", "/usr/sbin/docker-init"}
"""Where it mounts something, and its init."""
LABEL = "opencode-rl.test=reference-solutions"


def docker(*arguments: str, check: bool = True, **environment: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


# Runs in the shared sandbox, with the Python that is there: Harbor's steps for each task, without a container for each.
GRADE_ALL = """
import json, shutil, subprocess, sys, tomllib
from pathlib import Path
def verify():
    subprocess.run(["bash", "-c", "/tests/test.sh"], check=True)
    return Path("/logs/verifier/reward.txt").read_text()
def empty(folder):
    for path in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
shipped, names, *emptied = sys.argv[1:]
for name in json.loads(names):
    task = Path(shipped, name)
    for folder in emptied:
        empty(Path(folder))
    environment = tomllib.loads((task / "task.toml").read_text())["environment"]
    setup = ["bash", "-c", environment["healthcheck"]["command"]]
    subprocess.run(setup, cwd=environment["workdir"], check=True)
    shutil.copytree(task / "tests", "/tests", dirs_exist_ok=True)
    before = verify()
    shutil.copytree(task / "solution", "/solution", dirs_exist_ok=True)
    subprocess.run(["bash", "/solution/solve.sh"], cwd=environment["workdir"], check=True)
    print(json.dumps([name, before, verify(), Path("/logs/verifier/reward.json").exists()]), flush=True)
"""


@dataclass
class Sandbox:
    container: str
    task: Path
    logs: Path

    def run(self, command: str) -> str:
        return docker("exec", "--workdir", "/workdir", self.container, "bash", "-c", command, check=False)

    def solve(self) -> None:
        docker("cp", f"{self.task}/solution/.", f"{self.container}:/solution")
        self.run("bash /solution/solve.sh")

    def verify(self) -> str:
        """Run the verifier as Harbor does and return the text of the reward file."""
        docker("cp", f"{self.task}/tests/.", f"{self.container}:/tests")
        docker("exec", self.container, "bash", "-c", "/tests/test.sh")
        assert not (self.logs / "reward.json").exists()
        return (self.logs / "reward.txt").read_text()


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    name = f"opencode-rl-test-{uuid.uuid4().hex[:8]}"
    docker("network", "create", "--internal", "--label", LABEL, name)
    yield name
    docker("network", "rm", name)


@contextlib.contextmanager
def sandbox(task: Path, network: str, scratch: Path, *volumes: dict[str, str | bool]) -> Iterator[Sandbox]:
    config = tomllib.loads((task / "task.toml").read_text())["environment"]
    logs = scratch / "verifier"
    logs.mkdir(parents=True)
    base, harbor = scratch / "base.json", scratch / "harbor.json"
    main = {"image": config["docker_image"], "command": ["sh", "-c", "sleep infinity"]}
    base.write_text(json.dumps({"services": {"main": main}}))
    mounts = [{"type": "bind", "source": str(logs), "target": "/logs/verifier"}, *volumes]
    harbor.write_text(json.dumps({"services": {"main": {"volumes": mounts, "cpus": 1.0, "mem_limit": "4096m"}}}))
    project = f"reference-{uuid.uuid4().hex[:8]}"
    compose = ("compose", "--project-name", project, "--project-directory", str(task / "environment"))
    files = [part for path in (base, task / COMPOSE_FILE, harbor) for part in ("--file", str(path))]
    try:
        docker(*compose, *files, "up", "--detach", "--wait", "--quiet-pull", SANDBOX_NETWORK=network)
        container = f"{project}-main-1"
        docker("exec", "--workdir", config["workdir"], container, "bash", "-c", config["healthcheck"]["command"])
        yield Sandbox(container, task, logs)
    finally:
        docker(*compose, *files, "down", "--volumes", "--timeout", "2", SANDBOX_NETWORK=network, check=False)


@pytest.fixture
def smoke_sandbox(network: str, tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(TASKS / "smoke" / "train" / "first-b", network, tmp_path) as started:
        yield started


def name_of(task: Path) -> str:
    return "/".join(task.parts[-3:])


@pytest.fixture(scope="module")
def graded(network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str | bool]]]:
    """Task -> the reward of nothing done, that of its reference solution, and whether a second reward file was left."""
    shipped = {"type": "bind", "source": str(TASKS), "target": "/shipped", "read_only": True}
    with sandbox(SHIPPED[0], network, tmp_path_factory.mktemp("shared"), shipped) as shared:
        names = json.dumps([name_of(task) for task in SHIPPED])
        lines = docker("exec", shared.container, "python3", "-c", GRADE_ALL, "/shipped", names, *EMPTIED)
        changed = {line.split(" ", 1)[1] for line in docker("diff", shared.container).splitlines()}
        # What one task left elsewhere, the next would have found.
        elsewhere = {path for path in changed if not path.startswith(EMPTIED)} - MADE_BY_DOCKER
        assert elsewhere == set()
        yield {name: rest for name, *rest in map(json.loads, lines.splitlines())}


@pytest.mark.parametrize("task", SHIPPED, ids=name_of)
def test_reference_solution_scores_1_and_nothing_done_0(task: Path, graded: dict[str, list[str | bool]]) -> None:
    assert graded[name_of(task)] == ["0\n", "1\n", False]


@pytest.mark.parametrize("task", FIRST_OF_EACH_SPLIT, ids=name_of)
def test_a_sandbox_of_its_own_scores_the_same(task: Path, network: str, tmp_path: Path) -> None:
    with sandbox(task, network, tmp_path) as started:
        assert started.verify() == "0\n"
        started.solve()
        assert started.verify() == "1\n"


def test_sandboxes_of_all_tasks_differ_in_the_files_that_the_healthcheck_writes_alone() -> None:
    """Why one sandbox can stand for all: the same image, limits, compose file and verifier."""

    def without_files(task: Path) -> str:
        config = tomllib.loads((task / "task.toml").read_text())
        config["environment"]["healthcheck"].pop("command")
        config["metadata"].pop("difficulty")
        grading = [(task / file).read_text() for file in (COMPOSE_FILE, "tests/test.sh", "tests/grader.py")]
        return json.dumps([config, *grading], sort_keys=True)

    assert len({without_files(task) for task in SHIPPED}) == 1


def test_every_task_of_the_shipped_pins_was_run() -> None:
    pinned = {
        f"{suite}/{task['split']}/{task['name']}"
        for suite in ("smoke", "learn")
        for task in json.loads((TASKS / f"{suite}.json").read_text())["tasks"]
    }
    assert {name_of(path) for path in SHIPPED} == pinned


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier/reward.txt /logs/verifier/reward.json",
        "echo 1 > /tmp/one && ln -sf /tmp/one /logs/verifier/reward.txt",
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "ln -s /tests/expected.json answer.txt",
        "mkfifo answer.txt",
        "ln -s /dev/zero answer.txt",
        "mkdir answer.txt",
        "head -c 100000000 /dev/zero > answer.txt",
        "printf '\\xff\\xfe' > answer.txt",
        "mkdir -p /tests && echo 'print(1)' > /tests/json.py",
        "echo 'import os; print(1, flush=True); os._exit(0)' > /usr/lib/python3/dist-packages/sitecustomize.py",
        "printf 'nan' > answer.txt",
    ],
)
def test_what_is_no_answer_scores_0(cheat: str, smoke_sandbox: Sandbox) -> None:
    smoke_sandbox.run(cheat)
    assert smoke_sandbox.verify() == "0\n"


def test_verifier_that_cannot_run_its_grader_still_leaves_a_reward(smoke_sandbox: Sandbox) -> None:
    smoke_sandbox.solve()
    smoke_sandbox.run("rm /usr/bin/python3")
    assert smoke_sandbox.verify() == "0\n"


def test_sandbox_has_no_default_route_and_an_init(smoke_sandbox: Sandbox) -> None:
    default_route = "awk '$2 == \"00000000\"' /proc/net/route"
    assert smoke_sandbox.run(default_route) == ""
    image = docker("inspect", "--format", "{{.Config.Image}}", smoke_sandbox.container).strip()
    assert docker("run", "--rm", image, "bash", "-c", default_route) != ""  # on a network that is not internal
    host = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", smoke_sandbox.container))
    assert (host["Init"], host["PidsLimit"], host["SecurityOpt"]) == (True, 512, ["no-new-privileges:true"])


def test_shipped_tasks_need_nothing_else_than_this_test_gives_them() -> None:
    assert shutil.which("docker")
    for task in SHIPPED:
        assert load_task(task).docker_image == "local/opencode-rl-sandbox:cpu"
