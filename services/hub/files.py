"""Files as the Hub lists them, and whether what lies here is one of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, RepoFile

Kind = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as the Hub lists it."""

    path: str
    size_bytes: int
    git_sha1: str
    lfs_sha256: str | None = None

    @property
    def content_id(self) -> str:
        """Equal for two files with the same bytes that are stored the same way."""
        return self.lfs_sha256 or self.git_sha1

    def is_at(self, path: Path) -> bool:
        """Whether the file at ``path`` has the listed bytes; False when nothing is there."""
        try:
            if path.stat().st_size != self.size_bytes:
                return False
            with path.open("rb") as stream:
                if self.lfs_sha256:
                    return hashlib.file_digest(stream, "sha256").hexdigest() == self.lfs_sha256
                blob = hashlib.sha1(b"blob %d\0" % self.size_bytes)
                while piece := stream.read(1 << 20):
                    blob.update(piece)
                return blob.hexdigest() == self.git_sha1
        except FileNotFoundError:
            return False


def list_files(
    api: HfApi, repo: str, revision: str, folder: str | None = None, kind: Kind = "model"
) -> list[RemoteFile]:
    """All files of a revision, or those below ``folder``, which must exist.

    Raises: what huggingface_hub raises.
    """
    listed = api.list_repo_tree(repo, folder, recursive=True, revision=revision, repo_type=kind)
    return [
        RemoteFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        for entry in listed
        if isinstance(entry, RepoFile)
    ]
