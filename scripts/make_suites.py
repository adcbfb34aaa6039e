"""Write the task suites that ship with the project, ``smoke`` and ``learn``, and their pin files, from a seed.

``python -m scripts.make_suites [--out DIR] [--check]``. Same seed, same bytes, on every machine: ``--check`` compares
instead of writing, and a test runs it, so that the shipped files are what this program makes.

A task is a question about small data files. Its data travel as text in the task's healthcheck command, the hook by
which the recipe's own tasks pull theirs. Harbor runs it in the started sandbox before the agent, on every backend
alike, so no image is built per task and no path of the host is mounted. The reference solution is one shell line,
``solution/solve.sh``. A held-out task is a new combination of words that were all seen in training.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from services.common.errors import RecipeError, run_main
from services.common.tasks import (
    COMPOSE_FILE,
    SANDBOX_COMPOSE,
    SANDBOX_IMAGE,
    WORKDIR,
    PinFile,
    ShippedSource,
    dump_pin,
    listing,
    load_task,
    pin_task,
)

SEED = 20261129
TASKS_DIR = Path(__file__).resolve().parents[1] / "data" / "tasks"
GRADER = Path(__file__).with_name("suite_grader.py")
NAMES = (
    "ann", "ben", "cat", "dan", "eva", "fay", "gus", "hal", "ida", "joe", "kim", "leo",
    "mia", "ned", "ola", "pia", "rob", "sue", "tom", "uma", "vic", "wes", "yan", "zoe",
)  # fmt: skip

Split = Literal["train", "heldout"]
Answer = int | str


@dataclass(frozen=True)
class TaskSpec:
    """One task before it is written."""

    split: Split
    name: str
    instruction: str
    command: str
    """The reference solution, one shell line."""
    answer: Answer
    data_script: str
    """Shell lines that make the data files in the working directory; running them again changes nothing."""
    difficulty: Literal["easy", "medium", "hard"]


# --- smoke: one short command each; four forms x three files of name,number lines ----------------------------------

Row = dict[str, Any]
"""Column -> value, a name or a whole number."""
Table = list[Row]


@dataclass(frozen=True)
class SmokeForm:
    name: str
    instruction: str
    command: str
    answer: Callable[[Table], Answer]


SMOKE_FORMS = (
    SmokeForm("lines", "Write the number of lines of {file} to answer.txt.", "wc -l < {file} > answer.txt", len),
    SmokeForm(
        "largest", "Write the largest number of {file} to answer.txt.",
        "cut -d, -f2 {file} | sort -n | tail -1 > answer.txt", lambda table: max(row["number"] for row in table),
    ),
    SmokeForm(
        "smallest", "Write the smallest number of {file} to answer.txt.",
        "cut -d, -f2 {file} | sort -n | head -1 > answer.txt", lambda table: min(row["number"] for row in table),
    ),
    SmokeForm(
        "first", "Write the first name of {file} to answer.txt.",
        "cut -d, -f1 {file} | head -1 > answer.txt", lambda table: table[0]["name"],
    ),
)  # fmt: skip
SMOKE_FILES = ("a.csv", "b.csv", "c.csv")
SMOKE_HELDOUT = {("lines", "a.csv"), ("largest", "b.csv"), ("smallest", "c.csv"), ("first", "a.csv")}


def smoke_tasks(seed: int) -> Iterator[TaskSpec]:
    for form in SMOKE_FORMS:
        for file in SMOKE_FILES:
            rng = random.Random(f"smoke {seed} {form.name} {file}")
            tables = smoke_tables(rng, form, file)
            yield TaskSpec(
                split="heldout" if (form.name, file) in SMOKE_HELDOUT else "train",
                name=f"{form.name}-{file[0]}",
                instruction=form.instruction.format(file=file),
                command=form.command.format(file=file),
                answer=form.answer(tables[file]),
                data_script="".join(here_document(name, csv_text(table)) for name, table in tables.items()),
                difficulty="easy",
            )


def smoke_tables(rng: random.Random, form: SmokeForm, file: str) -> dict[str, Table]:
    """Draw tables until no other form or file gives the right answer: a wrong command is then never right."""
    while True:
        sizes = rng.sample(range(4, 10), len(SMOKE_FILES))
        tables = {name: smoke_table(rng, size) for name, size in zip(SMOKE_FILES, sizes, strict=True)}
        others = [
            other.answer(table)
            for other in SMOKE_FORMS
            for name, table in tables.items()
            if (other.name, name) != (form.name, file)
        ]
        if form.answer(tables[file]) not in others:
            return tables


def smoke_table(rng: random.Random, size: int) -> Table:
    names, numbers = rng.sample(NAMES, size), rng.sample(range(20, 99), size)
    return [{"name": name, "number": number} for name, number in zip(names, numbers, strict=True)]


# --- learn: five forms x three file types x five columns ----------------------------------------------------------

LEARN_COLUMNS = ("pay", "cost", "size", "mass", "area")
WARMUP_COLUMNS = (
    "age",
    "rank",
    "speed",
    "width",
    "depth",
    "score",
    "price",
    "level",
    "hours",
    "weight",
    "height",
    "count",
)
"""Only in questions that the tiny policy is warmed up on: it learns there what words are for, and none of the tasks."""
LEARN_FILES = ("a.csv", "b.json", "c.db")
LEARN_DIFFICULTY: dict[str, Literal["easy", "medium", "hard"]] = {"a.csv": "easy", "b.json": "medium", "c.db": "hard"}


@dataclass(frozen=True)
class LearnForm:
    """One kind of question, with its solution for each type of file."""

    name: str
    instruction: str
    csv: str
    json: str
    sql: str
    answer: Callable[[Table, str], Answer]

    def command(self, file: str, column: str) -> str:
        template = {"a.csv": self.csv, "b.json": self.json, "c.db": self.sql}[file]
        field = str((*LEARN_COLUMNS, *WARMUP_COLUMNS).index(column) + 2)  # the name is field 1
        return template.replace("COLUMN", column).replace("FIELD", field) + " > answer.txt"


LEARN_FORMS = (
    LearnForm(
        "largest", "Write the largest {column} in {file} to answer.txt.",
        "tail -n +2 a.csv | cut -d, -fFIELD | sort -n | tail -1",
        "jq 'map(.COLUMN) | max' b.json", "sqlite3 c.db 'select max(COLUMN) from t'",
        lambda table, column: max(row[column] for row in table),
    ),
    LearnForm(
        "smallest", "Write the smallest {column} in {file} to answer.txt.",
        "tail -n +2 a.csv | cut -d, -fFIELD | sort -n | head -1",
        "jq 'map(.COLUMN) | min' b.json", "sqlite3 c.db 'select min(COLUMN) from t'",
        lambda table, column: min(row[column] for row in table),
    ),
    LearnForm(
        "total", "Write the total {column} in {file} to answer.txt.",
        "awk -F, '{s += $FIELD} END {print s}' a.csv",
        "jq 'map(.COLUMN) | add' b.json", "sqlite3 c.db 'select sum(COLUMN) from t'",
        lambda table, column: sum(row[column] for row in table),
    ),
    LearnForm(
        "different", "Write the number of different {column} values in {file} to answer.txt.",
        "tail -n +2 a.csv | cut -d, -fFIELD | sort -u | wc -l",
        "jq 'map(.COLUMN) | unique | length' b.json", "sqlite3 c.db 'select count(distinct COLUMN) from t'",
        lambda table, column: len({row[column] for row in table}),
    ),
    LearnForm(
        "who", "Write the name with the largest {column} in {file} to answer.txt.",
        "tail -n +2 a.csv | sort -t, -kFIELD,FIELDn | tail -1 | cut -d, -f1",
        "jq -r 'max_by(.COLUMN) | .name' b.json", "sqlite3 c.db 'select name from t order by COLUMN desc limit 1'",
        lambda table, column: max(table, key=lambda row: row[column])["name"],
    ),
)  # fmt: skip


def learn_tasks(seed: int) -> Iterator[TaskSpec]:
    for form_index, form in enumerate(LEARN_FORMS):
        for file_index, file in enumerate(LEARN_FILES):
            for column_index, column in enumerate(LEARN_COLUMNS):
                tables = learn_tables(random.Random(f"learn {seed} {form.name} {file} {column}"), form, file, column)
                yield TaskSpec(
                    # A third is held out, so that each pair of words is still seen in training.
                    split="heldout" if (form_index + file_index + column_index) % 3 == 0 else "train",
                    name=f"{form.name}-{column}-{file[0]}",
                    instruction=form.instruction.format(column=column, file=file),
                    command=form.command(file, column),
                    answer=form.answer(tables[file], column),
                    data_script=here_document("a.csv", csv_text(tables["a.csv"], header=True))
                    + here_document("b.json", json_text(tables["b.json"]))
                    + sqlite_script("c.db", tables["c.db"]),
                    difficulty=LEARN_DIFFICULTY[file],
                )


def learn_warmup() -> Iterator[tuple[str, str, str]]:
    """Name, instruction and command of every question about the warm-up's columns. No sandbox runs them."""
    for form in LEARN_FORMS:
        for file in LEARN_FILES:
            for column in WARMUP_COLUMNS:
                yield (
                    f"{form.name}-{column}-{file[0]}",
                    form.instruction.format(column=column, file=file),
                    form.command(file, column),
                )


def learn_tables(rng: random.Random, form: LearnForm, file: str, column: str) -> dict[str, Table]:
    """Draw tables until the right answer is right for no other question about them."""
    while True:
        tables = {name: learn_table(rng) for name in LEARN_FILES}
        others = [
            other.answer(table, c)
            for other in LEARN_FORMS
            for name, table in tables.items()
            for c in LEARN_COLUMNS
            if (other, name, c) != (form, file, column)
        ]
        if form.answer(tables[file], column) not in others:
            return tables


def learn_table(rng: random.Random) -> Table:
    """6 to 20 rows of names and numbers."""
    size = rng.randint(6, 20)
    columns = {column: learn_column(rng, size) for column in LEARN_COLUMNS}
    return [
        {"name": name} | {column: columns[column][index] for column in LEARN_COLUMNS}
        for index, name in enumerate(rng.sample(NAMES, size))
    ]


def learn_column(rng: random.Random, size: int) -> list[int]:
    """Numbers of which the largest stands alone and others repeat, so that each form has one right answer."""
    *values, largest = sorted(rng.sample(range(100, 999), rng.randint(size // 2, size)))
    column = [largest, *(rng.choice(values) for _ in range(size - 1))]
    rng.shuffle(column)
    return column


# --- data files as text -------------------------------------------------------------------------------------------


def csv_text(table: Table, *, header: bool = False) -> str:
    rows = ([list(table[0])] if header else []) + [list(row.values()) for row in table]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def json_text(table: Table) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n"


def here_document(name: str, text: str) -> str:
    return f"cat > {name} <<'END'\n{text}END\n"


def sqlite_script(name: str, table: Table) -> str:
    columns = ", ".join(f"{column} {'text' if column == 'name' else 'integer'}" for column in table[0])
    rows = "".join(f"    {tuple(row.values())},\n" for row in table)
    return f"""\
rm -f {name}
python3 - <<'END'
import sqlite3

rows = [
{rows}]
with sqlite3.connect("{name}") as db:
    db.execute("create table t ({columns})")
    db.executemany("insert into t values ({", ".join("?" * len(table[0]))})", rows)
END
"""


# --- writing ------------------------------------------------------------------------------------------------------

SUITES: dict[str, Callable[[int], Iterator[TaskSpec]]] = {"smoke": smoke_tasks, "learn": learn_tasks}

WARMUP: dict[str, Callable[[], Iterable[tuple[str, str, str]]]] = {"learn": learn_warmup}

TEST_SH = """\
#!/bin/sh
# Always leaves a valid reward: 0 unless the grader prints 1. What an agent may have put in its place goes first.
# -I and -S: Python takes no module from the agent's folders, its environment or site-packages.
cd / && rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json
reward=$(timeout 30 python3 -IS /tests/grader.py) || reward=0
[ "$reward" = 1 ] || reward=0
printf '%s\\n' "$reward" > /logs/verifier/reward.txt
exit 0
"""


def task_toml(spec: TaskSpec) -> str:
    """task.toml in the schema of Harbor 0.24; every value is ours, so plain formatting is enough."""
    return f"""\
schema_version = "1.4"

[metadata]
difficulty = "{spec.difficulty}"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
docker_image = "{SANDBOX_IMAGE}"
cpus = 1
memory_mb = 4096
workdir = "{WORKDIR}"

[environment.healthcheck]
interval_sec = 1.0
timeout_sec = 30.0
retries = 3
command = '''
set -e
mkdir -p {WORKDIR}
cd {WORKDIR}
{spec.data_script}'''
"""


def write_task(spec: TaskSpec, folder: Path) -> None:
    kind = "number" if isinstance(spec.answer, int) else "text"
    files = {
        "task.toml": task_toml(spec),
        "instruction.md": spec.instruction + "\n",
        COMPOSE_FILE: SANDBOX_COMPOSE,
        "solution/solve.sh": spec.command + "\n",
        "tests/test.sh": TEST_SH,
        "tests/grader.py": GRADER.read_text(encoding="utf-8"),
        "tests/expected.json": json.dumps({"kind": kind, "value": spec.answer}) + "\n",
    }
    for relative, text in files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def write_suite(out: Path, suite: str, seed: int = SEED) -> PinFile:
    """Replace the suite's folder and pin file below ``out``.

    The pinned order is a shuffle by hash, so that neighbouring training steps ask different questions.
    """
    shutil.rmtree(out / suite, ignore_errors=True)
    specs = sorted(SUITES[suite](seed), key=lambda spec: hashlib.sha256(f"{seed} {spec.name}".encode()).digest())
    tasks = []
    for spec in specs:
        folder = out / suite / spec.split / spec.name
        write_task(spec, folder)
        tasks.append(pin_task(load_task(folder), spec.split))
    grader = hashlib.sha256(GRADER.read_bytes()).hexdigest()
    pin = PinFile(source=ShippedSource(), grader_sha256=(grader,), tasks=tuple(tasks))
    (out / f"{suite}.json").write_text(dump_pin(pin), encoding="utf-8", newline="\n")
    return pin


def different_files(first: Path, second: Path, names: Iterable[str]) -> list[str]:
    """Paths below both folders whose bytes differ or that only one of them has."""

    def content(root: Path) -> dict[str, bytes]:
        paths = [path for name in names for path in [root / f"{name}.json", *(root / name).rglob("*")]]
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()}

    mine, theirs = content(first), content(second)
    return sorted(path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path))


def make(
    out: Annotated[Path, typer.Option(help="Folder of the suites.")] = TASKS_DIR,
    check: Annotated[bool, typer.Option("--check", help="Compare with what is there; write nothing.")] = False,
) -> None:
    """Write the shipped suites, or check that they are what the seed makes."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) if check else out
        for suite in SUITES:
            pin = write_suite(target, suite)
            print(f"{suite}: {len(pin.in_split('train'))} train, {len(pin.in_split('heldout'))} heldout")
        if check and (different := different_files(target, out, SUITES)):
            raise RecipeError(listing(f"{out} is not what the seed makes; run `make_suites` again:", different))


def main() -> int:
    typer.run(make)
    return 0


if __name__ == "__main__":
    run_main(main)
