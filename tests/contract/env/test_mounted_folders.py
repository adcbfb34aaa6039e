"""What a hostile agent left in folders that the host reads as root."""

import os
from pathlib import Path

import pytest

from services.env import sandbox
from services.env.sandbox import clear, make_plain


def test_links_pipes_and_huge_files_go_and_plain_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_LOG_FILE_BYTES", 100)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "agent"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "log.txt").write_text("fine")
    (folder / "deep" / "big").write_bytes(b"x" * 101)
    (folder / "trajectory.json").symlink_to(outside / "kept")
    (folder / "deep" / "away").symlink_to(outside)
    (folder / "dangling").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe")
    make_plain(folder)
    assert sorted(path.name for path in folder.rglob("*")) == ["deep", "log.txt"]
    assert (outside / "kept").read_text() == "kept"


def test_of_many_files_the_largest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_LOG_FOLDER_BYTES", 100)
    (tmp_path / "deep").mkdir()
    for name, size in (("log", 10), ("deep/big", 60), ("bigger", 61), ("small", 30)):
        (tmp_path / name).write_bytes(b"x" * size)
    make_plain(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["big", "log", "small"]


def test_clear_empties_the_folder_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder = tmp_path / "verifier"
    (folder / "sub").mkdir(parents=True)
    (folder / "reward.json").write_text("{}")
    (folder / "sub" / "file").write_text("x")
    (folder / "away").symlink_to(outside)
    clear(folder)
    assert list(folder.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"
