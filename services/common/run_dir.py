"""``runs/<run>/``: every durable thing of a run, and how it is written so that a crash leaves no half file.

A file is published by writing aside, fsync and rename; a directory by a ``READY`` marker written last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from services.common.errors import RecipeError

READY = "READY"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
"""The two files of an adapter, as PEFT writes them."""
TRACKIO = ".trackio"
"""Folder beside the runs with trackio's database of all of them."""
TAKE_OVER = "be the user who made the run, or: sudo chown --recursive $(id -u):$(id -g) runs"
"""What a person does about a run that this user cannot write."""
APP_UID = 10001
"""User of every service but env, in all images."""
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def write_text(path: Path, text: str) -> None:
    """Publish ``text`` at ``path`` so that a reader sees the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes 0600; services of other users read the run directory
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def write_json(path: Path, value: Any) -> None:
    """Publish ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def read_json(path: Path) -> Any | None:
    """The parsed file, or None when it is not there (yet)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_request(path: Path) -> dict[str, Any] | None:
    """A stop request that is whole. A person may write one by hand: with an editor, in parts, or without a reason."""
    try:
        value = read_json(path)
    except ValueError:
        return None
    return {"reason": "asked for by hand", **value} if isinstance(value, dict) else None


def read_final_request(path: Path) -> dict[str, Any] | None:
    """A stop request after which the run does not start again."""
    asked = read_request(path)
    return None if asked is None or asked.get("resume") else asked


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line, whole or not at all; lines of several processes never mix.

    Raises: OSError: it could not be written, as on a full disk; the file is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(value, sort_keys=True, default=str) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o664)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the end may take more than one write; it is let go with the descriptor
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a line that a crash cut short must not swallow this one
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete JSON lines; one cut by a crash is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(value := json.loads(line), dict):
                found.append(value)
    return found


class User(NamedTuple):
    uid: int
    gid: int


def host_user(runs_dir: Path) -> User:
    """Whom the runs are for: the owner of their folder. One that the engine made, as root, is given to the owner of
    TASKS_DIR, which is part of the checkout."""
    found = runs_dir.stat()
    checkout = Path(os.environ.get("TASKS_DIR", ""))
    if found.st_uid == 0 and checkout.is_absolute() and checkout.is_dir():
        found = checkout.stat()
        os.chown(runs_dir, found.st_uid, found.st_gid)
    return User(found.st_uid, found.st_gid)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. ``path`` is the same inside every container and on the host."""

    path: Path

    @classmethod
    def from_environment(cls, run_name: str) -> RunDir:
        """``$RUNS_DIR/<run_name>``. Raises: RecipeError: RUNS_DIR is unset or not absolute."""
        root = os.environ.get("RUNS_DIR", "")
        if not root.startswith("/"):
            raise RecipeError(f"RUNS_DIR is {root!r}; it must be an absolute path that every service mounts alike")
        return cls(Path(root) / run_name)

    def prepare(self) -> None:
        """Make the folders that several services write to.

        env, as root, gives them to the services' user and to the group of the host's user, who may write there too:
        what is made in them takes their group.
        """
        shared = self.path.parent / TRACKIO
        own = (self.path, self.heartbeats, self.checkpoints, self.rollouts, self.eval, self.incidents)
        for folder in (shared, *own):
            folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            group = host_user(self.path.parent).gid
            for folder in (shared, *own):
                os.chown(folder, APP_UID, group)
                folder.chmod(0o2775)
            for file in self.path.iterdir():  # of a run that is resumed: the host's user has written some
                if file.is_file() and not file.is_symlink():
                    os.chown(file, APP_UID, group)

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trained(self) -> Path:
        """One line per step: which groups of training tasks it trained, dropped and gave up."""
        return self.path / "trained.jsonl"

    @property
    def attempts(self) -> Path:
        """One line for each start and end of the training process, written by its supervisor."""
        return self.path / "attempts.jsonl"

    @property
    def resume_points(self) -> Path:
        """Checkpoints for this machine alone, between those in ``checkpoints``; only the newest."""
        return self.path / "resume"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def ledger(self) -> Path:
        return self.path / "sandboxes.jsonl"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def incidents(self) -> Path:
        return self.path / "incidents"

    @property
    def control_key(self) -> Path:
        """The key to env's control plane, for the services alone; written by env."""
        return self.path / "control.key"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def stop_request(self) -> Path:
        """The watchdog or a person writes it (``reason``, ``at``, and ``resume``: whether to start again from the
        newest checkpoint); the trainer's supervisor obeys it and takes it away."""
        return self.path / "stop.json"

    @property
    def result(self) -> Path:
        """How training ended (``exit_code``, ``reason``, ``step``): written last by the trainer's supervisor. While it
        is there, nothing of the run is started again; ``make resume`` takes it away."""
        return self.path / "result.json"

    def complete_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints whose READY marker is there, oldest step first."""
        return list(iter_checkpoints(self.checkpoints))


def iter_checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Complete ``checkpoint-N`` folders below ``folder``, in order of N."""
    found = [
        Checkpoint(int(match[1]), entry)
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if (match := _CHECKPOINT.match(entry.name)) and (entry / READY).exists()
    ]
    yield from sorted(found, key=lambda checkpoint: checkpoint.step)


@contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """Keep rotation from deleting a complete checkpoint inside the block. A process that dies lets go of it."""
    with (checkpoint / READY).open("rb") as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)
        yield


@contextmanager
def unused(checkpoint: Path) -> Iterator[bool]:
    """Whether nobody is inside ``in_use``; inside the block nobody gets there."""
    with (checkpoint / READY).open("rb") as marker:
        yield lock_now(marker.fileno())


def lock_now(descriptor: int) -> bool:
    """Lock an open file or folder for this process alone, without waiting. It ends with the descriptor, or the process.

    Returns: whether nobody else has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def utc_now() -> str:
    """Seconds precision, ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
