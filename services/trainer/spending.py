"""What the run costs, at every step, and the ceiling at which it ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from services.common.costs import Meter, Spent
from services.common.errors import StoppedError
from services.common.recipe import Costs
from services.common.run_dir import RunDir


class Spending(TrainerCallback):
    """Counts at the end of each step. Must come after the callback that writes ``metrics.jsonl``: the step that passes
    the ceiling is written down before it ends the run."""

    def __init__(self, prices: Costs, run: RunDir) -> None:
        self._ceiling_usd = prices.ceiling_usd
        self._meter = Meter(run, prices)
        self._steps = 0
        self._spent: Spent = self._meter.update(0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._steps = state.global_step
        self._spent = self._meter.update(self._steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any) -> None:
        """Raises: StoppedError: the ceiling is passed; the trainer saves a checkpoint and ends with exit code 4."""
        if self._ceiling_usd is not None and self._spent.usd >= self._ceiling_usd:
            raise StoppedError(
                f"the run has cost {self._spent.usd:.2f} dollars at step {self._steps}; costs.ceiling_usd is "
                f"{self._ceiling_usd:g}; the checkpoint of this step is saved: raise the ceiling to go on from it"
            )

    def metrics(self) -> dict[str, float]:
        per_step = self._spent.per_step(self._steps)
        return {
            "costs/gpu_hours": self._spent.gpu_hours,
            "costs/sandbox_minutes": self._spent.sandbox_minutes,
            "costs/usd": self._spent.usd,
            **({} if per_step is None else {"costs/usd_per_step": per_step}),
        }
