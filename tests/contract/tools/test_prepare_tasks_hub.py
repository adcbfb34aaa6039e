"""``python -m scripts.prepare_tasks`` against a local Hub: hundreds of tasks, each fault, each bad answer."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from scripts import prepare_tasks
from services.common.errors import StackError
from services.hub.client import ATTEMPTS
from tests.hub.dataset import published, published_task
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[3]
REPO = "made/train"
IMAGE = "example/sandbox:1"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub() as started:
        yield started


class Tool:
    """The command line, with folders of its own."""

    def __init__(self, hub: LocalHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.tasks_dir = folder / "tasks"
        self.tasks_dir.mkdir()

    def command(self, *arguments: str) -> list[str]:
        cache = ["--cache-dir", str(self.folder / "cache")] if arguments[0] in ("pin", "fetch") else []
        return [*arguments, "--tasks-dir", str(self.tasks_dir), *cache]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """As a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.prepare_tasks", *self.command(*arguments)],
            cwd=ROOT,
            env=os.environ | self.hub.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts background jobs with SIGINT ignored, which a child inherits: the test needs it heard.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """In this process, to the end: what it prints, or its one message where ``code`` is not 0."""
        result = CliRunner().invoke(prepare_tasks.app, self.command(*arguments))
        if code == 0:
            assert result.exit_code == 0, (result.output, result.exception)
            return result.output
        assert isinstance(result.exception, StackError), (result.output, result.exception)
        assert result.exception.exit_code == code, result.exception
        return str(result.exception)

    def pin(self, *arguments: str, revision: str, name: str = "train", code: int = 0) -> str:
        return self.run("pin", name, "--repo", REPO, "--revision", revision, *arguments, code=code)

    def fetch(self, *arguments: str, code: int = 0) -> str:
        return self.run("fetch", "train", "--image", IMAGE, *arguments, code=code)

    def fetched(self) -> list[str]:
        return sorted(path.name for path in self.tasks_dir.glob("train/t*"))


@pytest.fixture
def tool(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tool]:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    # The client waits up to 23 s between its attempts; tests/contract/tools/test_local_hub.py sees it wait for real.
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda seconds: sleep(seconds / 20)))
    monkeypatch.setattr(prepare_tasks.out, "_width", 200, raising=False)
    yield Tool(hub, tmp_path)
    huggingface_hub.close_session()


@pytest.fixture
def revision(hub: LocalHub) -> str:
    return hub.commit(REPO, published(range(12)), repo_type="dataset")


@pytest.fixture
def pinned(tool: Tool, revision: str) -> str:
    """All twelve tasks pinned, nothing in the cache; the requests of pinning forgotten."""
    tool.pin(revision=revision)
    subprocess.run(["rm", "-r", str(tool.folder / "cache")], check=True)
    tool.hub.requests.clear()
    return revision


def edit_pin(tool: Tool, **changes: Any) -> None:
    path = tool.tasks_dir / "train.json"
    data = json.loads(path.read_text())
    data["tasks"][3] |= changes
    path.write_text(json.dumps(data))


# --- the way it goes ----------------------------------------------------------------------------------------------


def test_hundreds_of_tasks_are_pinned_fetched_once_and_verified(tool: Tool, hub: LocalHub) -> None:
    """More files than one page of a listing has; ``scripts.bench_tasks`` does a thousand tasks."""
    without_easy = [number for number in range(450) if number % 3]
    revision = hub.commit(REPO, published(without_easy), repo_type="dataset")
    hub.commit(REPO, {"README.md": b"newer"}, repo_type="dataset")
    tool.pin("--take", "medium=100", "--take", "hard=150", "--seed", "7", revision=revision[:10])
    pin = json.loads((tool.tasks_dir / "train.json").read_text())
    assert pin["source"]["revision"] == revision
    assert [sum(task["difficulty"] == tier for task in pin["tasks"]) for tier in ("medium", "hard")] == [100, 150]
    first = (tool.tasks_dir / "train.json").read_bytes()
    tool.pin("--take", "medium=100", "--take", "hard=150", "--seed", "7", revision=revision)
    assert (tool.tasks_dir / "train.json").read_bytes() == first

    hub.requests.clear()
    out = tool.fetch()
    assert "250 tasks: task.toml no longer reads ${HF_TOKEN} from the host" in out
    assert len(tool.fetched()) == 250
    assert hub.requests == []  # pinning had brought all of it into the cache
    assert "up to date, 250 tasks" in tool.fetch()
    assert "prepared" in tool.run("verify", "train")
    assert "hard" in tool.run("stats")


def test_only_what_is_pinned_is_downloaded(tool: Tool, hub: LocalHub, revision: str) -> None:
    tool.pin("--take", "hard=2", revision=revision)
    subprocess.run(["rm", "-r", str(tool.folder / "cache")], check=True)
    hub.requests.clear()
    tool.fetch()
    names = {task["name"] for task in json.loads((tool.tasks_dir / "train.json").read_text())["tasks"]}
    downloaded = [request.path for request in hub.requests if request.method == "GET" and "/resolve/" in request.path]
    assert {path.split("/tasks/")[1].split("/")[0] for path in downloaded} == names
    assert len(downloaded) == 2 * len(published_task(0))
    hub.requests.clear()
    tool.fetch()
    assert hub.requests == []


def test_train_shares_nothing_with_test(tool: Tool, hub: LocalHub) -> None:
    revision = hub.commit(REPO, published(range(9)), repo_type="dataset")
    tool.pin("--take", "hard=2", revision=revision, name="test")
    message = tool.pin("--take", "hard=2", "--disjoint-from", "test", revision=revision, code=2)
    assert "2 hard tasks were asked for and 1 can be taken of 3" in message
    tool.pin("--take", "hard=1", "--disjoint-from", "test", revision=revision)
    tool.run("verify")
    tool.pin("--take", "hard=2", revision=revision)
    assert "overlap" in tool.run("verify", code=2)


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", "/resolve/", status=429, headers={"Retry-After": "1"}, times=2),
        Fault("HEAD", "/resolve/", status=429, headers={"Retry-After": "1"}, times=2),
        Fault("GET", "/tree/", status=429, headers={"Retry-After": "1"}),
        Fault("GET", "/resolve/", status=500, times=2),
        Fault("GET", "/tree/", status=502),
        Fault("GET", "/resolve/", cut_after=20, times=5),
        Fault("GET", "/tree/", cut_after=20),
        Fault("GET", "/resolve/", corrupt=True, times=2),
        # Both hit one file: which files the faults above hit depends on the downloads' order.
        Fault("GET", "/resolve/.*/t0003/task.toml", corrupt=True, times=ATTEMPTS - 1),
        Fault("GET", "/resolve/.*/t0003/task.toml", status=500, times=ATTEMPTS - 1),
        Fault("GET", "/resolve/.*/t0003/task.toml", cut_after=20, times=5),
        Fault("GET", "/resolve/", delay_s=1, times=3),
    ],
    ids=lambda fault: (
        f"{fault.method}{fault.path}{fault.status or ''}{'cut' if fault.cut_after else ''}"
        f"{'corrupt' if fault.corrupt else ''}{'slow' if fault.delay_s else ''}"
    ),
)
def test_passing_fault_is_survived(fault: Fault, tool: Tool, hub: LocalHub, pinned: str) -> None:
    hub.fail(fault)
    tool.fetch()
    assert len(tool.fetched()) == 12
    assert fault.times == 0
    tool.run("verify", "train")


def test_a_file_that_arrived_broken_is_fetched_anew_although_the_hub_fails_in_between(
    tool: Tool, hub: LocalHub, pinned: str
) -> None:
    file = "/resolve/.*/t0003/task.toml"
    hub.fail(Fault("GET", file, corrupt=True), Fault("HEAD", file, status=503, skip=1, times=2))
    tool.fetch("--workers", "1")
    assert len(tool.fetched()) == 12
    asked = [request for request in hub.requests if request.method == "HEAD" and "t0003/task" in request.path]
    assert [request.status for request in asked] == [200, 503, 503, 200]


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (Fault("GET", "/resolve/.*/t0003/", status=403, times=99), 2, "refuses access"),
        (Fault("GET", "/resolve/.*/t0003/", corrupt=True, times=99), 3, f"arrived {ATTEMPTS} times with other bytes"),
        (Fault("GET", "/resolve/.*/t0003/task.toml", status=503, times=99), 3, "does not answer"),
    ],
    ids=["refused", "corrupt", "down"],
)
def test_lasting_fault_stops_with_one_message_and_the_rest_is_kept(
    fault: Fault, code: int, message: str, tool: Tool, hub: LocalHub, pinned: str
) -> None:
    hub.fail(fault)
    assert message in tool.fetch(code=code)
    assert tool.fetched() == []
    hub.heal()
    kept = len(
        [path for path in (tool.folder / "cache").glob("*/tasks/**/*") if path.is_file() and "t0003" not in path.parts]
    )
    hub.requests.clear()
    tool.fetch()
    assert len(tool.fetched()) == 12
    fetched_now = [request for request in hub.requests if request.method == "GET" and "/resolve/" in request.path]
    assert kept > 0 and len(fetched_now) <= 12 * len(published_task(0)) - kept


def test_network_gone_in_the_middle(tool: Tool, hub: LocalHub, pinned: str) -> None:
    hub.fail(
        Fault("GET", "/resolve/", cut_after=0, skip=20, times=10_000),
        Fault("HEAD", "", cut_after=0, skip=30, times=10_000),
    )
    assert "run the same command again to go on" in tool.fetch(code=3)
    assert tool.fetched() == []
    hub.heal()
    tool.fetch()
    assert len(tool.fetched()) == 12


def test_message_and_exit_code_of_the_process(tool: Tool, hub: LocalHub, pinned: str) -> None:
    edit_pin(tool, instruction_sha256="0" * 64)
    process = tool.start("fetch", "train", "--image", IMAGE)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert stderr.startswith("RecipeError: ") and "Traceback" not in stderr and stdout == ""


def test_hub_that_is_not_there(tool: Tool, hub: LocalHub, pinned: str) -> None:
    hub.stop()
    assert f"{hub.endpoint} does not answer" in tool.fetch(code=3)


def test_interrupt_leaves_nothing_half_written(tool: Tool, hub: LocalHub, pinned: str) -> None:
    hub.fail(Fault("GET", "/resolve/", delay_s=0.5, times=10_000))
    process = tool.start("fetch", "train", "--image", IMAGE, "--workers", "2")
    while len(hub.requests) < 8:
        sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert tool.fetched() == []
    hub.heal()
    tool.fetch()
    assert len(tool.fetched()) == 12


# --- bad input ----------------------------------------------------------------------------------------------------


def test_revision_must_name_one_commit(tool: Tool, hub: LocalHub) -> None:
    for digit in "12":
        hub.commit(REPO, published(range(3)), repo_type="dataset", oid="abcdef0" + digit * 33)
    assert "ambiguous" in tool.pin(revision="abcdef0", code=2)
    assert "no commit of made/train starts with abcdef9" in tool.pin(revision="abcdef9", code=2)
    for no_commit in ("main", "abcd", "g" * 40, "a" * 41):
        assert "is no commit" in tool.pin(revision=no_commit, code=2)
    tool.pin(revision="abcdef01")


def test_dataset_that_is_not_there(tool: Tool, hub: LocalHub) -> None:
    assert "made/train is not on" in tool.pin(revision="abcdef0", code=2)


def test_pinned_revision_that_is_gone(tool: Tool, hub: LocalHub, pinned: str) -> None:
    del hub.repo(REPO, "dataset").commits[pinned]
    assert "no such revision" in tool.fetch(code=2)


def test_pinned_task_that_is_gone(tool: Tool, hub: LocalHub, pinned: str) -> None:
    for path in [path for path in hub.repo(REPO, "dataset").at(pinned).files if "/t0004/" in path]:
        del hub.repo(REPO, "dataset").at(pinned).files[path]
    message = tool.fetch(code=2)
    assert "does not have these pinned tasks" in message and "t0004" in message


@pytest.mark.parametrize("what", ["instruction_sha256", "files_sha256"])
def test_wrong_hash_stops_with_both_values(what: str, tool: Tool, hub: LocalHub, pinned: str) -> None:
    edit_pin(tool, **{what: "0" * 64})
    message = tool.fetch(code=2)
    assert re.search(rf"t0003: .*changed.* SHA-256 [0-9a-f]{{64}}, pinned is {'0' * 64}", message)
    assert tool.fetched() == []


def test_name_that_leaves_the_folder(tool: Tool, hub: LocalHub, pinned: str) -> None:
    edit_pin(tool, name="../../evil")
    assert "tasks.3.name" in tool.fetch(code=2)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction.md": b"Answer question 0.\n"}, "the same instruction"),
        ({"instruction.md": b"Answer\r\n"}, "Windows line ends"),
        ({"instruction.md": b"caf\xe9\n"}, "not UTF-8"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
        ({"task.toml": b"[metadata\n"}, "not valid TOML"),
        ({"task.toml": b"[environment]\n"}, "no metadata 'notebook_id'"),
    ],
    ids=["one instruction", "line ends", "not UTF-8", "no tests", "no TOML", "no metadata"],
)
def test_dataset_with_a_bad_task_is_not_pinned_whole(
    change: dict[str, bytes | None], message: str, tool: Tool, hub: LocalHub
) -> None:
    files = published(range(6))
    for path, content in change.items():
        if content is None:
            del files[f"tasks/t0002/{path}"]
        else:
            files[f"tasks/t0002/{path}"] = content
    revision = hub.commit(REPO, files, repo_type="dataset")
    assert message in tool.pin(revision=revision, code=2)
    assert not (tool.tasks_dir / "train.json").exists()
    out = tool.pin("--take", "easy=2", revision=revision)  # t0000 and t0003
    assert message == "the same instruction" or "left out: t0002" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", "no-owner"], "--repo 'no-owner' is not understood"),
        (["--grader-sha256", "abc"], "--grader-sha256 'abc' is not understood"),
        (["--folder", "../x"], "--folder '../x' is not understood"),
        (["--take", "hard"], "--take 'hard' is not understood"),
        (["--disjoint-from", "nothing"], "nothing.json does not exist"),
    ],
)
def test_option_of_another_form(arguments: list[str], message: str, tool: Tool, hub: LocalHub) -> None:
    assert message in tool.pin(*arguments, revision="abcdef0", code=2)
    assert hub.requests == []


def test_dataset_without_tasks(tool: Tool, hub: LocalHub) -> None:
    revision = hub.commit(REPO, {"tasks/README.md": b"none yet"}, repo_type="dataset")
    assert "has no task in tasks/" in tool.pin(revision=revision, code=2)


def test_more_tasks_than_there_are(tool: Tool, hub: LocalHub, revision: str) -> None:
    message = tool.pin("--take", "hard=5", revision=revision, code=2)
    assert "5 hard tasks were asked for and 4 can be taken of 4; the dataset has: easy 4, hard 4, medium 4" in message


def test_grader_with_another_hash(tool: Tool, hub: LocalHub, revision: str) -> None:
    message = tool.pin("--grader-sha256", "0" * 64, revision=revision, code=2)
    assert "tests/grader.py is changed" in message and "0" * 64 in message
