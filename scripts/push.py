"""``python -m scripts.push --registry ghcr.io/me``: build all images, push them, and write images/digests.json.

What was pushed is named by digest from then on: in the payload of a Job, and in the manifest of every run.
"""

from __future__ import annotations

import os
import subprocess
from typing import Annotated

import docker
import typer
from docker.errors import APIError, DockerException, ImageNotFound
from rich.console import Console

from scripts.hf import digests
from scripts.hf.digests import NAMES, Digests
from scripts.stack import ROOT, check_variant, git_revision
from services.common.errors import NotReadyError, RecipeError, run_main

out = Console(highlight=False, soft_wrap=True)


def main(
    registry: Annotated[str, typer.Option(envvar="REGISTRY", help="where to push: host/owner, as in ghcr.io/me")] = "",
    variant: Annotated[str, typer.Option(envvar="VARIANT", help="cpu or cuda")] = "cuda",
    build: Annotated[bool, typer.Option(help="build first; without it what is there is pushed")] = True,
) -> None:
    """Build and push every image."""
    run_main(lambda: _push(registry, variant, build))


def _push(registry: str, variant: str, build: bool) -> int:
    check_variant(variant)
    if not registry or registry == "local":
        raise RecipeError("REGISTRY is not set; name where to push: `make push REGISTRY=ghcr.io/me VARIANT=cuda`")
    tag = os.environ.get("TAG") or variant
    if build:
        environment = {**os.environ, "REGISTRY": registry, "TAG": tag}
        command = [str(ROOT / "scripts/build_images.sh"), variant, "default", "job"]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            raise NotReadyError(f"the images could not be built (exit code {code}); the lines above say why")
    try:
        client = docker.from_env(timeout=3600)
        pushed = {name: push(client, f"{registry}/opencode-rl-{name}", tag) for name in NAMES}
    except DockerException as error:
        raise NotReadyError(f"the Docker engine does not answer ({error})") from None
    found = Digests(variant, git_revision(), pushed)
    found.write(digests.PATH)
    out.print(f"{digests.PATH} names {len(pushed)} images of revision {found.revision}.")
    if found.revision.endswith("-dirty"):
        out.print(
            "This tree has changes that nobody else has: commit, and push again, for a run that others can repeat."
        )
    return 0


def push(client: docker.DockerClient, repository: str, tag: str) -> str:
    """Push one image; return its reference by digest. Raises: NotReadyError: it is not here, or it is refused."""
    try:
        image = client.images.get(f"{repository}:{tag}")
        for line in client.images.push(repository, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise NotReadyError(f"{repository}:{tag} is refused: {line['error'].strip()}; `docker login` first?")
        image.reload()
    except ImageNotFound:
        raise NotReadyError(f"image {repository}:{tag} is not on this engine; push without --no-build") from None
    except APIError as error:
        raise NotReadyError(f"{repository}:{tag} cannot be pushed: {error.explanation or error}") from None
    by_digest = [found for found in image.attrs["RepoDigests"] if found.startswith(f"{repository}@")]
    if not by_digest:
        raise NotReadyError(f"the engine gives no digest of {repository}:{tag} after the push")
    out.print(by_digest[0])
    return str(by_digest[0])


if __name__ == "__main__":
    typer.run(main)
