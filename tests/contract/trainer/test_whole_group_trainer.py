"""TRL's real training loop on whole groups: ratio, staleness, learning rate, and what costs a backward pass."""

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

from services.common import health, run_dir
from services.common.recipe import Algorithm
from services.common.run_dir import RunDir
from services.trainer import packing
from services.trainer.groups import Rollout, Row, ScoredGroup
from services.trainer.grpo import WholeGroupTrainer
from services.trainer.ratio import ratio_stats
from services.trainer.resume import Start
from services.trainer.scheduler import Limits
from tests.contract.trainer.tiny_models import LORA_TARGETS, SHIPPED, use_stand_ins

LENGTHS = (60, 45, 33, 90)
PROMPT_TOKENS = 12


class FakeChannel(queue.Queue):
    """FAKE of the way to the worker: groups that were put there beforehand, and tickets that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: queue.Queue[Any] = queue.Queue()


class FakeWorker:
    """FAKE of a rollout worker: it was given its groups beforehand."""

    def __init__(self) -> None:
        self.rollout_buffer = FakeChannel()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the queue ran dry")


class FakeTransfer:
    """FAKE of a weight sync, to nobody; it leaves the weights alone."""

    merges_in_trainer = False
    version = 0

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        list(iterator)
        self.version += 1

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def row(trainer: WholeGroupTrainer, length: int, version: int) -> Row:
    """Tokens whose old log-probabilities are the model's own, of this row alone."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(8, trainer.model.config.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, use_cache=False).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    mask = [0] * PROMPT_TOKENS + [1] * (length - PROMPT_TOKENS)
    old = [0.0] * PROMPT_TOKENS + log_probs[PROMPT_TOKENS - 1 :].tolist()
    return Row(ids[0].tolist(), mask, old, [version] * length)


def put(
    trainer: WholeGroupTrainer, ticket: int, versions: tuple[int, ...] = (1, 1, 1, 1), advantage: float = 1.0
) -> None:
    rollouts = [
        Rollout([row(trainer, length, version)], 1.0, advantage * (1 if length % 2 else -1), float(version))
        for length, version in zip(LENGTHS, versions, strict=True)
    ]
    trainer.rollout_worker.rollout_buffer.put(ScoredGroup(ticket, ticket, rollouts))


@pytest.fixture
def build(tmp_path: Path):
    use_stand_ins()
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)
    run = RunDir(tmp_path / "run")
    run.prepare()

    def trainer(max_staleness: int = 4, **kwargs: Any) -> WholeGroupTrainer:
        args = AsyncGRPOConfig(
            str(tmp_path / "out"), per_device_train_batch_size=1, gradient_accumulation_steps=1, dtype="float32",
            num_generations=2, report_to="none", bf16=False, save_strategy="no",
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True, logging_steps=1, **kwargs,
        )  # fmt: skip
        data = {"prompt": [{"role": "user", "content": "x"}]}
        return WholeGroupTrainer(
            model=str(model), args=args, train_dataset=Dataset.from_list([data] * 4),
            processing_class=AutoTokenizer.from_pretrained(model), rollout_worker=FakeWorker(),
            weight_transfer=FakeTransfer(), algorithm=Algorithm(), samples_per_row=3, resume_steps=None,
            limits=Limits(1, max_staleness, max_open_groups=2, min_group_size=2, max_group_tries=1),
            pulse=pulse, run=run, start=Start(), save_state=lambda *_arguments: None,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"),
        )  # fmt: skip

    with health.Pulse("trainer", run) as pulse:
        yield trainer


def logged(trainer: WholeGroupTrainer, key: str) -> list[float | None]:
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
def test_an_untouched_policy_has_ratio_1_and_the_last_step_waits_for_no_other_group(build, gradient_checkpointing):
    trainer = build(max_steps=1, learning_rate=0.0, gradient_checkpointing=gradient_checkpointing)
    packing.install(trainer.model)
    put(trainer, 0)  # one step, one group: FakeWorker fails if a second one is asked for
    trainer.train()
    assert logged(trainer, "ratio/staleness_0") == [pytest.approx(1.0, abs=1e-5)]
    assert logged(trainer, "kl/staleness_0") == [pytest.approx(0.0, abs=1e-6)]
    assert logged(trainer, "ratio") == [pytest.approx(1.0, abs=1e-5)]
    assert logged(trainer, "batch/groups_per_step") == [1.0]


def test_a_leak_shows_in_the_kl_of_staleness_0(build):
    trainer = build(max_steps=1, learning_rate=0.0)
    put(trainer, 0)
    trainer.train()
    assert logged(trainer, "kl/staleness_0")[0] > 1e-5


def test_staleness_is_that_of_training(build):
    trainer = build(max_steps=2, learning_rate=1e-2)
    packing.install(trainer.model)
    put(trainer, 0)
    put(trainer, 1)
    trainer.train()
    assert trainer.rollout_worker.versions == [0, 1, 2, 3]
    assert [value is None for value in logged(trainer, "ratio/staleness_0")] == [False, True]
    assert [value is None for value in logged(trainer, "ratio/staleness_1")] == [True, False]
    assert logged(trainer, "kl/staleness_1")[1] > 1e-6  # the policy has moved
    assert logged(trainer, "reward") == [1.0, 1.0]
    assert logged(trainer, "sample/staleness_max") == [0.0, 1.0]


@pytest.mark.parametrize(("kind", "rates"), [("constant", [1e-2, 1e-2]), ("linear", [1e-2, 5e-3])])
def test_learning_rate_is_the_recipes_at_first_and_then_follows_its_schedule(build, kind, rates):
    trainer = build(max_steps=2, learning_rate=1e-2, lr_scheduler_type=kind)
    applied = []
    step = trainer.create_optimizer().step
    trainer.optimizer.step = lambda *args: applied.append(trainer.optimizer.param_groups[0]["lr"]) or step(*args)
    packing.install(trainer.model)
    put(trainer, 0)
    put(trainer, 1)
    trainer.train()
    assert applied == pytest.approx(rates)


def test_one_step_may_hold_several_versions(build):
    trainer = build(max_steps=1, learning_rate=0.0)
    packing.install(trainer.model)
    put(trainer, 0, versions=(1, 0, 1, 0))
    trainer.train()
    assert logged(trainer, "ratio/staleness_0") == [pytest.approx(1.0, abs=1e-5)]
    assert logged(trainer, "ratio/staleness_1") == [pytest.approx(1.0, abs=1e-5)]


def test_a_group_beyond_the_limit_is_not_trained_and_is_named(build, tmp_path):
    trainer = build(max_steps=1, learning_rate=0.0, max_staleness=1)
    packing.install(trainer.model)
    put(trainer, 0, versions=(1, 1, 1, -1))
    put(trainer, 1)
    trainer.train()
    assert logged(trainer, "groups/dropped_stale_total") == [1.0]
    (line,) = run_dir.read_lines(tmp_path / "run" / "trained.jsonl")
    assert line["groups"] == [1]
    assert line["stale"] == [{"position": 0, "age": 2.0, "tokens": sum(LENGTHS), "rollouts": 4}]


def test_a_silent_group_costs_no_backward_pass_and_the_optimizer_steps_with_gradients_of_0(build):
    trainer = build(max_steps=2, learning_rate=1e-2)
    packing.install(trainer.model)
    backward = []
    run_backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **kwargs: backward.append(loss) or run_backward(loss, **kwargs)
    put(trainer, 0)
    put(trainer, 1, advantage=0.0)
    trainer.train()
    assert len(backward) == 2  # four rows, three to a packed row
    assert logged(trainer, "grad_norm")[1] == 0.0
    assert logged(trainer, "groups/silent_share") == [0.0, 1.0]
    assert logged(trainer, "batch/forward_only_share") == [0.0, 1.0]
    # Adam counted both steps: momentum goes on as it does for any gradient of 0.
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}


def test_the_shipped_model_passes_the_start_up_check(build):
    trainer = build(max_steps=1)
    samples = [row(trainer, length, 1).input_ids for length in (200, 150)]
    leaking = packing.measure(trainer.model, samples)
    packing.install(trainer.model)
    report = packing.check(trainer.model, samples, max_abs_logprob_diff=1e-4)
    assert leaking.max_abs_logprob_diff > 100 * report.max_abs_logprob_diff
