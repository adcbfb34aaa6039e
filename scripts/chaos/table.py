"""The table of a chaos test: a line for each fault, and one for each run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.chaos.torment import NAMED_LIMIT_S
from scripts.stack import console

TABLE_WIDTH = 150
FAULTLESS = ("replayed", "lost", "dropped", "problems", "containers_left", "networks_left")


def show(book: dict[str, Any]) -> None:
    faults = Table(title="Faults")
    for column in ("fault", "step", "what happened", "named", "back", "next step", "run"):
        faults.add_column(column, overflow="fold")
    for name, found in book["outcomes"].items():
        faults.add_row(
            name, str(found["step"]), found["what"] if found["recovered"] else f"NOT SURVIVED: {found['what']}",
            _s(found["named_s"]), _s(found["back_s"]), _s(found["step_s"]), found["run"][-6:],
        )  # fmt: skip
    runs = Table(title="Runs")
    for column in (
        "run",
        "end",
        "steps",
        "replayed",
        "lost",
        "dropped",
        "containers left",
        "networks left",
        "base hash",
    ):
        runs.add_column(column, overflow="fold")
    for name, found in book["runs"].items():
        runs.add_row(
            name[-6:], f"{found['exit_code']} {found['reason']}", str(found["steps"]), str(len(found["replayed"])),
            str(len(found["lost"])), str(len(found["dropped"])), str(found["containers_left"]),
            str(found["networks_left"]), "unchanged" if found["base_unchanged"] else "CHANGED",
        )  # fmt: skip
        for problem in found["problems"]:
            runs.add_row("", problem)
    wide = Console(stderr=True, width=max(console.width, TABLE_WIDTH))
    wide.print(faults)
    wide.print(runs)
    outcomes = book["outcomes"].values()
    console.print(f"{sum(found['recovered'] for found in outcomes)} of {len(outcomes)} faults survived")


def all_well(book: dict[str, Any]) -> bool:
    survived = all(
        found["recovered"] and (found["named_s"] or 0) <= NAMED_LIMIT_S for found in book["outcomes"].values()
    )
    return survived and all(
        found["exit_code"] == 0 and found["base_unchanged"] and not any(found[key] for key in FAULTLESS)
        for found in book["runs"].values()
    )


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"
