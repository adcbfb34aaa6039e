"""One attempt of a small training run: TRL's real trainer and worker process, our checkpoints, and a FAKE agent.

``python -m tests.contract.trainer.resume_driver RUN_FOLDER``. What the FAKE agent samples is a function of the task
and of the rollout's number in its group, so two runs differ only if they are asked for different rollouts. Every fifth
group has a rollout that cannot be scored and every seventh has none that can, as in a real run.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult
from openenv.core.harness.training import TrainingTurn

from services.common.run_dir import RunDir
from services.trainer.policy_versions import VersionLog
from services.trainer.session import Captured

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "data/models/tiny-lfm2"
TASKS = 5
STEPS = 8
SAVE_STEPS = 2
RESUME_STEPS = 1
GENERATIONS = 4


class FakeSession(ResourceSession):
    """FAKE of one rollout in a sandbox: tokens drawn by (task, number in group), without a policy."""

    def __init__(self, task: int, position: int, number: int) -> None:
        self._task, self._position, self._number = task, position, number

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        if "--slow" in sys.argv:
            time.sleep(2)
        if self._position % 7 == 6 or (self._position % 5 == 4 and self._number == 1):
            raise RuntimeError("unscorable")
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        generator = torch.Generator().manual_seed(1000 * self._task + self._number)
        length = 8 + 3 * self._number
        prompt = torch.randint(20, 400, (12,), generator=generator).tolist()
        completion = torch.randint(20, 400, (length,), generator=generator).tolist()
        return TrainingTrace(
            turns=[
                TrainingTurn(
                    node_id="0",
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    per_token_logps=[-7.0] * length,
                    loss_mask=[0] * len(prompt) + [1] * length,
                )
            ]
        )

    def verify(self, transcript: Any, final_state: Any | None = None) -> VerifyResult:
        return VerifyResult(env_reward=float((self._task + self._number) % 2), done=True)

    def close(self) -> None: ...

    def initial_messages(self) -> list[Any]:
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error="none")


class FakeFactory(ResourceSessionFactory[FakeSession]):
    """FAKE: numbers the rollouts of a group in the order in which they are asked for."""

    def __init__(self, folder: Path, sampling: Any = None) -> None:
        self._versions = VersionLog(RunDir(folder))
        self.captured: dict[str, Captured] = {}
        self._made: Counter[int] = Counter()
        self._lock = threading.Lock()

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> FakeSession:
        assert seed is not None and episode_id is not None
        self.captured[episode_id] = Captured(calls=[], version=self._version(), truncated=False)
        with self._lock:
            number = self._made[seed] % GENERATIONS
            self._made[seed] += 1
        return FakeSession(int(task[-1]["content"].split()[-1]), seed, number)

    def _version(self) -> int:
        now_s = time.time()
        return self._versions.of([(now_s, now_s)])[0][0]


class FakeTransfer:
    """FAKE of the weight sync: serves nobody, and notes the versions as the real one does."""

    merges_in_trainer = False

    def __init__(self, run: Any) -> None:
        self.version = 0
        self._log = VersionLog(run)

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        list(iterator)
        self.version += 1
        self._log.served(self.version)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def main(folder: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.chat_template_utils import lfm2_2_5_template
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from services.common import health, recipe, signals
    from services.trainer import cpu, packing, resume, scheduler
    from services.trainer.callbacks import RunRecorder
    from services.trainer.grpo import StoppableWorker, WholeGroupTrainer
    from services.trainer.ratio import RatioGuard

    cfg = recipe.load(ROOT / "data/recipes/smoke.toml", {"trainer.max_steps": STEPS, "trainer.save_steps": SAVE_STEPS})
    run = RunDir(folder)
    torch.set_num_threads(1)
    cpu.install()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.response_template = lfm2_2_5_template
    prompts = [[{"role": "user", "content": f"task {number}"}] for number in range(TASKS)]
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    with signals.stop_event() as stop, health.Pulse("trainer", run) as pulse:
        start = resume.begin(run, cfg)
        if start.step >= STEPS:
            return
        worker = StoppableWorker(
            stop=stop, advantage="std",
            harness_session_factory=functools.partial(FakeFactory, folder), model_name="policy", dataset=dataset,
            reward_funcs=[],
            processing_class=tokenizer, eos_token_ids=[tokenizer.eos_token_id], num_generations=GENERATIONS,
            max_inflight_tasks=1,
        )  # fmt: skip
        args = AsyncGRPOConfig(
            str(run.checkpoints), seed=cfg.run.seed, max_steps=STEPS, learning_rate=1e-3,
            lr_scheduler_type="linear", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            num_generations=GENERATIONS, max_staleness=1000, dtype="float32", bf16=False, use_cpu=True,
            save_steps=SAVE_STEPS, save_total_limit=None, report_to="none", disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = WholeGroupTrainer(
            model=str(MODEL), args=args, train_dataset=dataset, processing_class=tokenizer,
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=list(cfg.lora.target_modules)),
            rollout_worker=worker, weight_transfer=FakeTransfer(run), pulse=pulse, run=run, start=start,
            algorithm=cfg.algorithm, samples_per_row=2, resume_steps=RESUME_STEPS,
            limits=scheduler.Limits(1, 1000, max_open_groups=3, min_group_size=2, max_group_tries=2),
            callbacks=[RunRecorder(run, pulse, stop, RatioGuard((0.0, 1e9), 1), [], keep_checkpoints=100)],
            save_state=functools.partial(resume.write_state, cfg=cfg),
        )  # fmt: skip
        packing.install(trainer.model)
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
