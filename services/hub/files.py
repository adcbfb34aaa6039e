"""Files as the Hub lists them, whether what lies here is one of them, and how one comes here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, RepoFile

from services.hub.client import ATTEMPTS, DamagedError, patiently

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


def download(api: HfApi, repo: str, revision: str, file: RemoteFile, folder: Path, kind: Kind = "model") -> Path:
    """Bring one file to its path below ``folder``, with the listed bytes or not at all.

    Its patience is its own: other bytes and a Hub that does not answer are each tried ATTEMPTS times.

    Raises: DamagedError: other bytes each time. What huggingface_hub raises.
    """
    target = folder / file.path
    for _ in range(ATTEMPTS):
        patiently(api.hf_hub_download)(repo, file.path, repo_type=kind, revision=revision, local_dir=folder)
        if file.is_at(target):
            return target
        target.unlink(missing_ok=True)  # or it would count as present
    raise DamagedError(f"{file.path} of {repo} arrived {ATTEMPTS} times with other bytes than {api.endpoint} lists")
