"""``manifest.json``: what a run was made of, written once by the one service that can ask the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from services.common import recipe, run_dir
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.tasks import Task, suite_sha256
from services.env.docker import inspect

IMAGES = ("policy", "trainer", "env", "tools")
LABELS = ("opencode-rl.variant", "opencode-rl.lock", "opencode-rl.base.origin", "org.opencontainers.image.revision")


def write(cfg: Recipe, run: RunDir, train: tuple[Task, ...], heldout: tuple[Task, ...]) -> None:
    """Record git revision, images, recipe, model and tasks. A restarted env leaves the first record as it is."""
    if run.manifest.exists():
        return
    # ``local/opencode-rl-{}:cpu``: compose.yaml fills in registry and tag.
    pattern = os.environ.get("IMAGE_PATTERN", "")
    names = {name: pattern.format(name) for name in IMAGES if pattern} | {"sandbox": cfg.sandbox_image()}
    # Where no engine answers for the images, whoever started the Job says which they are.
    given: dict[str, str] = json.loads(os.environ.get("IMAGE_DIGESTS") or "{}")
    found = {name: _image(reference) for name, reference in names.items()} if cfg.env.backend == "docker" else {}
    run_dir.write_json(
        run.manifest,
        {
            "run": run.path.name,
            "started_at": run_dir.utc_now(),
            "git_revision": os.environ.get("GIT_REVISION", "unknown"),
            "recipe_sha256": cfg.sha256(),
            "recipe": cfg.model_dump(mode="json"),
            "model": {"id": cfg.model.id, "revision": cfg.model.revision or _local_revision(cfg)},
            "tasks": {
                cfg.tasks.train: {"tasks": len(train), "sha256": suite_sha256(train)},
                cfg.tasks.heldout: {"tasks": len(heldout), "sha256": suite_sha256(heldout)},
            },
            "images": given | {name: image["id"] for name, image in found.items() if image},
            "image_digests": {name: image["digest"] for name, image in found.items() if image and image["digest"]}
            | given,
            "image_labels": {name: image["labels"] for name, image in found.items() if image},
        },
    )


def _image(reference: str) -> dict[str, Any] | None:
    details = inspect("image", reference)
    if details is None:
        return None
    labels = details["Config"].get("Labels") or {}
    digests = details.get("RepoDigests") or []
    return {
        "id": details["Id"],
        "digest": digests[0] if digests else None,
        "labels": {name: labels[name] for name in LABELS if name in labels},
    }


def _local_revision(cfg: Recipe) -> str | None:
    weights = Path(cfg.model_location()) / "model.safetensors"
    return f"sha256:{recipe.file_sha256(weights)}" if weights.is_file() else None
