"""Files of sandboxes, which belong to whatever user wrote them there, become the host user's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from services.common.run_dir import User


def hand_over(folder: Path, user: User) -> None:
    """Give all below ``folder`` to ``user``, and let nobody outside its group write there. No link is followed.

    Only where no sandbox has the folder mounted any more: nothing may change while this looks.
    Raises: PermissionError: this process is neither root nor the owner.
    """
    _give(folder, user)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _give(Path(root, name), user)


def _give(path: Path, user: User) -> None:
    status = path.lstat()
    if (status.st_uid, status.st_gid) != user:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return
    needed = stat.S_IRWXU if stat.S_ISDIR(status.st_mode) else stat.S_IRUSR | stat.S_IWUSR
    mode = stat.S_IMODE(status.st_mode) & ~(stat.S_IWOTH | stat.S_ISUID) | needed
    if not stat.S_ISDIR(status.st_mode):
        mode &= ~stat.S_ISGID
    path.chmod(mode)
