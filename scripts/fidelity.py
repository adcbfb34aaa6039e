"""``python -m scripts.fidelity``: one table of all fidelity checks, on a policy of its own. ``make fidelity``.

Brings up ``policy`` of compose.yaml under another project name, runs ``services.trainer.fidelity`` in the trainer's
image on the same network, gives the tool-call cases to the parser in the policy's image, takes everything down again.
A run that is under way is not touched. Exit codes: 0 all checks passed, 1 one did not, 3 the policy did not start.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scripts.stack import ROOT, compose_files
from services.common import run_dir
from services.common.errors import NotReadyError, RecipeError, run_main

PROJECT = "opencode-rl-fidelity"
CASES = ROOT / "tests" / "cases" / "lfm2_tool_calls.json"

QUIET = ["--env", "TRL_EXPERIMENTAL_SILENCE=1", "--env", "HF_HUB_DISABLE_PROGRESS_BARS=1"]
WIDTH = 120
"""Of the table in a file or a pipe."""

Row = dict[str, Any]
"""``services.trainer.fidelity.Check`` as JSON."""


def main(
    variant: Annotated[str, typer.Option(help="cpu or cuda: which images, with or without GPUs")] = "cpu",
    output: Annotated[Path, typer.Option(help="where the numbers go as JSON")] = ROOT / "runs" / "fidelity.json",
) -> None:
    """Check that what is trained is exactly what is sampled."""
    run_main(lambda: _main(variant, output))


def _main(variant: str, output: Path) -> int:
    if variant not in ("cpu", "cuda"):
        raise RecipeError(f"VARIANT is {variant!r}; allowed: cpu, cuda")
    started, console = time.monotonic(), Console(stderr=True)
    stack = Compose(variant)
    try:
        console.print("Starting a policy for the checks")
        stack.run("up", "--detach", "--wait", "policy")
        console.print("Packing, weight sync and importance ratio")
        rows = trainer_rows(
            stack.output("run", "--rm", "--no-deps", "-T", *QUIET, "trainer", *_module("trainer.fidelity"))
        )
        console.print("Tool-call cases")
        parsed = stack.output("exec", "-T", "policy", *_module("policy.parse_cases"), "/dev/stdin", stdin=CASES)
        rows.append(cases_row(parsed))
    finally:
        stack.run("down", "--remove-orphans", "--volumes", check=False)
    passed = all(row["passed"] for row in rows)
    value = {"passed": passed, "wall_s": round(time.monotonic() - started, 1), "checks": rows}
    run_dir.write_json(output, {"recipe": os.environ.get("RECIPE"), "at": run_dir.utc_now(), **value})
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(table(rows))
    console.print(f"{'all checks passed' if passed else 'A CHECK FAILED'}, {value['wall_s']:.0f} s, {output}")
    return 0 if passed else 1


class Compose:
    """``docker compose`` on this repository's files, under a project name of its own."""

    def __init__(self, variant: str) -> None:
        files = (str(ROOT / name) for name in compose_files(variant))
        self._command = ["docker", "compose", *(part for name in files for part in ("--file", name))]
        self._environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, "TAG": os.environ.get("TAG") or variant}

    def run(self, *arguments: str, check: bool = True) -> None:
        """Raises: NotReadyError: it failed; with the logs of the services."""
        done = self._call(arguments, stderr=subprocess.PIPE)
        if check and done.returncode:
            logs = self._call(("logs", "--tail", "40"), stderr=subprocess.STDOUT).stdout
            raise NotReadyError(f"docker compose {' '.join(arguments)} failed:\n{done.stderr}\n{logs}")

    def output(self, *arguments: str, stdin: Path = Path(os.devnull)) -> str:
        """What the command printed, whatever its exit code; its errors go to ours."""
        with stdin.open("rb") as stream:
            return self._call(arguments, stdin=stream).stdout

    def _call(self, arguments: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            env=self._environment, stdout=subprocess.PIPE, text=True, check=False, **options,
        )  # fmt: skip


def _module(name: str) -> list[str]:
    return ["python", "-m", f"services.{name}"]


def trainer_rows(printed: str) -> list[Row]:
    """The checks, which are the last line. Raises: NotReadyError: there are none; its errors were shown before."""
    last = printed.strip().rpartition("\n")[2]
    try:
        rows: list[Row] = json.loads(last)
    except ValueError:
        raise NotReadyError(f"services.trainer.fidelity came to no end; its last line is {last[-300:]!r}") from None
    return rows


def cases_row(printed: str) -> Row:
    """The row of ``services.policy.parse_cases``, whose last line has the counts."""
    last = printed.strip().rpartition("\n")[2]
    words = last.split()
    counts = [int(word) for word in words if word.isdigit()]
    whole = len(counts) == 3 and words[1] == "cases,"
    found = f"{counts[1]} of {counts[1] + counts[2]} PASS" if whole else last or "nothing printed"
    passed = whole and counts[1] > 0 and counts[2] == 0
    return {"check": "tool-call cases, in four ways of cutting", "found": found, "allowed": "all PASS",
            "passed": passed, "control": False}  # fmt: skip


def table(rows: list[Row]) -> Table:
    found = Table(title="Fidelity: is what is trained exactly what is sampled?")
    found.add_column("check")
    found.add_column("found", justify="right")
    found.add_column("allowed", justify="right")
    found.add_column("")
    for row in rows:
        shown = _shown(row["found"])
        name = f"[dim]control:[/dim] {row['check']}" if row["control"] else row["check"]
        found.add_row(name, shown, row["allowed"], "[green]PASS[/green]" if row["passed"] else "[red]FAIL[/red]")
    return found


def _shown(found: float | int | str) -> str:
    if not isinstance(found, float):
        return str(found)
    return f"{found:.7f}" if abs(found - 1) < 0.1 else f"{found:.3g}"  # a ratio near 1, or a difference


if __name__ == "__main__":
    typer.run(main)
