"""Runs inside the env image, fed on stdin: starts a task's sandbox as a rollout does, grades it with nothing done, and
another after the reference solution, and prints both as JSON. It judges nothing; ``sandbox`` does."""

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.trial.trial import Trial

from services.common import recipe
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env import app, sandbox
from services.env.docker import docker, make_network

NETWORK = f"opencode-rl-doctor-{uuid.uuid4().hex[:8]}"


async def graded(agent: str, task: Path, cfg: Recipe, run: RunDir, overlay: Path) -> dict[str, Any]:
    """One trial without a model. Args: agent: Harbor's ``nop``, or ``oracle``, which runs solution/solve.sh."""

    def build() -> TrialConfig:
        return TrialConfig(
            task=TaskConfig(path=task),
            agent=AgentConfig(name=agent),
            environment=EnvironmentConfig(type="docker"),
            verifier=VerifierConfig(),
            trial_name=f"{NETWORK}-{agent}",
            trials_dir=run.trials,
        )

    setup_network = app.SETUP_NETWORK if cfg.env.healthcheck_internet else None
    bounded = sandbox.bounded(build, cfg, run, overlay, cfg.sandbox_image(), setup_network)
    trial = await Trial.create(bounded())
    result = await trial.run()
    error = result.exception_info
    return {
        "rewards": dict(result.verifier_result.rewards or {}) if result.verifier_result else {},
        "error": f"{error.exception_type}: {error.exception_message}"[:600] if error else "",
    }


async def main(task: Path, runs_dir: Path) -> dict[str, Any]:
    cfg = recipe.from_environment()
    run = RunDir(runs_dir / NETWORK)
    run.trials.mkdir(parents=True)
    os.environ["SANDBOX_NETWORK"] = NETWORK
    if cfg.env.healthcheck_internet:
        make_network(app.SETUP_NETWORK, app.SETUP_NETWORK_OPTIONS)
    docker("network", "create", "--internal", NETWORK)
    try:
        overlay = sandbox.write_overlay(cfg, run, NETWORK, cfg.sandbox_image())
        found = {"nothing": await graded("nop", task, cfg, run, overlay)}
        if (task / "solution" / "solve.sh").is_file():
            found["solution"] = await graded("oracle", task, cfg, run, overlay)
        return found
    finally:
        with contextlib.suppress(Exception):
            docker("network", "rm", NETWORK)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        answer = asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    print(json.dumps(answer))
