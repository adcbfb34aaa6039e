"""services.common.tasks: what a suite, a task and a pin file must be, and the one message for each that is not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common import tasks
from services.common.errors import RecipeError
from services.common.tasks import PinFile, ShippedSource, TaskProblem, load_pin, load_suite, load_task

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "data" / "tasks"
TASK = "smoke/train/first-b"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of one shipped task."""
    return Path(shutil.copytree(SHIPPED / TASK, tmp_path / "first-b"))


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    """A copy of the shipped smoke suite with its pin file."""
    shutil.copytree(SHIPPED / "smoke", tmp_path / "tasks" / "smoke")
    shutil.copy(SHIPPED / "smoke.json", tmp_path / "tasks")
    return tmp_path / "tasks"


def problem_of(folder: Path) -> str:
    with pytest.raises(TaskProblem) as raised:
        load_task(folder)
    return str(raised.value)


def refusal_of(tasks_dir: Path, suite: str = "smoke/train") -> str:
    with pytest.raises(RecipeError) as raised:
        load_suite(tasks_dir, suite)
    return str(raised.value)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_shipped_task_is_read(task: Path) -> None:
    loaded = load_task(task)
    assert loaded.name == "first-b"
    assert loaded.instruction == "Write the first name of b.csv to answer.txt.\n"
    assert loaded.docker_image == "local/opencode-rl-sandbox:cpu"
    assert loaded.difficulty == "easy"
    assert loaded.reference_solution() == "cut -d, -f1 b.csv | head -1 > answer.txt"


def test_suite_comes_in_the_pinned_order(tasks_dir: Path) -> None:
    pinned = [entry["name"] for entry in json.loads((tasks_dir / "smoke.json").read_text())["tasks"]]
    loaded = [task.name for task in load_suite(tasks_dir, "smoke/train")]
    assert loaded == [name for name in pinned if name in loaded]
    assert loaded != sorted(loaded)
    assert [task.name for task in load_suite(tasks_dir, "smoke/train", limit=3)] == loaded[:3]


def test_suite_without_a_pin_file_comes_by_name(tasks_dir: Path) -> None:
    (tasks_dir / "smoke.json").unlink()
    loaded = [task.name for task in load_suite(tasks_dir, "smoke/train")]
    assert loaded == sorted(loaded) and len(loaded) == 8


def test_changed_missing_and_extra_tasks_are_listed_in_one_message(tasks_dir: Path) -> None:
    train = tasks_dir / "smoke" / "train"
    (train / "first-b" / "instruction.md").write_text("Another question.\n")
    shutil.rmtree(train / "lines-b")
    shutil.copytree(train / "first-c", train / "unpinned")
    message = refusal_of(tasks_dir)
    assert "first-b: instruction.md has SHA-256" in message
    assert "lines-b: pinned, but missing" in message
    assert "unpinned: extra: not pinned" in message


def test_tasks_with_one_instruction_are_refused_even_if_only_space_differs(tasks_dir: Path) -> None:
    (tasks_dir / "smoke.json").unlink()
    train = tasks_dir / "smoke" / "train"
    (train / "first-c" / "instruction.md").write_text(" " + (train / "first-b" / "instruction.md").read_text() + "\n")
    assert "first-b and first-c: the same instruction" in refusal_of(tasks_dir)


def test_train_and_heldout_that_share_a_task_are_refused(tasks_dir: Path) -> None:
    train = load_suite(tasks_dir, "smoke/train")
    with pytest.raises(RecipeError, match=f"{train[0].name} = {train[0].name}"):
        tasks.check_disjoint(train, train[:1])
    tasks.check_disjoint(train, load_suite(tasks_dir, "smoke/heldout"))


def test_tasks_that_name_the_projects_image_run_on_the_runs_own_and_others_are_refused() -> None:
    loaded = load_suite(SHIPPED, "smoke/train")
    for image in ("local/opencode-rl-sandbox:cpu", "localhost:5000/me/opencode-rl-sandbox:cuda", "mine:1"):
        tasks.check_image(loaded, image)
    digest = replace(loaded[0], docker_image="docker.io/me/opencode-rl-sandbox@sha256:0a")
    tasks.check_image([digest, replace(loaded[1], docker_image="mine:1")], "mine:1")
    for foreign in ("python:3.12-slim", "opencode-rl-sandbox/other:1"):
        with pytest.raises(RecipeError, match=f"first-b: {foreign}"):
            tasks.check_image([replace(loaded[1], name="first-b", docker_image=foreign)], "mine:1")


@pytest.mark.parametrize("suite", ["smoke/nothing", "nothing"])
def test_unknown_suite_says_what_there_is(tasks_dir: Path, suite: str) -> None:
    assert "(there: smoke)" in refusal_of(tasks_dir, suite)


def test_suite_that_is_pinned_but_not_fetched_says_so(tasks_dir: Path) -> None:
    (tasks_dir / "smoke.json").rename(tasks_dir / "train.json")
    assert "run `make prepare`, or `prepare_tasks fetch train`" in refusal_of(tasks_dir, "train")


@pytest.mark.parametrize("suite", ["../smoke", "smoke/..", "/etc", "smoke//train", "", "Smoke", "smoke/train/"])
def test_suite_name_that_leaves_the_folder_is_refused(tasks_dir: Path, suite: str) -> None:
    assert "is no suite name" in refusal_of(tasks_dir, suite)


def test_empty_suite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no task" in refusal_of(tmp_path, "empty")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("instruction.md", b"Write it.\r\n", "instruction.md has Windows line ends"),
        ("instruction.md", b"caf\xe9\n", "instruction.md is not UTF-8 (byte 3)"),
        ("instruction.md", b" \n\n", "instruction.md is empty"),
        ("instruction.md", b"\xef\xbb\xbfWrite it.\n", "starts with a byte-order mark"),
        ("instruction.md", b"a\0b\n", "NUL"),
        ("instruction.md", None, "instruction.md is missing"),
        ("task.toml", None, "task.toml is missing"),
        ("task.toml", b"[environment\n", "task.toml is not valid TOML"),
        ("task.toml", b"[environment]\n", "no [environment] docker_image"),
        ("task.toml", b"[environment]\ndocker_image = ' '\n", "no [environment] docker_image"),
        ("tests/test.sh", None, "tests/test.sh is missing"),
        ("tests/test.sh", b"#!/bin/sh\r\nexit 0\r\n", "test.sh has Windows line ends"),
        ("solution/solve.sh", b"true\r\n", "solve.sh has Windows line ends"),
    ],
)
def test_broken_task_has_one_message(task: Path, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        (task / file).unlink()
    else:
        (task / file).write_bytes(content)
    assert message in problem_of(task)


def test_link_in_a_task_is_refused(task: Path) -> None:
    os.symlink("/etc/passwd", task / "tests" / "answers")
    assert "tests/answers is a link" in problem_of(task)


@pytest.mark.parametrize(
    "text",
    [
        "${HF_TOKEN}",
        "$HF_TOKEN",
        "${HF_TOKEN:-x}",
        "${SANDBOX_NETWORK:-${HF_TOKEN}}",
        "a$$b$HF_TOKEN",
        "${HF_TOKEN?no}",
    ],
)
def test_task_that_reads_the_hosts_environment_is_refused(task: Path, text: str) -> None:
    compose = task / tasks.COMPOSE_FILE
    compose.write_text(f"services: {{main: {{environment: {{T: '{text}'}}}}}}\n")
    assert "it takes HF_TOKEN from the host's environment" in problem_of(task)
    load_task(task, allowed=tasks.ALLOWED_VARIABLES | {"HF_TOKEN"})
    load_task(task, published=True)


def test_env_tables_of_task_toml_count_too(task: Path) -> None:
    for section in ("environment.env", "verifier.env", "solution.env"):
        shutil.copy(SHIPPED / TASK / "task.toml", task)
        with (task / "task.toml").open("a") as file:
            file.write(f'\n[{section}]\nT = "${{HF_TOKEN}}"\n')
        assert "it takes HF_TOKEN" in problem_of(task), section


def test_dollar_in_a_shell_command_is_no_variable_of_the_host(task: Path) -> None:
    edit(task / "task.toml", "set -e\n", "set -e\necho ${HF_TOKEN}\n")
    (task / tasks.COMPOSE_FILE).write_text("services: {main: {command: ['sh', '-c', 'echo $$HOME']}}\n# ${HF_TOKEN}\n")
    load_task(task)


@given(st.text(), st.text(alphabet=" \n\t", max_size=5), st.text(alphabet=" \n\t", max_size=5))
def test_prompt_key_ignores_space_around_a_prompt_and_nothing_else(text: str, before: str, after: str) -> None:
    assert tasks.prompt_key(before + text + after) == tasks.prompt_key(text)
    assert tasks.prompt_key("x" + text + "y") != tasks.prompt_key("x" + text + "z")


def test_files_hash_sees_names_and_bytes_but_not_modes(task: Path) -> None:
    before = tasks.files_sha256(task)
    (task / "tests" / "test.sh").chmod(0o600)
    assert tasks.files_sha256(task) == before
    (task / "tests" / "expected.json").rename(task / "tests" / "other.json")
    renamed = tasks.files_sha256(task)
    assert renamed != before
    (task / "tests" / "other.json").write_text("{}")
    assert tasks.files_sha256(task) not in (before, renamed)


def test_suite_hash_depends_on_order() -> None:
    loaded = load_suite(SHIPPED, "smoke/train")
    assert tasks.suite_sha256(loaded) != tasks.suite_sha256(loaded[::-1])


def pin_with(**changes: object) -> dict[str, object]:
    """The shipped smoke pin with its first task changed."""
    data = json.loads((SHIPPED / "smoke.json").read_text())
    data["tasks"][0] |= changes
    return data


@pytest.mark.parametrize(
    "name",
    ["../first", "..", ".", "a/b", "", ".hidden", "a\0b", "a\n", "-rf", "C:\\x", "a b", "x" * 200, "ünicode"],
)
def test_pinned_name_that_is_no_plain_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    path.write_text(json.dumps(pin_with(name=name)))
    with pytest.raises(RecipeError, match=r"tasks\.0\.name"):
        load_pin(path)


def test_pin_file_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(RecipeError, match="does not exist"):
        load_pin(path)
    path.write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_pin(path)
    path.write_text(json.dumps(pin_with(instruction_sha256="abc", surprise=1)))
    with pytest.raises(RecipeError, match=r"(?s)tasks\.0\.instruction_sha256.*tasks\.0\.surprise"):
        load_pin(path)
    path.write_text(json.dumps({"source": {"kind": "shipped"}, "tasks": []}))
    with pytest.raises(RecipeError, match="at least 1 item"):
        load_pin(path)
    path.write_text(json.dumps({"source": {"kind": "hub", "repo": "a/b", "revision": "main"}, "tasks": []}))
    with pytest.raises(RecipeError, match="revision"):
        load_pin(path)


def test_pin_file_that_names_a_task_or_an_instruction_twice_is_refused() -> None:
    tasks_of = PinFile.model_validate(pin_with()).tasks
    again = tasks_of[0].model_copy(update={"name": "other"})
    with pytest.raises(ValidationError, match="the same instruction is pinned twice"):
        PinFile(source=ShippedSource(), tasks=(*tasks_of, again))
    upper = tasks_of[0].model_copy(update={"name": tasks_of[0].name.upper(), "instruction_sha256": "0" * 64})
    with pytest.raises(ValidationError, match="the same task is pinned twice"):
        PinFile(source=ShippedSource(), tasks=(*tasks_of, upper))


def test_pin_file_is_written_as_it_was_read(tmp_path: Path) -> None:
    for name in ("smoke", "learn"):
        text = (SHIPPED / f"{name}.json").read_text()
        assert tasks.dump_pin(load_pin(SHIPPED / f"{name}.json")) == text


def test_module_needs_only_pydantic_and_the_standard_library() -> None:
    code = "import sys; import services.common.tasks; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    heavy = {"yaml", "tomlkit", "huggingface_hub", "torch", "httpx", "rich", "typer"} & set(loaded.split())
    assert heavy == set()
