"""``python -m scripts.chaos [--only kill:policy:sync,...|policy|sync]``: the stack under kills, and what came of it.

A run goes on through several faults; where it ends before all are made, another run takes the rest. Results are added
to ``chaos.json`` in RUNS_DIR, so that the whole can be done in pieces: each call makes what is missing there,
``--fresh`` forgets it, ``--table`` only shows it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.chaos import account, faults, table
from scripts.chaos.faults import ALL, Fault
from scripts.chaos.torment import Outcome, RunOver, Torment
from scripts.stack import ROOT, Stack, console, folder
from services.common import recipe, run_dir, signals
from services.common.errors import RecipeError, run_main
from services.common.run_dir import RunDir

RECIPE = ROOT / "data/recipes/chaos.toml"
RESTARTS = "on-failure:100"
END_LIMIT_S = 600.0


def main(
    only: Annotated[str, typer.Option(help="faults by name, victim or phase, joined by commas")] = "",
    minutes: Annotated[float, typer.Option(help="begin no further fault after so long")] = 60,
    fresh: Annotated[bool, typer.Option(help="forget earlier results")] = False,
    show: Annotated[bool, typer.Option("--table", help="only show what there is")] = False,
) -> None:
    """Make every fault that has no result yet, and show the table. Exit code 1 if one was not survived."""
    run_main(lambda: _main(only, minutes, fresh, show))


def _main(only: str, minutes: float, fresh: bool, show: bool) -> int:
    runs_dir = folder("RUNS_DIR", "runs")
    book = Book(runs_dir / "chaos.json", fresh)
    wanted = chosen(only)
    until = time.monotonic() + 60 * minutes
    with signals.stop_event() as stop:
        while not show and (left := [fault for fault in wanted if fault.name not in book.done]):
            torment_a_run(left, book, runs_dir, until, stop)
            if stop.is_set() or time.monotonic() > until or left[0].name not in book.done:
                break  # the last: a run that bore not even the first fault has something to be looked at
    table.show(book.value)
    return 0 if table.all_well(book.value) else 1


def chosen(only: str) -> list[Fault]:
    """Faults that a part of ``only`` names. Raises: RecipeError: a part that names none."""
    if not only:
        return list(ALL)
    found: list[Fault] = []
    for part in only.split(","):
        matches = [fault for fault in ALL if part == fault.name or part in fault.name.split(":")]
        if not matches:
            raise RecipeError(f"{part!r} names no fault; allowed: {', '.join(fault.name for fault in ALL)}, or a part")
        found += [fault for fault in matches if fault not in found]
    return found


class Book:
    """``chaos.json``: outcomes by fault, and the account of every run."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self._path = path
        self.value: dict[str, Any] = (None if fresh else run_dir.read_json(path)) or {"outcomes": {}, "runs": {}}

    @property
    def done(self) -> set[str]:
        return set(self.value["outcomes"])

    def add(self, run: RunDir, outcome: Outcome) -> None:
        self.value["outcomes"][outcome.fault] = {**outcome.as_json(), "run": run.path.name}
        run_dir.write_json(self._path, self.value)

    def close(self, run: RunDir, account: dict[str, Any]) -> None:
        self.value["runs"][run.path.name] = account
        run_dir.write_json(self._path, self.value)


def torment_a_run(left: list[Fault], book: Book, runs_dir: Path, until: float, stop: signals.StopFlag) -> None:
    """Start a run, make as many of the faults as it lives through, and let it end."""
    name = f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    environment = {
        "RUN_NAME": name, "RECIPE": str(RECIPE), "RUNS_DIR": str(runs_dir), "RESTART": RESTARTS,
        "TASKS_DIR": str(folder("TASKS_DIR", "data/tasks")), "MAX_STEPS": str(2 * len(left) + 2),
    }  # fmt: skip
    os.environ |= environment
    run = RunDir(runs_dir / recipe.from_environment().run.name)
    base = Base(run)
    stack = Stack("cpu", environment, stop)
    try:
        stack.guarded(lambda: under_fire(stack, run, base, left, book, until, stop))
    finally:
        base.look()
        found = account.of(run)
        stack.down()
        containers, networks = faults.left_behind(name)
        book.close(
            run,
            {
                "exit_code": (run_dir.read_json(run.result) or {}).get("exit_code"),
                "reason": (run_dir.read_json(run.result) or {}).get("reason"),
                "steps": found.steps, "replayed": found.replayed, "lost": found.lost, "dropped": found.dropped,
                "problems": found.problems, "containers_left": containers, "networks_left": networks,
                "base_unchanged": base.unchanged,
            },
        )  # fmt: skip


def under_fire(
    stack: Stack, run: RunDir, base: Base, left: list[Fault], book: Book, until: float, stop: signals.StopFlag
) -> int:
    evaluated = any(fault.victim == "evaluator" for fault in left)
    servers = ["policy", "env", *(["policy-eval"] if evaluated else [])]
    console.print(f"Run [bold]{run.path.name}[/bold]: {len(left)} faults; starting {', '.join(servers)}")
    stack("up", "--detach", "--wait", *servers)
    stack("up", "--detach", "trainer", *(["evaluator"] if evaluated else []))
    torment = Torment(run, stop, console.print)
    for fault in left:
        if time.monotonic() > until or stop.is_set():
            break
        try:
            outcome = torment.strike(fault)
        except RunOver:
            break
        if stop.is_set():
            break
        book.add(run, outcome)
        base.look()
    wait_for_the_end(run, stack, stop)
    return 0


class Base:
    """The base weights' hashes, as each attempt found them when it started and when it ended."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.path / "base_weights.json"
        self._seen: list[dict[str, str]] = []

    def look(self) -> None:
        found = run_dir.read_json(self._path) or {}
        self._seen += [hashes for hashes in (found.get("at_start"), found.get("at_end")) if hashes]

    @property
    def unchanged(self) -> bool:
        return bool(self._seen) and all(hashes == self._seen[0] for hashes in self._seen)


def wait_for_the_end(run: RunDir, stack: Stack, stop: signals.StopFlag) -> None:
    """The run has what is left of its steps to end by itself."""
    until = time.monotonic() + END_LIMIT_S
    while not run.result.exists() and time.monotonic() < until and not stop.is_set():
        if stack.exit_code("trainer") is not None:
            return
        time.sleep(1)


if __name__ == "__main__":
    typer.run(main)
