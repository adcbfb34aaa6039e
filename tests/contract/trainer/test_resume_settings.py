"""What a resume takes from the recipe as it is now, and what it refuses to change."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, get_scheduler

from services.common import recipe
from services.common.errors import RecipeError
from services.common.run_dir import Checkpoint
from services.trainer import grpo, resume

ROOT = Path(__file__).parents[3]
STEPS = 10


def made(kind: str, rate: float, beta1: float, epsilon: float, steps: int = STEPS) -> tuple[Any, Any]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=rate, betas=(beta1, 0.99), eps=epsilon, fused=True)
    return optimizer, get_scheduler(kind, optimizer, 0, steps)


def step(optimizer: Any, scheduler: Any, times: int = 1) -> None:
    for _ in range(times):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        optimizer.step()
        scheduler.step()


def resumed(kind: str, before: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer with another learning rate that has loaded what four steps of the first one left."""
    first = made(before, 1e-6, 0.9, 1e-8)
    step(*first, times=4)
    saved = [part.state_dict() for part in first]

    def load(self: Any, checkpoint: str | None) -> None:
        for part, state in zip((self.optimizer, self.lr_scheduler), saved, strict=True):
            part.load_state_dict(state)

    monkeypatch.setattr(Trainer, "_load_optimizer_and_scheduler", load)
    trainer = object.__new__(grpo.WholeGroupTrainer)
    trainer.args = SimpleNamespace(learning_rate=5e-6, adam_beta1=0.5, adam_epsilon=1e-4)
    trainer.optimizer, trainer.lr_scheduler = made(kind, 5e-6, 0.5, 1e-4, steps=2 * STEPS)
    trainer._load_optimizer_and_scheduler("checkpoint-4")
    return trainer


@pytest.mark.parametrize("before", ["constant", "linear"])
@pytest.mark.parametrize("kind", ["constant", "linear"])
def test_a_changed_learning_rate_schedule_and_adam_are_obeyed(kind, before, monkeypatch):
    trainer = resumed(kind, before, monkeypatch)
    (group,) = trainer.optimizer.param_groups
    for done in range(4, 8):
        expected = 5e-6 * (1 - done / (2 * STEPS) if kind == "linear" else 1)
        assert group["lr"] == pytest.approx(expected) and trainer.lr_scheduler.get_last_lr() == [group["lr"]]
        step(trainer.optimizer, trainer.lr_scheduler)
    assert (group["betas"], group["eps"]) == ((0.5, 0.99), 1e-4)


def test_adams_moments_stay(monkeypatch):
    trainer = resumed("constant", "constant", monkeypatch)
    (state,) = trainer.optimizer.state.values()
    assert state["step"] == 4 and state["exp_avg"].item() == pytest.approx(1 - 0.9**4)


def test_the_seam_is_transformers_own():
    assert list(inspect.signature(Trainer._load_optimizer_and_scheduler).parameters) == ["self", "checkpoint"]


def loaded(**changes: Any) -> recipe.Recipe:
    return recipe.load(ROOT / "data/recipes/smoke.toml", {key.replace("__", "."): v for key, v in changes.items()})


def check(**changes: Any) -> None:
    state = {"recipe": resume._identity(loaded())}
    resume._check_recipe(Checkpoint(4, Path("checkpoint-4")), state, loaded(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"trainer__samples_per_row": 1}, {"trainer__learning_rate": 3e-6}, {"trainer__lr_scheduler_type": "linear"},
     {"trainer__adam_beta1": 0.5}, {"trainer__max_steps": 9}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_what_changes_no_objective_may_change_at_a_resume(changes):
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"reward__tool_efficiency_bonus": 0.2}, "reward"), ({"weight_sync__rounding": "nearest"}, "rounding"),
     ({"lora__r": 4}, "lora")],
)  # fmt: skip
def test_what_would_make_it_another_run_may_not(changes, named):
    with pytest.raises(RecipeError, match=rf"^checkpoint-4 was made with another recipe: {named} was"):
        check(**changes)
