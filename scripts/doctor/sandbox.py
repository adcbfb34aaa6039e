"""One sandbox of the training suite, started and graded as a rollout's is, without a model.

A suite whose set-up, base image or verifier does not work here would fail every rollout, or reward every one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docker.errors import ImageNotFound

from scripts.checks import Check, bad_recipe, ok, skipped
from scripts.doctor.setup import Setup, output_of
from scripts.stack import ROOT
from services.common import tasks
from services.common.errors import RecipeError

PROBE = ROOT / "scripts/doctor/probe_sandbox.py"
MARGIN_S = 120.0
NAME = "sandbox"
Facts = Mapping[str, Any]
"""What ``probe_sandbox.py`` printed; ``{"skipped": why}`` when it could not run, ``{"failed": how}`` when it died."""


def grading(setup: Setup, facts: Facts | None = None) -> Check:
    """Doing nothing earns 0 and the reference solution, where there is one, 1. Args: facts: default: look now."""
    facts = look(setup) if facts is None else facts
    if "skipped" in facts:
        return skipped(NAME, facts["skipped"])
    if "failed" in facts:
        return bad_recipe(NAME, facts["failed"], "see what the other lines say; then `make images`")
    for what, wanted in (("nothing", 0.0), ("solution", 1.0)):
        if what in facts and (problem := _problem(setup, what, facts[what], wanted)):
            return problem
    solution = "the reference solution 1" if "solution" in facts else "there is no reference solution"
    return ok(NAME, f"{facts['task']}: doing nothing earns 0, {solution}")


def before_a_run(setup: Setup) -> Check:
    """The same, but for the suites that ship with the project: its tests have run each of their tasks, and their hashes
    are pinned."""
    pin = setup.tasks_dir / f"{setup.cfg.tasks.train.partition('/')[0]}.json"
    if pin.is_file() and tasks.load_pin(pin).source.kind == "shipped":
        return skipped(NAME, f"suite {setup.cfg.tasks.train} ships with the project")
    return grading(setup)


def _problem(setup: Setup, what: str, found: Mapping[str, Any], wanted: float) -> Check | None:
    rewards, done = found["rewards"], "doing nothing" if what == "nothing" else "the reference solution"
    if found["error"] or not rewards:
        mend = "the task's own set-up, image or verifier does not work here: "
        mend += "env.sandbox_base names the image that the suite expects"
        if not setup.cfg.env.healthcheck_internet:
            mend += "; env.healthcheck_internet = true where its set-up fetches data"
        return bad_recipe(NAME, f"{done} was not graded: {found['error'] or 'the verifier wrote no reward'}", mend)
    reward = rewards.get("reward", next(iter(rewards.values())))
    if reward != wanted:
        mend = "the verifier is broken or the task is: look at its tests/ (`python -m scripts.prepare_tasks show`)"
        return bad_recipe(NAME, f"{done} earns {reward:g} ({rewards}), and must earn {wanted:g}", mend)
    return None


def look(setup: Setup) -> Facts:
    """Run the probe in the env image, with the engine's socket, as env itself has it."""
    if setup.cfg.env.backend != "docker":
        return {"skipped": f"backend {setup.cfg.env.backend} starts no container on this machine"}
    if setup.engine is None:
        return {"skipped": "no Docker engine answers"}
    try:
        for image in (setup.image("env"), setup.sandbox_image):
            setup.engine.images.get(image)
        task = tasks.load_suite(setup.tasks_dir, setup.cfg.tasks.train)[0]
    except ImageNotFound:
        return {"skipped": f"image {image} is not there"}
    except RecipeError as error:
        return {"skipped": f"the suite is not there: {str(error).splitlines()[0]}"}
    setup.runs_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=setup.runs_dir, prefix=".doctor-"))
    try:
        return _ask(setup, task, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ask(setup: Setup, task: tasks.Task, scratch: Path) -> Facts:
    rollout = setup.cfg.rollout
    limit_s = 2 * (rollout.build_timeout_s + rollout.setup_timeout_s + rollout.verifier_timeout_s) + MARGIN_S
    mounts = (
        f"{scratch}:{scratch}",
        f"{task.folder}:{task.folder}:ro",
        f"{setup.recipe_path.resolve()}:/run/recipe.toml:ro",
    )
    code, text = output_of(
        "docker", "run", "--rm", "--interactive", "--init", "--network", "none",
        "--volume", "/var/run/docker.sock:/var/run/docker.sock",
        *(part for mount in mounts for part in ("--volume", mount)),
        "--env", "RECIPE=/run/recipe.toml", "--env", f"IMAGE_PATTERN={setup.image('{}')}",
        setup.image("env"), "python", "-", str(task.folder), str(scratch),
        timeout_s=limit_s, text=PROBE.read_text(encoding="utf-8"),
    )  # fmt: skip
    try:
        return {**json.loads(text.splitlines()[-1]), "task": task.name}
    except (ValueError, IndexError, TypeError):
        return {"failed": f"the env image's probe ended with exit code {code}: {text[-300:]}"}
