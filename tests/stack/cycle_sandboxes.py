"""Makes sandboxes one after another, as env does, and takes them down again: run inside the env image.

``python cycle_sandboxes.py COUNT AT_A_TIME FOLDER NETWORK``. Prints a line for each that is up. Real Harbor, real
engine, our ``Sandbox``; no agent and no policy.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from services.common import recipe
from services.common.run_dir import RunDir
from services.env import sandbox
from services.env.sandbox import Sandbox

IMAGE = "local/opencode-rl-sandbox:cpu"


async def cycle(number: int, run: RunDir, overlay: Path) -> None:
    paths = TrialPaths(run.trials / f"cycle-{number}")
    paths.mkdir()
    task = run.path / "task"
    task.mkdir(exist_ok=True)
    one = Sandbox(
        task, "cycle", f"cycle-{number}", paths,
        EnvironmentConfig(docker_image=IMAGE),
        run_path=str(run.path), start_timeout_s=120.0, image=IMAGE, disk_mb=1000, extra_docker_compose=[overlay],
    )  # fmt: skip
    try:
        await one.start(force_build=False)
        print(f"up {number}", flush=True)
        answer = await one.exec("echo $((6 * 7))")
        assert (answer.return_code, (answer.stdout or "").strip()) == (0, "42"), answer
    finally:
        await one.stop(delete=True)


async def main(count: int, at_a_time: int, folder: Path, network: str) -> None:
    run = RunDir(folder)
    run.trials.mkdir(parents=True, exist_ok=True)
    cfg = recipe.from_environment()
    overlay = sandbox.write_overlay(cfg, run, network, IMAGE)
    turn = asyncio.Semaphore(at_a_time)

    async def in_turn(number: int) -> None:
        async with turn:
            await cycle(number, run, overlay)

    await asyncio.gather(*(in_turn(number) for number in range(count)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
