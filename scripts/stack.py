"""The compose stack of one run, as scripts drive it: which files, which environment, and a clean end.

``scripts.run`` trains with it, ``scripts.eval`` evaluates with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from scripts.sweep import sweep_all
from services.common import signals
from services.common.errors import MachineError, NotReadyError, RecipeError, machine_error
from services.common.run_dir import lock_now

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("cpu", "cuda")
LOG_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
BESIDE = "a run that trains is watched with `docker compose up --detach evaluator`, else wait (`make status` shows it)"
"""What to do while a run is alive."""
console = Console(stderr=True)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM while a compose command ran."""


def check_variant(variant: str) -> None:
    """Raises: RecipeError: not one of VARIANTS."""
    if variant not in VARIANTS:
        raise RecipeError(f"VARIANT is {variant!r}; allowed: {', '.join(VARIANTS)}")


def folder(variable: str, default: str) -> Path:
    """The absolute folder that the environment variable names, or the project's own."""
    return Path(os.environ.get(variable) or ROOT / default).resolve()


def make_mounted_folders() -> None:
    """A folder that Compose mounts and that is not there, the engine makes, as root: this user could not use it."""
    for place in (folder("RUNS_DIR", "runs"), hf_cache()):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise machine_error(error) from None


def hf_cache() -> Path:
    """The Hub's cache that is mounted into the containers."""
    return Path(os.environ.get("HF_CACHE") or Path.home() / ".cache/huggingface")


def git_revision() -> str:
    """Full commit of this tree; ``-dirty`` at its end: with changes that nobody else has."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def compose_files(variant: str) -> list[str]:
    """Names of the files that make the stack of ``cpu`` or ``cuda``."""
    return ["compose.yaml", *(["compose.cpu.yaml"] if variant == "cpu" else [])]


def refuse_beside(running: Collection[str]) -> None:
    """Raises: MachineError: these services run, for a run or an evaluation that would be taken down."""
    if running:
        raise MachineError(f"{', '.join(running)} of this project run already; {BESIDE}, or end them with `make down`")


@contextmanager
def alone() -> Iterator[None]:
    """Around a command that starts and stops services: the only one of this machine, from before its first service.

    A lock on a folder: it ends with the process, however that ends, and every user of the machine can take it.
    Raises: MachineError: another command has it.
    """
    project = os.environ.get("COMPOSE_PROJECT_NAME") or "opencode-rl"
    place = Path(tempfile.gettempdir()) / f"{project}.lock"
    place.mkdir(exist_ok=True)
    held = os.open(place, os.O_RDONLY)
    try:
        if not lock_now(held):
            raise MachineError(
                f"another command of this project starts or runs its services; {BESIDE}, or end it with Ctrl-C where "
                "it was started"
            )
        yield
    finally:
        os.close(held)


class Stack:
    """``docker compose`` with this run's files and environment."""

    def __init__(self, variant: str, environment: dict[str, str], stop: signals.StopFlag) -> None:
        files = [*compose_files(variant), *(["compose.hub.yaml"] if os.environ.get("HF_TOKEN") else [])]
        pull = {"PULL_POLICY": "missing"} if os.environ.get("REGISTRY", "local") != "local" else {}
        self._environment = {"COMPOSE_FILE": ":".join(files), **pull, **os.environ, **environment}
        self._stop = stop

    def __call__(self, *arguments: str, check: bool = True, quiet: bool = True, always: bool = False) -> int:
        """Run a compose command. In its own session: Ctrl-C reaches this process only, which ends the command.

        Args: check: raise when it fails. quiet: show nothing. always: not even Ctrl-C ends it (clean-up).
        Raises: Interrupted. subprocess.CalledProcessError: with what it said.
        """
        process = subprocess.Popen(
            ["docker", "compose", *arguments],
            cwd=ROOT, env=self._environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.PIPE if quiet else None, text=True,
        )  # fmt: skip
        while True:
            try:
                _out, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if self._stop.is_set() and not always:
                    process.terminate()
                    process.communicate()
                    raise Interrupted from None
        if check and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, arguments, stderr=errors)
        return process.returncode

    def evaluator(self, *arguments: str, **environment: str) -> int:
        """Run a command of ``services.evaluator`` to its end, its output shown; return its exit code.

        Args: environment: set in its container, over what compose.yaml gives it.
        """
        environment["COLUMNS"] = str(console.width if console.is_terminal else LOG_WIDTH)
        return self(
            "run", "--rm", "--no-deps", "--no-TTY",
            *(f"--env={name}={value}" for name, value in environment.items()),
            "evaluator", "python", "-m", "services.evaluator", *arguments,
            check=False, quiet=False,
        )  # fmt: skip

    def exit_code(self, service: str) -> int | None:
        """Exit code of the service's container; None while it runs, and when there is none."""
        out = self._ask("ps", "--all", "--format", "{{.State}} {{.ExitCode}}", service).split()
        return int(out[1]) if len(out) == 2 and out[0] == "exited" else None

    def running(self) -> list[str]:
        """Services of the project that have a running container, whichever run they belong to."""
        return sorted(set(self._ask("--profile", "*", "ps", "--services", "--status", "running").split()))

    def guarded(self, work: Callable[[], int]) -> int:
        """Do ``work`` and return its exit code; a stop request and a failed compose command have theirs."""
        try:
            return work()
        except Interrupted:
            return 128 + signal.SIGINT
        except subprocess.CalledProcessError as error:
            console.print(f"[red]docker compose {' '.join(error.cmd)} failed:[/red]\n{error.stderr}")
            self.show_logs()
            return NotReadyError.exit_code

    def show_logs(self) -> None:
        console.print("[red]The last log lines of every service:[/red]")
        self("--profile", "*", "logs", "--tail", "25", check=False, quiet=False, always=True)

    def down(self) -> None:
        """Stop and remove everything. A network with a sandbox in it cannot be removed, so those that an env that was
        killed has left go first."""
        self("--profile", "*", "stop", check=False, always=True)
        sweep_all(Path(self._environment.get("RUNS_DIR") or ROOT / "runs"))
        self("--profile", "*", "down", "--remove-orphans", check=False, always=True)

    def _ask(self, *arguments: str) -> str:
        """What a compose command that is over at once says. In its own session, as above: else Ctrl-C would end it.

        Raises: subprocess.CalledProcessError: with what it said.
        """
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT, env=self._environment, start_new_session=True, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, arguments, stderr=done.stderr)
        return done.stdout
