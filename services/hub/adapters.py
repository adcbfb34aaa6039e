"""Checkpoints on the Hub: found, fetched at a full commit, checked, and marked READY here once they are whole.

Only an adapter's two files travel. A folder ``checkpoint-N`` counts when its READY marker is in the commit, as it
does on disk: a push may take several commits. Adapter files at the top of a repository, as an export puts them,
are whole as soon as their commit is there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError

from services.common import run_dir
from services.common.errors import RecipeError
from services.common.run_dir import CONFIG, READY, WEIGHTS, Checkpoint
from services.hub.client import UNAVAILABLE, DamagedError, connect, first_line, messages, patiently
from services.hub.files import RemoteFile, download, list_files

PREFIX = "hub:"
DOWNLOADS = "hub"
"""Folder below ``eval/`` with what was asked for by name: ``<label>/``."""
MIRROR = "mirror"
"""Folder below ``eval/`` with what a watcher brought here: ``<content>/checkpoint-N/``."""
_REFERENCE = re.compile(r"^hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@:]+))?(?::(?:checkpoint-)?(?P<step>\d+))?$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_MARKER = re.compile(rf"^(?P<folder>(?:.+/)?checkpoint-(?P<step>\d+)/){READY}$")
logger = logging.getLogger("hub")


@dataclass(frozen=True, slots=True)
class Reference:
    """``hub:owner/name``, ``hub:owner/name@revision`` or ``hub:owner/name@revision:300``."""

    repo: str
    revision: str = "main"
    step: int | None = None
    """None: the adapter at the top of the repository, or else its newest checkpoint."""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises: RecipeError: what was found and what is allowed."""
        match = _REFERENCE.match(text)
        if match is None:
            raise RecipeError(f"{text!r} names no adapter on the Hub; allowed: hub:owner/name@revision[:step]")
        return cls(match["repo"], match["revision"] or "main", int(match["step"]) if match["step"] else None)

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}@{self.revision}" + ("" if self.step is None else f":{self.step}")

    @property
    def label(self) -> str:
        """For results; it cannot be mistaken for a checkpoint of the run."""
        name = f"hub-{self.repo.replace('/', '--')}-{self.revision[:12]}"
        return name if self.step is None else f"{name}-checkpoint-{self.step}"


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter in one commit of a repository."""

    step: int | None
    folder: str
    """Path in the repository with a slash at its end; empty: the top."""
    weights: RemoteFile
    config: RemoteFile


class AdapterRepo:
    """A model repository with adapters in it."""

    def __init__(self, repo: str, api: HfApi | None = None) -> None:
        self.repo = repo
        self._api = api or connect()

    def commit(self, revision: str) -> str:
        """The full commit that a branch, a tag or a commit, short or full, means now.

        Raises: RecipeError: none, or several.
        """
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            return str(self._api.repo_info(self.repo, revision=revision).sha)
        except RevisionNotFoundError:
            if not _SHORT_COMMIT.fullmatch(revision):
                raise RecipeError(f"{self.repo} has no branch, tag or commit {revision} on {self.where}") from None
        ids = [commit.commit_id for commit in self._api.list_repo_commits(self.repo)]
        found = [commit for commit in ids if commit.startswith(revision)]
        if len(found) != 1:
            raise RecipeError(
                f"{revision} means {len(found)} commits of {self.repo}{': ' if found else ''}{', '.join(found)}; "
                f"give more of its digits; the newest is {ids[0]}"
            )
        return found[0]

    @property
    def where(self) -> str:
        return self._api.endpoint

    def files(self, commit: str) -> dict[str, RemoteFile]:
        return {file.path: file for file in list_files(self._api, self.repo, commit)}

    def fetch(self, commit: str, adapter: RemoteAdapter, target: Path) -> None:
        """Bring the adapter's files to ``target``, READY last; one that is there already is not asked for again.

        Raises: DamagedError. What huggingface_hub raises.
        """
        if (target / READY).exists():
            return
        aside = target.with_name(f".{target.name}.part")
        target.mkdir(parents=True, exist_ok=True)
        for listed, name in ((adapter.weights, WEIGHTS), (adapter.config, CONFIG)):
            os.replace(download(self._api, self.repo, commit, listed, aside), target / name)
        shutil.rmtree(aside)
        run_dir.write_text(target / READY, f"{commit}\n")


def adapters_in(files: dict[str, RemoteFile]) -> dict[int | None, RemoteAdapter]:
    """Step -> complete adapter, oldest first; None: the one at the top of the repository.

    Raises: RecipeError: two folders hold the same step.
    """
    found: dict[int | None, RemoteAdapter] = {}
    folders = [(int(match["step"]), match["folder"]) for path in files if (match := _MARKER.match(path))]
    for step, folder in [*sorted(folders), (None, "")]:
        weights, config = files.get(f"{folder}{WEIGHTS}"), files.get(f"{folder}{CONFIG}")
        if weights is None or config is None:
            continue
        if step in found:
            raise RecipeError(f"{found[step].folder} and {folder} are the same step; keep one run in a repository")
        found[step] = RemoteAdapter(step, folder, weights, config)
    return found


def resolve(reference: Reference) -> Reference:
    """The same adapter by full commit and, for a checkpoint, by step.

    Raises: RecipeError: it is not there; the message lists what is. NotReadyError: the Hub does not answer.
    """
    return _locate(AdapterRepo(reference.repo), reference)[0]


def fetch(reference: Reference, into: Path) -> Checkpoint:
    """Bring the adapter to ``into/<label>``; by full commit and already there, without a request.

    Raises: RecipeError: it is not there; the message lists what is. NotReadyError: the Hub does not answer.
    """
    if _COMMIT.fullmatch(reference.revision) and (into / reference.label / READY).exists():
        return Checkpoint(reference.step or 0, into / reference.label)
    repo = AdapterRepo(reference.repo)
    exact, adapter = _locate(repo, reference)
    with messages(repo.repo, repo.where):
        repo.fetch(exact.revision, adapter, into / exact.label)
    return Checkpoint(exact.step or 0, into / exact.label)


def _locate(repo: AdapterRepo, reference: Reference) -> tuple[Reference, RemoteAdapter]:
    with messages(repo.repo, repo.where):
        commit = patiently(repo.commit)(reference.revision)
        found = adapters_in(patiently(repo.files)(commit))
    steps = [step for step in found if step is not None]
    step = reference.step if reference.step is not None or None in found or not steps else steps[-1]
    if step not in found:
        have = ", ".join([*map(str, steps), *(["an adapter at the top"] if None in found else [])]) or "none"
        raise RecipeError(
            f"{'an adapter' if step is None else f'checkpoint {step}'} is not in {repo.repo} at {commit}; "
            f"complete there: {have}"
        )
    return replace(reference, revision=commit, step=step), found[step]


class HubSource:
    """What a watcher follows where it does not share a disk with the trainer: the newest commit of ADAPTER_REPO.

    A Hub that does not answer is no reason to stop: what was fetched stays, and it is asked again.
    """

    def __init__(self, repo: AdapterRepo, into: Path, last_step: int) -> None:
        """Args: last_step: of the recipe; no checkpoint follows that one."""
        self._repo = repo
        self._into = into
        self._last_step = last_step
        self._seen = ""
        self._over = False
        self._fetched: dict[int, Checkpoint] = {}

    def complete(self) -> list[Checkpoint]:
        try:
            self._look()
        except (*UNAVAILABLE, DamagedError) as error:
            logger.warning("the Hub is asked again later", extra={"repo": self._repo.repo, "error": first_line(error)})
        return [self._fetched[step] for step in sorted(self._fetched)]

    def ended(self) -> bool:
        """The last step is here, or the commit looked at last holds the run's result.json."""
        return self._over or self._last_step in self._fetched

    def _look(self) -> None:
        commit = self._repo.commit("main")
        if commit == self._seen:
            return
        files = self._repo.files(commit)
        for step, adapter in adapters_in(files).items():
            if step is None:
                continue
            # By content: a commit that leaves the adapter as it is costs nothing, one that changes it is seen.
            target = self._into / adapter.weights.content_id[:16] / f"checkpoint-{step}"
            self._repo.fetch(commit, adapter, target)
            self._fetched[step] = Checkpoint(step, target)
        self._over = any(path.rpartition("/")[2] == "result.json" for path in files)
        self._seen = commit
