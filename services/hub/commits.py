"""One commit that is there afterwards exactly once, whatever the Hub answers on the way.

Two writers get 412 and must build on the newer commit; a full Hub answers 429 with the time to wait; and a 500 may
hide a commit that landed. So every try looks first: what is there already is not committed again.
"""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

from services.hub.client import REQUEST_TIMEOUT_S, first_line, http, is_passing, patiently, status
from services.hub.files import list_files

CONFLICT = (409, 412)
MAX_WAIT_S = 60.0
MAX_RETRY_AFTER_S = 600.0
"""A Hub that asks for more is asked again after this much."""
_backoff = wait_exponential_jitter(multiplier=0.5, max=MAX_WAIT_S)
logger = logging.getLogger("hub")


def ensure_repository(api: HfApi, repo: str, *, private: bool = True) -> None:
    """Make the repository unless it is there; one that is there keeps its visibility."""
    patiently(api.create_repo)(repo, private=private, exist_ok=True)


def commit(
    api: HfApi,
    repo: str,
    files: Mapping[str, Path],
    message: str,
    retry_for_s: float,
    sleep: Callable[[float], None] = time.sleep,
    *,
    without: Collection[str] = (),
) -> str:
    """Have ``files`` (path in the repository -> file) in the newest commit, all in one commit if any is missing.

    Args: without: paths in the repository that the newest commit must not have.
    Returns: the commit.  Raises: what huggingface_hub raises, when it does not pass within ``retry_for_s``; OSError: a
    file is gone.
    """
    for attempt in Retrying(
        retry=retry_if_exception(may_pass),
        stop=stop_after_delay(retry_for_s),
        wait=_wait,
        before_sleep=_log_retry,
        sleep=sleep,
        reraise=True,
    ):
        with attempt:
            return _commit_on_top(api, repo, files, message, without)
    raise AssertionError("tenacity ends with a result or an exception")


def _commit_on_top(api: HfApi, repo: str, files: Mapping[str, Path], message: str, without: Collection[str]) -> str:
    head = str(api.repo_info(repo, timeout=REQUEST_TIMEOUT_S).sha)
    listed = {file.path: file for file in list_files(api, repo, head)}
    missing = {path: file for path, file in files.items() if path not in listed or not listed[path].is_at(file)}
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationAdd(path, str(file)) for path, file in sorted(missing.items())),
        *(CommitOperationDelete(path, is_folder=False) for path in without if path in listed),
    ]
    if not operations:
        return head
    made: Any = api.create_commit(repo, operations, commit_message=message, parent_commit=head)
    return str(made.oid)


def may_pass(error: BaseException) -> bool:
    """Whether a commit may succeed later: what a read may, and a conflict with another writer."""
    return is_passing(error) or status(error) in CONFLICT


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked_s = retry_after_s(error) if error else None
    return _backoff(state) if asked_s is None else min(asked_s, MAX_RETRY_AFTER_S)


def retry_after_s(error: BaseException) -> float | None:
    """Seconds that the Hub asked to wait, by its Retry-After header: a number, or a date."""
    response = getattr(error, "response", None)
    value = None if response is None else response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if error is not None:
        logger.warning(
            "push is tried again",
            extra={"error": first_line(error), "status": status(error), "wait_s": round(state.upcoming_sleep, 1)},
        )


FAILURES = (http.HTTPError, OSError, ValueError)
"""What a push can end with, and a caller that must go on has to catch; HfHubHTTPError is one of the first two."""
