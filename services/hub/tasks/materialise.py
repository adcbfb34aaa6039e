"""Turn verified tasks into the folder that a run uses: written aside, checked, renamed.

What changes on the way: the sandbox image and its limits, ``init: true`` and the sandboxes' network, and every
variable that would be taken from the host's environment. All else is copied byte for byte, the healthcheck hook that
pulls a task's data included.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.errors import NotReadyError, RecipeError, machine_error
from services.common.tasks import (
    ALLOWED_VARIABLES,
    COMPOSE_FILE,
    SANDBOX_COMPOSE,
    VARIABLE,
    PinFile,
    TaskProblem,
    compose_services,
    dump_pin,
    env_tables,
    files_sha256,
    listing,
    load_task,
)

LOCK_FILE = ".prepared.json"


class Settings(BaseModel):
    """What a run wants of its sandboxes; comes from the recipe or the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str
    cpus: int = 1
    memory_mb: int = 4096
    pids: int = 512
    allowed_variables: tuple[str, ...] = ()
    """Variables of the host that a task may read, beside those that Harbor and our own compose file need."""

    @property
    def allowed(self) -> frozenset[str]:
        return ALLOWED_VARIABLES | set(self.allowed_variables)


class Prepared(BaseModel):
    """What lies in a prepared folder, so that it can be checked without its source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pin_sha256: str
    settings: Settings
    files_sha256: dict[str, str]
    """Path of a task -> hash of its files as prepared."""

    @classmethod
    def read(cls, folder: Path) -> Prepared | None:
        """The record of a prepared folder; None if the folder has none, and so is not ours."""
        try:
            return cls.model_validate_json((folder / LOCK_FILE).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise RecipeError(f"{folder / LOCK_FILE} is damaged ({error.error_count()} errors); use --force") from None


def pin_sha256(pin: PinFile) -> str:
    return hashlib.sha256(dump_pin(pin).encode()).hexdigest()


def changes(folder: Path, pin: PinFile, prepared: Prepared) -> list[str]:
    """What differs in a prepared folder from what was prepared: one line for each task."""
    found = {
        path.parent.relative_to(folder).as_posix(): path.parent
        for path in folder.glob("*/*/task.toml" if pin.tasks[0].split else "*/task.toml")
    }
    lines = [f"{path}: missing" for path in sorted(prepared.files_sha256.keys() - found.keys())]
    lines += [f"{path}: extra" for path in sorted(found.keys() - prepared.files_sha256.keys())]
    lines += [
        f"{path}: changed"
        for path, sha256 in prepared.files_sha256.items()
        if path in found and files_sha256(found[path]) != sha256
    ]
    return lines


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock beside ``folder``: of two preparations at a time, the second is told so."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.parent / f".{folder.name}.lock", timeout=0):
            yield
    except Timeout:
        raise NotReadyError(f"another prepare_tasks is writing {folder}; wait for it to end") from None


def materialise(
    source: Path, folder: Path, pin: PinFile, settings: Settings, *, advance: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Replace ``folder`` by the pinned tasks of ``source``, which must have been verified.

    Returns: what was dropped, and from how many tasks.
    Raises: RecipeError: a task cannot be made safe to run. MachineError: disk. ``folder`` is then as it was before.
    """
    aside = folder.parent / f".{folder.name}.new"
    old = folder.parent / f".{folder.name}.old"
    dropped: Counter[str] = Counter()
    problems: list[str] = []
    hashes: dict[str, str] = {}
    try:
        for leftover in (aside, old):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)
        for task in pin.tasks:
            target = aside / task.path
            copy_files(source / task.path, target)
            try:
                dropped.update(prepare_task(target, settings))
                load_task(target, allowed=settings.allowed)
            except TaskProblem as problem:
                problems.append(f"{task.path}: {problem}")
            hashes[task.path] = files_sha256(target)
            advance()
        if problems:
            raise RecipeError(listing("these tasks cannot be prepared:", problems))
        record = Prepared(pin_sha256=pin_sha256(pin), settings=settings, files_sha256=hashes)
        (aside / LOCK_FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.rename(folder, old)
        os.rename(aside, folder)
    except OSError as error:
        raise machine_error(error) from None
    finally:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        for leftover in (aside, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return dropped


def copy_files(source: Path, target: Path) -> None:
    """Copy a task; unlike shutil.copytree, stop at the first error and raise it as it is."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def prepare_task(folder: Path, settings: Settings) -> list[str]:
    """Rewrite task.toml and the compose file in place. Returns: the variables of the host that were dropped."""
    path = folder / "task.toml"
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    environment = document.setdefault("environment", tomlkit.table())
    environment["docker_image"] = settings.image
    environment["cpus"] = settings.cpus
    environment["memory_mb"] = settings.memory_mb
    environment.pop("memory", None)  # deprecated spelling; Harbor refuses two that differ
    dropped = _drop_from_env(document, settings.allowed)
    path.write_text(tomlkit.dumps(document), encoding="utf-8", newline="\n")
    tomllib.loads(path.read_text(encoding="utf-8"))
    compose = folder / COMPOSE_FILE
    compose.parent.mkdir(exist_ok=True)
    text, more = sandbox_compose(compose.read_text(encoding="utf-8") if compose.is_file() else None, settings)
    compose.write_text(text, encoding="utf-8", newline="\n")
    return dropped + more


def _drop_from_env(document: Mapping[str, Any], allowed: frozenset[str]) -> list[str]:
    dropped: list[str] = []
    for table in env_tables(document):
        assert isinstance(table, MutableMapping)
        for key, value in table.items():
            if isinstance(value, str):
                new = without_host_variables(value, allowed, dropped.append)
                if new != value:
                    table[key] = new
    return [f"task.toml no longer reads ${{{name}}} from the host" for name in dropped]


def sandbox_compose(text: str | None, settings: Settings) -> tuple[str, list[str]]:
    """The compose file of a prepared task: ours, merged over the task's own where it has one.

    Returns: the text, and what was dropped. Raises: TaskProblem: it could reach the host or other containers.
    """
    ours = SANDBOX_COMPOSE.replace("pids_limit: 512", f"pids_limit: {settings.pids}")
    if text is None or text == SANDBOX_COMPOSE:
        return ours, []
    own = _own_services(text)
    wanted = yaml.safe_load(ours)
    merged = {
        "services": {name: {**(own.get(name) or {}), **wanted["services"]["main"]} for name in ["main", *own]},
        "networks": wanted["networks"],
    }
    dropped: list[str] = []
    cleaned = _without_host_variables(merged, settings.allowed, dropped.append)
    head = "# Written by prepare_tasks from the task's own compose file.\n"
    return head + yaml.safe_dump(cleaned, sort_keys=False), [
        f"{COMPOSE_FILE} no longer reads ${{{name}}} from the host" for name in dropped
    ]


def _own_services(text: str) -> dict[str, dict[str, Any] | None]:
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TaskProblem(f"{COMPOSE_FILE} is not valid YAML: {str(error).splitlines()[0]}") from None
    return compose_services(parsed)


def _without_host_variables(value: Any, allowed: frozenset[str], report: Callable[[str], None]) -> Any:
    if isinstance(value, str):
        return without_host_variables(value, allowed, report)
    if isinstance(value, list):
        return [_without_host_variables(item, allowed, report) for item in value]
    if isinstance(value, dict):
        return {
            _without_host_variables(key, allowed, report): _without_host_variables(item, allowed, report)
            for key, item in value.items()
        }
    return value


def without_host_variables(text: str, allowed: frozenset[str], report: Callable[[str], None]) -> str:
    """``text`` with each variable that is not allowed replaced by its default, or by nothing; each one is reported."""
    parts = []
    while match := VARIABLE.search(text):
        name, braced = match["name"], match[0].startswith("${")
        end = _closing_brace(text, match.end()) if braced else match.end()
        inner = text[match.end() : end]
        parts.append(text[: match.start()])
        if name is None:
            parts.append(match[0])
        elif name in allowed:
            parts.append(f"${{{name}{without_host_variables(inner, allowed, report)}}}" if braced else match[0])
        else:
            report(name)
            default = inner.removeprefix(":").removeprefix("-") if inner.startswith((":-", "-")) else ""
            parts.append(without_host_variables(default, allowed, report))
        text = text[end + braced :]
    return "".join(parts) + text


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes a ``${`` whose name ends at ``start``; the end of the text if there is none."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return len(text)
