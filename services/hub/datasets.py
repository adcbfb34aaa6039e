"""Tasks of one revision of a dataset on the Hub, fetched in parallel, resumed, and checked by hash."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import HfApi

from services.common.errors import RecipeError
from services.common.run_dir import write_text
from services.common.tasks import HubSource, listing
from services.hub.client import messages, patiently
from services.hub.files import RemoteFile, download, list_files

AGAIN = "what was downloaded is kept: run the same command again to go on"
FULL_COMMIT = 40
SHORTEST_COMMIT = 7


def resolve_revision(api: HfApi, repo: str, revision: str) -> str:
    """The full commit that ``revision`` abbreviates, looked up in the dataset's list of commits.

    A branch name is refused: the pin would say nothing about which tasks it meant.
    """
    wanted = revision.lower()
    if not SHORTEST_COMMIT <= len(wanted) <= FULL_COMMIT or not set(wanted) <= set("0123456789abcdef"):
        raise RecipeError(
            f"revision {revision!r} is no commit; give {SHORTEST_COMMIT} to {FULL_COMMIT} hexadecimal digits of one"
        )
    with messages(repo, api.endpoint, "dataset", AGAIN):
        commits = [commit.commit_id for commit in api.list_repo_commits(repo, repo_type="dataset")]
    found = [commit for commit in commits if commit.startswith(wanted)]
    if not found:
        raise RecipeError(f"no commit of {repo} starts with {revision}; its newest is {commits[0]}")
    if len(found) > 1:
        raise RecipeError(listing(f"{revision} is ambiguous in {repo}; it may mean:", found))
    return found[0]


class RemoteTasks:
    """The tasks of one pinned revision, and the cache folder they are downloaded to."""

    def __init__(self, api: HfApi, source: HubSource, cache_dir: Path) -> None:
        self.api, self.source = api, source
        self.root = cache_dir / f"{source.repo.replace('/', '__')}@{source.revision}"

    @property
    def folder(self) -> Path:
        """Local folder with one sub-folder a task."""
        return self.root / self.source.folder

    def files(self) -> dict[str, list[RemoteFile]]:
        """Task name -> its files. A revision never changes, so the listing is kept beside the files."""
        kept = self.root / "listing.json"
        if kept.is_file():
            with contextlib.suppress(ValueError, TypeError):
                entries = json.loads(kept.read_text(encoding="utf-8"))
                return _by_task([RemoteFile(**entry) for entry in entries], self.source.folder)
        with messages(self.source.repo, self.api.endpoint, "dataset", AGAIN):
            files = patiently(list_files)(
                self.api, self.source.repo, self.source.revision, self.source.folder, kind="dataset"
            )
            write_text(kept, json.dumps([asdict(file) for file in files]))
        return _by_task(files, self.source.folder)

    def missing(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        """Those that are not in the cache with the listed content."""
        return [file for file in files if not self._is_cached(file)]

    def _is_cached(self, file: RemoteFile) -> bool:
        return file.is_at(self.root / file.path)

    def download(self, files: list[RemoteFile], *, workers: int, advance: Callable[[], None]) -> None:
        """Fetch ``files`` into the cache; ``advance`` is called once a file. Interrupted, it can be run again."""
        pool = ThreadPoolExecutor(workers)
        try:
            one = functools.partial(download, self.api, self.source.repo, self.source.revision)
            futures = [pool.submit(one, file, self.root, "dataset") for file in files]
            for future in futures:
                future.add_done_callback(lambda _: advance())
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            with messages(self.source.repo, self.api.endpoint, "dataset", AGAIN):
                for future in done:
                    future.result()
        finally:  # after the first failure, or Ctrl-C, what has not begun must not begin
            pool.shutdown(cancel_futures=True)


def _by_task(files: Iterable[RemoteFile], folder: str) -> dict[str, list[RemoteFile]]:
    tasks: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, inside, rest = file.path.removeprefix(f"{folder}/").partition("/")
        if inside and ".." not in rest.split("/"):
            tasks.setdefault(name, []).append(file)
    return tasks
