"""The newest checkpoint of a run from the Hub, whole, where this machine has none: the run's first machine is gone.

With it come the records that go on: what the run has cost, its metrics, and what it has trained on.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi

from services.common.errors import RecipeError
from services.common.run_dir import READY, Checkpoint, RunDir
from services.hub.client import connect, messages, patiently
from services.hub.files import RemoteFile, download, list_files
from services.hub.pushes import PROGRESS

_MARKER = re.compile(rf"^checkpoint-(\d+)/{READY}$")
logger = logging.getLogger("hub")


def from_environment() -> Callable[[RunDir], Checkpoint | None] | None:
    """What brings a checkpoint of ADAPTER_REPO, where RESUME_FROM_HUB asks for it; else None.

    Not by itself: a new run that pushes to a repository with an older run's checkpoints is not that run.
    """
    if os.environ.get("RESUME_FROM_HUB") != "1":
        return None
    repo = os.environ.get("ADAPTER_REPO")
    if not repo:
        raise RecipeError("RESUME_FROM_HUB is 1 and ADAPTER_REPO is not set; it names the repository to resume from")
    return lambda run: newest(connect(), repo, run)


def newest(api: HfApi, repo: str, run: RunDir) -> Checkpoint | None:
    """Bring the newest complete checkpoint to the run, READY last; None when the repository has none.

    Before READY, the run's records, those that it has not here: a run with a checkpoint is not asked for again.
    Raises: RecipeError: the repository is not there. NotReadyError: the Hub does not answer, or sends other bytes.
    """
    with messages(repo, api.endpoint):
        head = str(patiently(api.repo_info)(repo, timeout=30).sha)
        files = patiently(list_files)(api, repo, head)
        steps = [int(match[1]) for file in files if (match := _MARKER.match(file.path))]
        _bring_records(api, repo, head, files, run)
        if not steps:
            return None
        name = f"checkpoint-{max(steps)}"
        target = run.checkpoints / name
        aside = run.checkpoints / f".{name}.part"
        wanted = [file for file in files if file.path.startswith(f"{name}/")]
        for file in wanted:
            download(api, repo, head, file, aside)
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(wanted, key=lambda file: file.path.endswith(f"/{READY}")):
            moved = target / file.path.removeprefix(f"{name}/")
            moved.parent.mkdir(parents=True, exist_ok=True)
            os.replace(aside / file.path, moved)
    shutil.rmtree(aside, ignore_errors=True)
    logger.info("checkpoint is from the Hub", extra={"repo": repo, "commit": head, "step": max(steps)})
    return Checkpoint(max(steps), target)


def _bring_records(api: HfApi, repo: str, revision: str, files: list[RemoteFile], run: RunDir) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run.path, prefix=".records.") as aside:
        for file in files:
            if file.path in PROGRESS and not (run.path / file.path).exists():
                os.replace(download(api, repo, revision, file, Path(aside)), run.path / file.path)
