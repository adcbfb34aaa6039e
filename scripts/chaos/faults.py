"""What is done to a running stack: signals to processes, sent from the host.

``docker kill`` would not do: the engine takes it for a person's wish and does not start the container again.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Literal, get_args

PROJECT = "opencode-rl"
Victim = Literal["policy", "env", "trainer", "training", "evaluator", "watchdog", "sandbox"]
"""``trainer``: its container with all that is in it. ``training``: the training process alone. The rest: containers."""
Phase = Literal["rollout", "training", "sync", "saving"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Fault:
    """One thing done to one victim while the trainer is in a phase."""

    victim: Victim
    phase: Phase
    freeze: bool = False
    """SIGSTOP, undone once the watchdog has named the victim; else SIGKILL."""

    @property
    def name(self) -> str:
        return f"{'stop' if self.freeze else 'kill'}:{self.victim}:{self.phase}"


ALL = (*(Fault(victim, phase) for victim in VICTIMS for phase in PHASES), Fault("policy", "sync", freeze=True))


class Gone(Exception):
    """The victim is not there at the moment."""


def processes(victim: Victim, run_name: str) -> list[int]:
    """The victim's processes as the host numbers them; killing the first kills them all. Raises: Gone."""
    if victim == "sandbox":
        container = _docker("ps", "--quiet", "--filter", f"label=opencode-rl.run={run_name}").split()
        return _inside(container[0]) if container else _gone(victim)
    service = "trainer" if victim == "training" else victim
    label = f"label=com.docker.compose.service={service}"
    found = _docker(
        "ps", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}", "--filter", label
    ).split()
    if not found:
        _gone(victim)
    if victim != "training":
        return _inside(found[0])
    lines = _docker("top", found[0], "-eo", "pid,args").splitlines()[1:]
    pids = [int(line.split()[0]) for line in lines if "services.trainer.train" in line]
    return pids or _gone(victim)


def send(pids: list[int], number: signal.Signals) -> None:
    """SIGKILL to the first process, another signal to all of them. Raises: Gone."""
    try:
        for pid in pids[:1] if number == signal.SIGKILL else pids:
            os.kill(pid, number)
    except ProcessLookupError:
        raise Gone(f"process {pids[0]} has ended") from None


def left_behind(run_name: str) -> tuple[int, int]:
    """Containers that carry the run's label, and networks of its sandboxes' own projects."""
    containers = _docker("ps", "--all", "--quiet", "--filter", f"label=opencode-rl.run={run_name}").split()
    networks = _docker("network", "ls", "--format", "{{.Name}}").split()
    return len(containers), sum(name.startswith("oe-") for name in networks)


def _inside(container: str) -> list[int]:
    first = int(_docker("inspect", "--format", "{{.State.Pid}}", container))
    if first == 0:
        raise Gone(f"container {container} is not running")
    others = [int(line.split()[0]) for line in _docker("top", container, "-eo", "pid").splitlines()[1:]]
    return [first, *(pid for pid in others if pid != first)]


def _gone(victim: Victim) -> list[int]:
    raise Gone(f"{victim} is not running")


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Gone(done.stderr.strip())
    return done.stdout
