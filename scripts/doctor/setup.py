"""What is looked at: the recipe, and what differs between machines."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException

from scripts.stack import ROOT, check_variant, folder, hf_cache
from services.common import recipe
from services.common.recipe import Recipe

PROJECT = "opencode-rl"
IMAGES = ("policy", "trainer", "env", "tools")


@dataclass(frozen=True)
class Setup:
    """One set-up. The environment is a field, so that no check reads another one."""

    cfg: Recipe
    recipe_path: Path
    variant: str
    tag: str
    registry: str
    runs_dir: Path
    tasks_dir: Path
    models_dir: Path
    hf_cache: Path
    env_port: int
    environment: Mapping[str, str]

    @classmethod
    def from_environment(cls, variant: str) -> Setup:
        """Raises: RecipeError: RECIPE names no valid recipe, or the variant is unknown."""
        check_variant(variant)
        return cls.of(recipe.from_environment(), variant, Path(os.environ["RECIPE"]))

    @classmethod
    def of(cls, cfg: Recipe, variant: str, recipe_path: Path) -> Setup:
        """Args: recipe_path: the file that ``cfg`` was read from."""
        return cls(
            cfg=cfg,
            recipe_path=recipe_path,
            variant=variant,
            tag=os.environ.get("TAG") or variant,
            registry=os.environ.get("REGISTRY") or "local",
            runs_dir=folder("RUNS_DIR", "runs"),
            tasks_dir=folder("TASKS_DIR", "data/tasks"),
            models_dir=folder("MODELS_DIR", "data/models"),
            hf_cache=hf_cache(),
            env_port=int(os.environ.get("ENV_PORT") or 8100),
            environment=dict(os.environ),
        )

    def image(self, name: str) -> str:
        return f"{self.registry}/{PROJECT}-{name}:{self.tag}"

    @property
    def sandbox_image(self) -> str:
        return self.cfg.env.sandbox_image or self.image("sandbox")

    @property
    def images(self) -> list[str]:
        """Every image that a run of this set-up starts."""
        sandbox = [self.sandbox_image] if self.cfg.env.backend == "docker" else []
        return [*(self.image(name) for name in IMAGES), *sandbox]

    @property
    def lock_of(self) -> Mapping[str, Path]:
        """Image name -> its lock in this checkout."""
        return {name: lock_path(name, self.variant) for name in (*IMAGES, "sandbox")}

    @functools.cached_property
    def engine(self) -> docker.DockerClient | None:
        """The Docker engine, or None when none answers."""
        try:
            client = docker.from_env(timeout=20)
            client.ping()
        except DockerException:
            return None
        return client

    def container(self, service: str) -> str | None:
        """Id of the project's running container of a service."""
        if self.engine is None:
            return None
        labels = [f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}"]
        found = self.engine.containers.list(filters={"label": labels, "status": "running"})
        return str(found[0].id) if found else None


def lock_path(name: str, variant: str) -> Path:
    own = ROOT / f"images/{name}/requirements.{variant}.txt"
    return own if own.exists() else ROOT / f"images/{name}/requirements.txt"


def pinned(lock: Path) -> dict[str, str]:
    """Distribution -> version, of a hashed lock."""
    lines = (line.split(" ")[0] for line in lock.read_text(encoding="utf-8").splitlines() if line[:1].isalnum())
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def output_of(*command: str, timeout_s: float = 20.0, text: str | None = None) -> tuple[int, str]:
    """Exit code and what a command said, stdout first; 127 when it is not installed."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, input=text, timeout=timeout_s, cwd=ROOT, check=False
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not end within {timeout_s:.0f} s"
    return found.returncode, (found.stdout or found.stderr).strip()
