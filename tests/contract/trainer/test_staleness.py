"""TRL's real training loop on packed rows: the ratio of an untouched policy is 1, whatever shares its row."""

from __future__ import annotations

import math
import queue
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from services.trainer import packing
from services.trainer.ratio import ratio_stats
from services.trainer.staleness import MODEL_VERSION, StalenessTrainer, stale_key
from tests.contract.trainer.tiny_models import LORA_TARGETS, SHIPPED, use_stand_ins

LENGTHS = (60, 45, 33, 90)
PROMPT_TOKENS = 12


class FakeWorker:
    """A rollout worker that was given its samples beforehand."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the queue ran dry")


class FakeTransfer:
    """A weight sync to nobody; it leaves the weights alone."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def sample(trainer: StalenessTrainer, length: int, version: int) -> RolloutSample:
    """Tokens whose old log-probabilities are the model's own, of this sample alone."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(8, trainer.model.config.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, use_cache=False).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    mask = [0] * PROMPT_TOKENS + [1] * (length - PROMPT_TOKENS)
    old = [0.0] * PROMPT_TOKENS + log_probs[PROMPT_TOKENS - 1 :].tolist()
    return RolloutSample(
        prompt=[], completion=[], input_ids=ids[0].tolist(), completion_mask=mask, old_log_probs=old,
        advantage=1.0 if length % 2 else -1.0, model_version=version, group_id=length, metrics={"reward": 1.0},
    )  # fmt: skip


@pytest.fixture
def build(tmp_path: Path):
    use_stand_ins()
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)

    def trainer(**kwargs: Any) -> StalenessTrainer:
        args = AsyncGRPOConfig(
            str(tmp_path / "out"), token_budget=0, per_device_train_batch_size=len(LENGTHS), dtype="float32",
            gradient_accumulation_steps=1, num_generations=2, report_to="none", bf16=False, save_strategy="no",
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True, logging_steps=1, **kwargs,
        )  # fmt: skip
        row = {"prompt": [{"role": "user", "content": "x"}]}
        return StalenessTrainer(
            model=str(model), args=args, train_dataset=Dataset.from_list([row] * 4),
            processing_class=AutoTokenizer.from_pretrained(model), rollout_worker=FakeWorker(),
            weight_transfer=FakeTransfer(),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"),
        )  # fmt: skip

    return trainer


def logged(trainer: StalenessTrainer, key: str) -> list[float | None]:
    return [entry.get(key) for entry in trainer.state.log_history if "train_runtime" not in entry]


def test_ratio_stats_are_sums_and_counts_of_each_staleness():
    stats = ratio_stats(
        log_ratio=torch.tensor([0.0, math.log(2), math.log(0.5), 9.0]),
        mask=torch.tensor([1, 1, 1, 0]),
        staleness=torch.tensor([0, 2, 2, 5]),
    )
    assert stats == {
        "ratio/staleness_0": (1.0, 1.0),
        "kl/staleness_0": (0.0, 1.0),
        "ratio/staleness_2": (pytest.approx(2.5), 2.0),
        "kl/staleness_2": (pytest.approx(1 - math.log(2) + math.log(2) - 0.5), 2.0),
    }


def test_ratio_stats_of_no_trained_token_are_empty():
    assert ratio_stats(torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.long)) == {}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_an_untouched_policy_has_ratio_1_in_packed_rows(build, gradient_checkpointing):
    trainer = build(max_steps=1, learning_rate=0.0, gradient_checkpointing=gradient_checkpointing)
    packing.install(trainer.model)
    for length in LENGTHS * 2:  # the data loader fetches one batch ahead
        trainer.rollout_queue.put(sample(trainer, length, version=1))
    trainer.train()
    assert logged(trainer, "ratio/staleness_0") == [pytest.approx(1.0, abs=1e-5)]
    assert logged(trainer, "kl/staleness_0") == [pytest.approx(0.0, abs=1e-6)]
    assert logged(trainer, "ratio") == [pytest.approx(1.0, abs=1e-5)]


def test_a_leak_shows_in_the_kl_of_staleness_0(build):
    trainer = build(max_steps=1, learning_rate=0.0)
    for length in LENGTHS * 2:
        trainer.rollout_queue.put(sample(trainer, length, version=1))
    trainer.train()
    assert logged(trainer, "kl/staleness_0")[0] > 1e-5


def test_staleness_is_that_of_training_and_not_of_fetching(build):
    """The second step's batch is fetched before the first step's sync, and is one version old when it is trained."""
    trainer = build(max_steps=2, learning_rate=1e-2, max_staleness=4)
    packing.install(trainer.model)
    for length in LENGTHS * 3:
        trainer.rollout_queue.put(sample(trainer, length, version=1))
    trainer.train()
    assert trainer.rollout_worker.versions == [1, 2, 3]
    assert [value is None for value in logged(trainer, "ratio/staleness_0")] == [False, True]
    assert [value is None for value in logged(trainer, "ratio/staleness_1")] == [True, False]
    assert logged(trainer, "kl/staleness_1")[1] > 1e-6  # the policy has moved
    assert MODEL_VERSION not in trainer.state.log_history[0]
    assert logged(trainer, "reward") == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "rates"), [("constant", [1e-2, 1e-2]), ("linear", [1e-2, 5e-3])])
def test_learning_rate_is_the_recipes_at_first_and_then_follows_its_schedule(build, kind, rates):
    trainer = build(max_steps=2, learning_rate=1e-2, lr_scheduler_type=kind, max_staleness=4)
    applied = []
    step = trainer.create_optimizer().step
    trainer.optimizer.step = lambda *args: applied.append(trainer.optimizer.param_groups[0]["lr"]) or step(*args)
    packing.install(trainer.model)
    for length in LENGTHS * 3:
        trainer.rollout_queue.put(sample(trainer, length, version=1))
    trainer.train()
    assert applied == pytest.approx(rates)


def test_one_row_may_hold_several_versions(build):
    trainer = build(max_steps=1, learning_rate=0.0)
    packing.install(trainer.model)
    for length, version in zip(LENGTHS * 2, (1, 0, 1, 0) * 2, strict=True):
        trainer.rollout_queue.put(sample(trainer, length, version))
    trainer.train()
    assert logged(trainer, "ratio/staleness_0") == [pytest.approx(1.0, abs=1e-5)]
    assert logged(trainer, "ratio/staleness_1") == [pytest.approx(1.0, abs=1e-5)]


def test_dropped_samples_are_counted_by_their_length(build):
    trainer = build(max_steps=1, learning_rate=0.0, max_staleness=0)
    packing.install(trainer.model)
    for version in (0, 1, 1):
        for length in LENGTHS:
            trainer.rollout_queue.put(sample(trainer, length, version))
    trainer.train()
    assert logged(trainer, "sample/dropped_stale_total") == [float(len(LENGTHS))]
    assert logged(trainer, "sample/dropped_stale_le_1024_total") == [float(len(LENGTHS))]


def test_a_counter_of_dropped_samples_names_the_length_that_it_goes_up_to():
    names = [stale_key(length) for length in (1024, 1025, 70_000)]
    assert names == [f"sample/dropped_stale_le_{bound}_total" for bound in ("1024", "4096", "inf")]


def test_the_shipped_model_passes_the_start_up_check(build):
    trainer = build(max_steps=1)
    samples = [sample(trainer, length, 1).input_ids for length in (200, 150)]
    leaking = packing.measure(trainer.model, samples)
    packing.install(trainer.model)
    report = packing.check(trainer.model, samples, max_abs_logprob_diff=1e-4)
    assert leaking.max_abs_logprob_diff > 100 * report.max_abs_logprob_diff
