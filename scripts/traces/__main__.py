"""``python -m scripts.traces``: list the rollouts of a run, read one, write them as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from scripts import run_view
from scripts.doctor.data import hub_snapshot
from scripts.stack import folder, hf_cache
from scripts.traces import page, reader, terminal
from scripts.traces.reader import Order, TokenText
from services.common import run_dir
from services.common.errors import RecipeError, run_main
from services.common.run_dir import RunDir

FILE = "traces.html"


def main(
    run: Annotated[str | None, typer.Option(help="name of the run; default: RUN_NAME, or the newest")] = None,
    step: Annotated[int | None, typer.Option(envvar="STEP", help="only rollouts in flight at this step")] = None,
    task: Annotated[str, typer.Option(envvar="TASK", help="only rollouts of this task")] = "",
    sort: Annotated[str, typer.Option(envvar="SORT", help=f"one of {', '.join(get_args(Order))}")] = "newest",
    limit: Annotated[int, typer.Option("--limit", "-n", envvar="N", min=1, help="at most so many")] = 100,
    rollout: Annotated[str, typer.Option("--id", envvar="ID", help="read the one whose id begins so")] = "",
    tokens: Annotated[bool, typer.Option(envvar="TOKENS", help="with ID: tokens, coloured by log-probability")] = False,
) -> None:
    """List rollouts and write them as one HTML file; with an id, read that one here."""
    run_main(lambda: _work(run_view.find_run(run), step, task or None, sort, limit, rollout, tokens))


def _work(run: RunDir, step: int | None, task: str | None, sort: str, limit: int, rollout: str, tokens: bool) -> int:
    console = Console()
    text_of = TokenText(tokenizer_of(run))
    if rollout:
        for part in terminal.reading(reader.load(run, reader.by_id(run, rollout)), text_of, tokens):
            console.print(part, soft_wrap=False)
        return 0
    order = _order(sort)
    found = reader.choose(run, step=step, task=task, order=order, limit=limit)
    total = len(run_dir.read_lines(run.rollouts / "index.jsonl"))
    console.print(terminal.listing(found, f"{run.path.name}: {len(found)} of {total} rollouts, {sort} first"))
    path = write(run, found, text_of, total)
    console.print(f"page: {path}", highlight=False, soft_wrap=True)
    console.print("read one here: make traces ID=<id> (TOKENS=1)", highlight=False)
    return 0


def _order(name: str) -> Order:
    orders: tuple[Order, ...] = get_args(Order)
    for order in orders:
        if order == name:
            return order
    raise RecipeError(f"SORT is {name!r}; allowed: {', '.join(orders)}")


def write(run: RunDir, records: list[reader.Record], text_of: TokenText, total: int) -> Path:
    """Write ``runs/<run>/traces.html``. Raises: RecipeError: this user cannot."""
    text = page.render(run.path.name, (reader.load(run, record) for record in records), text_of, total)
    try:
        run_dir.write_text(run.path / FILE, text)
    except PermissionError:
        raise RecipeError(f"{run.path} belongs to another user; {run_dir.TAKE_OVER}") from None
    return run.path / FILE


def tokenizer_of(run: RunDir) -> Path | None:
    """tokenizer.json of the run's model; None when the run does not say which, or it is not on this machine."""
    manifest = run_dir.read_json(run.manifest)
    if manifest is None:
        return None
    model = manifest["recipe"]["model"]
    if model["source"] == "local":
        return folder("MODELS_DIR", "data/models") / str(model["id"]) / "tokenizer.json"
    return hub_snapshot(hf_cache(), model["id"], model["revision"]) / "tokenizer.json"


if __name__ == "__main__":
    typer.run(main)
