"""The gradient of a step equals that of its formulas, computed rollout by rollout and token by token."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.experimental.async_grpo import AsyncGRPOTrainer

from services.common.recipe import Algorithm
from services.trainer import objective, packing
from services.trainer.groups import Rollout, Row, ScoredGroup, oldest_version
from services.trainer.grpo import WholeGroupTrainer
from services.trainer.step_batch import packed_rows
from tests.contract.trainer.tiny_models import VOCAB_SIZE, tiny_lfm2

VERSION = 7
"""Served when the step is made."""
MAX_RELATIVE_DIFFERENCE = 1e-5
OPTIONS = {
    "the recipe's": {},
    "advantages are not divided": {"advantage": "none"},
    "each token counts the same": {"aggregation": "token"},
    "narrow and unequal bounds": {"clip_low": 0.05, "clip_high": 0.28},
    "wide bounds": {"clip_low": 1.0, "clip_high": 9.0},
    "truncated importance weight": {"stale_weight_cap": 1.1},
    "a small truncated importance weight": {"stale_weight_cap": 0.5, "aggregation": "token"},
    "KL to the base": {"kl_coef": 0.1},
    "KL to the base and a cap": {"kl_coef": 0.02, "stale_weight_cap": 2.0, "advantage": "none"},
    "truncated rollouts are left out": {"truncated": "mask"},
    "truncated rollouts are left out, tokens": {"truncated": "mask", "aggregation": "token", "kl_coef": 0.05},
}
ALGORITHMS = {name: Algorithm(**options) for name, options in OPTIONS.items()}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """As a step trains it: LoRA with B != 0, and the packing hooks."""
    made = with_lora(tiny_lfm2())
    packing.install(made)
    return made


@pytest.fixture(scope="module")
def exact() -> torch.nn.Module:
    """The same weights in float64, and no hooks: it is given one row at a time."""
    return with_lora(tiny_lfm2(attn_implementation="sdpa")).double()


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


# --- Random steps -----------------------------------------------------------------------------------------------------


def a_row(rng: random.Random, model: torch.nn.Module) -> Row:
    """Sampled by something near the model, so that ratios lie on both sides of the bounds."""
    length = rng.randint(2, 14)
    ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    mask = [0, *(int(rng.random() < 0.6) for _ in range(length - 1))]
    mask[rng.randrange(1, length)] = 1
    with torch.no_grad():
        own = log_probs_of(model, ids).tolist()
    old = [value + rng.gauss(0, 0.3) if sampled else 0.0 for value, sampled in zip([0.0, *own], mask, strict=True)]
    versions = [VERSION - rng.choice([0, 0, 1, 3]) for _ in ids]
    return Row(ids, mask, old, versions)


def a_step(seed: int, model: torch.nn.Module, algorithm: Algorithm) -> list[ScoredGroup]:
    """One to three groups; rollouts of one to three rows, some truncated; sometimes a group is silent."""
    rng = random.Random(seed)
    groups = []
    for position in range(rng.randint(1, 3)):
        size = rng.randint(2, 3)
        rewards = [rng.choice([0.0, 1.0, 1.25]) for _ in range(size)]
        advantages = objective.advantages(rewards, algorithm.advantage)
        rollouts = []
        for reward, advantage in zip(rewards, advantages, strict=True):
            rows = [a_row(rng, model) for _ in range(rng.randint(1, 3))]
            rollouts.append(Rollout(rows, reward, advantage, oldest_version(rows), truncated=rng.random() < 0.3))
        groups.append(ScoredGroup(position, position, rollouts))
    return groups


def log_probs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, of this row alone."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]


# --- The formulas, one rollout and one token after the other ----------------------------------------------------------


def reference_gradient(
    model: torch.nn.Module, groups: list[ScoredGroup], algorithm: Algorithm
) -> dict[str, torch.Tensor]:
    rollouts = [(rollout, group) for group in groups for rollout in group.rollouts]
    if algorithm.truncated == "mask":
        rollouts = [(rollout, group) for rollout, group in rollouts if not rollout.truncated]
    step_tokens = sum(sum(row.completion_mask) for rollout, _ in rollouts for row in rollout.rows)
    model.zero_grad(set_to_none=True)
    for rollout, group in rollouts:
        advantage = brute_force_advantage(rollout.reward, [other.reward for other in group.rollouts], algorithm)
        terms = [term for row in rollout.rows for term in token_terms(model, row, advantage, algorithm)]
        counted = step_tokens if algorithm.aggregation == "token" else len(terms) * len(rollouts)
        loss = sum(terms) / counted
        if loss.requires_grad:  # not where all tokens are beyond a bound
            loss.backward()
    return gradients(model)


def brute_force_advantage(reward: float, rewards: list[float], algorithm: Algorithm) -> float:
    mean = sum(rewards) / len(rewards)
    if algorithm.advantage == "none":
        return reward - mean
    variance = sum((other - mean) ** 2 for other in rewards) / len(rewards)
    return (reward - mean) / (variance**0.5 + 1e-8)


def token_terms(model: torch.nn.Module, row: Row, advantage: float, algorithm: Algorithm) -> list[torch.Tensor]:
    log_probs = log_probs_of(model, row.input_ids)
    with torch.no_grad(), model.disable_adapter():
        base = log_probs_of(model, row.input_ids)
    terms = []
    for token in range(1, len(row.input_ids)):
        if not row.completion_mask[token]:
            continue
        log_prob = log_probs[token - 1]
        ratio = torch.exp(log_prob - row.old_log_probs[token])
        if algorithm.stale_weight_cap is not None and row.versions[token] < VERSION:
            term = -min(ratio.item(), algorithm.stale_weight_cap) * advantage * log_prob
        else:
            # Beyond a bound on the side to which the advantage pushes, there is no gradient.
            if advantage > 0:
                bounded = min(ratio, torch.tensor(1 + algorithm.clip_high, dtype=ratio.dtype))
            else:
                bounded = max(ratio, torch.tensor(1 - algorithm.clip_low, dtype=ratio.dtype))
            term = -bounded * advantage
        if algorithm.kl_coef:
            q = base[token - 1] - log_prob
            term = term + algorithm.kl_coef * (torch.exp(q) - q - 1)
        terms.append(term)
    return terms


# --- The step as the trainer makes it ---------------------------------------------------------------------------------


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The losses of backward passes. TRL's and transformers' own step around it is not in the way here:
    test_whole_group_trainer.py has it."""
    calls = []

    def one_row(self: Any, model: Any, inputs: Any, _num_items: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        calls.append(loss.detach())
        return loss.detach()

    monkeypatch.setattr(AsyncGRPOTrainer, "training_step", one_row)
    return calls


def a_trainer(algorithm: Algorithm) -> WholeGroupTrainer:
    """With what ``training_step`` and ``compute_loss`` need, and no run around it."""
    trainer = WholeGroupTrainer.__new__(WholeGroupTrainer)
    trainer._algorithm, trainer.model_version = algorithm, VERSION
    trainer._metrics = {"train": defaultdict(list)}
    trainer._step_forward_s = trainer._current_train_step_time = 0.0
    trainer._step_forward_tokens = trainer._step_trained_tokens = 0.0
    trainer._step_seq_len_weighted = trainer._step_samples = 0.0
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer.args = SimpleNamespace(device=torch.device("cpu"))
    trainer._pulse = SimpleNamespace(set=lambda *_arguments, **_options: None)
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.compute_loss_context_manager = contextlib.nullcontext
    return trainer


def step_gradient(
    model: torch.nn.Module, groups: list[ScoredGroup], algorithm: Algorithm, samples_per_row: int
) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    rows = packed_rows(groups, algorithm, samples_per_row)
    a_trainer(algorithm).training_step(model, {"rows": rows})
    return gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over all trained parameters together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].double() - expected[name].double()).pow(2).sum()) for name in expected) ** 0.5
    size = sum(float(expected[name].double().pow(2).sum()) for name in expected) ** 0.5
    return difference / size if size else difference


PROPERTY = settings(max_examples=12, deadline=None)


@pytest.mark.usefixtures("backward_calls")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_a_step_is_that_of_its_formulas(
    name: str, model: torch.nn.Module, exact: torch.nn.Module
) -> None:
    algorithm = ALGORITHMS[name]

    @PROPERTY
    @given(seed=st.integers(0, 10**6), samples_per_row=st.integers(1, 8))
    def check(seed: int, samples_per_row: int) -> None:
        groups = a_step(seed, model, algorithm)
        found = step_gradient(model, groups, algorithm, samples_per_row)
        expected = reference_gradient(exact, groups, algorithm)
        assert relative_difference(found, expected) <= MAX_RELATIVE_DIFFERENCE

    check()


@pytest.mark.parametrize("other", [name for name in ALGORITHMS if name != "the recipe's"])
def test_each_option_changes_the_gradient(other: str, model: torch.nn.Module, exact: torch.nn.Module) -> None:
    """The control: a test that passes for every option could be one that sees none."""
    default = ALGORITHMS["the recipe's"]
    seeds = range(12)
    differences = []
    for seed in seeds:
        groups = a_step(seed, model, default)
        base = reference_gradient(exact, groups, default)
        differences.append(relative_difference(reference_gradient(exact, groups, ALGORITHMS[other]), base))
    assert max(differences) > 100 * MAX_RELATIVE_DIFFERENCE


@pytest.mark.usefixtures("backward_calls")
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_how_many_samples_share_a_row_does_not_change_the_gradient(model: torch.nn.Module, seed: int) -> None:
    algorithm = ALGORITHMS["the recipe's"]
    groups = a_step(seed, model, algorithm)
    expected = step_gradient(model, groups, algorithm, 1)
    for samples_per_row in (2, 5, 8):
        found = step_gradient(model, groups, algorithm, samples_per_row)
        assert relative_difference(found, expected) <= MAX_RELATIVE_DIFFERENCE


# --- Rows without a gradient ------------------------------------------------------------------------------------------


def half_silent(model: torch.nn.Module) -> list[ScoredGroup]:
    rng = random.Random(3)
    made = []
    for position, rewards in enumerate([(1.0, 0.0), (1.0, 1.0)]):
        advantages = objective.advantages(rewards, "std")
        rows = [[a_row(rng, model) for _ in range(2)] for _ in rewards]
        rollouts = [Rollout(*parts, oldest_version(parts[0])) for parts in zip(rows, rewards, advantages, strict=True)]
        made.append(ScoredGroup(position, position, rollouts))
    return made


def test_rows_without_a_gradient_make_no_backward_pass_and_miss_nothing(
    model: torch.nn.Module, backward_calls: list[torch.Tensor]
) -> None:
    algorithm = ALGORITHMS["the recipe's"]
    groups = half_silent(model)
    rows = packed_rows(groups, algorithm, 1)
    skipping = step_gradient(model, groups, algorithm, 1)
    assert (len(rows), len(backward_calls)) == (8, 4)
    model.zero_grad(set_to_none=True)
    a_trainer(algorithm).training_step(model, {"rows": [row | {"needs_gradient": True} for row in rows]})
    assert len(backward_calls) == 4 + 8
    assert relative_difference(skipping, gradients(model)) <= 1e-7


def test_with_a_kl_term_each_row_has_a_gradient(model: torch.nn.Module, backward_calls: list[torch.Tensor]) -> None:
    groups = half_silent(model)
    step_gradient(model, groups, ALGORITHMS["KL to the base"], 1)
    assert len(backward_calls) == 8


@pytest.mark.parametrize("options", [{}, {"truncated": "mask"}])
def test_a_step_that_teaches_nothing_has_gradients_of_exactly_0(
    options: dict[str, Any], model: torch.nn.Module, backward_calls: list[torch.Tensor]
) -> None:
    rng = random.Random(5)
    rollouts = [
        Rollout([a_row(rng, model)], 1.0, 1.0 if options else 0.0, VERSION, truncated=bool(options)) for _ in range(3)
    ]
    model.zero_grad(set_to_none=True)
    algorithm = Algorithm(**options)
    a_trainer(algorithm).training_step(model, {"rows": packed_rows([ScoredGroup(0, 0, rollouts)], algorithm, 2)})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert not backward_calls
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trained)


# --- Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backward_calls")
def test_a_rollout_weighs_one_however_many_rows_it_forked_into(model: torch.nn.Module) -> None:
    """A rollout twice as two rows is the rollout once."""
    rng = random.Random(11)
    algorithm = ALGORITHMS["the recipe's"]
    one, other = a_row(rng, model), a_row(rng, model)
    once = [Rollout([one], 1.0, 1.0, VERSION), Rollout([other], 0.0, -1.0, VERSION)]
    forked = [Rollout([one, one, one], 1.0, 1.0, VERSION), Rollout([other], 0.0, -1.0, VERSION)]
    found = step_gradient(model, [ScoredGroup(0, 0, forked)], algorithm, 4)
    expected = step_gradient(model, [ScoredGroup(0, 0, once)], algorithm, 4)
    assert relative_difference(found, expected) <= MAX_RELATIVE_DIFFERENCE


def test_a_ratio_that_overflows_on_a_token_that_does_not_count_leaves_the_loss_finite() -> None:
    log_probs = torch.tensor([-1.0, 200.0], requires_grad=True)
    terms = objective.Terms(
        log_probs=log_probs,
        old_log_probs=torch.tensor([-1.0, -200.0]),
        advantages=torch.tensor([1.0, 1.0]),
        weights=torch.tensor([1.0, 0.0]),
        staleness=torch.tensor([0, 0]),
    )
    loss = objective.policy_loss(terms, Algorithm())
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert log_probs.grad.tolist() == [-1.0, 0.0]


def test_the_default_loss_is_trl_s_own_formula(model: torch.nn.Module) -> None:
    """Of one row of one sample, as TRL 1.15 computes it (``AsyncGRPOTrainer.compute_loss``)."""
    row = a_row(random.Random(2), model)
    log_probs = log_probs_of(model, row.input_ids)
    mask, old = torch.tensor(row.completion_mask[1:]), torch.tensor(row.old_log_probs[1:])
    ratio = torch.exp(log_probs - old)
    per_token = -torch.min(ratio * 0.7, torch.clamp(ratio, 1 - 0.2, 1 + 0.2) * 0.7)
    expected = (per_token * mask).sum() / mask.sum()
    (packed,) = packed_rows([ScoredGroup(0, 0, [Rollout([row], 1.0, 0.7, VERSION)])], Algorithm(), 1)
    with torch.no_grad():
        found = a_trainer(Algorithm()).compute_loss(model, packed)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
