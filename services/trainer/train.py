"""The training process: wires TRL's trainer, the rollout worker, the weight sync and the run directory.

``services.trainer.__main__`` starts it as a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
from typing import Any

from services.common import health, log, network, recipe, run_dir, signals
from services.common.errors import NotReadyError, RecipeError, StoppedError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.hub import restore
from services.trainer import checkpoint as checkpoints
from services.trainer import resume

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

PACKING_CHECK_TOKENS = 2048
"""Of the longer of the two samples that the start-up check packs."""


def main() -> int:
    signals.die_with_parent()
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    logger = log.setup("trainer", run.path)
    run_dir.write_json(run.path / "trainer.json", {"recipe": cfg.model_dump(mode="json"), "versions": _versions()})
    with signals.stop_event() as stop, health.Pulse("trainer", run) as pulse:
        start = resume.begin(run, cfg, fetch=restore.from_environment())
        pulse.set(step=start.step)
        if start.step >= cfg.trainer.max_steps:
            logger.info("nothing is left to train", extra={"step": start.step})
            return 0
        from services.trainer.pushes import CheckpointPushes

        pushes = CheckpointPushes(cfg, run)
        trainer, rows = build(cfg, run, pulse, stop, start, pushes)
        logger.info(
            "training starts", extra={"tasks": rows, "max_steps": cfg.trainer.max_steps, "after_step": start.step}
        )
        from services.trainer import base_weights

        with base_weights.unchanged(trainer.model, run, may_drift=cfg.weight_sync.mode == "full"):
            try:
                return _train(trainer, run, pulse, logger)
            finally:
                pushes.flush(pulse, wait=not stop.is_set())


def _train(trainer: Any, run: RunDir, pulse: health.Pulse, logger: Any) -> int:
    from services.trainer.grpo import StopRequested

    try:
        trainer.train()
    except (StopRequested, StoppedError) as stopped:
        step = trainer.state.global_step
        logger.warning("training is stopped", extra={"step": step, "reason": str(stopped) or "SIGTERM"})
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        if step and not (checkpoint / run_dir.READY).exists():
            pulse.set("saving")
            trainer._save_checkpoint(trainer.model, trial=None)
            checkpoints.complete(checkpoint)
        if isinstance(stopped, StoppedError):
            raise
    logger.info("training ended", extra={"step": trainer.state.global_step})
    return 0


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "trl", "peft", "vllm", "openenv", "kernels")
    return {name: importlib.metadata.version(name) for name in names}


@dataclasses.dataclass(frozen=True)
class Peers:
    """Where the other services are; differs between compose and a Job."""

    policy_url: str
    env_url: str

    @classmethod
    def from_environment(cls) -> Peers:
        missing = [name for name in ("POLICY_URL", "ENV_URL") if not os.environ.get(name)]
        if missing:
            raise RecipeError(f"{' and '.join(missing)} not set; compose.yaml gives the trainer both")
        return cls(os.environ["POLICY_URL"], os.environ["ENV_URL"])


def build(
    cfg: Recipe, run: RunDir, pulse: health.Pulse, stop: signals.StopFlag, start: resume.Start, pushes: Any
) -> tuple[Any, int]:
    """The trainer, ready to train, and the number of training tasks."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoTokenizer
    from trl.chat_template_utils import lfm2_2_5_template

    from services.trainer import packing, preconditions

    source = {"pretrained_model_name_or_path": cfg.model_location(), "revision": _hub_revision(cfg)}
    # Before anything of TRL's internals is imported: another release would end in an ImportError of its own.
    config = AutoConfig.from_pretrained(**source)
    packing.require_supported(trl.__version__, config.model_type)
    preconditions.require_known_targets(config, cfg.lora.target_modules)
    preconditions.require_one_gpu(torch.cuda.device_count())

    from trl.experimental.async_grpo import AsyncGRPOConfig

    from services.trainer import attention, control, cpu, grpo, scheduler, served_forward
    from services.trainer.callbacks import RunRecorder
    from services.trainer.ratio import RatioGuard
    from services.trainer.rollout_counts import RolloutCounts
    from services.trainer.session import HarborSessionFactory
    from services.trainer.spending import Spending
    from services.trainer.sync import weight_transfer
    from services.trainer.throughput import PolicyLoad
    from services.trainer.tool_calls import ToolCallCounts
    from services.weight_sync.canary import Canary, model_score, prompt_ids
    from services.weight_sync.names import base_weight
    from services.weight_sync.policy_server import PolicyServer

    peers = Peers.from_environment()
    # At a resume the policy may have been killed too, and loads its weights while this process does.
    with contextlib.closing(PolicyServer(peers.policy_url, cfg.policy.served_model_name)) as policy:
        policy.wait_until_healthy(cfg.watchdog.start_limit_s / 2)
    on_cpu = not torch.cuda.is_available()
    torch.set_num_threads(cfg.trainer.omp_threads)
    if cfg.weight_sync.transport == "nccl":
        network.route_nccl_towards(peers.policy_url)
    implementation = attention.install(cfg.trainer.attn_implementation, cfg.model.dtype)
    logging.getLogger("trainer").info("attention of the trained model", extra={"attn_implementation": implementation})
    if on_cpu:
        cpu.install()
    elif cfg.trainer.gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(cfg.trainer.gpu_memory_fraction)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # TRL does not recognise LFM2.5's chat template by itself (pitfall 6).
    tokenizer.response_template = lfm2_2_5_template

    factory = functools.partial(HarborSessionFactory, cfg, peers.env_url, peers.policy_url, run)
    rows = factory().prompt_rows()
    if not rows:
        raise NotReadyError(f"the env server at {peers.env_url} serves no task of suite {cfg.tasks.train!r}")
    dataset = Dataset.from_list(rows)

    worker = grpo.StoppableWorker(
        stop=stop,
        advantage=cfg.algorithm.advantage,
        shuffle_rewards=cfg.control.shuffle_rewards,
        **worker_arguments(cfg, peers.policy_url, factory, dataset, tokenizer),
    )
    args = AsyncGRPOConfig(
        str(run.checkpoints),
        seed=cfg.run.seed,
        max_steps=cfg.trainer.max_steps,
        learning_rate=cfg.trainer.learning_rate,
        lr_scheduler_type=cfg.trainer.lr_scheduler_type,
        adam_beta1=cfg.trainer.adam_beta1,
        adam_epsilon=cfg.trainer.adam_epsilon,
        # To transformers a step is one batch: training_step runs all of its rows.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=cfg.rollout.num_generations,
        max_completion_length=cfg.sampling.max_completion_tokens,
        temperature=cfg.sampling.temperature,
        max_inflight_tasks=cfg.rollout.max_inflight,
        max_staleness=cfg.rollout.max_staleness,
        max_tool_calling_iterations=cfg.rollout.max_tool_calling_iterations,
        vllm_server_base_url=peers.policy_url,
        dtype=cfg.model.dtype,
        bf16=False,  # the weights have the recipe's dtype; no autocast on top
        use_cpu=on_cpu,
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
        save_steps=cfg.trainer.save_steps,
        save_total_limit=None,  # services.trainer.checkpoint rotates, after READY is written
        report_to="none",  # services.trainer.tracker sends metrics.jsonl
        disable_tqdm=True,
        model_init_kwargs={"revision": _hub_revision(cfg)} if cfg.model.source == "hub" else None,
    )
    make_sync = control.DroppedSyncs if cfg.control.drop_syncs else weight_transfer
    sync = make_sync(run, cfg, peers.policy_url, device="cpu" if on_cpu else "cuda")
    spending = Spending(cfg.costs, run)
    load = PolicyLoad(peers.policy_url, put_back=lambda: sync.put_back)
    extra_metrics = [
        sync.metrics,
        RolloutCounts(run, cfg).metrics,
        ToolCallCounts(peers.policy_url).metrics,
        load.metrics,
        pushes.metrics,
        spending.metrics,
    ]
    guard = RatioGuard(cfg.trainer.ratio_bounds, cfg.trainer.ratio_patience)
    trainer = grpo.WholeGroupTrainer(
        model=cfg.model_location(),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=cfg.lora.r,
            lora_alpha=cfg.lora.alpha,
            lora_dropout=cfg.lora.dropout,
            target_modules=list(cfg.lora.target_modules),
            task_type="CAUSAL_LM",
        ),
        rollout_worker=worker,
        weight_transfer=sync,
        # A checkpoint is complete before it is pushed, and a step is written down before it may end the run.
        callbacks=[
            RunRecorder(run, pulse, stop, guard, extra_metrics, cfg.trainer.keep_checkpoints),
            pushes,
            spending,
        ],
        algorithm=cfg.algorithm,
        limits=scheduler.limits(cfg),
        samples_per_row=cfg.trainer.samples_per_row,
        resume_steps=cfg.trainer.resume_steps,
        pulse=pulse,
        run=run,
        start=start,
        save_state=functools.partial(resume.write_state, cfg=cfg),
    )
    if cfg.trainer.forward == "served":
        served_forward.install(trainer.model, cfg.weight_sync.rounding)
    packing.install(trainer.model)
    longest = min(cfg.model.max_model_len // 4, PACKING_CHECK_TOKENS)
    samples = [prompt_ids(tokenizer, longest)[:longest], prompt_ids(tokenizer, longest)[7 : 7 + longest // 3]]
    report = packing.check(
        trainer.model, samples, cfg.trainer.packing_max_abs_logprob_diff, cfg.trainer.packing_max_rel_gradient_diff
    )
    logging.getLogger("trainer").info("packed rows are exact", extra=dataclasses.asdict(report))
    sync.describe(trainer.model)
    sync.prove_with(
        base_weight=functools.partial(base_weight, trainer.model),
        canary=Canary(
            prompt_ids(tokenizer),
            model_score(trainer.model),
            cfg.weight_sync.canary_mean_abs_logprob_diff,
            cfg.weight_sync.canary_max_abs_logprob_diff,
        ),
    )
    load.start()
    return trainer, len(rows)


def worker_arguments(cfg: Recipe, policy_url: str, factory: Any, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """What TRL's ``HarnessRolloutWorker`` is given. Its defaults (8 model calls, for one) are for other harnesses."""
    from services.trainer import reward

    return {
        "harness_session_factory": factory,
        "rollout_reward_fn": functools.partial(
            reward.score,
            bonus=cfg.reward.tool_efficiency_bonus,
            max_tool_calls=cfg.rollout.max_tool_calling_iterations,
        ),
        "model_name": cfg.policy.served_model_name,
        "dataset": dataset,
        "reward_funcs": [],
        "processing_class": tokenizer,
        "eos_token_ids": [tokenizer.eos_token_id],
        "num_generations": cfg.rollout.num_generations,
        "max_inflight_tasks": cfg.rollout.max_inflight,
        "vllm_server_url": policy_url,
        "max_tokens": cfg.sampling.max_completion_tokens,
        "temperature": cfg.sampling.temperature,
        "top_p": cfg.sampling.top_p,
        "top_k": cfg.sampling.top_k,
        "max_tool_calling_iterations": cfg.rollout.max_tool_calling_iterations,
    }


def _hub_revision(cfg: Recipe) -> str | None:
    if cfg.model.source == "local":
        return None
    if cfg.model.revision is None:
        raise RecipeError("model.revision is missing; a Hub model needs its full 40-character commit")
    return cfg.model.revision


if __name__ == "__main__":
    run_main(main)
