"""The recipe: one TOML file, one frozen model, every number of a run.

Unknown keys are refused and defaults live on the model only. A number on which two services must agree
stands once (the output cap, the sampling, the adapter's shape), so that it cannot differ between them.
Environment variables carry only what differs between machines: ``RECIPE``, ``RUNS_DIR``, peer URLs, secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.common.errors import RecipeError

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
SHARED_GPU_LIMIT = 0.92
"""Of one GPU's memory, for trainer and policy together."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    """Folder below RUNS_DIR and label of every container of the run."""
    seed: int = 0
    """Seeds the trainer, the adapter's initialisation and the order of tasks."""


class Model(Section):
    id: str
    """Hub repository, ``owner/name``, or the name of a folder below data/models."""
    revision: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|sha256:[0-9a-f]{64})$")] | None = None
    """Full commit, or ``sha256:`` and the hash of a local model's weights. None is refused at start for a Hub
    model: a branch name would let the weights drift."""
    source: Literal["hub", "local"] = "hub"
    """``local``: the folder data/models/<id>, shipped with the project."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the trained and the served weights."""
    max_model_len: Positive
    """Context of the policy server, prompt plus completion, in tokens."""


class Lora(Section):
    r: Positive = 32
    """Rank of the adapter."""
    alpha: Positive = 64
    """The merge adds `alpha / r` times B A."""
    dropout: Literal[0] = 0
    """Anything else would make the trained forward differ from the sampled one."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3")
    """Names of the matrices with an adapter. ``out_proj`` is also the output projection of the short convolutions."""


class Sampling(Section):
    """Full-vocabulary sampling only: truncation or a penalty breaks the agreement of log-probabilities."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Only 1."""
    top_p: float = 1.0
    """Only 1."""
    top_k: int = 0
    """Only 0, which is no limit."""
    min_p: float = 0.0
    """Only 0."""
    repetition_penalty: float = 1.0
    """Only 1."""
    presence_penalty: float = 0.0
    """Only 0."""
    frequency_penalty: float = 0.0
    """Only 0."""
    max_completion_tokens: Positive
    """Output cap of one model call, the same in training and evaluation."""

    @model_validator(mode="after")
    def _full_vocabulary(self) -> Sampling:
        full = {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        for key, allowed in full.items():
            if (found := getattr(self, key)) != allowed:
                raise ValueError(
                    f"sampling.{key} is {found}; only {allowed} is allowed: truncated, scaled or penalised sampling "
                    "makes the captured log-probabilities disagree with the trained ones"
                )
        return self


class Tasks(Section):
    train: str
    """Task suite, a folder below data/tasks: one Harbor task per sub-folder."""
    heldout: str
    """Suite of the evaluation; must not share a task with ``train``."""
    max_train: Positive | None = None
    """Use only the first N training tasks, in the pinned order."""


class Rollout(Section):
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Rollouts a prompt: the group size G."""
    max_inflight: Positive = 16
    """Rollouts at a time; the env server's concurrency follows it."""
    max_tool_calling_iterations: Positive = 32
    """Model calls a rollout; also the scale of the tool-efficiency bonus."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Policy versions between sampling and training beyond which nothing is trained: of each training row, mean over
    its sampled tokens."""
    max_open_groups: Positive | None = None
    """Groups that are being made or wait to be trained. Not set: ``(max_staleness + 1) * trainer.groups_per_step``,
    with which none gets too old, and at most that."""
    refill_silent_groups: Annotated[int, Field(ge=0)] = 0
    """In each step, up to so many groups whose rewards are all equal are replaced by the next group. 0: they take
    their place in the step, and teach nothing."""
    min_group_size: Positive = 2
    """Rollouts of a group that must be scored; with fewer, nothing can be compared, and the group is made again."""
    max_group_tries: Positive = 3
    """How often a group with fewer is made before it is dropped, and counted."""
    agent_timeout_s: Seconds = 900.0
    """The agent's own time; what it leaves when it is up is graded."""
    build_timeout_s: Seconds = 300.0
    """From the request for a sandbox until it runs; a task's own ``build_timeout_sec`` holds where it is less."""
    setup_timeout_s: Seconds = 360.0
    """Until the agent is ready in it."""
    verifier_timeout_s: Seconds = 180.0
    """Grading one answer."""
    outer_timeout_s: Seconds = 1800.0
    """The whole call, environment start to teardown; must exceed the four above together."""
    max_unscorable_share: Share = 0.5
    """Above this share of unscorable rollouts in ``unscorable_window`` the run stops."""
    unscorable_window: Positive = 64
    """Rollouts over which that share is taken, the last ones."""

    @model_validator(mode="after")
    def _outer_exceeds_inner(self) -> Rollout:
        inner = self.build_timeout_s + self.setup_timeout_s + self.agent_timeout_s + self.verifier_timeout_s
        if self.outer_timeout_s <= inner:
            raise ValueError(
                f"rollout.outer_timeout_s is {self.outer_timeout_s}; it must exceed build + setup + agent + verifier = "
                f"{inner}"
            )
        if self.min_group_size > self.num_generations:
            raise ValueError(
                f"rollout.min_group_size is {self.min_group_size} and num_generations {self.num_generations}; "
                "a group cannot have more scored rollouts than rollouts"
            )
        if self.max_inflight < self.num_generations:
            raise ValueError(
                f"rollout.max_inflight is {self.max_inflight} and num_generations {self.num_generations}; "
                "max_inflight must be at least num_generations, or a group runs in halves"
            )
        return self


class Reward(Section):
    keys: Annotated[tuple[Annotated[str, Field(pattern=r"^[^,\s]+$")], ...], Field(min_length=1)] = (
        "correctness",
        "reward",
    )
    """Which number of a task's verifier is its verdict: the first of these that the task gives. Any other is ignored. A
    task that writes ``reward.txt`` gives ``reward``."""
    tool_efficiency_bonus: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Correct answers earn ``bonus * max(0, (N - tool_calls) / N)``, N = rollout.max_tool_calling_iterations."""


class Env(Section):
    backend: Literal["docker", "hf-sandbox", "daytona", "e2b", "modal"] = "docker"
    """Where sandboxes run: this machine's Docker engine, Hugging Face Jobs, or another backend of Harbor's."""
    sandbox_image: str | None = None
    """Task base image with the agent baked in. Not set: the project's own, as REGISTRY and TAG name all others."""
    sandbox_base: str | None = None
    """Image that `make images` builds the sandbox image on: the one that the tasks are made for. Not set: the project's
    Debian."""
    opencode_version: str = "1.18.33"
    """Checked against the binary in the sandbox image, once per image."""
    sandbox_cpus: Annotated[float, Field(gt=0)] = 1.0
    """Processor cores of one sandbox."""
    sandbox_memory_mb: Positive = 4096
    """Memory of one sandbox, swap included."""
    sandbox_pids: Positive = 512
    """Processes and threads in one sandbox."""
    sandbox_disk_mb: Positive = 10240
    """All that a sandbox may write; one that has written more is ended. ``docker`` backend."""
    healthcheck_internet: bool = False
    """Whether a task's own set-up (its healthcheck) may fetch data before the agent starts. ``docker`` backend."""
    max_message_size_mb: Positive = 512
    """Of one rollout result: it grows with the square of the turns."""
    docker_starts_per_minute: Positive = 120
    """With the backend docker; a rollout waits for its turn. A group of 8 starts within 4 s."""
    hf_sandbox_flavor: str = "cpu-basic"
    """Machine of one sandbox, with the backend hf-sandbox; one rollout has it alone."""
    hf_sandbox_idle_timeout_s: Seconds = 1800.0
    """A sandbox that nobody calls for this long ends itself. A command that runs is no call: it must exceed the
    longest one, the agent's."""
    hf_sandbox_starts_per_minute: Positive = 60
    """The Hub limits how often Jobs are started; a rollout waits for its turn."""


class Policy(Section):
    served_model_name: str = "policy"
    """Fixed for the whole run; merged weights are served under it."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.90
    """Share of the GPU's memory that vLLM takes."""
    max_num_seqs: Positive = 64
    """Requests that vLLM runs at a time."""
    cpu_kvcache_gb: Positive = 1
    """KV cache of the CPU build; ignored on a GPU."""
    omp_threads: Positive = 2
    """Threads of the CPU build; ignored on a GPU."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts sooner, samples slower."""
    enable_prefix_caching: bool = True
    """Reuse what turns of a rollout have in common."""
    max_num_batched_tokens: Positive | None = None
    """Tokens a scheduler step of vLLM; not set: vLLM's own choice."""
    tensor_parallel_size: Positive = 1
    """GPUs that hold one copy of the model between them."""
    data_parallel_size: Positive = 1
    """Copies of the model, each with its share of the requests. The policy needs the product of both in GPUs."""


class WeightSync(Section):
    mode: Literal["factors", "full"] = "factors"
    """``factors``: only LoRA A and B, merged where they are served. ``full``: TRL's own merged stream."""
    transport: Literal["gloo", "nccl"] = "nccl"
    """``gloo``: through the processor's memory, for a machine without a GPU and for one GPU that trainer and policy
    share, which NCCL refuses."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How the merge rounds to bfloat16, with mode ``factors``. ``nearest`` serves a young adapter hardly at all: at
    learning rate 1e-6, 0.4 % of its change after one step. ``stochastic`` keeps all of it in expectation, with the same
    bits on every end. With dtype float32 nothing is rounded."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29511
    """Of the group that trainer and policy form."""
    init_timeout_s: Seconds = 120.0
    """Until both are connected."""
    pause_timeout_s: Seconds = 20.0
    """For the running step to end. With ``transfer_timeout_s``, a dead peer is named within 30 s."""
    transfer_timeout_s: Seconds = 20.0
    """For sending, and for merging."""
    canary_every: Positive = 10
    """Every N syncs a fixed prompt is scored on both sides. Checksums of the merged weights are compared each time."""
    canary_mean_abs_logprob_diff: Annotated[float, Field(gt=0)] = 0.15
    """In nats, mean over the prompt's tokens, and over those of its continuation; more stops the run. In bf16 at 2.6B
    with random weights, rounding alone makes 0.037 (docs/benchmarks.md); float32 allows 1e-4."""
    canary_max_abs_logprob_diff: Annotated[float, Field(gt=0)] = 0.5
    """In nats, of one token; more is a warning in the log. In bf16 at 2.6B with random weights, rounding alone makes
    0.17; float32 allows 1e-3."""


class Trainer(Section):
    max_steps: Positive = 1000
    """Optimizer steps of the run."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Of the first step."""
    lr_scheduler_type: Literal["constant", "linear"] = "constant"
    """``linear``: it falls to zero over ``max_steps``."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's momentum."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon. One as large as a usual gradient (root mean square) lets the step follow the gradient's size: a
    step in which one rollout in sixteen says something then moves the weights little, and not as far as any other."""
    groups_per_step: Positive = 1
    """Whole groups that an optimizer step trains on."""
    samples_per_row: Positive = 1
    """Samples packed into one forward row; peak memory grows with samples_per_row * max_model_len. The gradient of a
    step does not depend on it."""
    save_steps: Positive = 100
    """A checkpoint every so many steps, and one at the end: evaluated, pushed, kept."""
    resume_steps: Positive | None = 10
    """Between checkpoints, a resume point every so many steps: only the newest is kept, on this machine, and a run
    that dies loses no more than these. Not set: checkpoints only."""
    keep_checkpoints: Positive = 4
    """Newest kept beside the best one."""
    forward: Literal["served", "adapter"] = "served"
    """What the trainer's forward pass computes with. ``served``: the merged weights, bit for bit the policy's, with
    gradients straight through to A and B; takes memory for one more copy of the targets. ``adapter``: PEFT's, which
    adds the adapter's part to an output that is rounded already, and in bfloat16 loses most of a young adapter."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, more time."""
    attn_implementation: Literal["kernels-community/flash-attn3", "varlen", "sdpa"] = "kernels-community/flash-attn3"
    """All three keep packed samples apart. ``varlen`` is the FlashAttention that torch carries, for an image without
    the Hub's kernel; ``sdpa`` runs anywhere. What is asked for and not there is refused at start."""
    omp_threads: Positive = 2
    """Threads of torch on a CPU."""
    ratio_bounds: tuple[float, float] = (0.98, 1.02)
    """Allowed mean importance ratio at staleness 0; outside it is an alarm."""
    ratio_patience: Positive = 5
    """Steps in a row outside the bounds after which the run stops."""
    report_to: Literal["none", "trackio", "wandb"] = "trackio"
    """``trackio``: local, for `make dash`. ``wandb``: WANDB_API_KEY must be set. metrics.jsonl is written anyway."""
    packing_max_abs_logprob_diff: Annotated[float, Field(gt=0)] = 0.5
    """Start-up check: largest difference of a packed sample from the same sample alone, in nats. In bf16 at 2.6B,
    rounding alone makes 0.13 and a leak 2.8 (docs/benchmarks.md); float32 allows 1e-4."""
    packing_max_rel_gradient_diff: Annotated[float, Field(gt=0)] | None = None
    """The same check: largest difference of a gradient over its size. None: 1e-3 in float32; 0.1 in bfloat16, where
    0.07 was measured with random weights (docs/benchmarks.md)."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU that the trainer may take where the policy runs on the same one; None: it has its own."""

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> Trainer:
        low, high = self.ratio_bounds
        if not low <= 1.0 <= high:
            raise ValueError(f"trainer.ratio_bounds is [{low}, {high}]; it must be [lowest, highest] around 1")
        return self


AdvantageScale = Literal["std", "none"]


class Algorithm(Section):
    """The training objective; services/trainer/objective.py has each formula with its source."""

    advantage: AdvantageScale = "std"
    """``std``: reward over the group's mean, divided by the group's standard deviation. ``none``: not divided."""
    aggregation: Literal["sequence", "token"] = "sequence"
    """``sequence``: each rollout of a step counts the same, however long it is. ``token``: each sampled token does."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A token whose probability fell by more than this share is not pushed down further."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """A token whose probability rose by more than this share is not pushed up further."""
    stale_weight_cap: Annotated[float, Field(gt=0)] | None = None
    """Tokens of an older policy get a truncated importance weight of at most this instead of clipping. Not set: they
    are clipped as all others."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the base model. Above 0, each step costs another forward pass."""
    truncated: Literal["train", "mask"] = "train"
    """Rollouts that the output cap, the context, the number of model calls or the time limit cut: ``train``: with the
    reward that they got. ``mask``: not trained; their reward still counts in the group's mean."""


class Evaluator(Section):
    watch_tasks: Positive = 100
    """Fixed subset for each checkpoint, the first N of the held-out suite."""
    final_tasks: Positive = 250
    """Held-out tasks of the final evaluation, the first N of the suite."""
    attempts: Positive = 1
    """Rollouts of each task and arm."""
    max_inflight: Positive = 8
    """Evaluation rollouts at a time, beside the training's."""
    infrastructure_retries: Annotated[int, Field(ge=0)] = 2
    """A cell that failed for another reason than the agent's answer is run again, never scored 0."""
    collapse_drop: Share = 0.1
    """Fall of pass@1 below its best that, with p < 0.05, raises the collapse alarm."""
    collapse_stops: bool = False
    """Whether that alarm stops the run, or only warns."""


class Watchdog(Section):
    poll_s: Seconds = 10.0
    """Between two looks."""
    stall_s: Seconds = 1800.0
    """Without an optimizer step for this long, in the rollout and training phases, the run is stopped."""
    start_limit_s: Seconds = 3600.0
    """For starting, compiling and the first sync."""
    save_limit_s: Seconds = 1800.0
    """For saving and pushing."""
    eval_limit_s: Seconds = 7200.0
    """For an evaluation inside the trainer."""
    heartbeat_s: Seconds = 180.0
    """A process that has not renewed its heartbeat for this long is dead or frozen."""
    grace_s: Seconds = 60.0
    """Between the request to stop and the kill."""
    sync_silent_s: Seconds = 30.0
    """A policy that has not answered for this long while weights are sent to it is frozen."""
    max_resumes: Annotated[int, Field(ge=0)] = 3
    """How often a run starts again from its newest checkpoint before it gives up."""
    resume_backoff_s: Seconds = 10.0
    """Before the first resume; doubled for each further one, up to ``max_backoff_s``."""
    max_backoff_s: Seconds = 300.0
    """Longest wait before a resume."""


class Costs(Section):
    trainer_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Of the whole machine that trains, all its GPUs."""
    eval_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Of the machine of an evaluation Job."""
    sandbox_usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Of one sandbox; 0 where they run on the machine that trains."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Of the machine that trains, for the count of GPU hours."""
    ceiling_usd: Annotated[float, Field(gt=0)] | None = None
    """The run is stopped, with a checkpoint, at the first step after it has cost this much."""


class Push(Section):
    """Checkpoints on the Hub; only where ADAPTER_REPO names a repository."""

    retry_for_s: Seconds = 600.0
    """How long one push is tried again before its turn is over; it stays in the backlog, and its turn comes again."""
    flush_s: Seconds = 600.0
    """How long the end of training waits for what is not pushed yet."""


JobTimeout = Annotated[str, Field(pattern=r"^[1-9]\d*[smhd]$")]


class HfJob(Section):
    flavor: str = "h200x2"
    """Machine of the training Job."""
    timeout: JobTimeout = "72h"
    """Always sent: the Hub's own default ends a Job after 30 minutes."""
    eval_flavor: str = "h200"
    """Machine of the evaluation Job."""
    eval_timeout: JobTimeout = "48h"
    """After which the evaluation Job is ended."""


class Control(Section):
    """Faults on purpose, to see what training learns from. All off in a run that counts."""

    shuffle_rewards: bool = False
    """Within each group: how many were right stays, which ones is lost. Nothing may be learned."""
    drop_syncs: bool = False
    """The policy goes on serving the base. The canary must stop the run."""


class Recipe(Section):
    run: Run
    model: Model
    lora: Lora = Lora()
    sampling: Sampling
    tasks: Tasks
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    env: Env = Env()
    policy: Policy = Policy()
    weight_sync: WeightSync = WeightSync()
    trainer: Trainer = Trainer()
    algorithm: Algorithm = Algorithm()
    evaluator: Evaluator = Evaluator()
    watchdog: Watchdog = Watchdog()
    costs: Costs = Costs()
    push: Push = Push()
    hf_job: HfJob = HfJob()
    control: Control = Control()

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        if self.sampling.max_completion_tokens >= self.model.max_model_len:
            raise ValueError(
                f"sampling.max_completion_tokens is {self.sampling.max_completion_tokens} and model.max_model_len "
                f"{self.model.max_model_len}; the context must exceed the output cap"
            )
        fewest, most = self.trainer.groups_per_step, (self.rollout.max_staleness + 1) * self.trainer.groups_per_step
        if not fewest <= self.max_open_groups <= most:
            raise ValueError(
                f"rollout.max_open_groups is {self.max_open_groups}; allowed: {fewest} to {most}. A step needs "
                "trainer.groups_per_step groups; of more than (max_staleness + 1) times as many the last are too old "
                "when their turn comes"
            )
        if self.env.backend == "hf-sandbox":
            if self.env.hf_sandbox_idle_timeout_s <= self.rollout.agent_timeout_s:
                raise ValueError(
                    f"env.hf_sandbox_idle_timeout_s is {self.env.hf_sandbox_idle_timeout_s} and "
                    f"rollout.agent_timeout_s {self.rollout.agent_timeout_s}; the idle timeout must exceed it, or the "
                    "sandbox ends under a running agent"
                )
            if self.env.sandbox_image is None or self.env.sandbox_image.startswith("local/"):
                raise ValueError(
                    f"env.sandbox_image is {self.env.sandbox_image!r}; with backend hf-sandbox the Hub pulls it, so it "
                    "must be in a registry: `make push`, then name it by digest (images/digests.json)"
                )
        if self.policy.max_num_seqs < self.rollout.max_inflight:
            raise ValueError(
                f"policy.max_num_seqs is {self.policy.max_num_seqs} and rollout.max_inflight "
                f"{self.rollout.max_inflight}; the policy must take a call of every rollout in flight, or they queue"
            )
        if self.tasks.train == self.tasks.heldout:
            raise ValueError(f"tasks.train and tasks.heldout are both {self.tasks.train!r}; they must differ")
        if self.evaluator.watch_tasks > self.evaluator.final_tasks:
            raise ValueError(
                f"evaluator.watch_tasks is {self.evaluator.watch_tasks} and final_tasks {self.evaluator.final_tasks}; "
                "the watched subset is taken from the final one"
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> Recipe:
        if self.weight_sync.mode == "full" and self.weight_sync.transport != "nccl":
            raise ValueError(
                f"weight_sync.mode is 'full' and transport {self.weight_sync.transport!r}; TRL streams merged weights "
                "over 'nccl' only"
            )
        if self.weight_sync.mode == "full" and self.trainer.forward == "served":
            raise ValueError(
                "weight_sync.mode is 'full' and trainer.forward 'served'; TRL's own merge rounds otherwise, so set "
                "trainer.forward to 'adapter'"
            )
        fraction = self.trainer.gpu_memory_fraction
        if fraction is None:
            return self
        if self.weight_sync.transport == "nccl":
            raise ValueError(
                f"trainer.gpu_memory_fraction is {fraction}, so trainer and policy share a GPU, and "
                "weight_sync.transport is 'nccl', which refuses that; set transport to 'gloo'"
            )
        if (both := fraction + self.policy.gpu_memory_utilization) > SHARED_GPU_LIMIT:
            raise ValueError(
                f"trainer.gpu_memory_fraction and policy.gpu_memory_utilization are {both:g} together; on one GPU at "
                f"most {SHARED_GPU_LIMIT} is allowed: the policy's copy of the base and both CUDA contexts lie outside"
            )
        return self

    @property
    def max_open_groups(self) -> int:
        """``rollout.max_open_groups``, or its default."""
        return self.rollout.max_open_groups or (self.rollout.max_staleness + 1) * self.trainer.groups_per_step

    @property
    def lora_scale(self) -> float:
        return self.lora.alpha / self.lora.r

    def model_location(self) -> str:
        """What transformers and vLLM load: the folder of a local model, or the Hub id (read from HF_HOME)."""
        if self.model.source == "local":
            return str(Path(os.environ.get("MODELS_DIR", "data/models")) / self.model.id)
        return self.model.id

    def sandbox_image(self) -> str:
        """Image of every sandbox of the run: the recipe's, or the project's own as IMAGE_PATTERN says."""
        pattern = os.environ.get("IMAGE_PATTERN") or "local/opencode-rl-{}:cpu"
        return self.env.sandbox_image or pattern.format("sandbox")

    def sha256(self) -> str:
        """Hash of the resolved values, equal for two files that mean the same run."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load(path: Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Parse and validate the recipe at ``path``.

    Args: overrides: dotted key -> value, set over the file (``{"trainer.max_steps": 20}``).
    Raises: RecipeError: one message that names every wrong key with what was found and what is allowed.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist; set RECIPE to a file in data/recipes/") from None
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}; it must be a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from None
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    _fill_in(values, path)
    try:
        # Through JSON, where strict means "no conversion" and a list still is a tuple: "4" and true are no numbers.
        return Recipe.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise RecipeError(f"recipe {path} is refused:\n" + "\n".join(_messages(error))) from None


def require_weights(cfg: Recipe) -> None:
    """Raises: RecipeError: no commit of the model is named, or it is not in the Hub cache (HF_HOME), which no starting
    process fills."""
    if cfg.model.source != "hub":
        return
    if cfg.model.revision is None:
        raise RecipeError("model.revision is missing; a Hub model needs its full commit: run `make prepare`")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    folder = home / "hub" / f"models--{cfg.model.id.replace('/', '--')}" / "snapshots" / cfg.model.revision
    if not (folder / "config.json").exists():
        raise RecipeError(f"model {cfg.model.id} at {cfg.model.revision} is not in {home}: run `make prepare`")


def lock_path(path: Path) -> Path:
    """What `make prepare` has resolved for the recipe at ``path``."""
    return path.with_name(f"{path.name}.lock")


def _fill_in(values: dict[str, Any], path: Path) -> None:
    """Set what the recipe leaves open as it is locked: in the file beside it, or, in a container, by variables.

    Raises: RecipeError: the lock is of another model than the recipe.
    """
    locked: dict[str, str] = dict(os.environ)
    if (lock := lock_path(path)).is_file():
        locked = dict(line.split("=", 1) for line in lock.read_text(encoding="utf-8").splitlines() if "=" in line)
    model, env = values.get("model"), values.setdefault("env", {})
    if isinstance(env, dict) and (base := locked.get("LOCKED_SANDBOX_BASE")):
        env.setdefault("sandbox_base", base)
    if not isinstance(model, dict) or model.get("source", "hub") != "hub" or model.get("revision"):
        return
    name, _, revision = locked.get("LOCKED_MODEL", "").rpartition("@")
    if name and name != model.get("id"):
        raise RecipeError(f"recipe {path} names model {model.get('id')}, and its lock {name}; run `make prepare` again")
    if revision:
        model["revision"] = revision


def from_environment() -> Recipe:
    """The recipe that ``RECIPE`` names, with ``RUN_NAME`` and ``MAX_STEPS`` set over it when present."""
    path = os.environ.get("RECIPE", "")
    if not path:
        raise RecipeError("RECIPE is not set; it must name a recipe file, such as data/recipes/smoke.toml")
    overrides: dict[str, Any] = {}
    if name := os.environ.get("RUN_NAME"):
        overrides["run.name"] = name
    if steps := os.environ.get("MAX_STEPS"):
        if not re.fullmatch("[1-9][0-9]*", steps):
            raise RecipeError(f"MAX_STEPS is {steps!r}; it must be a positive whole number")
        overrides["trainer.max_steps"] = int(steps)
    return load(Path(path), overrides)


def _messages(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "recipe"
        if item["type"] == "extra_forbidden":
            lines.append(f"  {key}: unknown key; allowed in this section: {', '.join(_allowed(item['loc']))}")
        elif item["type"] == "value_error":
            lines.append(f"  {item['ctx']['error']}")
        elif item["type"] == "missing":
            lines.append(f"  {key}: missing; it has no default")
        else:
            lines.append(f"  {key}: found {item['input']!r}; {item['msg']}")
    return lines


def _allowed(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Recipe
    for part in location[:-1]:
        model = model.model_fields[str(part)].annotation
    return sorted(model.model_fields)


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
