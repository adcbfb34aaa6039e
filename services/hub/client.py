"""Connection, bounds, patience and messages: what every use of the Hub shares.

huggingface_hub resumes cut downloads and waits out 429 on some calls, but leaves gaps that are closed here: several
of its calls have no timeout, a GET that failed with 5xx is not repeated, and its errors do not say what to do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from services.common.errors import NotReadyError, RecipeError, machine_error

REQUEST_TIMEOUT_S = 30.0
"""Of one request's connect, each read, each write: not of a whole transfer."""
ATTEMPTS = 3
PASSING = (429, 500, 502, 503, 504)
"""HTTP statuses of failures that may be gone at once."""

# huggingface_hub 1 speaks through httpx, 2 through httpx2, and the images have either. Both have the same names.
http: Any = importlib.import_module(type(huggingface_hub.get_session()).__module__.partition(".")[0])
UNAVAILABLE = (HfHubHTTPError, http.HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled)


class DamagedError(Exception):
    """What arrived is not what the Hub lists."""


def connect(token: str | None = None) -> HfApi:
    """The API of the Hub that HF_ENDPOINT names, the public one by default, with a bound on every request.

    Args: token: default what HF_TOKEN or a log-in says.
    """
    huggingface_hub.set_client_factory(_bounded_client)
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)


def _bounded_client() -> Any:
    def bound(request: Any) -> None:
        # Listings ask for timeout=None, which overrides a client's default: one silent server would hang us for ever.
        limits = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: limits.get(name) or REQUEST_TIMEOUT_S for name in names}

    return http.Client(event_hooks={"request": [bound]}, follow_redirects=True)


def status(error: BaseException) -> int | None:
    """HTTP status of the answer that an error came with."""
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, HfHubHTTPError):
        return status(error) in PASSING
    return isinstance(error, http.TransportError)


patiently = retry(
    retry=retry_if_exception(is_passing),
    stop=stop_after_attempt(ATTEMPTS),
    wait=wait_exponential_jitter(multiplier=0.5, max=10),
    reraise=True,
)
"""Calls a function that reads again when what went wrong may pass."""


@contextlib.contextmanager
def messages(repo: str, where: str, kind: str = "model", again: str = "try again later") -> Iterator[None]:
    """Turn what the client raises into one message each, with what to do.

    Args: kind: model or dataset. again: what to do when the Hub does not answer.
    Raises: RecipeError: it is not there, or access is refused. NotReadyError: the Hub does not answer, or files arrive
    damaged. MachineError.
    """
    try:
        yield
    except RevisionNotFoundError:
        raise RecipeError(f"{repo} has no such revision on {where}; give a full commit from its history") from None
    except RemoteEntryNotFoundError as error:
        raise RecipeError(f"{repo} does not have what is asked for on {where}: {first_line(error)}") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise RecipeError(
            f"{kind} {repo} is not on {where}, or this token may not read it; check the name and HF_TOKEN"
        ) from None
    except DamagedError as error:
        raise NotReadyError(f"{error}; something between here and the Hub changes files; {again}") from None
    except UNAVAILABLE as error:
        if status(error) in (401, 403):
            raise RecipeError(f"{where} refuses access to {repo} ({status(error)}); check HF_TOKEN") from None
        raise NotReadyError(
            f"{where} does not answer for {repo}, retries included ({first_line(error)}); {again}"
        ) from None
    except OSError as error:
        raise machine_error(error) from None


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
