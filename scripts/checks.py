"""A check of something that must be true: what was found, and how to mend it. One type for the doctor and for Jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.errors import MachineError, NotReadyError, RecipeError, StackError

State = Literal["ok", "warn", "fail", "skipped"]
COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. ``skipped`` says that nothing was looked at: it is never a synonym of ``ok``."""

    name: str
    state: State
    found: str
    """What was found; for ``skipped``, why nothing could be looked at."""
    mend: str = ""
    """What to do about it; empty for ``ok``."""
    error: type[StackError] = MachineError
    """What a start that needs it ends with, if it fails; carries the exit code."""

    def __post_init__(self) -> None:
        if self.state in ("warn", "fail") and not self.mend:
            raise ValueError(f"check {self.name} is {self.state} and says not how to mend it")

    def as_dict(self) -> dict[str, Any]:
        value = asdict(self)
        del value["error"]
        return {**value, "exit_code": self.error.exit_code} if self.state == "fail" else value


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, mend: str) -> Check:
    return Check(name, "warn", found, mend)


def skipped(name: str, why: str) -> Check:
    return Check(name, "skipped", why)


def bad_recipe(name: str, found: str, mend: str) -> Check:
    """Recipe, tasks or the request are wrong: exit code 2."""
    return Check(name, "fail", found, mend, RecipeError)


def not_ready(name: str, found: str, mend: str) -> Check:
    """A peer, an image or the engine is not there, or is another than is needed: exit code 3."""
    return Check(name, "fail", found, mend, NotReadyError)


def unfit(name: str, found: str, mend: str) -> Check:
    """This machine does not fit: exit code 5."""
    return Check(name, "fail", found, mend, MachineError)


def exit_code(checks: Iterable[Check]) -> int:
    """0, or the code of the first failure; a bad recipe (2) comes before all others, since it can hide them."""
    codes = [check.error.exit_code for check in checks if check.state == "fail"]
    return RecipeError.exit_code if RecipeError.exit_code in codes else next(iter(codes), 0)


def require(checks: Sequence[Check]) -> None:
    """Raise the first failure as its error. Raises: RecipeError, NotReadyError, MachineError."""
    for check in checks:
        if check.state == "fail":
            raise check.error(f"{check.found}; {check.mend}")


def show(checks: Sequence[Check], console: Console) -> None:
    """One line a check, and under it how to mend what is not right."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        colour = COLOURS[check.state]
        lines = escape(check.found) + (f"\n[bold]mend:[/bold] {escape(check.mend)}" if check.mend else "")
        table.add_row(f"[{colour}]{check.state}[/{colour}]", check.name, lines)
    console.print(table)
    counts = {state: sum(check.state == state for check in checks) for state in COLOURS}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()), highlight=False)
