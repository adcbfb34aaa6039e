"""``python -m scripts.bench_smoke``: time and memory of `make smoke` by phase, and the images' sizes.

Runs the real thing once, samples the memory of every container of the stack meanwhile, and prints a table of what
it measured. ``--cold`` first removes this project's images and build cache, so that the build is part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import docker
import typer
from rich.console import Console
from rich.table import Table

from scripts import summary
from services.common import run_dir
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_S = 3.0


class PeakMemory:
    """Highest sum of the memory of all running containers, less their page cache, sampled in a thread."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        client: docker.DockerClient | None = None
        while not self._stop.wait(SAMPLE_S):
            try:
                client = client or docker.from_env()
                used = {box.name: _used(box.stats(stream=False, one_shot=True)) for box in client.containers.list()}
            except docker.errors.DockerException:
                continue  # no engine yet, or a container that ended in between
            if (total := sum(used.values())) > self.peak_bytes:
                self.peak_bytes, self.at_peak = total, used


def _used(stats: dict[str, Any]) -> int:
    memory = stats.get("memory_stats", {})
    details = memory.get("stats", {})
    cache = details.get("total_inactive_file", details.get("inactive_file", 0))
    return int(max(0, memory.get("usage", 0) - cache))


def image_sizes(client: docker.DockerClient, names: list[str]) -> dict[str, int]:
    """Bytes of each image, and of all together with shared layers counted once."""
    layers: dict[str, int] = {}
    sizes = {}
    for name in names:
        image = client.images.get(name)
        steps = [step["Size"] for step in reversed(image.history()) if step["Size"]]
        sizes[name] = sum(steps)
        # History has one entry with a size for each non-empty layer, in the order of RootFS.Layers.
        for digest, size in zip(image.attrs["RootFS"]["Layers"][-len(steps) :], steps, strict=False):
            layers[digest] = size
    return {**sizes, "together": sum(layers.values())}


def main(cold: Annotated[bool, typer.Option(help="remove images and build cache first")] = False) -> None:
    """Run `make smoke` once and print what it took."""
    console = Console()
    if cold:
        subprocess.run("docker images -q --filter reference='*/opencode-rl-*' | xargs -r docker rmi -f; "
                       "docker images -q 'opencode-rl/base' | xargs -r docker rmi -f; docker builder prune -af",
                       shell=True, check=False, stdout=subprocess.DEVNULL)  # fmt: skip
    name = f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    start = time.monotonic()
    with PeakMemory() as memory:
        images = subprocess.run(["make", "images", "VARIANT=cpu"], cwd=ROOT, check=False).returncode
        built = time.monotonic() - start
        environment = {**os.environ, "RUN_NAME": name}
        code = images or subprocess.run(["make", "smoke"], cwd=ROOT, env=environment, check=False).returncode
    wall = time.monotonic() - start

    this = RunDir(ROOT / "runs" / name)
    phases = run_dir.read_json(this.path / "timings.json") or {}
    table = Table(title=f"make smoke, {'cold' if cold else 'warm'}, exit code {code}, {os.cpu_count()} cores")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_row("engine, bases, images", f"{built:.0f} s")
    for phase, seconds in phases.items():
        table.add_row(phase, f"{seconds:.0f} s")
    table.add_row("make smoke without the build", f"{wall - built:.0f} s")
    table.add_row("all", f"{wall:.0f} s")
    table.add_row("peak memory of all containers", f"{memory.peak_bytes / 1e9:.2f} GB")
    for overhead, seconds in summary.sandbox_overhead(this).items():
        table.add_row(f"sandbox overhead a rollout, {overhead}", f"{seconds:.2f} s")
    client = docker.from_env()
    for group in (["policy", "trainer"], ["env"], ["tools"], ["sandbox"]):
        sizes = image_sizes(client, [f"local/opencode-rl-{image}:cpu" for image in group])
        table.add_row("image " + " + ".join(group), f"{sizes['together'] / 1e9:.2f} GB")
    console.print(table)
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
