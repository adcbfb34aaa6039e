"""Cells and the file that keeps their results.

A cell is one rollout of an evaluation: (arm, task, attempt). Its key covers all that could change the outcome:
weights, task content, sampling, budget, agent version, images. So a result is reused exactly when the very same
question was answered before, base cells are computed once, and a restart goes on at the first missing cell.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from services.common import recipe as recipes
from services.common import run_dir
from services.common.errors import RecipeError
from services.common.recipe import Recipe

BASE = "base"
"""Label of the arm without an adapter."""
IMAGES = ("sandbox", "env", "policy")
"""Images whose content can change a result, as named in the run's manifest."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What every cell of an evaluation shares, and what a result therefore holds for."""

    model: str
    model_revision: str
    sampling: Mapping[str, float]
    """``temperature``, ``top_p``, ``top_k`` as asked of the capture proxy."""
    reward_keys: tuple[str, ...]
    max_completion_tokens: int
    max_model_calls: int
    agent_timeout_s: float
    opencode_version: str
    images: Mapping[str, str]
    """Image name -> id; the sandbox image's name where the manifest has no id."""

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0


def conditions(cfg: Recipe, manifest: Mapping[str, Any] | None, *, greedy: bool = False) -> Conditions:
    """The conditions that the recipe and the run's manifest set.

    Args: greedy: temperature 0 in place of the recipe's, for a comparison without sampling noise.
    """
    recorded = (manifest or {}).get("images") or {}
    return Conditions(
        model=cfg.model.id,
        model_revision=_model_revision(cfg),
        sampling=eval_sampling(cfg, greedy=greedy),
        reward_keys=cfg.reward.keys,
        max_completion_tokens=cfg.sampling.max_completion_tokens,
        max_model_calls=cfg.rollout.max_tool_calling_iterations,
        agent_timeout_s=cfg.rollout.agent_timeout_s,
        opencode_version=cfg.env.opencode_version,
        images={"sandbox": cfg.sandbox_image()} | {name: str(recorded[name]) for name in IMAGES if name in recorded},
    )


def eval_sampling(cfg: Recipe, *, greedy: bool = False) -> dict[str, float]:
    """The recipe's sampling in the three keys that OpenEnv's ``eval_sampling`` takes; it writes "no top_k" as -1.

    The penalties and min_p are not among the keys: validation holds them at their neutral values.
    """
    sampling = cfg.sampling
    return {
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
    }


def _model_revision(cfg: Recipe) -> str:
    if cfg.model.revision is not None:
        return cfg.model.revision
    weights = Path(cfg.model_location()) / "model.safetensors"
    if cfg.model.source == "hub" or not weights.is_file():
        raise RecipeError(
            f"model.revision is missing and there is no {weights}; results could not say which weights they hold for"
        )
    return f"sha256:{recipes.file_sha256(weights)}"


@dataclass(frozen=True, slots=True)
class Arm:
    """One set of weights under evaluation: the base, or the base with an adapter."""

    label: str
    """``base`` or ``checkpoint-N``: for people. The hash is what counts."""
    adapter_sha256: str = ""
    """Of adapter_model.safetensors; empty for the base."""


@dataclass(frozen=True, slots=True)
class Cell:
    arm: Arm
    task: str
    task_sha256: str
    """Of every file of the task."""
    attempt: int

    def key(self, under: Conditions) -> str:
        """The label of the arm is left out: the same weights under two names are one cell."""
        parts = [asdict(under), self.arm.adapter_sha256, self.task, self.task_sha256, self.attempt]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rollout came to."""

    reward: float | None
    """The verifier's; None: the rollout failed for another reason than the agent's answer, and counts nowhere."""
    cause: str | None = None
    """``causes.Cause`` of a rollout without a score."""
    error: str = ""
    agent_timeout: bool = False
    """The agent used up its time; what it had left behind was graded."""
    turns: int = 0
    tool_calls: int = 0
    completion_tokens: int = 0
    unparsed_calls: int = 0
    """Turns whose text still holds a tool-call marker: the parser made no call of it."""
    wall_s: float = 0.0
    trial: str = ""
    """Folder below the run's ``trials/`` with what the agent did."""

    @property
    def scored(self) -> bool:
        return self.reward is not None

    @property
    def passed(self) -> bool:
        """A correct answer, as the training reward sees it."""
        return self.reward is not None and self.reward >= 1.0


_OUTCOME_FIELDS = tuple(field.name for field in fields(Outcome))


class CellStore:
    """Results of cells in a JSON-lines file: append-only, so that a kill at any moment loses only what was running.

    Safe for threads. A cell that two processes computed at once counts once: the first line wins.
    """

    def __init__(self, path: Path, under: Conditions) -> None:
        self._path = path
        self._under = under
        self._lock = threading.Lock()
        self._scored: dict[str, Outcome] = {}
        self._failed: dict[str, Outcome] = {}
        self.reload()

    def reload(self) -> None:
        """Read what other processes appended."""
        with self._lock:
            for line in run_dir.read_lines(self._path):
                self._remember(line["key"], Outcome(**{name: line[name] for name in _OUTCOME_FIELDS if name in line}))

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep the outcome. A failure is kept too, for the list of them, and leaves the cell missing."""
        key = cell.key(self._under)
        record = {
            "key": key,
            "label": cell.arm.label,
            "adapter_sha256": cell.arm.adapter_sha256,
            "task": cell.task,
            "attempt": cell.attempt,
            "at": run_dir.utc_now(),
            **asdict(outcome),
        }
        with self._lock:
            run_dir.append_line(self._path, record)
            self._remember(key, outcome)

    def _remember(self, key: str, outcome: Outcome) -> None:
        if outcome.scored:
            self._scored.setdefault(key, outcome)
            self._failed.pop(key, None)
        elif key not in self._scored:
            self._failed[key] = outcome

    def get(self, cell: Cell) -> Outcome | None:
        """The scored outcome of the cell, or None: it is missing."""
        return self._scored.get(cell.key(self._under))

    def failure(self, cell: Cell) -> Outcome | None:
        """The last failure of a cell that has no score."""
        return self._failed.get(cell.key(self._under))

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.get(cell) is None]
