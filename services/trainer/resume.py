"""Going on after anything died: where training stands, and what has to be undone first.

A checkpoint says which training tasks are done, and carries the groups that were scored and not trained yet. What was
written after it (metrics, the account of trained samples) belongs to steps that are trained again; it is cut off and
kept aside, so that no step is counted twice.

Tasks are walked through in order, again and again; a *position* is a place on that endless walk, and the id of the
rollout group that is made there.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.trainer import checkpoint as checkpoints
from services.trainer import policy_versions, resume_points

ROLLOUT_STATE = "rollout_state.json"
PENDING_GROUPS = "pending_groups.json.zst"
ROLLED_BACK = "rolled_back"
"""``metrics.rolled_back.jsonl``: lines of steps that a resume undid, in the order in which that happened."""

Fetch = Callable[[RunDir], Checkpoint | None]

logger = logging.getLogger("trainer")


@dataclass(frozen=True)
class Cursor:
    """Where the walk through the training tasks goes on."""

    next: int = 0
    """First position that nothing is known of."""
    again: tuple[int, ...] = ()
    """Positions before it whose group was not finished."""
    dropped: tuple[int, ...] = ()
    """Positions whose group was given up since the last step; the next one's line in ``trained.jsonl`` names them."""

    def positions(self) -> Iterator[int]:
        yield from self.again
        yield from itertools.count(self.next)


@dataclass(frozen=True)
class Start:
    """From where an attempt starts. The default: from the beginning."""

    checkpoint: Checkpoint | None = None
    cursor: Cursor = Cursor()
    pending: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """``ScoredGroup``s as JSON; policy versions as the checkpoint's trainer counted."""
    saved_version: int = 0
    """Policy version that the checkpoint's adapter was served as."""
    served_version: int = 0
    """Highest version that the policy was ever asked to serve in this run. The next is above it, so that a version
    names one adapter for ever, also those of steps that were undone."""

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


def begin(run: RunDir, cfg: Recipe, fetch: Fetch | None = None) -> Start:
    """Find and check the newest complete checkpoint, and undo what was recorded after it.

    Args: fetch: asked for a checkpoint where the run's folder has none, as after the loss of the machine.
    Raises: RecipeError: a piece of the checkpoint is missing or damaged, or it was made with another recipe.
    """
    found = newest(run, fetch)
    checkpoints.discard_incomplete(run, found.step if found else 0)
    resume_points.discard_incomplete(run)
    if found is None:
        _roll_back(run, 0)
        return Start(served_version=_highest_version(run))
    checkpoints.check(found)
    state = _state(found)
    cursor = state["cursor"]
    _check_recipe(found, state, cfg)
    _roll_back(run, found.step)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in cursor.items()}
    start = Start(
        checkpoint=found,
        cursor=Cursor(**fields),
        pending=_pending(found),
        saved_version=state["model_version"],
        served_version=max(state["model_version"], _highest_version(run)),
    )
    logger.info(
        "resuming",
        extra={"checkpoint": found.path.name, "cursor": asdict(start.cursor), "pending": len(start.pending)},
    )
    return start


def newest(run: RunDir, fetch: Fetch | None = None) -> Checkpoint | None:
    """The newest complete checkpoint or resume point: the run's own, else what ``fetch`` brings."""
    own = [*run.complete_checkpoints(), *run_dir.iter_checkpoints(run.resume_points)]
    if own:
        return max(own, key=lambda found: found.step)
    return fetch(run) if fetch is not None else None


# --- What a checkpoint says ---------------------------------------------------------------------------------------


def write_state(folder: Path, cursor: Cursor, model_version: int, pending: Sequence[Any], *, cfg: Recipe) -> None:
    """Write the two pieces of a checkpoint that are ours, over what TRL wrote of them.

    Args: pending: ``ScoredGroup``s that were not trained.
    """
    import zstandard

    state = {
        # As TRL reads it. Our own loop goes by the cursor: TRL's index repeats every group that ended out of order.
        "prompt_index": min((cursor.next, *cursor.again)),
        "model_version": model_version,
        "cursor": asdict(cursor),
        "pending_positions": sorted(group.position for group in pending),
        "recipe": _identity(cfg),
    }
    run_dir.write_json(folder / ROLLOUT_STATE, state)
    text = json.dumps([asdict(group) for group in pending], separators=(",", ":"))
    (folder / PENDING_GROUPS).write_bytes(zstandard.ZstdCompressor(level=3).compress(text.encode()))


def _state(found: Checkpoint) -> dict[str, Any]:
    state = run_dir.read_json(found.path / ROLLOUT_STATE)
    if not isinstance(state, dict) or "cursor" not in state:
        raise RecipeError(
            f"checkpoint-{found.step} has a {ROLLOUT_STATE} without a cursor: another version of the project made it, "
            "and nobody knows which tasks are done; start a new run"
        )
    return state


def _pending(found: Checkpoint) -> list[dict[str, Any]]:
    import zstandard

    data = (found.path / PENDING_GROUPS).read_bytes()
    return list(json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(data)))


def _identity(cfg: Recipe) -> dict[str, Any]:
    """What must not change under a run that goes on; learning rate, Adam's settings, steps, limits and how samples are
    laid out in rows may."""
    dumped = cfg.model_dump(mode="json")
    return {
        "model": dumped["model"],
        "lora": dumped["lora"],
        "sampling": dumped["sampling"],
        "tasks": dumped["tasks"],
        "algorithm": dumped["algorithm"],
        "reward": dumped["reward"],
        "rounding": cfg.weight_sync.rounding,
        "num_generations": cfg.rollout.num_generations,
        "seed": cfg.run.seed,
    }


def _check_recipe(found: Checkpoint, state: dict[str, Any], cfg: Recipe) -> None:
    then, now = state.get("recipe", {}), _identity(cfg)
    if changed := [key for key in now if then.get(key) != now[key]]:
        was = ", ".join(f"{key} was {then.get(key)!r}, is {now[key]!r}" for key in changed)
        raise RecipeError(
            f"checkpoint-{found.step} was made with another recipe: {was}; resume with that one, or start a new run"
        )


def obey(optimizer: Any, scheduler: Any, learning_rate: float, adam_beta1: float, adam_epsilon: float) -> None:
    """Set what the recipe says now over what a checkpoint's optimizer and schedule were made with.

    Moments and the place in the schedule stay. The shape of the schedule is the new one anyway: torch saves none.
    Args: optimizer: Adam, or accelerate's wrapper. scheduler: a ``LambdaLR``, or accelerate's wrapper.
    """
    schedule = getattr(scheduler, "scheduler", scheduler)
    schedule.base_lrs = [learning_rate] * len(schedule.base_lrs)
    rates = [learning_rate * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    schedule._last_lr = rates
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group |= {"initial_lr": learning_rate, "lr": rate, "eps": adam_epsilon}
        group["betas"] = (adam_beta1, group["betas"][1])


# --- What a resume undoes -----------------------------------------------------------------------------------------


def _roll_back(run: RunDir, step: int) -> None:
    for path in (run.metrics, run.trained):
        lines = run_dir.read_lines(path)
        undone = [line for line in lines if line["step"] > step]
        if not undone:
            continue
        # Aside first: a kill between the two leaves a line twice there, never one nowhere.
        for line in undone:
            run_dir.append_line(path.with_name(f"{path.stem}.{ROLLED_BACK}.jsonl"), line)
        kept = [line for line in lines if line["step"] <= step]
        run_dir.write_text(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))
        logger.warning("steps are undone", extra={"file": path.name, "after_step": step, "lines": len(undone)})


def _highest_version(run: RunDir) -> int:
    lines = run_dir.read_lines(run.path / policy_versions.FILE)
    return max((int(line["version"]) for line in lines), default=0)
