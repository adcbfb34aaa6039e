"""One JSON object a line on stdout, and the same in ``runs/<run>/<service>.log``.

Events carry names and numbers. Prompt text, token ids and secrets are never logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path

_RESERVED = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_SECRET_VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "OPENENV_CAPTURE_ADMIN_KEY")


def _secrets() -> list[str]:
    found = [os.environ.get(name, "") for name in _SECRET_VARIABLES]
    if path := os.environ.get("HF_TOKEN_PATH"):
        with contextlib.suppress(OSError):
            found.append(Path(path).read_text().strip())
    return [value for value in found if len(value) >= 8]


def redacted(text: str) -> str:
    """The text without any secret that this process was given."""
    for secret in _secrets():
        text = text.replace(secret, "[secret]")
    return text


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._secrets = _secrets()

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _RESERVED},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str)
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        return text


def setup(service: str, log_dir: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Send the root logger through the JSON formatter; return the service's own logger.

    Args: log_dir: the run directory; None logs to stdout only. What this process writes there, the group of the
        host's user may change and delete.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if log_dir is not None:
        os.umask(0o002)
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_dir / f"{service}.log"))
    root = logging.getLogger()
    root.handlers.clear()
    for handler in handlers:
        handler.setFormatter(_JsonFormatter(service))
        root.addHandler(handler)
    root.setLevel(level)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return logging.getLogger(service)
