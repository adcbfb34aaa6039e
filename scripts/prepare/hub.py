"""Files of one revision of a dataset on the Hub, fetched in parallel, resumed, and checked by hash.

huggingface_hub resumes cut downloads and waits out 429, but leaves gaps that are closed here: its listing calls have
no timeout, it does not retry a GET that failed with 5xx, and it does not compare what it received with the hash that
the Hub lists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import HfApi, RepoFile
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from services.common.errors import MachineError, NotReadyError, RecipeError
from services.common.run_dir import write_text
from services.common.tasks import HubSource, listing

REQUEST_TIMEOUT_S = 30.0
ATTEMPTS = 3
SERVER_FAILURES = (500, 502, 503, 504)
FULL_COMMIT = 40
SHORTEST_COMMIT = 7


@dataclass(frozen=True)
class RemoteFile:
    """One file as the Hub lists it."""

    path: str
    size_bytes: int
    git_sha1: str
    lfs_sha256: str | None = None

    def matches(self, content: bytes) -> bool:
        if self.lfs_sha256:
            return hashlib.sha256(content).hexdigest() == self.lfs_sha256
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == self.git_sha1


def connect() -> HfApi:
    """The API of the Hub that HF_ENDPOINT names, the public one by default, with a bound on every request."""
    huggingface_hub.set_client_factory(_bounded_client)
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _bounded_client() -> httpx2.Client:
    def bound(request: httpx2.Request) -> None:
        # Listings ask for timeout=None, which overrides a client's default: one silent server would hang us for ever.
        limits = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: limits.get(name) or REQUEST_TIMEOUT_S for name in names}

    return httpx2.Client(event_hooks={"request": [bound]}, follow_redirects=True)


@contextlib.contextmanager
def hub_errors(repo: str, endpoint: str) -> Iterator[None]:
    """Turn what the client raises into one message each, with what to do."""
    try:
        yield
    except RevisionNotFoundError:
        raise RecipeError(f"{repo} has no such revision on {endpoint}; pin a full commit from its history") from None
    except RemoteEntryNotFoundError as error:
        raise RecipeError(f"{repo} does not have what is pinned on {endpoint}: {_first_line(error)}") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise RecipeError(
            f"dataset {repo} is not on {endpoint}, or this token may not read it; check the name and HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, httpx2.HTTPError, HfHubHTTPError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise RecipeError(f"{endpoint} refuses access to {repo} ({status}); check HF_TOKEN") from None
        raise NotReadyError(
            f"{endpoint} does not answer for {repo}, retries included ({_first_line(error)}); "
            "what was downloaded is kept: run the same command again to go on"
        ) from None
    except OSError as error:
        raise machine_error(error) from None


def machine_error(error: OSError) -> MachineError:
    """One message for a disk that is full or a folder that cannot be written."""
    where = error.filename2 or error.filename or "a file"  # a failed copy names its source first
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(f"no space left while writing {where}; free some and run it again")
    return MachineError(f"{where} cannot be read or written: {error.strerror or error}")


def resolve_revision(api: HfApi, repo: str, revision: str) -> str:
    """The full commit that ``revision`` abbreviates, looked up in the dataset's list of commits.

    A branch name is refused: the pin would say nothing about which tasks it meant.
    """
    wanted = revision.lower()
    if not SHORTEST_COMMIT <= len(wanted) <= FULL_COMMIT or not set(wanted) <= set("0123456789abcdef"):
        raise RecipeError(
            f"revision {revision!r} is no commit; give {SHORTEST_COMMIT} to {FULL_COMMIT} hexadecimal digits of one"
        )
    with hub_errors(repo, api.endpoint):
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
        with hub_errors(self.source.repo, self.api.endpoint):
            files = [
                RemoteFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
                for entry in self.api.list_repo_tree(
                    self.source.repo,
                    self.source.folder,
                    recursive=True,
                    revision=self.source.revision,
                    repo_type="dataset",
                )
                if isinstance(entry, RepoFile)
            ]
            write_text(kept, json.dumps([asdict(file) for file in files]))
        return _by_task(files, self.source.folder)

    def missing(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        """Those that are not in the cache with the listed content."""
        return [file for file in files if not self._is_cached(file)]

    def _is_cached(self, file: RemoteFile) -> bool:
        path = self.root / file.path
        try:
            return path.stat().st_size == file.size_bytes and file.matches(path.read_bytes())
        except FileNotFoundError:
            return False

    def download(self, files: list[RemoteFile], *, workers: int, advance: Callable[[], None]) -> None:
        """Fetch ``files`` into the cache; ``advance`` is called once a file. Interrupted, it can be run again."""
        pool = ThreadPoolExecutor(workers)
        try:
            futures = [pool.submit(self._download_one, file) for file in files]
            for future in futures:
                future.add_done_callback(lambda _: advance())
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            with hub_errors(self.source.repo, self.api.endpoint):
                for future in done:
                    future.result()
        finally:  # after the first failure, or Ctrl-C, what has not begun must not begin
            pool.shutdown(cancel_futures=True)

    def _download_one(self, file: RemoteFile) -> None:
        for attempt in (1, 2):
            _retrying()(
                self.api.hf_hub_download,
                self.source.repo,
                file.path,
                repo_type="dataset",
                revision=self.source.revision,
                local_dir=self.root,
                force_download=attempt == 2,  # a file that lies there with other bytes counts as present otherwise
            )
            if self._is_cached(file):
                return
        raise RecipeError(
            f"{file.path} of {self.source.repo} arrived twice with other bytes than {self.api.endpoint} lists for it; "
            "something between here and the Hub changes files"
        )


def _by_task(files: Iterable[RemoteFile], folder: str) -> dict[str, list[RemoteFile]]:
    tasks: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, inside, rest = file.path.removeprefix(f"{folder}/").partition("/")
        if inside and ".." not in rest.split("/"):
            tasks.setdefault(name, []).append(file)
    return tasks


def _retrying() -> Retrying:
    return Retrying(
        retry=retry_if_exception(_is_server_failure),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential_jitter(initial=1, max=10),
        reraise=True,
    )


def _is_server_failure(error: BaseException) -> bool:
    return isinstance(error, HfHubHTTPError) and error.response.status_code in SERVER_FAILURES


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
