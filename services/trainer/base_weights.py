"""The base weights never change: hashed before training and after it, and compared.

A merge in place that was not undone bit for bit, an optimizer that holds a base parameter, a weight file that was
written over while the process maps it into memory: each shows here, by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.common import run_dir
from services.common.errors import StoppedError
from services.common.run_dir import RunDir
from services.weight_sync.adapter import base_hashes, drifted

FILE = "base_weights.json"
NAMED = 3
"""Changed weights that the message names; the file has all hashes."""

logger = logging.getLogger("trainer")


@contextmanager
def unchanged(model: torch.nn.Module, run: RunDir, *, may_drift: bool = False) -> Iterator[None]:
    """Hash every base weight of ``model`` around a block; ``runs/<run>/base_weights.json`` gets both.

    Args: may_drift: only log what changed: TRL's full stream merges in place, which drifts a bf16 base by design.
    Raises: StoppedError: a weight changed. If the block itself failed, its failure goes on and this is logged.
    """
    before = base_hashes(model)
    run_dir.write_json(run.path / FILE, {"at_start": before, "at_end": None, "changed": None})
    try:
        yield
    except BaseException:
        if message := _compare(model, run, before):
            logger.error(message)
        raise
    if message := _compare(model, run, before):
        if not may_drift:
            raise StoppedError(message)
        logger.warning(message)


def _compare(model: torch.nn.Module, run: RunDir, before: dict[str, str]) -> str:
    """Write the second half of the file. Returns: what changed, empty if nothing did."""
    after = base_hashes(model)
    changed = drifted(before, after)
    path = run.path / FILE
    run_dir.write_json(path, {"at_start": before, "at_end": after, "changed": changed})
    if not changed:
        return ""
    named = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
    return (
        f"{len(changed)} of {len(before)} base weights changed while training, {named}: the adapter was trained on "
        f"another base than the one it is for. {path} has all hashes; look for a merge in place, and for a weight "
        "file that was written over (replace it by a rename instead), and do not use checkpoints of this run"
    )
