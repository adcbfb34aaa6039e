"""``python -m scripts.job_smoke``: the smoke recipe in the job image, one container, as a Hugging Face Job runs it.

The same supervisord configuration and the same process on top; what differs is what the Hub would give: sandboxes come
from this machine's Docker engine, and the capture proxy's public address is a name in their network.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer

from scripts import summary
from scripts.stack import ROOT, console, folder, git_revision
from services.common import recipe, run_dir, signals
from services.common.errors import NotReadyError, run_main
from services.common.run_dir import RunDir

NETWORK = "opencode-rl-job-sandboxes"
STOP_LIMIT_S = 180
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""supervisord runs each program as its own user; the rest is env's."""


def main(
    run_name: Annotated[str, typer.Option(envvar="RUN_NAME", help="name of the run")] = "",
    services: Annotated[bool, typer.Option(help="mount ./services, to try a change without a build")] = False,
) -> None:
    """Train, evaluate and end with the trainer's exit code."""
    run_main(lambda: _run(run_name, services))


def _run(run_name: str, services: bool) -> int:
    cfg = recipe.from_environment()
    name = run_name or f"job-{cfg.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs, tasks = folder("RUNS_DIR", "runs"), folder("TASKS_DIR", "data/tasks")
    runs.mkdir(parents=True, exist_ok=True)
    image = f"{os.environ.get('REGISTRY', 'local')}/opencode-rl-{{}}:{os.environ.get('TAG') or 'cpu'}"
    container = f"opencode-rl-{name}"
    variables = {
        "RECIPE_TOML": Path(os.environ["RECIPE"]).read_text(encoding="utf-8"),
        "RUN_NAME": name,
        "RUNS_DIR": str(runs),  # sandboxes mount folders of the run, so the engine must know them by the same name
        "TASKS_DIR": str(tasks),
        "GIT_REVISION": git_revision(),
        "IMAGE_PATTERN": image,
        "IMAGE_DIGESTS": json.dumps({"job": _image_id(image.format("job"))}),
        "SANDBOX_NETWORK": NETWORK,
        "CAPTURE_URL": "http://capture:8000/capture",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    for inherited in ("MAX_STEPS", "ADAPTER_REPO", "HF_ENDPOINT", "HF_TOKEN"):
        if value := os.environ.get(inherited):
            variables[inherited] = value
    mounts = ["/var/run/docker.sock:/var/run/docker.sock", f"{runs}:{runs}", f"{tasks}:{tasks}:ro"]
    mounts.append(f"{ROOT}/data/models:/app/data/models:ro")
    if services:
        mounts.append(f"{ROOT}/services:/app/services:ro")
    command = [
        "docker", "run", "--rm", "--name", container, "--network", NETWORK, "--network-alias", "capture",
        "--shm-size", "1g", "--memory", "14g", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true",
        *(part for capability in CAPABILITIES for part in ("--cap-add", capability)),
        *(part for mount in mounts for part in ("--volume", mount)),
        *(part for variable in variables for part in ("--env", variable)),
        image.format("job"), "tini", "--", "/app/venvs/job/bin/python", "-m", "services.job", "train",
    ]  # fmt: skip
    _network("create", "--internal", "--opt", "com.docker.network.bridge.inhibit_ipv4=true", NETWORK)
    try:
        # Values by the environment, not by the command line, which everybody on this machine can read.
        code = _follow(command, {**os.environ, **variables}, container)
    finally:
        _network("rm", NETWORK)
    run = RunDir(runs / name)
    if run_dir.read_json(run.result):
        summary.show(run, cfg)
    return code


def _follow(command: list[str], environment: dict[str, str], container: str) -> int:
    """Run to the end, lines passing through; Ctrl-C stops the container, which saves and sweeps."""
    with signals.stop_event() as stop:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        while (code := process.poll()) is None:
            if stop.wait(0.5):
                console.print("[yellow]Stopping: the step ends, the adapter is saved[/yellow]")
                subprocess.run(["docker", "stop", "--time", str(STOP_LIMIT_S), container], check=False)
                return process.wait()
    return code


def _image_id(image: str) -> str:
    found = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Id}}", image], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise NotReadyError(f"image {image} is not there; `make job-smoke` builds it")
    return found.stdout.strip()


def _network(*arguments: str) -> None:
    subprocess.run(["docker", "network", *arguments], capture_output=True, check=False)


if __name__ == "__main__":
    typer.run(main)
