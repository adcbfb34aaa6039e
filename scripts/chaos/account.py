"""What a run that was tormented must still be able to show: its books, read from its files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.common import run_dir
from services.common.run_dir import RunDir


@dataclass(frozen=True)
class Account:
    """Of one run, at its end."""

    steps: int
    replayed: list[int] = field(default_factory=list)
    """Positions whose group was trained twice."""
    lost: list[int] = field(default_factory=list)
    """Positions that were passed over: neither trained, nor waiting in the last checkpoint, nor dropped."""
    dropped: list[int] = field(default_factory=list)
    """Positions whose group was given up after its tries."""
    problems: list[str] = field(default_factory=list)
    """Whatever else is not as it must be."""

    @property
    def clean(self) -> bool:
        return not (self.replayed or self.lost or self.dropped or self.problems)


def of(run: RunDir) -> Account:
    """Read a run's books. A run without a checkpoint has none."""
    lines = run_dir.read_lines(run.trained)
    trained = Counter(position for line in lines for position in line["groups"])
    settled = {position for line in lines for position in [*line["refilled"], *line["dropped"]]}
    dropped = {position for line in lines for position in line["dropped"]}
    newest = run.complete_checkpoints()[-1:]
    state = run_dir.read_json(newest[0].path / "rollout_state.json") if newest else None
    lost: list[int] = []
    if state is not None:
        waiting = {*state["cursor"]["again"], *state["cursor"]["dropped"], *state["pending_positions"]}
        lost = sorted(set(range(state["cursor"]["next"])) - set(trained) - settled - waiting)
    replayed = sorted(position for position, count in trained.items() if count > 1)
    return Account(len(lines), replayed, lost, sorted(dropped), list(_problems(run, lines)))


def _problems(run: RunDir, lines: list[dict[str, Any]]) -> Iterable[str]:
    for path in (run.metrics, run.trained):
        steps = [line["step"] for line in run_dir.read_lines(path)]
        if steps != list(range(1, len(lines) + 1)):
            yield f"{path.name} has steps {steps}"
    versions = [
        line["version"] for line in run_dir.read_lines(run.path / "policy_versions.jsonl") if "begins_s" in line
    ]
    if versions != sorted(versions):
        yield f"policy versions went back: {versions}"
    base = run_dir.read_json(run.path / "base_weights.json") or {}
    if base.get("changed"):
        yield f"base weights changed: {base['changed'][:3]}"
