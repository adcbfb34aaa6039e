"""What the cells add up to, and the files that say so.

``eval/<checkpoint>_results.json`` and ``eval/final_results.json`` hold one paired comparison each;
``eval/summary.json`` is made from the former alone: the curve, its best checkpoint, its alarms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common import run_dir
from services.common.errors import RecipeError
from services.common.tasks import Task
from services.evaluator import statistics
from services.evaluator.cells import Arm, Cell, CellStore, Conditions, Outcome

SUFFIX = "_results.json"
_POINT = ("adapter_sha256", "pass_at_1", "interval_95", "tasks", "unparsed_call_share")
_CHECKPOINT_RESULTS = re.compile(r"^checkpoint-(\d+)_results\.json$")


@dataclass(frozen=True, slots=True)
class Question:
    """The cells of one arm: which tasks, how often. The order of tasks is the suite's."""

    suite: str
    tasks: Mapping[str, str]
    """Task -> hash of its files."""
    attempts: int

    def cells(self, arms: Iterable[Arm]) -> list[Cell]:
        """All cells, those of one task and attempt side by side, so that a part of them is already paired."""
        arms = list(arms)
        return [
            Cell(arm, task, sha256, attempt)
            for attempt in range(self.attempts)
            for task, sha256 in self.tasks.items()
            for arm in arms
        ]


def choose(suite: str, tasks: Sequence[Task], limit: int | None = None, names: Sequence[str] = ()) -> list[Task]:
    """The first ``limit`` of the tasks, or those named.

    Raises: RecipeError: a name that the suite lacks; the message lists those it has.
    """
    known = {task.name: task for task in tasks}
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"{', '.join(unknown)}: no such task in {suite}; there: {', '.join(known)}")
    return [known[name] for name in names] if names else list(tasks)[:limit]


def split_names(text: str) -> list[str]:
    """Names separated by commas; empty for none."""
    return [name.strip() for name in text.split(",") if name.strip()]


def rates(store: CellStore, question: Question, arm: Arm) -> dict[str, float]:
    """Task -> share of passed attempts, of the tasks that have a scored attempt."""
    passed: dict[str, list[bool]] = {}
    for cell in question.cells([arm]):
        if (outcome := store.get(cell)) is not None:
            passed.setdefault(cell.task, []).append(outcome.passed)
    return {task: sum(found) / len(found) for task, found in passed.items()}


def summarise_arm(store: CellStore, question: Question, arm: Arm) -> dict[str, Any]:
    """Pass@1 with its 95 % interval, and means a scored rollout."""
    outcomes = [outcome for cell in question.cells([arm]) if (outcome := store.get(cell)) is not None]
    by_task = rates(store, question, arm)
    rate = statistics.pass_at_1(list(by_task.values()))
    return {
        "label": arm.label,
        "adapter_sha256": arm.adapter_sha256 or None,
        "pass_at_1": rate,
        "interval_95": None if rate is None else statistics.wilson_interval(rate, len(by_task)),
        "tasks": len(by_task),
        "rollouts": len(outcomes),
        "passed": sum(outcome.passed for outcome in outcomes),
        "agent_timeouts": sum(outcome.agent_timeout for outcome in outcomes),
        "mean_turns": _mean(outcomes, "turns"),
        "mean_tool_calls": _mean(outcomes, "tool_calls"),
        "mean_completion_tokens": _mean(outcomes, "completion_tokens"),
        "mean_wall_s": _mean(outcomes, "wall_s"),
        "unparsed_call_share": _share(outcomes, "unparsed_calls", "turns"),
    }


def _mean(outcomes: Sequence[Outcome], field: str) -> float | None:
    return math.fsum(getattr(outcome, field) for outcome in outcomes) / len(outcomes) if outcomes else None


def _share(outcomes: Sequence[Outcome], part: str, whole: str) -> float | None:
    total = sum(getattr(outcome, whole) for outcome in outcomes)
    return sum(getattr(outcome, part) for outcome in outcomes) / total if total else None


def compile_results(
    store: CellStore, question: Question, under: Conditions, base: Arm, adapter: Arm | None
) -> dict[str, Any]:
    """One comparison as it is written: conditions, both arms, the pairs, what failed.

    Args: adapter: None evaluates the base alone.
    """
    arms = [base] if adapter is None else [base, adapter]
    by_arm = {arm: rates(store, question, arm) for arm in arms}
    failures = [
        {"label": cell.arm.label, "task": cell.task, "attempt": cell.attempt, "cause": failure.cause,
         "error": failure.error}
        for cell in question.cells(arms)
        if (failure := store.failure(cell)) is not None
    ]  # fmt: skip
    value: dict[str, Any] = {
        "at": run_dir.utc_now(),
        "suite": question.suite,
        "attempts": question.attempts,
        "greedy": under.greedy,
        "conditions": asdict(under),
        "base": summarise_arm(store, question, base),
        "missing_cells": len(store.missing(question.cells(arms))),
        "infrastructure_failures": failures,
        "tasks": {task: {arm.label: by_arm[arm].get(task) for arm in arms} for task in question.tasks},
    }
    if adapter is not None:
        pairs = statistics.compare(by_arm[base], by_arm[adapter])
        value["adapter"] = summarise_arm(store, question, adapter)
        value["paired"] = {
            "tasks": pairs.num_tasks,
            "both": pairs.both,
            "only_base": pairs.only_first,
            "only_adapter": pairs.only_second,
            "neither": pairs.neither,
            "mcnemar_exact_p": pairs.p_value,
        }
    return value


def write_summary(folder: Path, *, collapse_drop: float) -> dict[str, Any]:
    """Make ``summary.json`` from the checkpoints' results in ``folder``; return it."""
    found = _checkpoint_results(folder)
    curve = {step: _adapter_rates(value) for step, value in found.items()}
    alarms = statistics.collapses(curve, collapse_drop)
    best = best_step(curve)
    summary = {
        "at": run_dir.utc_now(),
        "base": found[max(found)]["base"] if found else None,
        "checkpoints": [
            {
                "step": step,
                "label": f"checkpoint-{step}",
                **{key: value["adapter"][key] for key in _POINT},
                "mcnemar_exact_p": value["paired"]["mcnemar_exact_p"],
                "infrastructure_failures": len(value["infrastructure_failures"]),
            }
            for step, value in found.items()
        ],
        "best": None if best is None else f"checkpoint-{best}",
        "collapse_alarms": [asdict(alarm) for alarm in alarms],
    }
    run_dir.write_json(folder / "summary.json", summary)
    return summary


def best_step(curve: Mapping[int, Mapping[str, float]]) -> int | None:
    """The step with the highest pass@1; of equals the first, which drifted least from the base."""
    means = {step: statistics.pass_at_1(list(found.values())) for step, found in sorted(curve.items())}
    scored = {step: rate for step, rate in means.items() if rate is not None}
    return max(scored, key=lambda step: scored[step], default=None)


def _checkpoint_results(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> results, in order; only those with a scored adapter."""
    found = {}
    for path in folder.glob(f"checkpoint-*{SUFFIX}"):
        match = _CHECKPOINT_RESULTS.match(path.name)
        value = run_dir.read_json(path) if match else None
        if match and value and value.get("adapter", {}).get("pass_at_1") is not None:
            found[int(match[1])] = value
    return dict(sorted(found.items()))


def _adapter_rates(value: Mapping[str, Any]) -> dict[str, float]:
    label = value["adapter"]["label"]
    return {task: found[label] for task, found in value["tasks"].items() if found.get(label) is not None}
