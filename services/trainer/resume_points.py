"""Resume points: checkpoints for this machine alone, more often than those that are evaluated, pushed and kept.

``runs/<run>/resume/checkpoint-N`` has the pieces of a checkpoint, and READY last. Only the newest is kept, and none
once a checkpoint is newer.
"""

from __future__ import annotations

import shutil

from services.common import run_dir
from services.common.run_dir import RunDir
from services.trainer import checkpoint


def keep_only(run: RunDir, step: int | None) -> None:
    """Complete the resume point of ``step``, then delete all others. None: delete all."""
    kept = run.resume_points / f"checkpoint-{step}"
    if step is not None:
        checkpoint.complete(kept)
    for folder in sorted(run.resume_points.glob("checkpoint-*")):
        if folder != kept:
            # READY first, so that a deletion cut short leaves no folder that looks complete.
            (folder / run_dir.READY).unlink(missing_ok=True)
            shutil.rmtree(folder)


def discard_incomplete(run: RunDir) -> None:
    """Delete what a save that was cut short left."""
    for folder in run.resume_points.glob("checkpoint-*"):
        if not (folder / run_dir.READY).exists():
            shutil.rmtree(folder)
