"""Remove what a run left in the engine: its sandboxes and their networks, and nothing of another run.

Found in two ways, because either can be cut short by a kill: by the run's label, and by the ledger's open entries.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from services.common.run_dir import RunDir
from services.env.docker import DockerError, docker
from services.env.ledger import Ledger

LABEL = "opencode-rl.run"
"""On every sandbox's container; the value is the run's name."""
PROJECT_LABEL = "com.docker.compose.project"

logger = logging.getLogger("env.sweep")


def sweep(run: RunDir, keep: Collection[str] = ()) -> int:
    """Remove the run's containers and networks and close its ledger entries; safe to call at any time, twice.

    Args: keep: Compose projects that are in use and stay. Read after the engine has listed what is there: a sandbox is
        in use before it exists, so one that starts meanwhile is spared.
    Returns: containers removed.  Raises: DockerError: the engine does not answer, or refuses a removal.
    """
    ledger = Ledger(run.ledger)
    opened = ledger.open_projects()
    found = _ids("container", [f"{LABEL}={run.path.name}", *map(_of_project, opened)])
    in_use = frozenset(keep)
    kept = set(_ids("container", map(_of_project, in_use)))
    containers = [container for container in found if container not in kept]
    if containers:
        _remove("container", "rm", "--force", "--volumes", ids=containers)
    projects = [project for project in opened if project not in in_use]
    if networks := _ids("network", map(_of_project, projects)):
        _remove("network", "rm", ids=networks)
    for project in projects:
        ledger.record("closed", project, by="sweep")
    if containers or projects:
        logger.info("swept", extra={"containers": len(containers), "ledger_entries": len(projects)})
    return len(containers)


def _of_project(project: str) -> str:
    return f"{PROJECT_LABEL}={project}"


def _ids(kind: str, labels: Iterable[str]) -> list[str]:
    # One label a call: the engine's filters are joined by "and".
    extra = ["--all"] if kind == "container" else []
    found: dict[str, None] = {}
    for label in labels:
        listed = docker(kind, "ls", *extra, "--quiet", "--no-trunc", "--filter", f"label={label}")
        found |= dict.fromkeys(listed.split())
    return list(found)


def _remove(kind: str, *command: str, ids: list[str]) -> None:
    try:
        docker(kind, *command, *ids)
    except DockerError as error:
        # A sandbox that ends by itself meanwhile is what was wanted.
        if "no such" not in str(error).lower() and "already in progress" not in str(error).lower():
            raise
