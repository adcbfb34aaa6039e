"""Before a Job is submitted: what would make it fail after an hour is asked now. The doctor lists these too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from scripts import checks
from scripts.checks import Check
from scripts.hf import digests, registry
from scripts.hf.digests import Digests
from services.common import recipe as recipes
from services.common import tasks
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.hub.client import UNAVAILABLE, first_line, patiently, status

SCOPES = {"repo.write": "push checkpoints", "job.write": "start Jobs and sandboxes"}
OPEN_STAGES = ["RUNNING", "SCHEDULING"]


def hub(api: HfApi, repo: str, run_name: str) -> Iterator[Check]:
    """Token, its rights, the repository, and whether the run is on its way already.

    Args: run_name: of the run to train; empty: nothing is trained, so nothing can be in its way.
    """
    token = api.token or get_token()
    if not token:
        yield checks.bad_recipe("token", "no token is set", "set HF_TOKEN, or run `hf auth login`")
        return
    try:
        account = patiently(api.whoami)()
    except UNAVAILABLE as error:
        if status(error) in (401, 403):
            yield checks.bad_recipe(
                "token", f"{api.endpoint} refuses the token ({status(error)})", "make a new one, with write access"
            )
        else:
            yield checks.not_ready("token", f"{api.endpoint} does not answer ({first_line(error)})", "try again later")
        return
    yield checks.ok("token", f"{account['name']} on {api.endpoint}")
    yield scopes(account)
    yield repository(api, repo)
    if run_name:
        yield no_other(api, os.environ.get("HF_NAMESPACE") or account["name"], run_name)


def scopes(account: Mapping[str, Any]) -> Check:
    """Whether the token may push and start Jobs."""
    token = (account.get("auth") or {}).get("accessToken") or {}
    role = token.get("role", "unknown")
    if role == "write":
        return checks.ok("scopes", "write")
    if role == "fineGrained":
        granted = {
            permission
            for scope in (token.get("fineGrained") or {}).get("scoped", [])
            for permission in scope.get("permissions", [])
        }
        missing = [f"{scope} (to {why})" for scope, why in SCOPES.items() if scope not in granted]
        if not missing:
            return checks.ok("scopes", f"fine-grained, with {' and '.join(SCOPES)}")
        return checks.bad_recipe(
            "scopes", f"the fine-grained token lacks {' and '.join(missing)}", "grant it in the settings of the token"
        )
    return checks.bad_recipe("scopes", f"the token's role is {role}", "use a token with role write")


def repository(api: HfApi, repo: str) -> Check:
    try:
        info = patiently(api.repo_info)(repo, timeout=30)
    except RepositoryNotFoundError:
        return checks.warn("repository", f"{repo} does not exist", "nothing: it is created, private, on submission")
    except UNAVAILABLE as error:
        return checks.bad_recipe(
            "repository", f"{repo} cannot be read ({first_line(error)})", "check ADAPTER_REPO and the token's rights"
        )
    return checks.ok("repository", f"{repo}, {'private' if info.private else 'public'}")


def no_other(api: HfApi, namespace: str, run_name: str) -> Check:
    """Two trainers of one run would write to one repository."""
    labels = {"run": run_name, "role": "train"}

    def ids() -> list[str]:
        return [job.id for job in api.list_jobs(namespace=namespace, labels=labels, status=OPEN_STAGES, timeout=30)]

    try:
        found = patiently(ids)()
    except UNAVAILABLE as error:
        problem = f"Jobs of {namespace} cannot be listed ({first_line(error)})"
        return checks.not_ready("jobs", problem, "try again later, or check that the token may list Jobs")
    if found:
        return checks.bad_recipe(
            "jobs", f"run {run_name} is trained by Job {', '.join(found)} already",
            "choose another RUN_NAME, or `make hf-stop` first",
        )  # fmt: skip
    return checks.ok("jobs", f"no other Job trains run {run_name}")


def images(path: Path = digests.PATH, revision: str | None = None) -> Iterator[Check]:
    """What was pushed, and whether the Hub can pull it. Args: revision: of this tree; None: not compared."""
    try:
        pushed = digests.load(path)
    except RecipeError as error:
        yield checks.bad_recipe("images", str(error), "`make push REGISTRY=... VARIANT=cuda`")
        return
    if pushed.variant != "cuda":
        problem = f"{path.name} names images of variant {pushed.variant}, and a Job has GPUs"
        yield checks.bad_recipe("images", problem, "`make push VARIANT=cuda`")
    yield _pushed_from(pushed, revision)
    for name in ("job", "sandbox"):
        reference = pushed.images[name]
        if (refusal := registry.find(reference)) is None:
            yield checks.ok(f"image {name}", reference)
        else:
            yield checks.not_ready(
                f"image {name}", f"{reference} cannot be pulled without a login: {refusal}",
                "make the repository public in its registry, or push again",
            )  # fmt: skip


def _pushed_from(pushed: Digests, revision: str | None) -> Check:
    if revision is None or pushed.revision == revision:
        return checks.ok("image revision", pushed.revision)
    return checks.warn(
        "image revision", f"the images are of revision {pushed.revision}, this tree is {revision}",
        "`make push` again, unless the difference does not matter",
    )  # fmt: skip


def recipe(cfg: Recipe, tasks_dir: Path) -> Iterator[Check]:
    """What the recipe says, as far as a Job needs it."""
    if cfg.model.source != "hub":
        yield checks.bad_recipe("model", f"model.source is {cfg.model.source}", "a Job has no model of this machine")
    elif cfg.model.revision is None:
        yield checks.bad_recipe("model", "model.revision is missing", "pin the full 40-character commit in the recipe")
    else:
        yield checks.ok("model", f"{cfg.model.id} at {cfg.model.revision}")
    for suite in (cfg.tasks.train, cfg.tasks.heldout):
        yield _pinned(suite, tasks_dir)
    if cfg.costs.trainer_usd_per_hour == 0:
        yield checks.warn("costs", "costs.trainer_usd_per_hour is 0", "set the price, or nothing is counted or bounded")
    elif cfg.costs.ceiling_usd is None:
        yield checks.warn("costs", "costs.ceiling_usd is not set", "set it: only the timeout bounds what a run costs")
    else:
        yield checks.ok("costs", f"ceiling {cfg.costs.ceiling_usd:g} dollars")


def _pinned(suite: str, tasks_dir: Path) -> Check:
    path = pin_file(suite, tasks_dir)
    try:
        pinned = tasks.load_pin(path)
    except RecipeError as error:
        return checks.bad_recipe(
            f"tasks {suite}", str(error), "`python -m scripts.prepare_tasks pin` makes it, where the Hub answers"
        )
    return checks.ok(f"tasks {suite}", f"{len(pinned.tasks)} tasks pinned in {path.name}")


def pin_file(suite: str, tasks_dir: Path) -> Path:
    return tasks_dir / f"{suite.partition('/')[0]}.json"


def pins(cfg: Recipe, tasks_dir: Path) -> dict[str, str]:
    """Pin file -> SHA-256. Call it after ``recipe``'s checks passed."""
    files = {pin_file(suite, tasks_dir) for suite in (cfg.tasks.train, cfg.tasks.heldout)}
    return {path.name: recipes.file_sha256(path) for path in sorted(files)}
