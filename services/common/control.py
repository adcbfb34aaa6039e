"""The key to env's control plane: who has it may start rollouts, and see and end sandboxes.

env draws it and keeps it in the run directory, where trainer, evaluator and watchdog read it; no sandbox sees that
folder. It travels as the password of HTTP's basic authentication, so that a person's browser can ask for it.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from collections.abc import Mapping

from services.common.run_dir import APP_UID, RunDir

USER = "opencode-rl"


def issue(run: RunDir) -> str:
    """The run's key. One that is there stays: an env that starts again meets a trainer that knows it."""
    if key := read(run):
        return key
    run.path.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe(32)
    aside = run.control_key.with_name(f"{run.control_key.name}.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(key + "\n")
        if os.geteuid() == 0:
            os.fchown(stream.fileno(), 0, APP_UID)
        os.fchmod(stream.fileno(), 0o640)
    os.replace(aside, run.control_key)
    return key


def read(run: RunDir) -> str:
    """The run's key; empty when env has not drawn one yet."""
    try:
        return run.control_key.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def headers(run: RunDir) -> dict[str, str]:
    """What a call to env's control plane needs; nothing while there is no key."""
    key = read(run)
    return {"Authorization": _basic(key)} if key else {}


def is_right(sent: Mapping[bytes, bytes], key: str) -> bool:
    """Args: sent: headers of a call by their names in small letters."""
    return hmac.compare_digest(sent.get(b"authorization", b""), _basic(key).encode())


def _basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"{USER}:{key}".encode()).decode()
