"""``python -m scripts.bench_grpo_gpu``: optimizer steps of the real trainer against the real policy, on GPUs.

TRL's ``AsyncGRPOTrainer`` as this stack runs it (packing, staleness, factor sync, proofs), vLLM and NCCL are the real
ones; the model has LFM2.5-2.6B's shapes and random weights. Where no sandbox can run, the agent is a stub: it replays
conversations that OpenCode had in a run of this stack (``--rollouts runs/<run>/rollouts``) turn by turn through the
policy, with what the policy samples in place of the recorded answers. One token stands for a character, which gives
prompts about as long as LFM2.5's tokenizer makes of them with their tools. The reward is the share of even token ids.

Without a GPU it runs the tiny model, to try the script. Needs the packages of the trainer's and policy's images.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from openenv.core.harness import ResourceSession, ToolResult, TrainingTrace, VerifyResult
from openenv.core.harness.training import TrainingTurn
from rich.console import Console
from rich.table import Table

from scripts import bench_sync
from services.common import health, recipe
from services.common.recipe import Recipe
from services.common.run_dir import RunDir

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)

FIRST_TOKEN = 64
"""Below are special tokens of the tiny model's tokenizer."""
REQUEST_TIMEOUT_S = 300.0


@app.command()
def run(
    rollouts: Annotated[Path, typer.Option(help="Folder of recorded rollouts.")],
    work: Annotated[Path, typer.Option(help="Scratch folder for the model, the run and logs.")] = Path(
        "/tmp/bench_grpo"
    ),
    steps: Annotated[int, typer.Option(min=1)] = 6,
    attn_implementation: Annotated[str, typer.Option()] = "sdpa",
    compilation_config: Annotated[str, typer.Option(help="JSON, passed to vLLM.")] = "",
) -> None:
    """Serve, train, print the steps; exit 1 if a loss is not finite or a ratio out of bounds."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"MODELS_DIR": str(work), "RUNS_DIR": str(work / "runs"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    cfg = settings(steps, attn_implementation)
    if bench_sync.has_gpu():
        bench_sync.build_model(work / bench_sync.MODEL)
    else:
        os.environ["MODELS_DIR"] = str(bench_sync.TINY.parent)
    started = time.monotonic()
    with bench_sync.served(cfg, work / "vllm-grpo.log", compilation_config) as (_, start_s):
        found = train(cfg, Traffic.read(rollouts, cfg.model.max_model_len))
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "argv": sys.argv[1:], **bench_sync.machine(),
        "server_start_s": start_s, "seconds": time.monotonic() - started, "steps": found,
    }  # fmt: skip
    (Path(os.environ.get("OUT") or work) / "bench_grpo.json").write_text(json.dumps(result, indent=1))
    raise typer.Exit(0 if report(found, steps, cfg) else 1)


def settings(steps: int, attn_implementation: str) -> Recipe:
    """The full run's recipe with the random model and short completions; without a GPU the smoke recipe."""
    common: dict[str, Any] = {
        "run.name": "bench-grpo", "trainer.max_steps": steps, "trainer.save_steps": steps + 1, "model.revision": None,
    }  # fmt: skip
    if not bench_sync.has_gpu():
        small = {"sampling.max_completion_tokens": 24, "model.max_model_len": 2048}
        return recipe.load(bench_sync.ROOT / "data/recipes/smoke.toml", {**common, **small})
    return recipe.load(
        bench_sync.ROOT / "data/recipes/lfm2.5-2.6b.toml",
        {
            **common, "model.id": bench_sync.MODEL, "model.source": "local", "policy.gpu_memory_utilization": 0.6,
            "sampling.max_completion_tokens": 256, "rollout.max_inflight": 16, "trainer.learning_rate": 1e-5,
            "trainer.attn_implementation": attn_implementation, "weight_sync.canary_every": 2,
            # A sample is trained by the policy that sampled it, so that each step has a ratio at staleness 0.
            "rollout.max_staleness": 0,
        },
    )  # fmt: skip


# -- the stub agent ----------------------------------------------------------------------------------------------


class Traffic:
    """FACTORY of stub sessions: recorded conversations by their instruction. Pickled into TRL's worker process."""

    def __init__(self, conversations: dict[str, list[list[int]]]) -> None:
        self.conversations = conversations
        """Instruction -> what each model call has that the one before and its answer had not, as token ids."""
        self.policy_url, self.model, self.max_tokens = bench_sync.URL, "policy", 0
        self.captured: dict[str, Any] = {}
        self.run: RunDir | None = None
        """Whose ``policy_versions.jsonl`` says which version samples."""

    @classmethod
    def read(cls, folder: Path, longest: int) -> Traffic:
        """Raises: FileNotFoundError: no rollout with an agent's conversation is in the folder."""
        import zstandard

        found: dict[str, list[list[int]]] = {}
        for path in sorted(folder.glob("*.json.zst")):
            with zstandard.open(path, "rt", encoding="utf-8") as stream:
                conversations = json.load(stream)["result"]["conversations"]
            for conversation in conversations:
                messages = conversation["messages"]
                user = next((message["content"] for message in messages if message["role"] == "user"), None)
                if user and messages[-1]["role"] == "assistant":
                    found.setdefault(str(user), turns(messages, longest))
        if not found:
            raise FileNotFoundError(
                f"{folder} holds no recorded conversation; run the stack once, then name its rollouts"
            )
        return cls(found)

    def __call__(self, sampling: dict[str, Any]) -> Traffic:
        return self

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> ReplaySession:
        from services.trainer.policy_versions import VersionLog
        from services.trainer.session import Captured

        assert episode_id is not None and self.run is not None
        now_s = time.time()
        version = VersionLog(self.run).of([(now_s, now_s)])[0][0]
        self.captured[episode_id] = Captured(calls=[], version=version, truncated=False)
        return ReplaySession(self, self.conversations[str(task[-1]["content"])])


def turns(messages: list[dict[str, Any]], longest: int) -> list[list[int]]:
    """Characters between the assistant's answers as token ids; a prompt that is too long loses its beginning."""
    calls, text = [], ""
    for message in messages:
        if message["role"] == "assistant":
            calls.append([FIRST_TOKEN + ord(character) % 512 for character in text])
            text = ""
        else:
            text += f"<{message['role']}>{message['content']}"
    calls[0] = calls[0][-longest // 2 :]
    return calls


class ReplaySession(ResourceSession):
    """One rollout: each recorded call asked of the policy, with its own earlier answers in the prompt."""

    def __init__(self, traffic: Traffic, calls: list[list[int]]) -> None:
        self._traffic, self._calls = traffic, calls
        self._turns: list[TrainingTurn] = []

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        prompt: list[int] = []
        for call in self._calls:
            prompt = prompt + call
            answer = self._sample(prompt)
            ids = answer["token_ids"]
            self._turns.append(
                TrainingTurn(
                    node_id=uuid.uuid4().hex, prompt_token_ids=prompt, completion_token_ids=ids,
                    per_token_logps=answer["logprobs"]["token_logprobs"], loss_mask=[0] * len(prompt) + [1] * len(ids),
                )
            )  # fmt: skip
            prompt = prompt + ids
        return 0

    def _sample(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": self._traffic.model, "prompt": prompt, "max_tokens": self._traffic.max_tokens, "ignore_eos": True,
            "temperature": 1.0, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        url = f"{self._traffic.policy_url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def fetch_training_trace(self) -> TrainingTrace:
        return TrainingTrace(turns=self._turns)

    def verify(self, transcript: list[Any], final_state: Any | None = None) -> VerifyResult:
        ids = [token for turn in self._turns for token in turn.completion_token_ids]
        return VerifyResult(env_reward=sum(token % 2 == 0 for token in ids) / len(ids), done=True)

    def close(self) -> None:
        """Nothing is held."""

    def initial_messages(self) -> list[Any]:
        return []

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error="a replayed agent calls no tools")


def score(outcome: Any) -> float | None:
    """TRL's reward function."""
    reward: float | None = outcome.env_reward
    return reward


# -- training ----------------------------------------------------------------------------------------------------


def train(cfg: Recipe, traffic: Traffic) -> list[dict[str, float]]:
    """As ``services.trainer.train.build`` puts it together, with the stub agent. Returns: the metrics of each step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from services.trainer import attention, cpu, grpo, packing, resume, scheduler, served_forward
    from services.trainer.sync import weight_transfer
    from services.weight_sync.canary import Canary, model_score, prompt_ids
    from services.weight_sync.names import base_weight

    run = RunDir.from_environment(cfg.run.name)
    run.path.mkdir(parents=True, exist_ok=True)
    on_cpu = not torch.cuda.is_available()
    attention.install(cfg.trainer.attn_implementation, cfg.model.dtype)
    if on_cpu:
        cpu.install()
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_location())
    traffic.run = run
    traffic.max_tokens = cfg.sampling.max_completion_tokens
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in traffic.conversations])
    worker = grpo.StoppableWorker(
        stop=threading.Event(), advantage=cfg.algorithm.advantage,
        harness_session_factory=traffic, rollout_reward_fn=score, model_name=cfg.policy.served_model_name,
        dataset=dataset, reward_funcs=[], processing_class=tokenizer, eos_token_ids=[tokenizer.eos_token_id],
        num_generations=cfg.rollout.num_generations, max_inflight_tasks=cfg.rollout.max_inflight,
        vllm_server_url=bench_sync.URL, max_tokens=cfg.sampling.max_completion_tokens, temperature=1.0, top_p=1.0,
        top_k=0, max_tool_calling_iterations=cfg.rollout.max_tool_calling_iterations,
    )  # fmt: skip
    sync = weight_transfer(run, cfg, bench_sync.URL, device="cpu" if on_cpu else "cuda:0")
    each: list[dict[str, float]] = []

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> None:
            if logs is not None and "train_runtime" not in logs:
                numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
                each.append({"step": state.global_step, "time_s": time.time(), **numbers, **sync.metrics()})

    args = AsyncGRPOConfig(
        str(run.checkpoints), seed=cfg.run.seed, max_steps=cfg.trainer.max_steps, logging_steps=1,
        learning_rate=cfg.trainer.learning_rate,
        per_device_train_batch_size=1, gradient_accumulation_steps=1,
        num_generations=cfg.rollout.num_generations, max_completion_length=cfg.sampling.max_completion_tokens,
        temperature=1.0, max_inflight_tasks=cfg.rollout.max_inflight, max_staleness=cfg.rollout.max_staleness,
        vllm_server_base_url=bench_sync.URL, dtype=cfg.model.dtype, bf16=False, use_cpu=on_cpu,
        gradient_checkpointing=cfg.trainer.gradient_checkpointing, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    with health.Pulse("trainer", run) as pulse:
        trainer = grpo.WholeGroupTrainer(
            model=cfg.model_location(), args=args, train_dataset=dataset, processing_class=tokenizer,
            peft_config=LoraConfig(
                r=cfg.lora.r, lora_alpha=cfg.lora.alpha, lora_dropout=cfg.lora.dropout,
                target_modules=list(cfg.lora.target_modules), task_type="CAUSAL_LM",
            ),
            rollout_worker=worker, weight_transfer=sync, callbacks=[Recorder()], pulse=pulse,
            algorithm=cfg.algorithm, limits=scheduler.limits(cfg), samples_per_row=cfg.trainer.samples_per_row,
            resume_steps=None, run=run, start=resume.Start(), save_state=lambda *_arguments: None,
        )  # fmt: skip
        if cfg.trainer.forward == "served":
            served_forward.install(trainer.model, cfg.weight_sync.rounding)
        packing.install(trainer.model)
        sync.describe(trainer.model)
        sync.prove_with(
            base_weight=functools.partial(base_weight, trainer.model),
            canary=Canary(
                prompt_ids(tokenizer), model_score(trainer.model), cfg.weight_sync.canary_mean_abs_logprob_diff
            ),
        )
        trainer.train()
    return each


def report(steps: list[dict[str, float]], wanted: int, cfg: Recipe) -> bool:
    """Print a line a step. Returns: all steps are there, losses are finite and ratios at staleness 0 in bounds."""
    columns = (
        "step", "loss", "grad_norm", "reward", "ratio/staleness_0", "kl/staleness_0", "weight_sync/paused_s",
        "weight_sync/transfer_s", "weight_sync/merge_s", "weight_sync/verify_s",
        "weight_sync/canary_mean_abs_logprob_diff",
    )  # fmt: skip
    table = Table(*(column.replace("weight_sync/", "sync ") for column in columns))
    for step in steps:
        table.add_row(*(f"{step[column]:.4g}" if column in step else "-" for column in columns))
    console.print(table)
    console.print({key: statistics.median(step[key] for step in steps if key in step) for key in sorted(steps[-1])})
    ratios = [step["ratio/staleness_0"] for step in steps if "ratio/staleness_0" in step]
    low, high = cfg.trainer.ratio_bounds
    return (
        len(steps) >= wanted
        and all(math.isfinite(step["loss"]) for step in steps)
        and bool(ratios)
        and all(low <= ratio <= high for ratio in ratios)
    )


if __name__ == "__main__":
    app()
