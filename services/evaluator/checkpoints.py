"""Where checkpoints come from, and how a person names one.

A run's own folder, or what was brought here from the Hub (``hub``). Rotation may delete a checkpoint that proved
to be the best, so the adapter of the best one is kept under ``eval/best`` as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.common import recipe as recipes
from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import CONFIG, WEIGHTS, Checkpoint, RunDir
from services.evaluator.adapters import SNAPSHOTS
from services.hub import adapters as hub


class Source(Protocol):
    """What the watcher follows."""

    def complete(self) -> list[Checkpoint]:
        """Checkpoints that nobody writes to any more, oldest step first."""
        ...

    def ended(self) -> bool:
        """Whether no checkpoint will follow those that the next ``complete`` gives."""
        ...


@dataclass(frozen=True, slots=True)
class RunSource:
    """The run's own folder, written by a trainer that shares it."""

    run: RunDir

    def complete(self) -> list[Checkpoint]:
        return self.run.complete_checkpoints()

    def ended(self) -> bool:
        return self.run.result.exists()


def known(run: RunDir) -> list[Checkpoint]:
    """Every complete checkpoint of the run that is on this machine, oldest step first; the trainer's own preferred."""
    folders = [*sorted((run.eval / hub.MIRROR).glob("*")), run.eval / "best", run.checkpoints]
    found = {checkpoint.step: checkpoint for folder in folders for checkpoint in run_dir.iter_checkpoints(folder)}
    return [found[step] for step in sorted(found)]


def find(run: RunDir, name: str) -> Checkpoint:
    """The checkpoint that a person names: a step, ``checkpoint-N``, ``best``, ``final`` or ``hub:owner/name@rev``.

    Raises: RecipeError: it does not exist; the message lists those that do. NotReadyError: the Hub does not answer.
    """
    if name.startswith(hub.PREFIX):
        return hub.fetch(hub.Reference.parse(name), run.eval / hub.DOWNLOADS)
    complete = known(run)
    wanted = name
    if name == "final" and complete:
        return complete[-1]
    if name == "best":
        wanted = (run_dir.read_json(run.eval / "summary.json") or {}).get("best") or "best (no checkpoint is evaluated)"
    for checkpoint in complete:
        if wanted in (str(checkpoint.step), checkpoint.path.name):
            return checkpoint
    have = ", ".join(str(checkpoint.step) for checkpoint in complete) or "none"
    raise RecipeError(
        f"checkpoint {wanted} is not in {run.checkpoints}; complete there: {have}; allowed too: best, final, base, "
        "hub:owner/name@revision"
    )


def keep_best(run: RunDir, summary: Mapping[str, Any]) -> None:
    """Copy the adapter of the best checkpoint to ``eval/best``, where no rotation deletes it; forget an older one.

    A checkpoint that was written anew since it was evaluated is left out: its weights have no result yet.
    """
    point = next((point for point in summary["checkpoints"] if point["label"] == summary["best"]), None)
    if point is None:
        return
    folder = run.eval / "best"
    kept = folder / point["label"]
    if _marker(kept) == point["adapter_sha256"]:
        return
    # What was loaded, or else the checkpoint.
    loaded = run.eval / SNAPSHOTS / f"{point['label']}-{point['adapter_sha256'][:12]}"
    sources = (loaded, *(found.path for found in known(run) if found.step == point["step"]))
    if not any(_keep(source, kept, point["adapter_sha256"]) for source in sources):
        return
    for older in folder.iterdir():
        if older != kept:
            shutil.rmtree(older)


def _keep(source: Path, kept: Path, sha256: str) -> bool:
    """Copy an adapter. Returns: whether it had these weights, and was not removed meanwhile: by rotation, or by another
    evaluator that cleans up."""
    try:
        if recipes.file_sha256(source / WEIGHTS) != sha256:
            return False
        (kept / run_dir.READY).unlink(missing_ok=True)
        kept.mkdir(parents=True, exist_ok=True)
        for file in (WEIGHTS, CONFIG):
            shutil.copyfile(source / file, kept / file)
    except FileNotFoundError:
        return False
    run_dir.write_text(kept / run_dir.READY, sha256 + "\n")
    return True


def _marker(folder: Path) -> str | None:
    """The hash that the READY marker of a kept checkpoint holds."""
    try:
        return (folder / run_dir.READY).read_text().strip()
    except FileNotFoundError:
        return None
