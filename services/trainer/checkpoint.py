"""A checkpoint from which training goes on exactly: its pieces, READY over their hashes, and which ones rotation keeps.

A folder without READY is a save that a kill cut short: it is never resumed, evaluated or pushed. One with READY whose
pieces are not what READY says is damaged, and refused by the name of the piece: going on from an older one in silence
would train the steps between twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from services.common import health, run_dir
from services.common.errors import RecipeError
from services.common.run_dir import READY, Checkpoint, RunDir

PIECES = {
    "adapter_model.safetensors": "LoRA factors",
    "adapter_config.json": "LoRA configuration",
    "optimizer.pt": "optimizer state",
    "scheduler.pt": "learning-rate schedule",
    "rng_state.pth": "random number generators",
    "trainer_state.json": "step and history",
    "rollout_state.json": "position in the training tasks",
    "pending_groups.json.zst": "groups that were scored and not trained yet",
}
"""File -> what it holds. Whatever else the libraries save beside them is not needed."""

logger = logging.getLogger("trainer")


def complete(folder: Path) -> None:
    """Write READY, last, with the size and hash of every piece.

    Raises: FileNotFoundError: a piece is missing; the checkpoint is not complete.
    """
    files = {}
    for name in PIECES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name} ({PIECES[name]}); it is not marked as complete")
        files[name] = _fingerprint(folder / name, sync=True)
    run_dir.write_json(folder / READY, {"at": run_dir.utc_now(), "files": files})


def check(checkpoint: Checkpoint) -> None:
    """Compare every piece with READY.

    Raises: RecipeError: the first piece that is missing or damaged, by name.
    """
    expected = _expected(checkpoint)
    for name, what in PIECES.items():
        path = checkpoint.path / name
        if not path.is_file():
            raise _refusal(checkpoint, f"has no {name} ({what})")
        if name not in expected:
            raise _refusal(checkpoint, f"has a READY that does not name {name} ({what})")
        found, wanted = _fingerprint(path), expected[name]
        if found != wanted:
            detail = f"{found['size_bytes']} bytes, sha256 {found['sha256'][:12]}"
            raise _refusal(
                checkpoint,
                f"has a damaged {name} ({what}): found {detail}, READY says {wanted['size_bytes']} bytes, sha256 "
                f"{wanted['sha256'][:12]}",
            )


def _expected(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    try:
        return dict(json.loads((checkpoint.path / READY).read_text())["files"])
    except (ValueError, KeyError, TypeError):
        raise _refusal(checkpoint, "has a READY that is not the list of its pieces") from None


def _refusal(checkpoint: Checkpoint, problem: str) -> RecipeError:
    return RecipeError(
        f"checkpoint-{checkpoint.step} {problem}; bring the file back, or delete the folder {checkpoint.path} to "
        "resume from the one before it"
    )


def _fingerprint(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"size_bytes": stream.tell(), "sha256": digest}


# --- Rotation -----------------------------------------------------------------------------------------------------


def rotate(run: RunDir, keep: int) -> list[int]:
    """Delete complete checkpoints but the newest ``keep``, the best one, and any that somebody uses.

    Returns: steps of the deleted ones, oldest first.
    """
    kept = {f"checkpoint-{step}" for step in _steps_in_use(run)} | {_best(run)}
    deleted = []
    for checkpoint in run.complete_checkpoints()[:-keep]:
        if checkpoint.path.name not in kept and _delete_unused(checkpoint.path):
            deleted.append(checkpoint.step)
    if deleted:
        logger.info("older checkpoints deleted", extra={"steps": deleted})
    return deleted


def discard_incomplete(run: RunDir, newest: int) -> None:
    """Delete what saves that were cut short left above the step ``newest``: old pieces must not mix with new ones."""
    for folder in run.checkpoints.glob("checkpoint-*") if run.checkpoints.is_dir() else ():
        if not (folder / READY).exists() and _step(folder) > newest:
            logger.warning("incomplete checkpoint deleted", extra={"checkpoint": folder.name})
            shutil.rmtree(folder)


def _best(run: RunDir) -> str:
    """Name of the best checkpoint so far by the evaluator's account; empty before there is one."""
    return str((run_dir.read_json(run.eval / "summary.json") or {}).get("best") or "")


def _steps_in_use(run: RunDir) -> set[int]:
    evaluator = health.read_heartbeats(run).get("evaluator")
    return {evaluator.step} if evaluator is not None and evaluator.phase == "evaluating" else set()


def _delete_unused(folder: Path) -> bool:
    with run_dir.unused(folder) as free:
        if free:
            # READY first, so that a deletion cut short leaves no folder that looks complete.
            (folder / READY).unlink()
            shutil.rmtree(folder)
    return free


def _step(folder: Path) -> int:
    digits = folder.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
