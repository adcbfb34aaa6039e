"""``python -m scripts.doctor``: is this machine, with this recipe, ready to train? ``--json`` for a program."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console

from scripts import checks
from scripts.doctor import report
from scripts.doctor.setup import Setup
from services.common.errors import run_main


def main(
    variant: Annotated[str, typer.Option(envvar="VARIANT", help="cpu or cuda: which images")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="print the checks as JSON")] = False,
) -> None:
    """Look at every precondition of a run; exit code 0, or that of the first failure: 2 recipe, 3 peer, 5 machine."""
    run_main(lambda: _examine(variant, as_json))


def _examine(variant: str, as_json: bool) -> int:
    began = time.monotonic()
    found = report.examine(Setup.from_environment(variant))
    if as_json:
        value = {"checks": [check.as_dict() for check in found], "exit_code": checks.exit_code(found)}
        print(json.dumps(value, indent=2))
    else:
        console = Console()
        checks.show(found, console)
        console.print(f"{time.monotonic() - began:.1f} s", highlight=False)
    return checks.exit_code(found)


if __name__ == "__main__":
    typer.run(main)
