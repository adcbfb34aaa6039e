"""Files of a run: published whole or not at all, read in any state."""

import errno
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import READY, Checkpoint, RunDir


def test_a_published_file_is_readable_by_other_users_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    run_dir.write_json(path, {"b": 1, "a": Path("/x")})
    assert path.read_text() == '{\n  "a": "/x",\n  "b": 1\n}\n'
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    path, wrong, stop = tmp_path / "f", [], threading.Event()
    run_dir.write_text(path, "0" * 200_000)

    def read() -> None:
        while not stop.is_set():
            text = path.read_text()
            if len(text) != 200_000 or len(set(text)) != 1:
                wrong.append(text[:20])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        run_dir.write_text(path, str(number % 10) * 200_000)
    stop.set()
    reader.join()
    assert wrong == []


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    run_dir.write_text(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_dir.write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_file_that_is_not_there_reads_as_none(tmp_path: Path) -> None:
    assert run_dir.read_json(tmp_path / "none") is None
    assert run_dir.read_lines(tmp_path / "none") == []


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel takes seven bytes at a time; the list holds how many it still has room for, in all."""
    room, write = [10**6], os.write

    def short(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data[: min(7, room[0])])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", short)
    return room


def test_a_line_that_takes_several_writes_is_whole(tmp_path: Path, small_writes: list[int]) -> None:
    for number in range(3):
        run_dir.append_line(tmp_path / "lines", {"number": number, "text": "x" * 100})
    assert [line["number"] for line in run_dir.read_lines(tmp_path / "lines")] == [0, 1, 2]


def test_a_line_for_which_the_disk_has_no_room_is_an_error_and_leaves_the_file_as_it_was(
    tmp_path: Path, small_writes: list[int]
) -> None:
    path = tmp_path / "lines"
    run_dir.append_line(path, {"number": 0})
    before = path.read_bytes()
    small_writes[0] = 20
    with pytest.raises(OSError, match="No space left"):
        run_dir.append_line(path, {"number": 1, "text": "x" * 100})
    assert path.read_bytes() == before
    small_writes[0] = 1000
    run_dir.append_line(path, {"number": 2})
    assert [line["number"] for line in run_dir.read_lines(path)] == [0, 2]


def _append_many(path: Path, writer: int) -> None:
    for number in range(200):
        run_dir.append_line(path, {"writer": writer, "number": number, "text": "x" * 500})


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    writers = [multiprocessing.Process(target=_append_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = run_dir.read_lines(path)
    assert {(line["writer"], line["number"]) for line in lines} == {(w, n) for w in range(3) for n in range(200)}
    assert len(lines) == 600


@pytest.mark.parametrize("value", [{"text": "a\nb\u2028c\x0bd"}, {"text": "ä€😀"}, {"n": 1e300}])
def test_any_value_is_one_line_and_comes_back(tmp_path: Path, value: dict[str, Any]) -> None:
    path = tmp_path / "lines.jsonl"
    run_dir.append_line(path, value)
    run_dir.append_line(path, value)
    assert path.read_bytes().count(b"\n") == 2
    assert run_dir.read_lines(path) == [value, value]


def test_a_last_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    run_dir.append_line(path, {"step": 1})
    whole = path.read_bytes()
    run_dir.append_line(path, {"step": 2})
    whole_too = len(path.read_bytes()) - 1  # without its line end the record is complete all the same
    for cut in range(len(whole), whole_too):
        damaged = tmp_path / f"cut-{cut}"
        damaged.write_bytes(path.read_bytes()[:cut])
        assert run_dir.read_lines(damaged) == [{"step": 1}], cut


def test_what_is_appended_after_a_line_that_a_crash_cut_off_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    run_dir.append_line(path, {"step": 1})
    path.write_bytes(path.read_bytes() + b'{"step": ')
    run_dir.append_line(path, {"step": 2})
    run_dir.append_line(path, {"step": 3})
    assert {"step": 3} in run_dir.read_lines(path)
    assert {"step": 1} in run_dir.read_lines(path)


def _checkpoint(run: RunDir, name: str, *, ready: bool = True) -> Path:
    folder = run.checkpoints / name
    folder.mkdir(parents=True)
    if ready:
        run_dir.write_text(folder / READY, "now\n")
    return folder


def test_only_checkpoints_with_the_marker_count_and_in_order_of_their_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.complete_checkpoints() == []
    folders = {step: _checkpoint(run, f"checkpoint-{step}") for step in (1000, 9, 200)}
    _checkpoint(run, "checkpoint-300", ready=False)
    for name in ("checkpoint-", "checkpoint-x", "checkpoint-5-old", "old-checkpoint-5", "best"):
        _checkpoint(run, name)
    assert run.complete_checkpoints() == [Checkpoint(step, folders[step]) for step in (9, 200, 1000)]


@pytest.mark.parametrize("root", ["", "runs", "./runs", "~/runs"])
def test_a_runs_folder_that_services_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.setenv("RUNS_DIR", root)
    with pytest.raises(RecipeError, match="must be an absolute path"):
        RunDir.from_environment("smoke")


def test_the_run_s_folder_is_named_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_DIR", "/srv/runs")
    assert RunDir.from_environment("smoke").path == Path("/srv/runs/smoke")


def test_preparing_a_run_makes_what_services_write_to_and_may_be_repeated(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare()
    (run.eval / "kept").write_text("x")
    run.prepare()
    for folder in (run.heartbeats, run.checkpoints, run.rollouts, run.eval, run.incidents):
        assert folder.is_dir()
        if os.geteuid() == 0:
            assert folder.stat().st_uid == run_dir.APP_UID
    assert (run.eval / "kept").read_text() == "x"


def test_every_path_of_a_run_lies_inside_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    names = [name for name, value in vars(RunDir).items() if isinstance(value, property)]
    paths = [getattr(run, name) for name in names]
    assert len(set(paths)) == len(paths) >= 10
    assert all(path.parent == tmp_path for path in paths)


def test_the_time_is_utc_to_the_second() -> None:
    assert len(run_dir.utc_now()) == len("2026-11-29T12:00:00Z") and run_dir.utc_now().endswith("Z")
    assert json.loads(json.dumps(run_dir.utc_now()))


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@as_root
def test_a_prepared_run_belongs_to_the_services_and_to_the_group_of_whoever_owns_the_runs(tmp_path: Path) -> None:
    os.chown(tmp_path, 4321, 4322)
    run = RunDir(tmp_path / "run")
    run.prepare()
    (run.path / "recipe.toml").write_text("written by the host's user for a resume")
    run.prepare()
    for folder in (tmp_path / run_dir.TRACKIO, run.path, run.heartbeats, run.checkpoints, run.rollouts, run.eval):
        status = folder.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (run_dir.APP_UID, 4322, 0o2775), folder
    assert (run.path / "recipe.toml").stat().st_uid == run_dir.APP_UID
    made = run.checkpoints / "checkpoint-1"
    made.mkdir()
    assert (made.stat().st_gid, made.stat().st_mode & 0o2000) == (4322, 0o2000), "what is made there has that group"


@as_root
def test_runs_that_the_engine_made_are_given_to_the_owner_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, tasks = tmp_path / "runs", tmp_path / "tasks"
    runs.mkdir()
    tasks.mkdir()
    os.chown(tasks, 4321, 4322)
    monkeypatch.setenv("TASKS_DIR", str(tasks))
    assert run_dir.host_user(runs) == (4321, 4322)
    assert (runs.stat().st_uid, runs.stat().st_gid) == (4321, 4322)
