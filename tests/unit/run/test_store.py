"""``services.run`` against the files of a real run (tests/cases/run), and against files that change meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common import health, run_dir
from services.common.run_dir import RunDir
from services.run import files, records
from services.run.files import Document, Lines
from services.run.store import RunStore

REAL = Path(__file__).resolve().parents[2] / "cases/run"
LINES = {
    "metrics": "metrics.jsonl", "trained": "trained.jsonl", "attempts": "attempts.jsonl",
    "policy_versions": "policy_versions.jsonl", "rollouts": "rollouts/index.jsonl", "sandboxes": "sandboxes.jsonl",
    "cells": "eval/cells.jsonl",
}  # fmt: skip
DOCUMENTS = {"manifest": "manifest.json", "result": "result.json", "costs": "costs.json", "tracker": "tracker.json"}


@pytest.fixture
def store() -> RunStore:
    return RunStore(RunDir(REAL))


@pytest.mark.parametrize(("name", "path"), LINES.items())
def test_every_line_of_a_real_run_is_a_record_and_is_written_as_it_was(
    name: str, path: str, store: RunStore, tmp_path: Path
) -> None:
    lines: Lines[Any] = getattr(store, name)
    follower = lines.follow()
    found = follower.look()
    assert lines.path == REAL / path
    assert len(found) == len((REAL / path).read_text().splitlines()) > 0 and follower.unreadable == 0
    copy = Lines(tmp_path / "copy", type(found[0]))
    for record in found:
        copy.append(record)
    assert run_dir.read_lines(tmp_path / "copy") == run_dir.read_lines(REAL / path)


@pytest.mark.parametrize(("name", "path"), DOCUMENTS.items())
def test_every_document_of_a_real_run_is_a_record_and_is_written_as_it_was(
    name: str, path: str, store: RunStore, tmp_path: Path
) -> None:
    document: Document[Any] = getattr(store, name)
    assert document.path == REAL / path
    copy = Document(tmp_path / "copy", type(document.read()))
    copy.write(document.read())
    assert json.loads((tmp_path / "copy").read_text()) == json.loads((REAL / path).read_text())


def test_fields_of_a_real_run_mean_what_the_records_say(store: RunStore) -> None:
    first, last = store.metrics.all()
    assert (first.step, last.step) == (1, 2) and first.numbers["ratio"] == pytest.approx(1, abs=0.01)
    assert all(rollout.scored == (rollout.cause is None) for rollout in store.rollouts.all())
    started, ended = store.attempts.all()
    assert (started.event, started.checkpoint, ended.event, ended.resume) == ("started", None, "ended", False)
    result, costs = store.result.read(), store.costs.read()
    assert result is not None and (result.exit_code, result.step) == (0, 2)
    assert costs is not None and costs.machine_s == pytest.approx(sum(end - begin for begin, end in costs.machines))


@pytest.mark.parametrize("path", sorted((REAL / "heartbeats").iterdir()), ids=lambda path: path.name)
def test_heartbeats_are_those_of_the_service(path: Path, store: RunStore) -> None:
    beat = store.heartbeat(path.name).read()
    assert beat is not None and beat.service == path.name and beat.phase in health.PHASES


def test_a_follower_parses_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    class Counted(records.PolicyVersion):
        def model_post_init(self, _context: Any) -> None:
            parsed.append(self.version)

    lines = Lines(tmp_path / "lines", Counted)
    follower = lines.follow()
    for version in range(3):
        run_dir.append_line(lines.path, {"version": version})
        assert [record.version for record in follower.look()] == list(range(version + 1))
    follower.look()
    assert parsed == [0, 1, 2]


@pytest.mark.parametrize("more", [0, 5])
def test_steps_that_a_resume_undid_are_gone_at_the_next_look(more: int, tmp_path: Path) -> None:
    """Whether or not the file has grown again to its old length."""
    store = RunStore(RunDir(tmp_path))
    follower = store.metrics.follow()
    for step in range(1, 6):
        store.metrics.append(records.Step(step=step, time_s=0.0, reward=0.5))
    assert len(follower.look()) == 5
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    run_dir.write_text(tmp_path / "metrics.jsonl", "".join(kept))
    for step in range(3, 3 + more):
        store.metrics.append(records.Step(step=step, time_s=1.0, reward=0.5))
    assert [(record.step, record.time_s) for record in follower.look()] == [(1, 0.0), (2, 0.0)] + [
        (step, 1.0) for step in range(3, 3 + more)
    ]


def test_a_line_that_is_no_such_record_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines", records.SandboxEvent)
    lines.path.write_text('{"event": "intent", "project": "a"}\n{"event": "burnt", "project": "a"}\n{"eve\n')
    follower = lines.follow()
    assert [record.project for record in follower.look()] == ["a"]
    assert follower.unreadable == 1  # the one that is cut is no JSON at all


def test_fields_of_another_version_are_kept(tmp_path: Path) -> None:
    document = Document(tmp_path / "result.json", records.Result)
    run_dir.write_json(document.path, {"exit_code": 0, "reason": "done", "mood": "good"})
    found = document.read()
    assert found is not None
    document.write(found)
    assert run_dir.read_json(document.path) == {"exit_code": 0, "reason": "done", "mood": "good"}


def test_a_file_that_is_not_there_or_half_written_by_hand_reads_as_none(tmp_path: Path) -> None:
    store = RunStore(RunDir(tmp_path))
    assert store.stop_request.read() is None and store.metrics.all() == []
    store.stop_request.path.write_text('{"reason": "I am st')
    assert store.stop_request.read() is None
    store.stop_request.path.write_text("{}")
    assert store.stop_request.read() == records.StopRequest()


def test_a_full_disk_is_an_error_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(tmp_path / "lines", records.TrackerPosition)
    lines.append(records.TrackerPosition(step=1))

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        lines.append(records.TrackerPosition(step=2))
    assert [record.step for record in lines.all()] == [1]


def test_a_run_that_is_copied_elsewhere_reads_the_same(store: RunStore, tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "copy")
    assert RunStore(RunDir(tmp_path / "copy")).rollouts.all() == store.rollouts.all()
    assert files.Follower(tmp_path / "none", records.Step).look() == []
