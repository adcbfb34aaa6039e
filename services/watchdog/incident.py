"""The evidence of a stop, gathered before anything is killed: ``incidents/<time>/``.

The trainer's supervisor adds what only it can see: the stacks of the training process and the table of GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import httpx

from services.common import control, run_dir
from services.common.run_dir import RunDir
from services.watchdog.plan import Decision, Observations

LOG_TAIL_BYTES = 200_000
PROBE_TIMEOUT_S = 5.0
PAGES = {"policy": ("health", "metrics"), "env": ("health", "metrics", "state")}
"""Peer -> what it is asked for; ``state`` is env's view of the engine: containers, networks, its own stacks."""


def write_bundle(
    run: RunDir, decision: Decision, seen: Observations, peers: Mapping[str, str], client: httpx.Client
) -> Path:
    """Gather heartbeats, the end of every log, metrics and health; return the bundle's folder.

    The folder gets its name last, so that one that is there is whole. What cannot be had is named in the file's
    place. Raises: OSError: the run directory cannot be written.
    """
    name = run_dir.utc_now().replace(":", "")
    aside = run.incidents / f".watchdog-{name}"
    aside.mkdir(parents=True)
    run_dir.write_json(aside / "decision.json", {"at": run_dir.utc_now(), **asdict(decision)})
    run_dir.write_json(aside / "observations.json", asdict(seen))
    for source in (*sorted(run.path.glob("*.log")), run.metrics, run.ledger):
        if source.is_file():
            (aside / f"{source.name}.tail").write_bytes(tail(source, LOG_TAIL_BYTES))
    for peer, url in peers.items():
        headers = control.headers(run) if peer == "env" else {}
        for page in PAGES.get(peer, ("health",)):
            (aside / f"{peer}-{page}.txt").write_text(_page(client, f"{url}/{page}", headers))
    folder = _free_name(run.incidents / f"watchdog-{name}")
    os.rename(aside, folder)
    return folder


def tail(path: Path, size_bytes: int) -> bytes:
    """The end of a file, from the start of a line on."""
    with path.open("rb") as stream:
        length = stream.seek(0, os.SEEK_END)
        # One byte more than asked for tells whether the first line is whole.
        stream.seek(max(0, length - size_bytes - 1))
        data = stream.read()
    return data if length <= size_bytes else data[data.find(b"\n") + 1 :]


def _page(client: httpx.Client, url: str, headers: Mapping[str, str]) -> str:
    try:
        response = client.get(url, headers=headers, timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"no answer from {url}: {type(error).__name__}: {error}\n"
    return f"{url} -> {response.status_code}\n{response.text}"


def _free_name(folder: Path) -> Path:
    number, name = 1, folder
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name
