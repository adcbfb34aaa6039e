"""Harbor tasks on disk and the pin files that name them: parse, check, hash.

A suite is a name such as ``smoke/train`` or ``train``: a folder below the tasks folder with one Harbor task per
sub-folder. The pin file named after the suite's first part (``smoke.json``, ``train.json``) fixes which tasks the
suite has, in which order, and what they say; ``load_suite`` refuses a folder that differs. Used by the preflight
of a run, the env server and the evaluator alike, so that all of them see one list in one order.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.common.errors import RecipeError

WORKDIR = "/workdir"
"""Where an agent starts and leaves answer.txt."""
SANDBOX_REPOSITORY = "opencode-rl-sandbox"
SANDBOX_IMAGE = f"local/{SANDBOX_REPOSITORY}:cpu"
"""How a task names the project's own sandbox image; the run starts its own one, whatever its registry and tag."""
COMPOSE_FILE = "environment/docker-compose.yaml"
SANDBOX_NETWORK = "SANDBOX_NETWORK"
"""The one variable of the host that our compose files read: the network of the sandboxes."""
HARBOR_VARIABLES = frozenset(
    {
        "MAIN_IMAGE_NAME", "PREBUILT_IMAGE_NAME", "CONTEXT_DIR", "CPUS", "MEMORY",
        "HOST_VERIFIER_LOGS_PATH", "HOST_AGENT_LOGS_PATH", "HOST_ARTIFACTS_PATH",
        "ENV_VERIFIER_LOGS_PATH", "ENV_AGENT_LOGS_PATH", "ENV_ARTIFACTS_PATH",
    }
)  # fmt: skip
"""Set by Harbor 0.24 itself for every compose call: they come from the task, not from the host's environment."""
ALLOWED_VARIABLES = HARBOR_VARIABLES | {SANDBOX_NETWORK}
MAX_LISTED = 20
"""Problems shown in one message; the rest is counted."""

SANDBOX_COMPOSE = """\
# Merged by Harbor into the sandbox's compose file. SANDBOX_NETWORK is the only host variable a task may read.
services:
  main:
    init: true # without it "sleep infinity" ignores SIGTERM, and teardown waits 10 s for the kill
    pids_limit: 512
    security_opt: ["no-new-privileges:true"]
    networks: [sandbox]
networks:
  sandbox: # made with --internal: from here only the capture proxy can be reached
    external: true
    name: ${SANDBOX_NETWORK:?the env service sets it to the network of the sandboxes}
"""

SERVICE_KEYS = frozenset(
    {
        "command", "depends_on", "entrypoint", "environment", "expose", "healthcheck", "image", "init", "networks",
        "pids_limit", "platform", "pull_policy", "read_only", "security_opt", "shm_size", "stop_grace_period",
        "stop_signal", "tmpfs", "user", "working_dir",
    }
)  # fmt: skip
"""What a task's own compose file may say of a service. The rest could reach the host (volumes, devices, pid, ...),
other containers (ports, network_mode, ...), or lift the limits that the recipe sets (cpus, mem_limit, deploy, ...)."""

# A name is a folder below a suite, a part of container names, and printed: nothing that could leave its place.
TASK_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$"
TaskName = Annotated[str, Field(pattern=TASK_NAME)]
SuitePart = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


# --- Pin files ----------------------------------------------------------------------------------------------------


class _Pinned(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class HubSource(_Pinned):
    """Tasks in a dataset repository on the Hub."""

    kind: Literal["hub"] = "hub"
    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")]
    revision: Commit
    """Full commit: a branch name would let the tasks drift."""
    folder: SuitePart = "tasks"
    """Folder of the repository with one sub-folder a task."""


class ShippedSource(_Pinned):
    """Tasks that ship beside the pin file, in a folder named like it."""

    kind: Literal["shipped"] = "shipped"


class Selection(_Pinned):
    """How the tasks were chosen, so that the choice can be made again."""

    seed: int
    rule: str
    take: dict[str, int]
    """Difficulty -> number of tasks; empty: all."""
    disjoint_from: tuple[str, ...] = ()
    """Pin files whose notebooks, questions and instructions were left out."""


class PinnedTask(_Pinned):
    name: TaskName
    split: SuitePart | None = None
    """Sub-folder of the suite; None: the suite has one set only."""
    difficulty: str
    instruction_sha256: Sha256
    """Of the bytes of instruction.md."""
    files_sha256: Sha256
    """Of every file of the task as published: ``files_sha256``."""
    notebook: str | None = None
    """What the question was asked about, where the task says so: two tasks on one notebook are related."""
    question_sha256: Sha256 | None = None
    """Of the question without case and spacing, where the task carries it apart from the instruction."""

    @property
    def path(self) -> str:
        """Folder of the task, relative to the suite's."""
        return f"{self.split}/{self.name}" if self.split else self.name


class PinFile(_Pinned):
    """Which tasks a suite has, in order, and what they contain."""

    schema_version: Literal[1] = 1
    source: Annotated[HubSource | ShippedSource, Field(discriminator="kind")]
    selection: Selection | None = None
    grader_sha256: tuple[Sha256, ...] = ()
    """Allowed hashes of tests/grader.py; empty: not checked apart from ``files_sha256``."""
    tasks: Annotated[tuple[PinnedTask, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_once(self) -> PinFile:
        for what, values in (
            ("task", [task.path.casefold() for task in self.tasks]),
            ("instruction", [task.instruction_sha256 for task in self.tasks]),
        ):
            if repeated := [value for value, count in Counter(values).items() if count > 1]:
                raise ValueError(f"the same {what} is pinned twice: {', '.join(repeated[:MAX_LISTED])}")
        if len({task.split is None for task in self.tasks}) > 1:
            raise ValueError("some tasks have a split and some have none; give all of them one, or none")
        return self

    def in_split(self, split: str | None) -> tuple[PinnedTask, ...]:
        return tuple(task for task in self.tasks if task.split == split)


def load_pin(path: Path) -> PinFile:
    """Parse a pin file. Raises: RecipeError: one message with every wrong entry."""
    try:
        return PinFile.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise RecipeError(
            f"pin file {path} does not exist; make it with `prepare_tasks pin` on a machine that reaches the Hub"
        ) from None
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}; found {item['input']!r:.120}"
                 for item in error.errors()]  # fmt: skip
        raise RecipeError(listing(f"pin file {path} is refused:", lines)) from None
    except (ValueError, OSError) as error:
        raise RecipeError(f"pin file {path} cannot be read: {error}") from None


def dump_pin(pin: PinFile) -> str:
    """The text of a pin file: the same pin gives the same bytes."""
    return json.dumps(pin.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False) + "\n"


# --- Tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One checked Harbor task."""

    name: str
    folder: Path
    instruction: str
    """The text of instruction.md as Harbor hands it to the agent."""
    instruction_sha256: str
    docker_image: str
    difficulty: str
    metadata: Mapping[str, Any]
    """The [metadata] table of task.toml."""

    @property
    def key(self) -> str:
        """What the task is found by when only its prompt is known; equal prompts have equal keys."""
        return prompt_key(self.instruction)

    def reference_solution(self) -> str | None:
        """Text of solution/solve.sh, one shell command in the shipped suites; None if the task has none."""
        path = self.folder / "solution" / "solve.sh"
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def pin_task(
    task: Task, split: str | None = None, *, notebook: str | None = None, question: str | None = None
) -> PinnedTask:
    """The pin of a task: its hashes as it lies there."""
    return PinnedTask(
        name=task.name,
        split=split,
        difficulty=task.difficulty,
        instruction_sha256=task.instruction_sha256,
        files_sha256=files_sha256(task.folder),
        notebook=notebook,
        question_sha256=text_sha256(question) if question else None,
    )


def text_sha256(text: str) -> str:
    """SHA-256 of a text without case and spacing: equal for two spellings of one question."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()


def prompt_key(text: str) -> str:
    """SHA-256 of a prompt without the space around it, which OpenEnv's Task API strips and Harbor keeps."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


class TaskProblem(Exception):
    """One thing that is wrong with one task; callers collect them into one RecipeError."""


def load_task(folder: Path, *, published: bool = False, allowed: frozenset[str] = ALLOWED_VARIABLES) -> Task:
    """Parse and check one task folder.

    Args:
        published: the task is as its dataset has it: `prepare_tasks fetch` has yet to set the image and to drop
            variables of the host, so neither is asked for.
        allowed: names of variables that it may take from the host's environment; any other is a problem.
    Raises: TaskProblem: the first thing wrong with it, what is allowed, and what to do.
    """
    if not folder.is_dir():
        raise TaskProblem("the folder is missing")
    if links := [path for path in folder.rglob("*") if path.is_symlink()]:
        raise TaskProblem(f"{links[0].relative_to(folder)} is a link; only plain files reach a sandbox unchanged")
    config = _read_toml(folder / "task.toml")
    environment = config.get("environment", {})
    instruction = _read_text(folder / "instruction.md")
    if not instruction.strip():
        raise TaskProblem("instruction.md is empty")
    if "\0" in instruction:
        raise TaskProblem("instruction.md holds a NUL character, which no command line can carry")
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskProblem("tests/test.sh is missing; without it no rollout can be graded")
    for script in sorted(folder.glob("*/*.sh")):
        _read_text(script)
    image = environment.get("docker_image")
    if not published and not (isinstance(image, str) and image.strip()):
        raise TaskProblem("task.toml has no [environment] docker_image; set it, or let `prepare_tasks fetch` write it")
    if not published and (foreign := sorted(host_variables(folder, config) - allowed)):
        raise TaskProblem(
            f"it takes {', '.join(foreign)} from the host's environment; allowed: {', '.join(sorted(allowed))}"
        )
    metadata = config.get("metadata", {})
    return Task(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        instruction_sha256=hashlib.sha256(instruction.encode()).hexdigest(),
        docker_image=image or "",
        difficulty=difficulty_of(metadata),
        metadata=metadata,
    )


def difficulty_of(metadata: Mapping[str, Any]) -> str:
    """``difficulty_tier`` of the FineEnvs data, ``difficulty`` of others, or ``unknown``."""
    return str(metadata.get("difficulty_tier") or metadata.get("difficulty") or "unknown").lower()


def load_suite(tasks_dir: Path, suite: str, *, limit: int | None = None) -> tuple[Task, ...]:
    """The tasks of a suite, in the pinned order; by name where no pin file lies beside the folder.

    Args: suite: such as ``smoke/train``. limit: only the first so many.
    Raises: RecipeError: unknown suite, no task, or the list of tasks that are changed, missing, extra, broken, or
        cannot be told apart because they share an instruction.
    """
    folder = suite_folder(tasks_dir, suite)
    names = task_folders(folder)
    pinned = _pinned_of(tasks_dir, suite)
    problems = [f"{name}: {problem}" for name, problem in _differences(pinned, names)] if pinned else []
    tasks = []
    for name in pinned or names:
        if name not in names:
            continue
        try:
            task = load_task(folder / name)
            if pinned and task.instruction_sha256 != pinned[name].instruction_sha256:
                raise TaskProblem(
                    f"instruction.md has SHA-256 {task.instruction_sha256}, pinned is {pinned[name].instruction_sha256}"
                )
            tasks.append(task)
        except TaskProblem as problem:
            problems.append(f"{name}: {problem}")
    problems += repeated_instructions(tasks)
    if problems:
        raise RecipeError(listing(f"suite {suite} in {tasks_dir} is refused:", problems))
    if not tasks:
        raise RecipeError(f"suite {suite} has no task in {folder}; a task is a folder with a task.toml")
    return tuple(tasks[:limit])


def suite_folder(tasks_dir: Path, suite: str) -> Path:
    """The folder of a suite. Raises: RecipeError: the name leaves the tasks folder, or nothing is there."""
    if not all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", part) for part in suite.split("/")):
        raise RecipeError(f"{suite!r} is no suite name; allowed: lower-case words joined by /, such as smoke/train")
    folder = tasks_dir / suite
    if not folder.is_dir():
        found = ", ".join(sorted(path.name for path in tasks_dir.glob("*") if path.is_dir())) or "none"
        hint = ""
        if (tasks_dir / f"{suite.split('/')[0]}.json").is_file():
            hint = f", or `prepare_tasks fetch {suite.split('/')[0]}`"
        raise RecipeError(f"suite {suite} is not in {tasks_dir} (there: {found}); run `make prepare`{hint}")
    return folder


def task_folders(folder: Path) -> list[str]:
    """Names of the task folders of a suite, sorted as OpenEnv's server sorts them."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pinned_of(tasks_dir: Path, suite: str) -> dict[str, PinnedTask]:
    name, _, split = suite.partition("/")
    path = tasks_dir / f"{name}.json"
    if not path.is_file():
        return {}
    tasks = load_pin(path).in_split(split or None)
    if not tasks:
        raise RecipeError(f"pin file {path} pins no task for {suite}; name one of its splits")
    return {task.name: task for task in tasks}


def _differences(pinned: Iterable[str], found: Iterable[str]) -> Iterator[tuple[str, str]]:
    pinned, found = list(pinned), list(found)
    for name in sorted(set(pinned) - set(found)):
        yield name, "pinned, but missing"
    for name in sorted(set(found) - set(pinned)):
        yield name, "extra: not pinned"


def repeated_instructions(tasks: Iterable[Task]) -> list[str]:
    """One line for each group of tasks with one instruction: a rollout could not tell which of them it is."""
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(task.key, []).append(task.name)
    return [f"{' and '.join(names)}: the same instruction" for names in groups.values() if len(names) > 1]


def check_disjoint(train: Iterable[Task], heldout: Iterable[Task]) -> None:
    """Raises: RecipeError: the held-out tasks that are also trained on."""
    trained = {task.key: task.name for task in train}
    if shared := [f"{task.name} = {trained[task.key]}" for task in heldout if task.key in trained]:
        raise RecipeError(listing("held-out tasks are trained on too; move them out of one of the suites:", shared))


def check_image(tasks: Iterable[Task], image: str) -> None:
    """All sandboxes of a run start from one image: a task may name that one, or the project's own in any registry and
    with any tag, for which the run's stands in.

    Raises: RecipeError: the tasks that name another.
    """
    if other := [f"{task.name}: {task.docker_image}" for task in tasks if not _is_fit(task.docker_image, image)]:
        head = (
            f"the run's sandbox image is {image}, and these tasks name another; run `prepare_tasks fetch --recipe` for "
            f"them, name {SANDBOX_IMAGE} in their task.toml, or set env.sandbox_image:"
        )
        raise RecipeError(listing(head, other))


def _is_fit(named: str, image: str) -> bool:
    repository = named.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return named == image or repository == SANDBOX_REPOSITORY


def suite_sha256(tasks: Iterable[Task]) -> str:
    """One hash for the content and the order of the tasks, for a run's manifest."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.name} {files_sha256(task.folder)}\n".encode())
    return digest.hexdigest()


def files_sha256(folder: Path) -> str:
    """SHA-256 of a ``path NUL sha256`` line for each file below ``folder``, sorted by path.

    Modes are left out: the Hub's HTTP downloads do not carry them.
    """
    digest = hashlib.sha256()
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*")):
        if path.is_file():
            digest.update(f"{relative}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


# --- Variables of the host ----------------------------------------------------------------------------------------

VARIABLE = re.compile(r"\$(?:\$|\{?(?P<name>[A-Za-z_]\w*))")
"""The start of ``$NAME``, ``${NAME}`` or ``${NAME:-default}``, defaults nested or not; ``$$`` is a literal dollar."""


def host_variables(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """Names that Harbor or Compose would replace by a value of the host's environment.

    Compose interpolates environment/docker-compose.yaml. Harbor resolves ``${NAME}`` in the env tables of task.toml
    and writes them to a compose file, where ``$NAME`` is interpolated too.
    """
    texts = [value for table in env_tables(config) for value in table.values() if isinstance(value, str)]
    compose = folder / COMPOSE_FILE
    if compose.is_file():
        texts += [line for line in _read_text(compose).splitlines() if not line.lstrip().startswith("#")]
    return {match["name"] for text in texts for match in VARIABLE.finditer(text) if match["name"]}


def env_tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every ``env`` table of task.toml, at any depth."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key == "env":
                yield value
            else:
                yield from env_tables(value)
        elif isinstance(value, list):
            yield from (table for item in value if isinstance(item, Mapping) for table in env_tables(item))


# --- Compose files ------------------------------------------------------------------------------------------------


def compose_services(parsed: Any) -> dict[str, dict[str, Any] | None]:
    """The services of a task's compose file.

    Args: parsed: the file's content; this module reads no YAML.
    Raises: TaskProblem: it has none, or says what could reach the host or other containers; what is allowed.
    """
    services = parsed.get("services") if isinstance(parsed, dict) else None
    if not isinstance(services, dict) or not all(isinstance(body, dict | None) for body in services.values()):
        raise TaskProblem(f"{COMPOSE_FILE} has no services; remove the file, or describe the service main")
    if refused := sorted(set(map(str, parsed)) - {"services", "networks", "version"}):
        raise TaskProblem(f"{COMPOSE_FILE} has {', '.join(refused)}; allowed at the top: services, networks")
    for name, body in services.items():
        allowed = SERVICE_KEYS - {"image"} if name == "main" else SERVICE_KEYS
        if refused := sorted(set(map(str, body or {})) - allowed):
            raise TaskProblem(
                f"{COMPOSE_FILE} sets {', '.join(refused)} for {name}, which may open the host or others to a sandbox, "
                f"or lift its limits; allowed: {', '.join(sorted(allowed))}"
            )
    return services


# --- Files --------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TaskProblem(f"{path.name} is missing") from None
    except UnicodeDecodeError as error:
        raise TaskProblem(f"{path.name} is not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise TaskProblem(f"{path.name} cannot be read: {error.strerror}") from None
    if "\r" in text:
        raise TaskProblem(f"{path.name} has Windows line ends; convert them to \\n, or a shell runs other words")
    if text.startswith("\ufeff"):
        raise TaskProblem(f"{path.name} starts with a byte-order mark; remove it")
    return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise TaskProblem("task.toml is missing") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskProblem(f"task.toml is not valid TOML: {error}") from None


def listing(head: str, lines: list[str]) -> str:
    """One message for many problems: the first ``MAX_LISTED``, and how many more there are."""
    more = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n  ".join([head, *lines[:MAX_LISTED], *more])
