"""The whole loop as a user who is not root, only in group docker, and whose Docker client has a proxy configured."""

import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user; who is not root tests it by hand"),
]

ROOT = Path(__file__).resolve().parents[2]
SOCKET = Path("/var/run/docker.sock")
NAME = "opencode-rl-test"
UID = 1000
DEAD_PROXY = "http://192.0.2.1:3128"
"""An address of the documentation: nothing answers there."""


@dataclass(frozen=True)
class Person:
    home: Path
    uid: int
    gid: int
    docker_gid: int

    @property
    def checkout(self) -> Path:
        return self.home / "opencode-rl"

    def run(self, command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("PATH", "TAG", "REGISTRY") if name in os.environ}
        return subprocess.run(
            list(command), cwd=self.checkout, env={**kept, "HOME": str(self.home), "USER": NAME, **environment},
            user=self.uid, group=self.gid, extra_groups=[self.docker_gid], umask=0o022,
            capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def docker_gid() -> Iterator[int]:
    """The group that may use the engine: docker. An engine started on a machine without it has left its socket to
    root's group; it then gets the group that `make docker` makes now, for as long as the test runs."""
    before = SOCKET.stat().st_gid
    if before != 0:
        yield before
        return
    subprocess.run(["groupadd", "--system", "--force", "docker"], check=True)
    gid = grp.getgrnam("docker").gr_gid
    os.chown(SOCKET, -1, gid)
    try:
        yield gid
    finally:
        os.chown(SOCKET, -1, before)


@pytest.fixture(scope="module")
def person(docker_gid: int) -> Iterator[Person]:
    """A new user with a checkout of this tree, changes included."""
    subprocess.run(["useradd", "--non-unique", "--uid", str(UID), "--user-group", "--create-home", NAME], check=True)
    entry = pwd.getpwnam(NAME)
    found = Person(Path(entry.pw_dir), entry.pw_uid, entry.pw_gid, docker_gid)
    try:
        _check_out(found)
        yield found
    finally:
        subprocess.run(["userdel", "--remove", NAME], check=True, capture_output=True)


def _check_out(person: Person) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and name != ".venv":
            (person.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, person.checkout / name)
    _give_python(person)
    (person.home / ".docker").mkdir()
    proxies = {"httpProxy": DEAD_PROXY, "httpsProxy": DEAD_PROXY}
    (person.home / ".docker" / "config.json").write_text(json.dumps({"proxies": {"default": proxies}}))
    subprocess.run(["chown", "--recursive", f"{person.uid}:{person.gid}", person.home], check=True)


def _give_python(person: Person) -> None:
    """This environment's packages under an interpreter that everybody may start: root's own may lie in root's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    usable = [path for path in (Path("/usr/bin") / version, Path("/usr/local/bin") / version) if path.exists()]
    if not usable:
        pytest.skip(f"no {version} that every user may start is on this machine")
    subprocess.run([usable[0], "-m", "venv", "--without-pip", person.checkout / ".venv"], check=True)
    (packages,) = (person.checkout / ".venv/lib").glob("*/site-packages")
    (packages / "ours.pth").write_text(f"{(ROOT / '.venv').resolve()}/lib/{version}/site-packages\n")


@pytest.fixture(scope="module")
def run(person: Person) -> Path:
    """A finished run of the smoke recipe."""
    done = person.run(
        [".venv/bin/python", "-m", "scripts.run", "--variant", "cpu"],
        RECIPE="data/recipes/smoke.toml", RUN_NAME="test", MAX_STEPS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return person.checkout / "runs" / "test"


def test_the_engine_is_used_as_it_is(person: Person) -> None:
    done = person.run(["scripts/ensure_docker.sh"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "was running" in done.stdout


def test_training_and_evaluation_end_well_and_the_view_has_written_its_own_file(run: Path, person: Person) -> None:
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0
    assert (run / "eval" / "final_results.json").is_file()
    timings = run / "timings.json"
    assert "down" in json.loads(timings.read_text()) and timings.stat().st_uid == person.uid


def test_what_a_person_does_with_a_finished_run_works(run: Path, person: Person) -> None:
    done = person.run([".venv/bin/python", "-m", "scripts.traces"], RUN_NAME="test")
    assert done.returncode == 0, done.stderr
    assert (run / "traces.html").stat().st_uid == person.uid
    for name in ("metrics.jsonl", "attempts.jsonl", "sandboxes.jsonl"):
        done = person.run(["tee", "--append", run / name])
        assert done.returncode == 0, done.stderr


def test_sandboxes_files_are_the_user_s_own_and_nothing_is_open_to_all(run: Path, person: Person) -> None:
    trials = list((run / "trials").rglob("*"))
    assert trials
    assert {path.lstat().st_uid for path in trials} == {person.uid}
    everything = [path.lstat() for path in run.parent.rglob("*")]
    assert [status for status in everything if not stat.S_ISLNK(status.st_mode) and status.st_mode & stat.S_IWOTH] == []


def test_no_folder_of_the_user_was_made_by_the_engine(run: Path, person: Person) -> None:
    for folder in (person.home / ".cache", person.home / ".cache" / "huggingface", run.parent):
        assert folder.stat().st_uid == person.uid, folder


def test_the_user_can_delete_it_all(run: Path, person: Person) -> None:
    """Last: nothing of the run is left."""
    done = person.run(["rm", "-r", run.parent])
    assert (done.returncode, done.stderr) == (0, "")
    assert not run.exists()
