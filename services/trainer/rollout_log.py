"""``runs/<run>/rollouts/``: every captured rollout, usable or not.

``index.jsonl`` has one line a rollout: what metrics, the watchdog and a person look at. Beside it one compressed file
a rollout with all that was captured: ids, log-probabilities, masks, text, tool calls, timings.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from services.common import run_dir
from services.common.run_dir import RunDir

INDEX = "index.jsonl"
_REPEATED = {"turns": {"__all__": {"request_messages", "request_tools"}}}
"""In every turn again; ``conversations`` has the messages once."""


@dataclass(frozen=True)
class RolloutRecord:
    """One line of the index."""

    rollout_id: str
    group: int | None
    """TRL's group: the rollouts of one prompt."""
    task: str
    scored: bool
    reward: float | None
    """The verifier's; None: there was no verdict, which is not 0."""
    cause: str | None
    """Why it is unscorable: ``services.common.causes``."""
    error: str | None
    breaches: Sequence[str]
    """Names of the capture gate's findings, fatal or not."""
    policy_steps: tuple[int, int]
    """The trainer's optimizer step when the rollout began and ended: the policy's version, at most one sync behind."""
    policy_versions: Sequence[tuple[int, int]] | None = None
    """Of each model call, in order and discarded ones too, lowest and highest version that can have sampled it; None:
    not known."""
    agent_timeout: bool = False
    turns: int = 0
    tool_calls: int = 0
    trainable_tokens: int = 0
    completion_tokens: int = 0
    """Sampled in all turns, discarded ones too."""
    cap_hits: int = 0
    """Turns that ended at sampling.max_completion_tokens."""
    budget_stops: int = 0
    """Model calls that were asked for beyond rollout.max_tool_calling_iterations."""
    sandbox_s: float = 0.0
    """Environment start to teardown, as the env server measured it."""
    agent_s: float = 0.0
    """Of it, the agent's own time; the rest is what a sandbox costs."""
    wall_s: float = 0.0
    """The whole call, as the trainer saw it."""
    at: str = field(default_factory=run_dir.utc_now)


def write(run: RunDir, record: RolloutRecord, result: Any | None) -> None:
    """Append the record; publish the result, if there is one, as ``<rollout_id>.json.zst``.

    Args: result: OpenEnv's ``HarborRolloutResult``.
    """
    if result is not None:
        _publish(
            run.rollouts / f"{record.rollout_id}.json.zst",
            {"record": asdict(record), "result": result.model_dump(mode="json", exclude=_REPEATED)},
        )
    run_dir.append_line(run.rollouts / INDEX, asdict(record))


def read(path: Path) -> dict[str, Any]:
    """``record`` and ``result`` of one ``.json.zst`` file."""
    with zstandard.open(path, "rt", encoding="utf-8") as stream:
        return dict(json.load(stream))


def _publish(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = zstandard.ZstdCompressor(level=3).compress(json.dumps(value, separators=(",", ":")).encode())
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    os.chmod(aside, 0o644)
    os.replace(aside, path)
