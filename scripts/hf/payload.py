"""What is asked of ``run_job``: pure functions of the recipe and of what was pushed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from scripts.hf.digests import Digests
from services.common import costs, recipe
from services.common.recipe import Recipe

Payload = dict[str, Any]
"""Arguments of ``HfApi.run_job``."""
PROJECT = "opencode-rl"
PUBLIC_PORT = 8000
COMMAND = ("tini", "--", "/app/venvs/job/bin/python", "-m", "services.job")
GROUP_LENGTH = 46
"""Of a network group's name: lower-case letters, digits and dashes."""
HIDDEN = "***"


@dataclass(frozen=True)
class Request:
    """One run, as a person asks for it."""

    recipe_toml: str
    """The recipe as the Job will read it."""
    cfg: Recipe
    """The same, parsed."""
    digests: Digests
    run_name: str
    repo: str
    revision: str
    namespace: str
    token: str
    pins: Mapping[str, str]
    """Pin file -> SHA-256, for the suites that are fetched in the Job."""
    max_steps: int | None = None
    resume: bool = False
    """Go on from the newest checkpoint in the repository."""


def job_recipe(path: Path, sandbox_image: str) -> str:
    """The recipe's text with the model's commit, which may be locked beside it, and the two keys that a Job changes:
    sandboxes are Jobs too, of the pushed image."""
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    section: Any = document.setdefault("env", tomlkit.table())
    section["backend"] = "hf-sandbox"
    section["sandbox_image"] = sandbox_image
    model = recipe.load(path).model
    if model.source == "hub" and model.revision is not None:
        document["model"].setdefault("revision", model.revision)
    return tomlkit.dumps(document)


def training(request: Request) -> Payload:
    """One Job with everything: policy on GPU 1, trainer on GPU 0, env, watchdog, and the final evaluation."""
    hf_job = request.cfg.hf_job
    return _job(request, "train", hf_job.flavor, hf_job.timeout, expose=True)


def evaluation(request: Request) -> Payload:
    """The Job beside it that evaluates every checkpoint which appears in the repository."""
    hf_job = request.cfg.hf_job
    return _job(request, "watch", hf_job.eval_flavor, hf_job.eval_timeout, expose=True)


def split(request: Request) -> list[Payload]:
    """Policy and trainer in Jobs of their own, in one network group: for what outgrows one machine."""
    hf_job = request.cfg.hf_job
    group = re.sub(r"[^a-z0-9]+", "-", request.run_name)[:GROUP_LENGTH].strip("-")
    policy = _job(request, "policy", hf_job.eval_flavor, hf_job.timeout, expose=False)
    trainer = _job(request, "train", hf_job.eval_flavor, hf_job.timeout, expose=True)
    trainer["env"]["POLICY_ALIAS"] = "policy"
    for payload, alias in ((policy, "policy"), (trainer, "trainer")):
        payload |= {"network_group": group, "network_aliases": [alias]}
    return [policy, trainer]


def _job(request: Request, role: str, flavor: str, timeout: str, *, expose: bool) -> Payload:
    variables = {
        "RECIPE_TOML": request.recipe_toml,
        "RUN_NAME": request.run_name,
        "ADAPTER_REPO": request.repo,
        "GIT_REVISION": request.revision,
        "IMAGE_DIGESTS": json.dumps(request.digests.images, sort_keys=True),
        "PINS": json.dumps(dict(request.pins), sort_keys=True),
    }
    if request.resume and role == "train":
        variables["RESUME_FROM_HUB"] = "1"
    if request.max_steps is not None:
        variables["MAX_STEPS"] = str(request.max_steps)
    return {
        "image": request.digests.images["job"],
        "command": [*COMMAND, role],
        "env": variables,
        "secrets": {"HF_TOKEN": request.token},
        "flavor": flavor,
        "timeout": timeout,
        **({"expose_public": [PUBLIC_PORT]} if expose else {}),
        "name": f"{request.run_name}-{role}",
        # Not the label of its sandboxes: a sweep of those must not find this Job.
        "labels": {"project": PROJECT, "run": request.run_name, "role": role, "revision": request.revision[:12]},
        "namespace": request.namespace,
    }


def shown(payload: Payload) -> Payload:
    """The payload for a person's eyes and logs: names of secrets, never values."""
    return {**payload, "secrets": dict.fromkeys(payload["secrets"], HIDDEN)}


def price(request: Request, role: str) -> costs.Estimate:
    """The most that a Job of the role and its sandboxes can cost."""
    cfg, prices = request.cfg, request.cfg.costs
    if role == "watch":
        prices = recipe.Costs(
            trainer_usd_per_hour=prices.eval_usd_per_hour, sandbox_usd_per_hour=prices.sandbox_usd_per_hour
        )
        return costs.estimate(prices, cfg.evaluator.max_inflight, costs.seconds(cfg.hf_job.eval_timeout))
    return costs.estimate(prices, cfg.rollout.max_inflight, costs.seconds(cfg.hf_job.timeout))
