"""The Docker CLI, for the few questions and commands that Harbor does not ask itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from services.common.errors import NotReadyError

TIMEOUT_S = 60.0


class DockerError(NotReadyError):
    """A docker command failed; the message carries its last output."""


def docker(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Standard output of ``docker <arguments>``. Raises: DockerError: no CLI, a failure, or no answer in time."""
    command = ["docker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise DockerError("the docker CLI is not installed; the env image carries it") from None
    except subprocess.TimeoutExpired:
        raise DockerError(f"`{' '.join(command)}` did not answer in {timeout_s:g} s; is the engine alive?") from None
    if done.returncode != 0:
        raise DockerError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def make_network(name: str, options: Mapping[str, str]) -> None:
    """A bridge network of this name, made unless it is there. Raises: DockerError: the engine refuses."""
    if inspect("network", name) is None:
        docker("network", "create", *(f"--opt={key}={value}" for key, value in options.items()), name)


def inspect(kind: str, name: str) -> dict[str, Any] | None:
    """What the engine knows of one image, network or container; None if there is no such thing."""
    try:
        return dict(json.loads(docker(kind, "inspect", name))[0])
    except DockerError as error:
        if "no such" in str(error).lower() or "not found" in str(error).lower():
            return None
        raise
