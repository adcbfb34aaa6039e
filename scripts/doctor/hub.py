"""The Hub and Jobs: looked at only where this set-up uses them. What a Job needs is in ``scripts.hf.preflight``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import httpx
from huggingface_hub import HfApi

from scripts.checks import Check, bad_recipe, not_ready, ok, skipped, warn
from scripts.doctor.setup import Setup
from scripts.hf import preflight
from services.common import costs

NAMES = ("hub-token", "hub-jobs-timeout", "hub-public-url")
JOBS_DEFAULT_S = 30 * 60
"""After which a Job ends that was given no timeout."""
FASTEST_STEP_S = 35
"""Of the original recipe on h200x2, once its rollout queue was full."""
PROBE_TIMEOUT_S = 10.0


def checks(setup: Setup, api: Callable[[str | None], HfApi] = lambda token: HfApi(token=token)) -> list[Check]:
    repository = setup.environment.get("ADAPTER_REPO", "")
    if setup.cfg.env.backend != "hf-sandbox" and not repository:
        return [skipped(name, "no ADAPTER_REPO, and the backend is not hf-sandbox") for name in NAMES]
    return [*_account(setup, api(setup.environment.get("HF_TOKEN")), repository), timeout(setup), public_url(setup)]


def _account(setup: Setup, api: HfApi, repository: str) -> Iterator[Check]:
    """Token, its rights, the repository; under names that say where they belong."""
    if not repository:
        yield skipped("hub-repository", "ADAPTER_REPO is not set")
        return
    run_name = setup.environment.get("RUN_NAME") or setup.cfg.run.name
    for check in preflight.hub(api, repository, run_name):
        yield dataclasses.replace(check, name=f"hub-{check.name}")


def timeout(setup: Setup) -> Check:
    """A Job's own default is half an hour; a run takes hours."""
    name, wanted = "hub-jobs-timeout", setup.cfg.hf_job.timeout
    seconds, steps = costs.seconds(wanted), setup.cfg.trainer.max_steps
    if seconds <= JOBS_DEFAULT_S:
        return bad_recipe(name, f"hf_job.timeout is {wanted}", "raise it: loading the weights alone takes minutes")
    if seconds < steps * FASTEST_STEP_S:
        found = f"hf_job.timeout is {wanted}; {steps} steps take {steps * FASTEST_STEP_S / 3600:.1f} h at best"
        return warn(name, found, "raise it: a Job that is ended saves nothing after its last checkpoint")
    return ok(name, wanted)


def public_url(setup: Setup) -> Check:
    """Sandboxes that run elsewhere reach the capture proxy through this address."""
    name, host = "hub-public-url", setup.environment.get("SPACE_HOST", "")
    url = setup.environment.get("CAPTURE_URL", "") or (f"https://{host}/capture" if host else "")
    if setup.cfg.env.backend == "docker":
        return skipped(name, "sandboxes are on this machine")
    if not url:
        return skipped(name, "neither CAPTURE_URL nor SPACE_HOST is set: a Job makes its own")
    if not url.startswith("https://"):
        return bad_recipe(name, f"CAPTURE_URL is {url}", "use https: session keys travel over it")
    try:
        httpx.get(f"{url}/health", timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        mend = "expose the port (expose_public=[8000]) and start env, or correct CAPTURE_URL"
        return not_ready(name, f"{url} does not answer ({type(error).__name__})", mend)
    return ok(name, url)
