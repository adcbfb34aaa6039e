"""Follow a run: evaluate every complete checkpoint once, in order, until training has ended."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import httpx

from services.common import run_dir
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.evaluator.adapters import AdapterNotReadyError
from services.evaluator.app import Evaluator, StoppedEarlyError
from services.evaluator.checkpoints import RunSource, Source

MAX_PASSES = 3
"""Times that a checkpoint with unscored cells is taken up again; each pass has the recipe's retries of its own."""
ALARMS = "collapse_alarms.jsonl"
Identity = tuple[int, float]
logger = logging.getLogger("evaluator")


def watch(evaluator: Evaluator, source: Source | None = None) -> int:
    """Args: source: what to follow; None: the run's own folder.
    Returns: exit code 0, after the last checkpoint of a run that has ended, or on a stop request.

    Scored cells are kept in the run directory, so a restart goes on at the first one that is missing.
    """
    source = source or RunSource(evaluator.run)
    passes: Counter[Identity] = Counter()
    while not evaluator.stop.is_set():
        evaluator.pulse.set("watching")
        # Read before the checkpoints are: the last one is complete before the result is written.
        ended = source.ended()
        left = [found for found in source.complete() if passes[identity(found)] < MAX_PASSES]
        for checkpoint in left:
            try:
                whole = _evaluate(evaluator, checkpoint)
            except (AdapterNotReadyError, httpx.HTTPError) as error:
                logger.warning("checkpoint is left for later", extra={"step": checkpoint.step, "error": str(error)})
                # Nothing writes to it any more once training has ended: then "later" has an end.
                passes[identity(checkpoint)] += ended
            except StoppedEarlyError:
                return 0
            else:
                passes[identity(checkpoint)] += MAX_PASSES if whole else 1
        if ended and not left:
            return 0
        evaluator.stop.wait(evaluator.cfg.watchdog.poll_s)
    return 0


def identity(checkpoint: Checkpoint) -> Identity:
    """A resumed run may write the same step again: then READY is younger, or for a moment missing."""
    try:
        return checkpoint.step, (checkpoint.path / run_dir.READY).stat().st_mtime
    except FileNotFoundError:
        return checkpoint.step, 0.0


def _evaluate(evaluator: Evaluator, checkpoint: Checkpoint) -> bool:
    """Evaluate and record; return whether every cell has a score."""
    logger.info("evaluating", extra={"step": checkpoint.step})
    value = evaluator.evaluate(checkpoint, evaluator.watch_question)
    if value["adapter"]["pass_at_1"] is None:
        logger.error("checkpoint has no score", extra={"failures": value["infrastructure_failures"][:3]})
        return False
    summary = evaluator.record_checkpoint(value)
    logger.info(
        "evaluated",
        extra={
            "step": checkpoint.step,
            "base": value["base"]["pass_at_1"],
            "adapter": value["adapter"]["pass_at_1"],
            "best": summary["best"],
        },
    )
    alarm_on_collapse(evaluator.cfg, evaluator.run, summary, checkpoint.step)
    return bool(value["missing_cells"] == 0)


def alarm_on_collapse(cfg: Recipe, run: RunDir, summary: dict[str, Any], step: int) -> None:
    """Warn when this checkpoint collapsed; ask the trainer to stop where the recipe says so.

    Each alarm is raised once: a run that a person resumed in spite of it must not be stopped by it again.
    """
    for alarm in summary["collapse_alarms"]:
        if alarm["step"] != step or _is_raised(run, alarm):
            continue
        reason = (
            f"pass@1 of checkpoint-{step} is {alarm['drop']:.3f} below checkpoint-{alarm['best_step']} "
            f"(p = {alarm['p_value']:.4f}; evaluator.collapse_drop is {cfg.evaluator.collapse_drop})"
        )
        logger.error("collapse", extra={"reason": reason, "stops": cfg.evaluator.collapse_stops})
        # A request to start again is no reason to keep silent: the run goes on after it.
        if cfg.evaluator.collapse_stops and run_dir.read_final_request(run.stop_request) is None:
            run_dir.write_json(run.stop_request, {"reason": reason, "at": run_dir.utc_now(), "by": "evaluator"})
        run_dir.append_line(run.eval / ALARMS, {**alarm, "reason": reason, "at": run_dir.utc_now()})


def _is_raised(run: RunDir, alarm: dict[str, Any]) -> bool:
    return any(alarm.items() <= line.items() for line in run_dir.read_lines(run.eval / ALARMS))
