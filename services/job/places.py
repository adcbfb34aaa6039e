"""Where everything is inside the container, as environment variables; what is set already stays.

Everybody is on one host here, so peers are on loopback, each on a port of its own. Public is port 8000 alone, with
nothing on it but the capture proxy.
"""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from services.common import recipe
from services.common.errors import RecipeError

Role = Literal["train", "watch", "policy"]
ROLES: tuple[Role, ...] = ("train", "watch", "policy")
"""``train``: the run, and its final evaluation. ``watch``: every checkpoint of ADAPTER_REPO, beside a run elsewhere.
``policy``: only the policy server, for a run whose trainer is in another Job of the same network group."""

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_PORT = 8000
POLICY_PORT = 8001
CONTROL_PORT = 8100
JOBS_DOMAIN = "hf.jobs"
DOCKER_SOCKET = Path("/var/run/docker.sock")


def variables(role: Role, given: Mapping[str, str]) -> dict[str, str]:
    """What is added to ``given``, the container's environment, for supervisord and every program.

    Raises: RecipeError: a Job's network group gives no address of the policy.
    """
    folder = Path(given.get("JOB_DIR", "/job"))
    alone = "0.0.0.0" if role == "policy" else "127.0.0.1"
    policy = f"http://127.0.0.1:{POLICY_PORT}"
    if alias := given.get("POLICY_ALIAS"):  # the policy is in another Job; the Hub gives the prefix of its name
        prefix = given.get("HF_NETWORK_GROUP_PREFIX")
        if prefix is None:
            raise RecipeError(
                "POLICY_ALIAS is set and HF_NETWORK_GROUP_PREFIX is not; start the Job with a network group"
            )
        policy = f"http://{prefix}{alias}:{POLICY_PORT}"
    found = {
        "JOB_DIR": str(folder),
        "RUNS_DIR": str(folder / "runs"),
        "TASKS_DIR": str(ROOT / "data/tasks"),
        "MODELS_DIR": str(ROOT / "data/models"),
        "HF_HOME": str(folder / "huggingface"),
        "POLICY_LISTEN": f"{alone}:{POLICY_PORT}",
        "POLICY_URL": policy,
        # Never beside `policy`: the two take turns on one GPU.
        "POLICY_EVAL_URL": f"http://127.0.0.1:{POLICY_PORT}",
        "ENV_URL": f"http://127.0.0.1:{CONTROL_PORT}",
        "CONTROL_HOST": "127.0.0.1",
        "METRICS_HOST": "127.0.0.1",
        "CAPTURE_HOST": "0.0.0.0",
        "CAPTURE_PORT": str(PUBLIC_PORT),
        "TRAINER_GPU": "0",
        "POLICY_GPU": "1" if role == "train" and not alias else "0",
        "EVALUATOR": "watch --hub" if role == "watch" else "final",
        "MACHINE_SINCE_S": str(time.time()),
        "OWN_USER": pwd.getpwuid(os.geteuid()).pw_name,
        "APP_USER": _user(),
        # Whoever may use the Docker engine is root anyway; without one, env needs no more than the others.
        "ENV_USER": "root" if os.geteuid() == 0 and DOCKER_SOCKET.exists() else _user(),
    }
    if job := given.get("JOB_ID"):
        found["SPACE_HOST"] = f"{job}--{PUBLIC_PORT}.{JOBS_DOMAIN}"
    return {name: value for name, value in found.items() if name not in given}


def _user() -> str:
    """Who the programs run as that need no more: ``app``, where this process may choose."""
    return "app" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name


def write_recipe(given: Mapping[str, str], folder: Path) -> Path:
    """The recipe of this Job: the text in RECIPE_TOML, which is what was checked when it was submitted, or RECIPE.

    Raises: RecipeError: neither is there.
    """
    if text := given.get("RECIPE_TOML"):
        path = folder / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return path
    if name := given.get("RECIPE"):
        return Path(name)
    raise RecipeError("neither RECIPE_TOML nor RECIPE is set; `make hf-job` sets the first")


def check_pins(given: Mapping[str, str], tasks_dir: Path) -> None:
    """Compare the image's pin files with those of whoever submitted the Job, by PINS: name -> SHA-256.

    Raises: RecipeError: one differs, so that another set of tasks would be trained on than was checked.
    """
    for name, expected in json.loads(given.get("PINS") or "{}").items():
        path = tasks_dir / name
        found = recipe.file_sha256(path) if path.is_file() else "no file"
        if found != expected:
            raise RecipeError(
                f"pin file {name} of this image has SHA-256 {found}, and the Job was submitted with {expected}; "
                "`make push` an image of the revision that you submit from"
            )
