"""scripts.prepare_tasks without a Hub: choosing, rewriting, writing aside, verifying, and every bad input."""

import errno
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts import prepare_tasks
from scripts.prepare import select
from services.common.errors import MachineError, RecipeError
from services.common.tasks import (
    ALLOWED_VARIABLES,
    PinFile,
    ShippedSource,
    TaskProblem,
    dump_pin,
    load_pin,
    load_suite,
    load_task,
    pin_task,
)
from services.hub.tasks import fetch as fetching
from services.hub.tasks import materialise, verify
from services.hub.tasks.materialise import Settings, prepare_task, sandbox_compose, without_host_variables
from tests.hub.dataset import GRADER, published_task

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "data" / "tasks"
SETTINGS = Settings(image="example/sandbox:1", memory_mb=2048)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for relative, content in files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six published tasks in a tasks folder ``made``."""
    for number in range(6):
        write(tmp_path / "tasks" / "made" / f"t{number:04}", published_task(number))
    return tmp_path / "tasks" / "made"


@pytest.fixture
def pin(source: Path) -> PinFile:
    made = PinFile(
        source=ShippedSource(),
        tasks=tuple(pin_task(load_task(folder, published=True)) for folder in sorted(source.iterdir())),
    )
    source.with_suffix(".json").write_text(dump_pin(made))
    return made


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch(source: Path, out: Path, *, settings: Settings = SETTINGS, force: bool = False) -> None:
    path = source.with_suffix(".json")
    fetching.fetch_one(
        path, load_pin(path), out / "made", settings, cache_dir=source.parent / "cache", workers=1, force=force
    )


# --- rewriting ----------------------------------------------------------------------------------------------------


def test_task_gets_image_limits_init_and_network_and_keeps_the_rest(source: Path) -> None:
    folder = source / "t0001"
    before = tomllib.loads((folder / "task.toml").read_text())
    dropped = prepare_task(folder, SETTINGS)
    after = tomllib.loads((folder / "task.toml").read_text())
    assert after["environment"]["docker_image"] == "example/sandbox:1"
    assert (after["environment"]["cpus"], after["environment"]["memory_mb"]) == (1, 2048)
    assert "memory" not in after["environment"]
    assert after["environment"]["healthcheck"] == before["environment"]["healthcheck"]
    assert after["environment"]["env"] == before["environment"]["env"] | {"TOKEN": "none"}
    assert {key: after[key] for key in ("metadata", "verifier", "agent")} == {
        key: before[key] for key in ("metadata", "verifier", "agent")
    }
    assert "# A comment that must survive." in (folder / "task.toml").read_text()
    assert dropped == ["task.toml no longer reads ${HF_TOKEN} from the host"]
    compose = yaml.safe_load((folder / "environment" / "docker-compose.yaml").read_text())
    assert compose["services"]["main"]["init"] is True
    assert compose["services"]["main"]["networks"] == ["sandbox"]
    assert (folder / "environment" / "pull_bucket.py").read_bytes() == published_task(1)["environment/pull_bucket.py"]
    load_task(folder)


def test_own_compose_file_is_merged_and_loses_the_hosts_variables() -> None:
    own = """
services:
  main:
    environment: {A: "${HF_TOKEN}", B: "${SECRET:-plain}", C: "$$HOME", D: "${SANDBOX_NETWORK}"}
    init: false
  database:
    image: ${REGISTRY-local}/db:1
networks: {elsewhere: {}}
"""
    text, dropped = sandbox_compose(own, Settings(image="x", pids=99))
    compose = yaml.safe_load(text)
    assert compose["services"]["main"]["environment"] == {
        "A": "", "B": "plain", "C": "$$HOME", "D": "${SANDBOX_NETWORK}",
    }  # fmt: skip
    assert compose["services"]["database"]["image"] == "local/db:1"
    for service in compose["services"].values():
        assert service["init"] is True
        assert service["pids_limit"] == 99
        assert service["networks"] == ["sandbox"]
    assert compose["networks"]["sandbox"]["external"] is True and "elsewhere" not in compose["networks"]
    assert [line.split("${")[1] for line in dropped] == [
        "HF_TOKEN} from the host", "SECRET} from the host", "REGISTRY} from the host",
    ]  # fmt: skip


def test_variable_allowed_by_name_stays() -> None:
    own = "services: {main: {environment: {A: '${REGION}', B: '${OTHER}'}}}"
    text, dropped = sandbox_compose(own, Settings(image="x", allowed_variables=("REGION",)))
    assert yaml.safe_load(text)["services"]["main"]["environment"] == {"A": "${REGION}", "B": ""}
    assert len(dropped) == 1


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("services: {main: {privileged: true}}", "sets privileged for main"),
        ("services: {main: {volumes: ['/:/host']}}", "sets volumes for main"),
        ("services: {main: {image: other}}", "sets image for main"),
        ("services: {main: {mem_limit: 64g}}", "sets mem_limit for main"),
        ("services: {other: {network_mode: host, image: x}}", "sets network_mode for other"),
        ("services: {main: {}}\nvolumes: {v: {}}", "has volumes; allowed at the top"),
        ("services: {main: {}}\ninclude: [x.yaml]", "has include; allowed at the top"),
        ("services: [main]", "has no services"),
        ("- main", "has no services"),
        ("services: {main: [", "is not valid YAML"),
    ],
)
def test_compose_file_that_reaches_out_is_refused(own: str, message: str) -> None:
    with pytest.raises(TaskProblem, match=r"docker-compose\.yaml") as raised:
        sandbox_compose(own, SETTINGS)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("$X", ""),
        ("a${X}b", "ab"),
        ("${X:-d}", "d"),
        ("${X-d}", "d"),
        ("${X:?needed}", ""),
        ("${X:+set}", ""),
        ("$$X", "$$X"),
        ("$$$X", "$$"),
        ("${X:-${Y:-deep}}", "deep"),
        ("${KEEP:-${X:-d}}", "${KEEP:-d}"),
        ("$KEEP and ${KEEP}", "$KEEP and ${KEEP}"),
        ("${X:-{a}}", "{a}"),
        ("${X", ""),
        ("5$ or $5", "5$ or $5"),
    ],
)
def test_variables_of_the_host_give_way_to_their_defaults(text: str, expected: str) -> None:
    assert without_host_variables(text, frozenset({"KEEP"}), lambda _: None) == expected


@given(st.text(alphabet="${}:-?+XYKEP abc"))
def test_no_variable_survives_that_is_not_allowed(text: str) -> None:
    from services.common.tasks import VARIABLE

    left = without_host_variables(text, frozenset({"KEEP"}), lambda _: None)
    assert {match["name"] for match in VARIABLE.finditer(left)} <= {None, "KEEP"}


# --- writing ------------------------------------------------------------------------------------------------------


def test_fetch_writes_all_tasks_and_doing_it_again_changes_nothing(source: Path, pin: PinFile, tmp_path: Path) -> None:
    fetch(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    fetch(source, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "made").rglob("*")} == {
        path: stamp for path, stamp in stamps.items() if (tmp_path / "out" / "made") in path.parents
    }
    assert [task.name for task in load_suite(tmp_path / "out", "made")] == [task.name for task in pin.tasks]


def test_other_settings_replace_what_is_there(source: Path, pin: PinFile, tmp_path: Path) -> None:
    fetch(source, tmp_path / "out")
    fetch(source, tmp_path / "out", settings=Settings(image="other:2"))
    assert {task.docker_image for task in load_suite(tmp_path / "out", "made")} == {"other:2"}


def test_another_pin_file_replaces_what_is_there(source: Path, pin: PinFile, tmp_path: Path) -> None:
    fetch(source, tmp_path / "out")
    shutil.rmtree(source / "t0005")
    source.with_suffix(".json").write_text(dump_pin(pin.model_copy(update={"tasks": pin.tasks[:-1]})))
    fetch(source, tmp_path / "out")
    assert len(load_suite(tmp_path / "out", "made")) == 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda made: (made / "t0001" / "tests" / "test.sh").write_text("exit 0\n"), "t0001: changed"),
        (lambda made: (made / "t0001" / "new").write_text(""), "t0001: changed"),
        (lambda made: shutil.rmtree(made / "t0002"), "t0002: missing"),
        (lambda made: shutil.copytree(made / "t0002", made / "t9999"), "t9999: extra"),
    ],
)
def test_prepared_folder_that_was_changed_stops_with_the_list(
    change: Callable[[Path], Any], line: str, source: Path, pin: PinFile, tmp_path: Path
) -> None:
    made = tmp_path / "out" / "made"
    fetch(source, tmp_path / "out")
    change(made)
    before = tree(made)
    with pytest.raises(RecipeError, match=line):
        fetch(source, tmp_path / "out")
    assert tree(made) == before
    report = verify.verify_pin(tmp_path / "out", "made", pin)
    assert any(line in problem for problem in report.problems)
    fetch(source, tmp_path / "out", force=True)
    assert verify.verify_pin(tmp_path / "out", "made", pin).problems == ()


def test_folder_that_is_not_ours_is_left_alone(source: Path, pin: PinFile, tmp_path: Path) -> None:
    (tmp_path / "out" / "made").mkdir(parents=True)
    (tmp_path / "out" / "made" / "mine.txt").write_text("keep")
    with pytest.raises(RecipeError, match="was not made by"):
        fetch(source, tmp_path / "out")
    assert tree(tmp_path / "out" / "made") == {"mine.txt": b"keep"}


SOURCE_CHANGES = {
    "changed": (lambda s: (s / "t0001" / "instruction.md").write_text("Other.\n"), "t0001: instruction.md is changed"),
    "missing": (lambda s: shutil.rmtree(s / "t0002"), "t0002: the folder is missing"),
    "extra": (lambda s: shutil.copytree(s / "t0002", s / "t9999"), "t9999: extra"),
    "line ends": (
        lambda s: (s / "t0001" / "instruction.md").write_bytes(b"A\r\n"),
        "t0001: instruction.md has Windows",
    ),
    "not UTF-8": (
        lambda s: (s / "t0001" / "instruction.md").write_bytes(b"\xff\n"),
        "t0001: instruction.md is not UTF-8",
    ),
    "no tests": (lambda s: shutil.rmtree(s / "t0003" / "tests"), "t0003: tests/test.sh is missing"),
    "other file": (
        lambda s: (s / "t0003" / "tests" / "test.sh").write_text("exit 0\n"),
        "t0003: its files are changed",
    ),
    "link": (lambda s: os.symlink("/etc/hosts", s / "t0003" / "hosts"), "t0003: hosts is a link"),
    "one instruction": (
        lambda s: shutil.copy(s / "t0000" / "instruction.md", s / "t0001" / "instruction.md"),
        "t0000 and t0001: the same instruction",
    ),
}


@pytest.mark.parametrize("case", SOURCE_CHANGES)
def test_source_that_is_not_as_pinned_stops_with_the_list(
    case: str, source: Path, pin: PinFile, tmp_path: Path
) -> None:
    change, line = SOURCE_CHANGES[case]
    change(source)
    with pytest.raises(RecipeError, match="nothing was written") as raised:
        fetch(source, tmp_path / "out")
    assert line in str(raised.value)
    assert not (tmp_path / "out" / "made").exists()


def test_grader_that_is_not_allowed_stops(source: Path, pin: PinFile, tmp_path: Path) -> None:
    import hashlib

    good = hashlib.sha256(GRADER).hexdigest()
    for allowed, refused in ((good, False), ("0" * 64, True)):
        pinned = pin.model_copy(update={"grader_sha256": (allowed,)})
        problems = verify.verify_source(source, pinned, published=True, extra_is_a_problem=True)
        assert bool(problems) is refused
        assert all(f"tests/grader.py is changed: it has SHA-256 {good}" in line for line in problems)


def test_task_that_cannot_be_made_safe_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (source / "t0004" / "environment" / "docker-compose.yaml").write_text("services: {main: {privileged: true}}\n")
    made = PinFile(
        source=ShippedSource(),
        tasks=tuple(pin_task(load_task(folder, published=True)) for folder in sorted(source.iterdir())),
    )
    source.with_suffix(".json").write_text(dump_pin(made))
    with pytest.raises(RecipeError, match=r"t0004: .* sets privileged"):
        fetch(source, tmp_path / "out")
    assert not (tmp_path / "out" / "made").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".made.lock"]


def test_full_disk_leaves_what_was_there(
    source: Path, pin: PinFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(source, tmp_path / "out")
    before = tree(tmp_path / "out" / "made")
    copied = []

    def fake_copy(source: Path, target: Path) -> None:
        if len(copied) == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copied.append(shutil.copyfile(source, target))

    monkeypatch.setattr(materialise.shutil, "copy", fake_copy)
    with pytest.raises(MachineError, match="no space left"):
        fetch(source, tmp_path / "out", settings=Settings(image="other:2"))
    assert tree(tmp_path / "out" / "made") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".made.lock", "made", "made.json"]


def test_killed_between_the_renames_is_repaired_by_the_next_run(source: Path, pin: PinFile, tmp_path: Path) -> None:
    fetch(source, tmp_path / "out")
    out = tmp_path / "out"
    (out / "made").rename(out / ".made.old")
    (out / ".made.new").mkdir()
    fetch(source, out)
    assert sorted(path.name for path in out.iterdir()) == [".made.lock", "made", "made.json"]


def test_second_fetch_at_a_time_is_told_so(source: Path, pin: PinFile, tmp_path: Path) -> None:
    with materialise.exclusive(tmp_path / "out" / "made"), pytest.raises(Exception, match="another prepare_tasks"):
        fetch(source, tmp_path / "out")


def test_shipped_suite_is_not_overwritten_in_place() -> None:
    with pytest.raises(RecipeError, match="give --out"):
        fetching.fetch_one(SHIPPED / "smoke.json", load_pin(SHIPPED / "smoke.json"), SHIPPED / "smoke", SETTINGS)


def test_settings_come_from_the_recipe_and_the_command_line_wins() -> None:
    smoke = ROOT / "data" / "recipes" / "smoke.toml"
    read = fetching.sandbox_settings(smoke, None, None, None, ())
    assert (read.image, read.cpus, read.memory_mb, read.pids) == ("local/opencode-rl-sandbox:cpu", 1, 4096, 512)
    assert fetching.sandbox_settings(smoke, "mine:1", 2, None, ("A",)).image == "mine:1"
    with pytest.raises(RecipeError, match="no sandbox image is named"):
        fetching.sandbox_settings(None, None, None, None, ())


# --- verify -------------------------------------------------------------------------------------------------------


def test_shipped_suites_are_as_pinned() -> None:
    for name in ("smoke", "learn"):
        report = verify.verify_pin(SHIPPED, name, load_pin(SHIPPED / f"{name}.json"))
        assert (report.state, report.problems) == ("shipped", ())


def test_pin_that_was_not_fetched_is_no_error_unless_asked_for(tmp_path: Path) -> None:
    data = json.loads((SHIPPED / "smoke.json").read_text())
    data["source"] = {"kind": "hub", "repo": "a/b", "revision": "0" * 40}
    (tmp_path / "train.json").write_text(json.dumps(data))
    prepare_tasks.verify_command(None, tmp_path)
    with pytest.raises(RecipeError, match="train: not fetched"):
        prepare_tasks.verify_command(["train"], tmp_path)


def test_sets_that_share_a_notebook_or_question_are_refused(tmp_path: Path, source: Path, pin: PinFile) -> None:
    related = [
        task.model_copy(update={"notebook": "n1", "question_sha256": "a" * 64, "instruction_sha256": f"{number:064}"})
        for number, task in enumerate(pin.tasks[:1])
    ]
    other = [pin.tasks[1].model_copy(update={"notebook": "n1", "question_sha256": "a" * 64})]
    lines = verify.overlaps(related, other)
    assert lines == ["t0000 and t0001: the same question", "t0000 and t0001: the same notebook"]


# --- choosing -----------------------------------------------------------------------------------------------------


def candidates(tmp_path: Path, numbers: range) -> list[select.Candidate]:
    return [
        select.candidate(write(tmp_path / "pool" / f"t{n:04}", published_task(n)), "notebook_id", "question")
        for n in numbers
    ]


def test_choice_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    pool = candidates(tmp_path, range(60))
    take = {"medium": 5, "hard": 7}

    def names(pool: list[select.Candidate], seed: int) -> list[str]:
        return [one.task.name for one in select.select(pool, take, seed)]

    first = names(pool, 1)
    assert names(pool[::-1], 1) == first
    assert names(pool, 2) != first
    chosen = select.select(pool, take, 1)
    assert [sum(one.task.difficulty == tier for one in chosen) for tier in ("easy", "medium", "hard")] == [0, 5, 7]


def test_choice_leaves_out_what_another_set_has(tmp_path: Path) -> None:
    pool = candidates(tmp_path, range(12))
    test = [pool[1].pinned()]
    same_notebook = write(tmp_path / "pool" / "same", published_task(100, notebook=1))
    same_question_toml = published_task(4)["task.toml"].replace(b"What is 4?", b"  WHAT is\\n1? ")
    same_question = write(tmp_path / "pool" / "asks", published_task(4) | {"task.toml": same_question_toml})
    pool = [
        pool[1],
        *(select.candidate(folder, "notebook_id", "question") for folder in (same_notebook, same_question)),
    ]
    left_out: list[str] = []
    with pytest.raises(RecipeError, match="1 medium tasks were asked for and 0 can be taken of 3"):
        select.select(pool, {"medium": 1}, 0, test, report=left_out.append)
    assert len(left_out) == 3
    with pytest.raises(RecipeError, match="share a notebook"):
        select.select(pool, {}, 0, test)


def test_choice_never_takes_one_instruction_twice(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / name, published_task(number, instruction="The same.\n"))
        for name, number in (("a", 1), ("b", 4))
    ]
    pool = [select.candidate(folder, None, None) for folder in folders]
    assert len(select.select(pool, {"medium": 1}, 0)) == 1
    with pytest.raises(RecipeError, match="2 medium tasks were asked for and 1 can be taken"):
        select.select(pool, {"medium": 2}, 0)


def test_metadata_key_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", published_task(1))
    with pytest.raises(
        TaskProblem, match="no metadata 'paper'; it has: difficulty_level, difficulty_tier, gold_answer"
    ):
        select.candidate(folder, "paper", None)


def test_task_whose_name_is_no_plain_folder_name_is_not_pinned(tmp_path: Path) -> None:
    folder = write(tmp_path / "a b", published_task(1))
    with pytest.raises(TaskProblem, match="its name has other characters"):
        select.candidate(folder, None, None)


@pytest.mark.parametrize("take", ["medium", "medium=", "medium=0", "medium=-1", "=4", "medium=x"])
def test_take_in_another_form_is_refused(take: str) -> None:
    with pytest.raises(RecipeError, match="give difficulty=N"):
        prepare_tasks.parse_take([take])


def test_find_task_by_number_name_and_path() -> None:
    pin = load_pin(SHIPPED / "smoke.json")
    assert prepare_tasks.find_task(pin, "0") == pin.tasks[0]
    assert prepare_tasks.find_task(pin, "first-b").path == "train/first-b"
    assert prepare_tasks.find_task(pin, "train/first-b").name == "first-b"
    with pytest.raises(RecipeError, match="there is no task '12'"):
        prepare_tasks.find_task(pin, "12")


@pytest.mark.parametrize("name", ["../x", "a/b", "A", "a b", ""])
def test_pin_name_that_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no name of a pin file"):
        prepare_tasks.pin_path(tmp_path, name)


def test_allowed_variables_of_harbor_are_those_it_sets() -> None:
    assert "HF_TOKEN" not in ALLOWED_VARIABLES and "PATH" not in ALLOWED_VARIABLES
