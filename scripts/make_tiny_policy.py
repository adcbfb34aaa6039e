"""``python -m scripts.make_tiny_policy make|verify|evaluate|record``: the tiny LFM2 that CPU runs train.

``make`` builds tokenizer and model from a seed and the recorded prompts of OpenCode, warms the model up on a task
suite and writes it with ``record.json``: arguments, versions, SHA-256 of each file, measured accuracy. Same arguments
and machine, same model up to float noise. It needs the trainer image's packages and no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts import make_suites
from scripts.tiny_policy import prompts
from services.common.errors import RecipeError, run_main
from services.common.run_dir import read_json, write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
RECORD = "record.json"
WEIGHTS = "model.safetensors"
MAX_BYTES = 8 * 2**20
PACKAGES = ("torch", "transformers", "tokenizers", "trl")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)
TasksDir = Annotated[Path, typer.Option(help="Folder of the task suites.")]
Suite = Annotated[str, typer.Option(help="Task suite below it, with train/ and heldout/.")]
Folder = Annotated[Path, typer.Option(help="Folder of the model.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; more than there are free cores is slower.")]


@app.command()
def make(
    suite: Suite = "smoke",
    tasks_dir: TasksDir = ROOT / "data/tasks",
    out: Folder = ROOT / "data/models/tiny-lfm2",
    seed: Annotated[int, typer.Option(help="Of weights and examples.")] = 1,
    target_accuracy: Annotated[
        float, typer.Option(min=0, max=1, help="Share of right answers to aim at, sampling at temperature 1.")
    ] = 0.45,
    warmup_steps: Annotated[int, typer.Option(min=10, help="Steps of the supervised warm-up.")] = 600,
    batch_size: Annotated[int, typer.Option(min=4, help="Conversations a step.")] = 16,
    bpe_pieces: Annotated[int, typer.Option(min=300, help="BPE vocabulary, bytes included.")] = 640,
    errors: Annotated[
        prompts.Errors, typer.Option(help="What it does when it is wrong: another task's command, or no answer.txt.")
    ] = "other-task",
    phrases: Annotated[bool, typer.Option(help="One token for each line of OpenCode's constant prompt.")] = True,
    threads: Threads = 2,
) -> None:
    """Make the model; replaces the one in --out."""
    arguments = {**locals(), "tasks_dir": None, "out": None}
    train, heldout = read_suites(tasks_dir, suite)
    set_threads(threads)
    from scripts.tiny_policy import model as models
    from scripts.tiny_policy import tokenizer as tokenizers
    from scripts.tiny_policy import warmup

    started = time.monotonic()
    examples = train + [prompts.Task(*task) for task in make_suites.WARMUP.get(suite, tuple)()]
    tokenizer = tokenizers.build(examples, bpe_pieces, phrases)
    model = models.build(tokenizer, seed)
    rng = random.Random(seed)
    data = warmup.Conversations(tokenizer, prompts.Examples(examples, heldout, rng, errors), rng)
    schedule = warmup.Schedule(target_accuracy=target_accuracy, steps=warmup_steps, batch_size=batch_size)
    with steps_bar(schedule.steps) as report:
        warmup.run(model, data, schedule, report)
    measured = measure(model, tokenizer, train, heldout)
    record = {
        "arguments": {key: value for key, value in arguments.items() if value is not None},
        "opencode_version": prompts.recorded()["opencode_version"],
        "versions": {name: version(name) for name in PACKAGES},
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "seconds": round(time.monotonic() - started),
        **measured,
    }
    publish(out, record, lambda folder: (model.save_pretrained(folder), tokenizer.save_pretrained(folder)))
    show(record)


@app.command()
def verify(folder: Folder = ROOT / "data/models/tiny-lfm2") -> None:
    """Compare the model's files with the hashes in its record; exit code 2 if one differs."""
    record = read_json(folder / RECORD)
    if record is None:
        raise RecipeError(f"{folder / RECORD} does not exist; make the model: python -m scripts.make_tiny_policy make")
    found = hashes(folder)
    recorded: dict[str, str] = record["sha256"]
    wrong = sorted(name for name in found | recorded if found.get(name) != recorded.get(name))
    if wrong:
        raise RecipeError(
            f"{folder}: {', '.join(wrong)} differ from {RECORD}; restore them, or make the model again: "
            "python -m scripts.make_tiny_policy make"
        )
    console.print(f"{len(found)} files as recorded; model.revision is sha256:{found[WEIGHTS]}")


@app.command()
def evaluate(
    suite: Suite = "smoke",
    tasks_dir: TasksDir = ROOT / "data/tasks",
    folder: Folder = ROOT / "data/models/tiny-lfm2",
    threads: Threads = 2,
) -> None:
    """Measure a made model on a suite, in the full prompts; prints JSON."""
    train, heldout = read_suites(tasks_dir, suite)
    set_threads(threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    json.dump(measure(model, tokenizer, train, heldout), sys.stdout, indent=2, sort_keys=True)


@app.command()
def record(
    opencode: Annotated[Path, typer.Option(help="The opencode binary, of the version that the sandboxes carry.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = prompts.REQUESTS,
) -> None:
    """Record what this OpenCode sends, for a new version of it; then make the model again."""
    from scripts.tiny_policy import recording

    # Not sorted: the chat template writes a tool's keys in the order in which OpenCode sends them.
    write_text(out, json.dumps(recording.record(opencode), indent=1, ensure_ascii=False) + "\n")


def read_suites(tasks_dir: Path, suite: str) -> tuple[list[prompts.Task], list[prompts.Task]]:
    return prompts.read_suite(tasks_dir, f"{suite}/train"), prompts.read_suite(tasks_dir, f"{suite}/heldout")


def set_threads(threads: int) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


@contextmanager
def steps_bar(total: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar that takes (step, loss)."""
    loss_column = TextColumn("{task.fields[loss]}")
    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss_column)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("warm-up", total=total, loss="")
        yield lambda step, loss: progress.update(bar, completed=step, loss=f"loss {loss:.3f}")


def measure(model: Any, tokenizer: Any, train: list[prompts.Task], heldout: list[prompts.Task]) -> dict[str, Any]:
    """Prompt lengths in tokens, and per task the exact chance of the reference answer (``sampled``, ``greedy``)."""
    from scripts.tiny_policy import tokenizer as tokenizers
    from scripts.tiny_policy import warmup

    def accuracy(tasks: list[prompts.Task]) -> dict[str, Any]:
        scores = {task.name: warmup.score_task(model, tokenizer, task) for task in tasks}
        return {
            "sampled": mean(score["call"].probability for score in scores.values()),
            "greedy": mean(score["call"].greedy for score in scores.values()),
            "final_text": mean(score["final"].probability for score in scores.values()),
            "title": mean(score["title"].probability for score in scores.values()),
            "tasks": {name: round(score["call"].probability, 4) for name, score in scores.items()},
        }

    request = tokenizers.render(tokenizer, *prompts.agent_request(train[0].instruction))
    return {
        "prompt_tokens": len(tokenizers.encode(tokenizer, request)),
        "accuracy": {"train": accuracy(train), "heldout": accuracy(heldout)},
    }


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the model but the record and the page about it."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in (RECORD, "README.md")
    }


def publish(out: Path, record: dict[str, Any], save: Callable[[Path], object]) -> None:
    """Write the model beside ``out``, check its size, move the files into place, the record last."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as aside:
        save(Path(aside))
        files = sorted(Path(aside).iterdir())
        if (size := sum(path.stat().st_size for path in files)) > MAX_BYTES:
            raise RecipeError(f"the model has {size} bytes; {MAX_BYTES} are allowed: use fewer --bpe-pieces")
        for name in hashes(out):
            (out / name).unlink()
        for path in files:
            path.chmod(0o644)  # safetensors writes 0600; the services that read it have other users
            os.replace(path, out / path.name)
    write_json(out / RECORD, {**record, "sha256": hashes(out)})


def show(record: dict[str, Any]) -> None:
    table = Table(title=f"{record['parameters']:,} parameters, prompt {record['prompt_tokens']} tokens")
    for column in ("tasks", "sampled", "greedy", "final text"):
        table.add_column(column)
    for name, row in record["accuracy"].items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in ("sampled", "greedy", "final_text")))
    console.print(table)


if __name__ == "__main__":
    run_main(app)
