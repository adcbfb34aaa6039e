"""A rollout that cannot be scored is one line of the log: its cause, not the way there through three libraries.

When training ends, every rollout in flight ends so. ``rollouts/index.jsonl`` has each with its cause.
"""

from __future__ import annotations

import logging

from trl.experimental.async_grpo import openenv_harness

from services.trainer.session import UnscorableRollout


def without_traceback(record: logging.LogRecord) -> bool:
    """A logging filter that keeps every record. What is no ``UnscorableRollout`` keeps its traceback: it is a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnscorableRollout):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


def install() -> None:
    """For the process in which TRL's loop runs."""
    logging.getLogger(openenv_harness.__name__).addFilter(without_traceback)
