"""Files of sandboxes belong to the host's user afterwards, and no link leads anywhere else."""

import os
from pathlib import Path

import pytest

from services.common.run_dir import User
from services.env.hand_over import hand_over

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def test_every_file_is_the_user_s_own_and_nobody_else_may_write_it(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    (folder / "agent" / "locked").mkdir(parents=True)
    (folder / "agent").chmod(0o777)
    (folder / "agent" / "locked" / "log").write_text("x")
    (folder / "agent" / "locked" / "log").chmod(0o4000)
    (folder / "agent" / "locked").chmod(0)
    os.chown(folder / "agent" / "locked", 10002, 10002)
    hand_over(folder, User(4321, 4322))
    found = {path.name: path.lstat() for path in (folder, *folder.rglob("*"))}
    assert set(found) == {"trial", "agent", "locked", "log"}
    assert {(status.st_uid, status.st_gid) for status in found.values()} == {(4321, 4322)}
    assert found["agent"].st_mode & 0o7777 == 0o775
    assert found["locked"].st_mode & 0o7777 == 0o700
    assert found["log"].st_mode & 0o7777 == 0o600


def test_what_a_link_leads_to_stays_as_it_is(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text("x")
    (outside / "secret").chmod(0o666)
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "to-folder").symlink_to(outside)
    (folder / "to-file").symlink_to(outside / "secret")
    hand_over(folder, User(4321, 4322))
    assert (outside.stat().st_uid, (outside / "secret").stat().st_uid) == (0, 0)
    assert (outside / "secret").stat().st_mode & 0o777 == 0o666
    assert (folder / "to-file").lstat().st_uid == 4321
