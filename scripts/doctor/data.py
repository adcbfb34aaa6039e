"""What a run reads: recipe, tasks, model; and the numbers on which services must agree."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.checks import Check, bad_recipe, ok
from scripts.doctor.setup import Setup
from services.common import recipe, tasks
from services.common.errors import RecipeError
from services.env import opencode
from services.evaluator import cells


def recipe_file(setup: Setup) -> Check:
    """It was loaded, or there would be no set-up: say which."""
    return ok("recipe", f"{setup.recipe_path}, sha256 {setup.cfg.sha256()[:12]}")


def task_suites(setup: Setup) -> Check:
    """Both suites are there, complete, unchanged, without a shared or doubled instruction."""
    cfg = setup.cfg
    try:
        train = tasks.load_suite(setup.tasks_dir, cfg.tasks.train)
        heldout = tasks.load_suite(setup.tasks_dir, cfg.tasks.heldout)
        tasks.check_disjoint(train, heldout)
        tasks.check_image((*train, *heldout), setup.sandbox_image)
    except RecipeError as error:
        mend = f"`make prepare RECIPE={setup.recipe_path}` fetches what does not ship; restore data/tasks if it changed"
        return bad_recipe("tasks", str(error), mend)
    shown = (f"{name} {len(suite)} ({tasks.suite_sha256(suite)[:12]})"
             for name, suite in ((cfg.tasks.train, train), (cfg.tasks.heldout, heldout)))  # fmt: skip
    return ok("tasks", ", ".join(shown))


def model(setup: Setup) -> Check:
    return _local_model(setup) if setup.cfg.model.source == "local" else _hub_model(setup)


def _local_model(setup: Setup) -> Check:
    cfg = setup.cfg
    folder = setup.models_dir / cfg.model.id
    if not (folder / "config.json").is_file():
        have = sorted(path.parent.name for path in setup.models_dir.glob("*/config.json")) or ["none"]
        found = f"model.id is {cfg.model.id!r} but {folder} holds no config.json"
        return bad_recipe("model", found, f"name one that is there: {', '.join(have)}")
    digest = "sha256:" + recipe.file_sha256(folder / "model.safetensors")
    if cfg.model.revision not in (None, digest):
        found = f"model.revision is {cfg.model.revision} and the weights in {folder} have {digest}"
        return bad_recipe("model", found, "restore the file or correct the recipe")
    return ok("model", f"{cfg.model.id}, {digest[:19]}")


def _hub_model(setup: Setup) -> Check:
    cfg = setup.cfg
    if cfg.model.revision is None:
        mend = (
            f"`make prepare RECIPE={setup.recipe_path}` finds and locks it: a branch name would let the weights drift"
        )
        return bad_recipe("model", "model.revision is missing; a Hub model needs its full 40-character commit", mend)
    snapshot = hub_snapshot(setup.hf_cache, cfg.model.id, cfg.model.revision)
    download = f"`make prepare RECIPE={setup.recipe_path}` downloads it"
    if not (snapshot / "config.json").exists():
        return bad_recipe("model", f"{cfg.model.id} at {cfg.model.revision[:12]} is not in {setup.hf_cache}", download)
    if missing := [name for name in weight_files(snapshot) if not (snapshot / name).exists()]:
        return bad_recipe("model", f"{snapshot} lacks {', '.join(missing)}", download)
    return ok("model", f"{cfg.model.id} at {cfg.model.revision[:12]} in the cache")


def hub_snapshot(cache: Path, repository: str, revision: str) -> Path:
    return cache / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / revision


def weight_files(snapshot: Path) -> list[str]:
    """Names of the weight files that a snapshot must hold, from its index if it has one."""
    index = snapshot / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def tracker(setup: Setup) -> Check:
    """A tracker never stops a run, so a missing key would only be seen afterwards."""
    wanted = setup.cfg.trainer.report_to
    if wanted == "wandb" and not setup.environment.get("WANDB_API_KEY"):
        mend = "set it, or trainer.report_to to trackio; metrics.jsonl is written anyway"
        return bad_recipe("tracker", "trainer.report_to is wandb and WANDB_API_KEY is not set", mend)
    return ok("tracker", wanted)


def output_caps(setup: Setup) -> Check:
    """Training, evaluation and the agent must cut a model call at the same length (a run collapsed where not)."""
    cfg = setup.cfg
    agent = opencode.config(cfg, "http://capture", "session", cfg.policy.served_model_name)
    limits = agent["provider"][opencode.PROVIDER]["models"][cfg.policy.served_model_name]["limit"]
    caps = {
        "training": cfg.sampling.max_completion_tokens,
        "evaluation": cells.conditions(cfg, None).max_completion_tokens,
        "OpenCode": limits["output"],
    }
    shown = ", ".join(f"{name} {cap}" for name, cap in caps.items())
    if len(set(caps.values())) > 1:
        mend = "all three must read sampling.max_completion_tokens: restore services/"
        return bad_recipe("output-caps", shown, mend)
    return ok("output-caps", f"{caps['training']} tokens in training, evaluation and OpenCode")
