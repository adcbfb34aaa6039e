"""What to do about a run, as a function of what is seen and of the time. No clock, no file, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.common.errors import NotReadyError, StoppedError
from services.common.health import Heartbeat
from services.common.recipe import Rollout as RolloutLimits
from services.common.recipe import Watchdog as Limits

STARTING = ("starting", "compiling", "first_sync")
SAVING = ("saving", "pushing")
ENDED = ("done", "failed")
STEADY = ("rollout", "training", "sync")
"""Phases in which an optimizer step is due. In all others only their own limit and a dead process count: a save, a
slow Hub or a cold compile needs no peer and is not disturbed."""
SUPERVISOR_MARGIN_S = 60.0
"""On top of the grace: the trainer's supervisor polls, dumps stacks, kills, and takes the request away."""
GONE_S = 5.0
"""A policy that refuses connections for this long is no hiccup: its process is dead, and the weights with it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The last time at which the trainer got further."""

    step: int
    at_s: float


def advance(progress: Progress, trainer: Heartbeat | None, step: int, now_s: float) -> Progress:
    """Progress after one more look.

    A new optimizer step is progress, also a lower one: the run was resumed. So is every moment outside the steady
    phases: a long save must not count against the step after it.

    Args: step: the trainer's last optimizer step; what it was before, while there is no trainer.
    """
    if step != progress.step or trainer is None or trainer.phase not in STEADY:
        return Progress(step, now_s)
    return progress


@dataclass(frozen=True, slots=True)
class Observations:
    """One look at the run. Times are Unix seconds. What an earlier attempt left behind is not in it."""

    beats: Mapping[str, Heartbeat]
    watching_since_s: float
    progress: Progress
    silent_since_s: Mapping[str, float]
    """Peer that once answered /health -> since when it has not; absent while it answers."""
    refused_since_s: Mapping[str, float] = field(default_factory=dict)
    """Peer -> since when it has refused connections, or has no address: nobody listens there any more."""
    trainer_gone_since_s: float | None = None
    """Since when there is no training process; None while there is one, and before the first."""
    stop_seen_s: float | None = None
    """When stop.json was first seen, whoever wrote it; None again when the supervisor has obeyed and resumes."""
    exit_code: int | None = None
    """Of result.json; None while the run goes on."""
    unscorable: Mapping[str, int] = field(default_factory=dict)
    """Cause -> how many of the last ``rollout.unscorable_window`` rollouts."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``wait``: nothing. ``alert``: log it, once a subject. ``stop``: bundle evidence, then ask the trainer's
    supervisor to stop. ``end``: the watchdog's own work is done."""

    action: Literal["wait", "alert", "stop", "end"]
    reason: str
    """A complete sentence; goes to the log, stop.json and the bundle."""
    subject: str = ""
    """The service that it is about."""
    exit_code: int | None = None
    """Of the watchdog, with ``end``."""
    resume: bool = False
    """With ``stop``: start again from the newest checkpoint, as often as the recipe allows. A stall may be chance; a
    bound of the recipe that was crossed is none."""


def plan(seen: Observations, limits: Limits, rollouts: RolloutLimits, now_s: float) -> Decision:
    """Decide. While a stop request is there, only ``wait`` and ``end`` follow: never two actions at once."""
    if seen.exit_code is not None:
        return Decision("end", f"The run ended with exit code {seen.exit_code}.", exit_code=seen.exit_code)
    if seen.stop_seen_s is not None:
        return _after_stop(seen.stop_seen_s, limits, now_s)
    trainer = seen.beats.get("trainer")
    if trainer is None:
        return _without_trainer(seen, limits, now_s)
    return (
        _dead(trainer, limits, now_s)
        or _lost_policy(seen, trainer, limits, now_s)
        or _silent_peer(seen, trainer, limits, now_s)
        or _unscorable(seen, trainer, rollouts)
        or _overdue(seen, trainer, limits, now_s)
        or _evaluator(seen.beats.get("evaluator"), limits, now_s)
        or Decision("wait", f"The trainer is in phase {trainer.phase} at step {trainer.step}.")
    )


def _after_stop(seen_s: float, limits: Limits, now_s: float) -> Decision:
    if now_s - seen_s > limits.grace_s + SUPERVISOR_MARGIN_S:
        reason = f"The stop request was not obeyed within {now_s - seen_s:.0f} s; the trainer's supervisor is gone."
        return Decision("end", reason, "trainer", StoppedError.exit_code)
    return Decision("wait", "A stop was requested; the trainer's supervisor is obeying it.")


def _without_trainer(seen: Observations, limits: Limits, now_s: float) -> Decision:
    since_s = seen.watching_since_s if seen.trainer_gone_since_s is None else seen.trainer_gone_since_s
    waited_s = now_s - since_s
    if waited_s > limits.start_limit_s:
        reason = (
            f"No heartbeat of the trainer came within {waited_s:.0f} s; watchdog.start_limit_s is "
            f"{limits.start_limit_s:.0f}."
        )
        return Decision("end", reason, "trainer", NotReadyError.exit_code)
    return Decision("wait", "There is no training process yet, or not yet again.")


def _dead(trainer: Heartbeat, limits: Limits, now_s: float) -> Decision | None:
    age_s = now_s - trainer.time_s
    if age_s <= limits.heartbeat_s:
        return None
    reason = (
        f"The trainer has renewed no heartbeat for {age_s:.0f} s (phase {trainer.phase}, step {trainer.step}): it is "
        f"dead or frozen; watchdog.heartbeat_s is {limits.heartbeat_s:.0f}."
    )
    return Decision("stop", reason, "trainer", resume=True)


def _lost_policy(seen: Observations, trainer: Heartbeat, limits: Limits, now_s: float) -> Decision | None:
    """A policy that is gone: one that comes back serves the bare base, and every rollout until the next sync is of
    another policy than its label says. And one that freezes while weights are sent to it."""
    if trainer.phase not in STEADY:
        return None
    where = f"(the trainer is in phase {trainer.phase} at step {trainer.step})"
    refused_s = now_s - seen.refused_since_s.get("policy", now_s)
    if refused_s > GONE_S:
        reason = f"policy is gone: nobody has listened there for {refused_s:.0f} s {where}; its adapter is lost."
        return Decision("stop", reason, "policy", resume=True)
    silent_s = now_s - seen.silent_since_s.get("policy", now_s)
    if trainer.phase == "sync" and silent_s > limits.sync_silent_s:
        reason = (
            f"policy has not answered for {silent_s:.0f} s {where}: it is frozen; watchdog.sync_silent_s is "
            f"{limits.sync_silent_s:.0f}."
        )
        return Decision("stop", reason, "policy", resume=True)
    return None


def _silent_peer(seen: Observations, trainer: Heartbeat, limits: Limits, now_s: float) -> Decision | None:
    """A peer that the trainer needs and that no longer answers, or whose own heartbeat stands still."""
    if trainer.phase not in STEADY:
        return None
    silent = dict(seen.silent_since_s)
    env = seen.beats.get("env")
    if env is not None and env.phase not in ENDED:
        silent["env"] = min(env.time_s, silent.get("env", env.time_s))
    for name, since_s in sorted(silent.items(), key=lambda item: item[1]):
        silent_s = now_s - since_s
        if silent_s > limits.heartbeat_s:
            reason = (
                f"{name} has not answered for {silent_s:.0f} s (the trainer is in phase {trainer.phase} at step "
                f"{trainer.step}); watchdog.heartbeat_s is {limits.heartbeat_s:.0f}."
            )
            return Decision("stop", reason, name, resume=True)
    return None


def _unscorable(seen: Observations, trainer: Heartbeat, limits: RolloutLimits) -> Decision | None:
    """Too many of the last rollouts say nothing about the agent's answer. A window that is not full yet counts its
    missing rollouts as good, so that a young run is not stopped by its first failures."""
    found = sum(seen.unscorable.values())
    if trainer.phase not in STEADY or found <= limits.max_unscorable_share * limits.unscorable_window:
        return None
    causes = ", ".join(f"{cause} {n}" for cause, n in sorted(seen.unscorable.items(), key=lambda item: -item[1]))
    reason = (
        f"{found} of the last {limits.unscorable_window} rollouts were unscorable ({causes}); "
        f"rollout.max_unscorable_share is {limits.max_unscorable_share:g}. rollouts/index.jsonl says why, one by one."
    )
    return Decision("stop", reason, "rollouts")


def _overdue(seen: Observations, trainer: Heartbeat, limits: Limits, now_s: float) -> Decision | None:
    """The trainer lives, but has been too long in its phase, or without an optimizer step."""
    phase = trainer.phase
    if phase in ENDED:
        return None
    if phase in STARTING:
        key, limit_s = "start_limit_s", limits.start_limit_s
    elif phase in SAVING:
        key, limit_s = "save_limit_s", limits.save_limit_s
    elif phase == "evaluating":
        key, limit_s = "eval_limit_s", limits.eval_limit_s
    else:
        idle_s = now_s - seen.progress.at_s
        if idle_s <= limits.stall_s:
            return None
        reason = (
            f"No optimizer step for {idle_s:.0f} s after step {seen.progress.step}; the trainer has been in phase "
            f"{phase} for {now_s - trainer.phase_since_s:.0f} s; watchdog.stall_s is {limits.stall_s:.0f}."
        )
        return Decision("stop", reason, "trainer", resume=True)
    spent_s = now_s - trainer.phase_since_s
    if spent_s <= limit_s:
        return None
    reason = f"The trainer has been in phase {phase} for {spent_s:.0f} s; watchdog.{key} is {limit_s:.0f}."
    return Decision("stop", reason, "trainer", resume=True)


def _evaluator(beat: Heartbeat | None, limits: Limits, now_s: float) -> Decision | None:
    """A stuck evaluator costs results, not the run: it is told, and nothing is stopped."""
    if beat is None or beat.phase in ENDED:
        return None
    if (age_s := now_s - beat.time_s) > limits.heartbeat_s:
        return Decision("alert", f"The evaluator has renewed no heartbeat for {age_s:.0f} s.", "evaluator")
    if beat.phase == "evaluating" and (spent_s := now_s - beat.phase_since_s) > limits.eval_limit_s:
        reason = (
            f"The evaluator has been at checkpoint-{beat.step} for {spent_s:.0f} s; watchdog.eval_limit_s is "
            f"{limits.eval_limit_s:.0f}."
        )
        return Decision("alert", reason, "evaluator")
    return None
