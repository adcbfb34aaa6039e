"""Many sandboxes, one after another, leave nothing: no container, no network of their own, no open line in the ledger.

Docker hands out a few dozen subnets: a network that each sandbox left behind would end a run within minutes.
``SANDBOX_CYCLES=200`` makes the full count, which takes some minutes.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.sweep import sweep_all
from services.common import run_dir
from services.common.run_dir import RunDir
from services.env.ledger import Ledger

pytestmark = pytest.mark.timeout(1800)  # hundreds of sandboxes

ROOT = Path(__file__).resolve().parents[2]
CYCLES = int(os.environ.get("SANDBOX_CYCLES", "12"))
AT_A_TIME = 4


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


@dataclass
class Yard:
    """A network for sandboxes, a run, and who makes the sandboxes."""

    run: RunDir
    network: str

    def start(self, count: int) -> subprocess.Popen[str]:
        arguments = [str(count), str(AT_A_TIME), str(self.run.path), self.network]
        return subprocess.Popen(
            [
                "docker", "run", "--rm", "--init", "--name", f"{self.network}-maker", "--network", "none",
                "--volume", f"{ROOT}/services:/app/services:ro", "--volume", f"{ROOT}/tests:/tests:ro",
                "--volume", f"{ROOT}/data:/data:ro", "--volume", f"{self.run.path.parent}:{self.run.path.parent}",
                "--volume", "/var/run/docker.sock:/var/run/docker.sock",
                "--env", "RECIPE=/data/recipes/smoke.toml", "--workdir", "/app", "local/opencode-rl-env:cpu",
                "python", "/tests/stack/cycle_sandboxes.py", *arguments,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def left(self) -> tuple[list[str], list[str]]:
        label = f"label=opencode-rl.run={self.run.path.name}"
        return docker("ps", "--all", "--quiet", "--filter", label).split(), Ledger(self.run.ledger).open_projects()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    name = f"cycles-{uuid.uuid4().hex[:8]}"
    docker("network", "create", "--internal", name)
    yard = Yard(RunDir(tmp_path / "runs" / name), name)
    try:
        yield yard
    finally:
        sweep_all(yard.run.path.parent)
        docker("network", "rm", name)


def networks() -> set[str]:
    return set(docker("network", "ls", "--format", "{{.Name}}").split())


def test_sandboxes_leave_no_container_no_network_and_no_open_line(yard: Yard) -> None:
    before = networks()
    started = time.monotonic()
    maker = yard.start(CYCLES)
    output, _ = maker.communicate(timeout=1500)
    print(f"{CYCLES} sandboxes in {time.monotonic() - started:.0f} s")
    assert maker.returncode == 0, output[-3000:]
    assert output.count("up ") == CYCLES
    assert yard.left() == ([], [])
    assert {name for name in networks() - before if "cycle" in name} == set()
    events = [line["event"] for line in run_dir.read_lines(yard.run.ledger)]
    assert [events.count(event) for event in ("intent", "created", "closed")] == [CYCLES] * 3


def test_what_a_killed_maker_left_is_swept_from_the_host_and_nothing_of_another_run(yard: Yard) -> None:
    maker = yard.start(40)
    assert maker.stdout is not None
    for line in maker.stdout:
        if line.startswith("up "):
            break
    docker("kill", f"{yard.network}-maker")
    maker.wait(60)
    other = docker("run", "--detach", "--label", "opencode-rl.run=another", "local/opencode-rl-env:cpu", "sleep", "99")
    try:
        containers, opened = yard.left()
        assert containers and opened
        assert sweep_all(yard.run.path.parent) >= len(containers)
        assert yard.left() == ([], [])
        assert docker("ps", "--quiet", "--no-trunc", "--filter", f"id={other.strip()}")
    finally:
        docker("rm", "--force", other.strip())
