"""One comparison, on request: the final adapter on all held-out tasks, or any checkpoint on some of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from services.common import run_dir
from services.common.errors import NotReadyError, RecipeError
from services.common.run_dir import Checkpoint
from services.evaluator import checkpoints, curve
from services.evaluator.adapters import AdapterNotReadyError
from services.evaluator.app import Evaluator
from services.evaluator.cells import BASE
from services.evaluator.results import SUFFIX, Question
from services.hub.adapters import PREFIX

MAX_FAILURES_SHOWN = 10


def final(evaluator: Evaluator, console: Console) -> int:
    """Base and newest checkpoint on ``evaluator.final_tasks`` held-out tasks -> ``eval/final_results.json``."""
    checkpoint = checkpoints.find(evaluator.run, "final")
    value = _evaluate(evaluator, checkpoint, evaluator.question(evaluator.cfg.evaluator.final_tasks))
    run_dir.write_json(evaluator.run.eval / "final_results.json", value)
    # The watched tasks are among the final ones, so the last point of the curve costs nothing more.
    watched = evaluator.from_store(value, evaluator.watch_question)
    summary = evaluator.record_checkpoint(watched) if watched else evaluator.record_summary()
    return _show(value, summary, evaluator.run.eval / "final_results.json", console)


def one(evaluator: Evaluator, name: str, limit: int | None, names: Sequence[str], console: Console) -> int:
    """Base and the named checkpoint on chosen held-out tasks.

    The results of a checkpoint of the run on exactly the watched tasks, sampled and in the images as in training,
    are a point of the curve; others go to ``eval/other/``, where they cannot be mistaken for one.
    """
    checkpoint = None if name == BASE else checkpoints.find(evaluator.run, name)
    question = evaluator.question(limit or evaluator.cfg.evaluator.watch_tasks, names)
    value = _evaluate(evaluator, checkpoint, question)
    label = checkpoint.path.name if checkpoint else BASE
    on_curve = (
        checkpoint is not None
        and not name.startswith(PREFIX)
        and question == evaluator.watch_question
        and evaluator.under == evaluator.trained
    )
    if on_curve and value["adapter"]["pass_at_1"] is not None:
        return _show(value, evaluator.record_checkpoint(value), evaluator.run.eval / f"{label}{SUFFIX}", console)
    kind = f"{len(question.tasks)}-tasks{'-greedy' if evaluator.under.greedy else ''}"
    path = evaluator.run.eval / "other" / f"{label}-{kind}{SUFFIX}"
    run_dir.write_json(path, value)
    if evaluator.under.images != evaluator.trained.images:
        console.print("The images are not those of the run, so this is no point of its curve.", highlight=False)
    return _show(value, None, path, console)


def _evaluate(evaluator: Evaluator, checkpoint: Checkpoint | None, question: Question) -> dict[str, Any]:
    try:
        return evaluator.evaluate(checkpoint, question)
    except AdapterNotReadyError as error:
        raise RecipeError(f"this adapter cannot be evaluated: {error}") from None
    except httpx.HTTPError as error:
        raise NotReadyError(f"policy-eval went away: {error}; scored rollouts are kept, run it again") from None


def _show(value: dict[str, Any], summary: dict[str, Any] | None, path: Path, console: Console) -> int:
    """Print the comparison. Raises: NotReadyError: nothing could be scored, so there is nothing to compare."""
    failures = value["infrastructure_failures"]
    arms = [value["base"], *([value["adapter"]] if "adapter" in value else [])]
    if any(arm["pass_at_1"] is None for arm in arms):
        first = failures[0] if failures else {"cause": "unknown", "error": ""}
        raise NotReadyError(
            f"no rollout of {' and '.join(arm['label'] for arm in arms if arm['pass_at_1'] is None)} could be scored; "
            f"{len(failures)} failed, first with {first['cause']}: {first['error']}"
        )
    console.print(table(value))
    for line in (*sentences(value), *([curve.terminal(summary)] if summary else []), f"Results: {path}"):
        if line:
            console.print(line, highlight=False, markup=False)
    return 0


def table(value: dict[str, Any]) -> Table:
    """Base and adapter side by side."""
    arms = [value["base"], *([value["adapter"]] if "adapter" in value else [])]
    sampling = "greedy" if value["greedy"] else "sampled as in training"
    shown = Table(title=f"{value['suite']}: {len(value['tasks'])} tasks, {value['attempts']} attempt(s), {sampling}")
    for name in ("", "pass@1", "95 % interval", "passed", "tool calls", "tokens", "unparsed", "timeouts"):
        shown.add_column(name, justify="left" if not name else "right")
    for arm in arms:
        low, high = arm["interval_95"]
        shown.add_row(
            arm["label"], f"{arm['pass_at_1']:.3f}", f"{low:.3f} - {high:.3f}", f"{arm['passed']}/{arm['rollouts']}",
            _number(arm["mean_tool_calls"]), _number(arm["mean_completion_tokens"]),
            "-" if arm["unparsed_call_share"] is None else f"{arm['unparsed_call_share']:.1%}",
            str(arm["agent_timeouts"]),
        )  # fmt: skip
    return shown


def sentences(value: dict[str, Any]) -> list[str]:
    """What the table cannot say: the pairs, and what failed."""
    lines = []
    if pairs := value.get("paired"):
        lines.append(
            f"Of {pairs['tasks']} tasks scored for both: {pairs['both']} both, {pairs['only_base']} only base, "
            f"{pairs['only_adapter']} only adapter, {pairs['neither']} neither; "
            f"exact McNemar p = {pairs['mcnemar_exact_p']:.3f}"
        )
    if value.get("adapter_is_zero"):
        lines.append("All B factors of the adapter are zero: it is the base.")
    failures = value["infrastructure_failures"]
    if failures:
        lines.append(f"{len(failures)} rollouts failed for another reason than the agent's answer and are not scored:")
        lines += [
            f"  {failure['label']} {failure['task']}: {failure['cause']}: {failure['error'][:120]}"
            for failure in failures[:MAX_FAILURES_SHOWN]
        ]
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
