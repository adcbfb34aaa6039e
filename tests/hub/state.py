"""What a local Hub holds: repositories with commits, and jobs. No HTTP here."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

REPO_TYPES = ("model", "dataset", "space")


class HubRefusal(Exception):
    """An answer other than 200 that the real Hub would give."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def blob_oid(content: bytes) -> str:
    """git's object id of a file, which the Hub gives as ETag and in tree listings."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def now() -> str:
    """The time in the one format that the client parses."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    date: str
    files: dict[str, bytes]
    """The whole tree after the commit."""


@dataclass
class Repo:
    repo_id: str
    repo_type: str
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def at(self, revision: str) -> Commit:
        """The commit of a branch, a tag or a full id; the Hub knows no short ids."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise HubRefusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, revision: str) -> list[Commit]:
        """Newest first. One line of history is enough here: every branch sees all older commits."""
        ids = list(self.commits)
        return [self.commits[oid] for oid in reversed(ids[: ids.index(self.at(revision).oid) + 1])]


@dataclass
class Job:
    """A job as asked for; nothing runs."""

    id: str
    namespace: str
    spec: dict[str, Any]
    created_at: str
    stage: str = "RUNNING"
    message: str | None = None
    logs: list[str] = field(default_factory=list)


class HubState:
    """Thread-safe: each public method holds the lock for its whole effect."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repos: dict[tuple[str, str], Repo] = {}
        self.jobs: dict[str, Job] = {}

    def create_repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        with self.lock:
            if (repo_type, repo_id) in self.repos:
                raise HubRefusal(409, "You already created this repo")
            repo = self.repos[repo_type, repo_id] = Repo(repo_id, repo_type)
            self._add(repo, "main", "initial commit", {".gitattributes": b""}, oid=None)
            return repo

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        with self.lock:
            if (repo_type, repo_id) not in self.repos:
                raise HubRefusal(404, "Repository not found", "RepoNotFound")
            return self.repos[repo_type, repo_id]

    def commit(
        self,
        repo_id: str,
        files: dict[str, bytes],
        *,
        repo_type: str = "model",
        branch: str = "main",
        title: str = "a commit",
        deleted: tuple[str, ...] = (),
        parent: str | None = None,
        oid: str | None = None,
    ) -> str:
        """Add one commit, making the repository if it is not there; returns its id.

        Args:
            files: path -> content, added to what the branch has.
            deleted: paths, or folders that end in ``/``.
            parent: refuse with 412 unless it is the branch's newest commit.
            oid: the id to give it, instead of one made from its content.
        """
        with self.lock:
            if (repo_type, repo_id) not in self.repos:
                self.create_repo(repo_id, repo_type)
            repo = self.repo(repo_id, repo_type)
            head = repo.at(branch)
            if parent is not None and parent != head.oid:
                raise HubRefusal(412, "A commit has happened since. Please refresh and try again.")
            kept = {path: content for path, content in head.files.items() if not _is_deleted(path, deleted)}
            return self._add(repo, branch, title, kept | files, oid)

    def _add(self, repo: Repo, branch: str, title: str, files: dict[str, bytes], oid: str | None) -> str:
        tree = "".join(f"{path} {blob_oid(content)}\n" for path, content in sorted(files.items()))
        oid = oid or hashlib.sha1(f"{len(repo.commits)} {title}\n{tree}".encode()).hexdigest()
        repo.commits[oid] = Commit(oid, title, now(), files)
        repo.branches[branch] = oid
        return oid

    def run_job(self, namespace: str, spec: dict[str, Any]) -> Job:
        with self.lock:
            job_id = hashlib.sha1(f"{namespace} {len(self.jobs)}".encode()).hexdigest()[:24]
            self.jobs[job_id] = Job(job_id, namespace, spec, now())
            return self.jobs[job_id]

    def job(self, namespace: str, job_id: str) -> Job:
        with self.lock:
            job = self.jobs.get(job_id)
            if job is None or job.namespace != namespace:
                raise HubRefusal(404, "Job not found")
            return job


def _is_deleted(path: str, deleted: tuple[str, ...]) -> bool:
    return any(path.startswith(entry) if entry.endswith("/") else path == entry for entry in deleted)
