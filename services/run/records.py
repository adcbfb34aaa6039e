"""What the files of a run say, a class for each. Times that end in ``_s`` are Unix seconds, or durations in seconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """One line of a file of lines, or the whole of a file with one record. Unknown fields are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)


# --- written by the trainer and its supervisor --------------------------------------------------------------------


class Step(Record):
    """``metrics.jsonl``: one optimizer step. The numbers themselves are the fields that are not listed here."""

    step: int
    time_s: float
    reward: float | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """Metric -> value, all of them."""
        found = {**(self.model_extra or {}), "reward": self.reward}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}


class TrainedStep(Record):
    """``trained.jsonl``: what one optimizer step trained on; which fields say so is the trainer's matter."""

    step: int
    time_s: float


class Attempt(Record):
    """``attempts.jsonl``: the training process started or ended, or a person resumed the run."""

    event: Literal["started", "ended", "resumed by a person"]
    at: str
    time_s: float
    attempt: int | None = None
    checkpoint: str | None = None
    """Folder name of the checkpoint from which it started; None: from the beginning."""
    step: int | None = None
    reason: str | None = None
    resume: bool | None = None
    """Of an end: whether the supervisor starts it again."""
    before: dict[str, Any] | None = None
    """result.json as it was when a person resumed the run."""


class PolicyVersion(Record):
    """``policy_versions.jsonl``: from when the policy may serve a version, or serves nothing older."""

    version: int
    begins_s: float | None = None
    served_s: float | None = None


class Result(Record):
    """``result.json``: how training ended."""

    exit_code: int
    reason: str
    step: int = 0
    resumes: int = 0
    at: str | None = None


class StopRequest(Record):
    """``stop.json``: the run is to stop. A person may write one by hand."""

    reason: str = "asked for by hand"
    at: str | None = None
    by: str | None = None
    resume: bool = False
    """Start again from the newest checkpoint."""


class Costs(Record):
    """``costs.json``: what the run has used so far."""

    usd: float = 0.0
    usd_per_step: float | None = None
    gpu_hours: float = 0.0
    machine_s: float = 0.0
    machines: list[tuple[float, float]] = Field(default_factory=list)
    """Begin and end of each span in which a machine was there."""
    sandbox_minutes: float = 0.0
    steps: int = 0


class TrackerPosition(Record):
    """``tracker.json``: the last step that the tracker got."""

    step: int


class Push(Record):
    """``pushes.jsonl``: one checkpoint that is on the Hub."""

    at: str
    repo: str
    step: int
    ready_ns: int
    commit: str
    wall_s: float


# --- written by the rollout worker --------------------------------------------------------------------------------


class Rollout(Record):
    """``rollouts/index.jsonl``: one training rollout."""

    rollout_id: str
    task: str
    scored: bool
    group: int | None = None
    """TRL's group: the rollouts of one prompt."""
    reward: float | None = None
    """The verifier's; None: there was no verdict, which is not 0."""
    cause: str | None = None
    """Why it is unscorable: ``services.common.causes``."""
    error: str | None = None
    breaches: list[str] = Field(default_factory=list)
    policy_steps: tuple[int, int] | None = None
    policy_versions: list[tuple[int, int]] | None = None
    agent_timeout: bool = False
    turns: int = 0
    tool_calls: int = 0
    trainable_tokens: int = 0
    completion_tokens: int = 0
    cap_hits: int = 0
    budget_stops: int = 0
    sandbox_s: float = 0.0
    agent_s: float = 0.0
    wall_s: float = 0.0
    at: str | None = None


# --- written by env -----------------------------------------------------------------------------------------------


class SandboxEvent(Record):
    """``sandboxes.jsonl``: a sandbox is about to be made, is there, or is gone."""

    event: Literal["intent", "created", "closed"]
    project: str
    """Compose project, or trial, of the sandbox; unique in the run."""
    at: str | None = None


class Manifest(Record):
    """``manifest.json``: what the run was made of."""

    run: str
    started_at: str
    git_revision: str
    recipe_sha256: str
    recipe: dict[str, Any]
    model: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    images: dict[str, str]
    image_digests: dict[str, str] = Field(default_factory=dict)


# --- written by the evaluator -------------------------------------------------------------------------------------


class Cell(Record):
    """``eval/cells.jsonl``: one held-out rollout of one set of weights."""

    key: str
    label: str
    adapter_sha256: str
    task: str
    attempt: int
    reward: float | None
    cause: str | None
    error: str = ""
    agent_timeout: bool = False
    turns: int = 0
    tool_calls: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    at: str | None = None


class CollapseAlarm(Record):
    """``eval/collapse_alarms.jsonl``: a checkpoint that is much worse than the best before it."""

    reason: str
    at: str


# --- written by all -----------------------------------------------------------------------------------------------


class Heartbeat(Record):
    """``heartbeats/<service>``: what a service is doing, since when."""

    service: str
    phase: str
    step: int
    time_s: float
    phase_since_s: float
    pid: int
    detail: dict[str, Any] = Field(default_factory=dict)
