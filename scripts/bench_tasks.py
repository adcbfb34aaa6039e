"""How long 1,000 tasks take from a local cache: ``python -m scripts.bench_tasks [--tasks 1000]``.

Fills a scratch cache with made-up tasks, as `prepare_tasks fetch` would have left it, then runs the real command
line on it as a process of its own and prints wall time, CPU time and peak memory of each step, next to the cost of
only reading and hashing the same files. The issue's bounds are 20 s and 300 MB on 2 cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from services.common.errors import run_main
from services.common.tasks import HubSource, PinFile, dump_pin, load_task, pin_task
from services.hub.files import RemoteFile

ROOT = Path(__file__).resolve().parents[1]
REVISION = "0" * 40


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_mb: float


def made_up_task(number: int) -> dict[str, str]:
    """Files of about the size of the recipe's tasks: a 1 kB question, an 8 kB grader."""
    padding = "".join(f"# line {line} of a grader\n" for line in range(300))
    return {
        "task.toml": f'[metadata]\ndifficulty_tier = "hard"\n[environment]\n[environment.env]\nPREFIX = "{number}"\n'
        '[environment.healthcheck]\ncommand = "python3 /opt/pull.py"\n',
        "instruction.md": f"Question {number}. " + "What does the data say? " * 40 + "\n",
        "environment/Dockerfile": "FROM example/base:1\n",
        "environment/pull.py": padding[:2000],
        "tests/test.sh": "#!/bin/sh\npython3 /tests/grader.py\n",
        "tests/grader.py": padding,
    }


def fill_cache(cache: Path, tasks_dir: Path, num_tasks: int) -> Path:
    """Write the cache of a dataset and its pin file. Returns: the folder of the cached tasks."""
    source = HubSource(repo="made/up", revision=REVISION)
    root = cache / f"made__up@{REVISION}"
    listed = []
    for number in range(num_tasks):
        for relative, text in made_up_task(number).items():
            path = root / "tasks" / f"t{number:05}" / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            content = text.encode()
            sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            listed.append(asdict(RemoteFile(path.relative_to(root).as_posix(), len(content), sha1)))
    (root / "listing.json").write_text(json.dumps(listed))
    folders = sorted((root / "tasks").iterdir())
    pin = PinFile(source=source, tasks=tuple(pin_task(load_task(folder, published=True)) for folder in folders))
    tasks_dir.mkdir()
    (tasks_dir / "train.json").write_text(dump_pin(pin))
    return root / "tasks"


def measured(command: list[str]) -> Cost:
    """Run a process to its end. Raises: CalledProcessError: it failed."""
    start = time.monotonic()
    # No Hub may be asked: a port where nothing listens would fail the command.
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
    return Cost(time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def measured_here(work: Callable[[], object]) -> Cost:
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.monotonic() - start, cpu_s, float("nan"))


def hash_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            hashlib.sha256(path.read_bytes()).digest()


def bench(tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 1000) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        cache, tasks_dir = Path(scratch) / "cache", Path(scratch) / "tasks"
        cached = fill_cache(cache, tasks_dir, tasks)
        tool = [sys.executable, "-m", "scripts.prepare_tasks"]
        fetch = [*tool, "fetch", "train", "--image", "example/sandbox:1"]
        fetch += ["--tasks-dir", str(tasks_dir), "--cache-dir", str(cache)]
        floor = measured_here(lambda: hash_all(cached))
        rows = {
            "read and hash the files, nothing else": floor,
            "start the program": measured([*tool, "--help"]),
            "fetch: verify and write": measured(fetch),
            "fetch again: nothing to do": measured(fetch),
            "verify": measured([*tool, "verify", "train", "--tasks-dir", str(tasks_dir)]),
        }
    table = Table(f"{tasks} tasks", "wall s", "CPU s", "peak MB", "of reading and hashing")
    for name, cost in rows.items():
        peak = "-" if cost.peak_mb != cost.peak_mb else f"{cost.peak_mb:.0f}"
        table.add_row(name, f"{cost.wall_s:.2f}", f"{cost.cpu_s:.2f}", peak, f"{cost.cpu_s / floor.cpu_s:.1f}x")
    Console().print(table)


def main() -> int:
    typer.run(bench)
    return 0


if __name__ == "__main__":
    run_main(main)
