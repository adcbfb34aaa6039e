"""The numbers of a run, under Prometheus names: what each is, and how it is read from the run directory.

Trainer, env, evaluator and watchdog each serve theirs on a port of their own. All of them are read from files that the
service writes anyway, when they are asked for, so that an endpoint can neither slow a run down nor differ from what the
run directory says. docs/metrics.md is made from these tables.

The one module here that uses a package beside pydantic, prometheus-client, and only in ``serve``: a service that
serves has it in its image.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from services.common import health, network, run_dir
from services.common.run_dir import RunDir

PREFIX = "opencode_rl_"
PORTS = {"trainer": 9101, "env": 9102, "evaluator": 9103, "watchdog": 9104}
"""Different ones, because in an HF Job all four share one host."""
Labels = tuple[str, ...]
logger = logging.getLogger("metrics")


@dataclass(frozen=True)
class Metric:
    """One row of docs/metrics.md."""

    key: str
    """Of metrics.jsonl; ``<label>`` stands for what differs. Elsewhere the Prometheus name without prefix."""
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    labels: Labels = ()
    """Of a metric that is in no metrics.jsonl; in the others ``<label>`` names it."""
    alias: str = ""
    """Prometheus name where that of the key would clash or read badly."""

    @property
    def name(self) -> str:
        """Prometheus name, without the ``_total`` that the client adds to counters."""
        return PREFIX + (self.alias or re.sub(r"\W", "_", self.key).removesuffix("_total"))

    @property
    def label_names(self) -> Labels:
        return (*re.findall(r"<(\w+)>", self.key), *self.labels)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"<\w+>", "([^/]+)", re.escape(self.key)))


def counter(key: str, text: str, *labels: str, alias: str = "") -> Metric:
    return Metric(key, text, "counter", labels, alias)


STEP: tuple[Metric, ...] = (
    Metric("reward", "Mean trained reward of the step's samples: verifier's verdict plus tool-efficiency bonus."),
    Metric("reward_std", "Spread of the rewards within a group, mean over groups; 0 trains nothing."),
    Metric("rewards/harness_reward", "The same reward under TRL's name of its source."),
    Metric("rollout/correctness_mean", "Share of the step's rollouts that the verifier found correct."),
    counter("groups/done", "Groups whose rollouts have all ended."),
    counter("groups/zero_variance", "Of them, groups whose scored rewards are all equal: no gradient."),
    Metric("groups/dropped_total", "Groups given up in the step after rollout.max_group_tries."),
    Metric("ratio", "Mean importance ratio of trained tokens: trained over sampled probability."),
    Metric(
        "ratio/staleness_<staleness>",
        "The same, of tokens sampled that many policy versions ago; at 0 it must be 1.",
        alias="ratio_by_staleness",
    ),
    Metric("kl", "Mean KL estimate between trained and sampling policy, in nats."),
    Metric("kl/staleness_<staleness>", "The same, by staleness.", alias="kl_by_staleness"),
    Metric("kl/base", "Mean KL estimate from the base model, in nats; with algorithm.kl_coef only."),
    Metric("entropy", "Mean entropy of the trained tokens' distributions, in nats."),
    Metric("loss", "GRPO loss."),
    Metric("grad_norm", "Norm of the gradient before clipping."),
    Metric("learning_rate", "Learning rate of the step."),
    Metric("epoch", "Passes over the training tasks."),
    Metric("num_input_tokens_seen", "Tokens that the trainer has seen, as transformers counts them."),
    Metric("clip_ratio/low_mean", "Share of tokens clipped below."),
    Metric("clip_ratio/high_mean", "Share of tokens clipped above."),
    Metric("clip_ratio/region_mean", "Share of tokens clipped on either side."),
    Metric("batch/forwarded_tokens_per_step", "Tokens that went through the model in the step."),
    Metric("batch/trained_tokens_per_step", "Of them, supervised ones: sampled by the policy."),
    Metric("batch/masked_token_frac", "Share of forwarded tokens that are context only."),
    Metric("batch/groups_per_step", "Groups in the step."),
    Metric("batch/samples_per_step", "Samples in the step."),
    Metric("batch/microbatches_per_step", "Forward and backward passes in the step."),
    Metric("batch/samples_per_row", "Samples packed in a row."),
    Metric("batch/forward_only_share", "Share of forwarded tokens of rows without a gradient: no backward pass."),
    Metric("batch/row_tokens_mean", "Tokens in a row."),
    Metric("batch/row_tokens_max", "Tokens in the longest row."),
    Metric("completions/mean_length", "Sampled tokens of a rollout."),
    Metric("completions/min_length", "Sampled tokens of the shortest rollout."),
    Metric("completions/max_length", "Sampled tokens of the longest rollout."),
    Metric("completions/clipped_ratio", "Share of samples that do not end with the end-of-sequence token."),
    Metric("sample/staleness_mean", "Policy versions between sampling and training, mean over a rollout's tokens."),
    Metric("sample/staleness_max", "The same, of the oldest rollout; never above rollout.max_staleness."),
    Metric("sample/truncated_share", "Share of rollouts that a limit cut: output cap, context, model calls, time."),
    Metric("groups/silent_share", "Share of the step's groups whose rewards are all equal: they teach nothing."),
    Metric("groups/refilled_total", "Silent groups that the step passed over (rollout.refill_silent_groups)."),
    Metric("groups/dropped_stale_total", "Groups that were too old to train on, and are made again."),
    Metric("groups/dropped_stale_tokens_mean", "Tokens of their rollouts; compare sample/forwarded_tokens_mean."),
    Metric("groups/dropped_stale_age_max", "Age of the oldest of them, in policy versions."),
    Metric("sample/forwarded_tokens_mean", "Tokens of a rollout."),
    Metric("sample/forwarded_tokens_max", "Tokens of the longest rollout."),
    Metric("sample/trained_tokens_mean", "Supervised tokens of a rollout."),
    Metric("rollout/samples_per_rollout", "Rows that a rollout became: more than 1 when its history forked."),
    Metric("rollout/fork_frac", "Share of rollouts whose history forked."),
    Metric("rollout/realign_frac", "Share of rollouts whose capture had to be realigned."),
    Metric("rollout/drift_tokens_mean", "Tokens that a capture differed by."),
    Metric("rollout/drift_tokens_max", "The same, worst rollout."),
    Metric("rollout/turns_mean", "Model calls of a rollout."),
    Metric("rollout/turns_max", "Model calls of the longest rollout."),
    Metric("rollout/duration_s", "Seconds of a rollout, start of the sandbox to its end."),
    Metric("rollout/generated_tok_s", "Sampled tokens a second, over all rollouts in flight."),
    Metric("rollout/inflight", "Rollouts in flight, as the rollout worker sees it."),
    Metric("rollout/backpressure_s", "Seconds that finished rollouts waited for room in the queue."),
    Metric("rollout/score_queue_size", "Groups that wait to be scored."),
    Metric("rollout/score_s", "Seconds to score a group."),
    Metric("rollout/score_wait_s", "Seconds that a group waited to be scored."),
    Metric("rollout/timeout_frac", "Share of rollouts whose agent ran out of time."),
    Metric("rollout/unscorable_frac", "Share of rollouts that could not be scored."),
    counter("rollouts/done", "Training rollouts that have ended, since the run's first attempt."),
    counter("rollouts/unscorable", "Of them, those that failed for another reason than the agent's answer."),
    counter("rollouts/unscorable/<cause>", "The same, by cause.", alias="rollouts_unscorable_by_cause"),
    counter(
        "rollouts/breach/<finding>",
        "Rollouts with a finding of the capture gate, fatal or not.",
        alias="rollouts_breach",
    ),
    counter("rollouts/cap_hits", "Rollouts with a turn that ended at sampling.max_completion_tokens."),
    counter("rollouts/budget_stops", "Rollouts that asked for more than rollout.max_tool_calling_iterations calls."),
    Metric("rollouts/per_hour", "Training rollouts an hour, over the last 64."),
    Metric("tools/call_frequency", "Tool calls of a rollout, as TRL counts them."),
    Metric("tools/failure_frequency", "Share of tool calls that failed, as TRL counts them."),
    counter(
        "tool_calls/<outcome>", "Tool calls since the policy's start: parsed, repaired, unparsed.", alias="tool_calls"
    ),
    Metric("perf/step_s", "Seconds of the optimizer step, everything included."),
    Metric("perf/rollout_wait_s", "Of them, waiting for rollouts."),
    Metric("perf/fwd_bwd_s", "Of them, forward and backward."),
    Metric("perf/fwd_s", "Of them, forward."),
    Metric("perf/optimizer_s", "Of them, the optimizer."),
    Metric("perf/weight_sync_s", "Of them, the weight sync."),
    Metric("perf/weight_sync_pause_s", "TRL's phase of that name; with LoRA factors 0, see weight_sync/pause_s."),
    Metric("perf/weight_sync_barrier_s", "TRL's phase of that name; with LoRA factors 0."),
    Metric("perf/weight_sync_transfer_s", "TRL's phase of that name; with LoRA factors the whole sync."),
    Metric("perf/forwarded_tok_s_fwd_bwd", "Tokens a second through forward and backward."),
    Metric("perf/forwarded_tok_s_wall_clock", "Tokens a second through the model, waiting included."),
    Metric("perf/trained_tok_s_wall_clock", "Supervised tokens a second, waiting included."),
    Metric("perf/mfu", "Model FLOPs utilisation of the trainer's GPU."),
    Metric("weight_sync/version", "Version of the adapter that the policy serves; 1 is B = 0."),
    Metric("lora/b_rms", "Root mean square over all B of the adapter that is served."),
    Metric(
        "weight_sync/kept_share",
        "Share of the adapter's change that is left after rounding to the served type; 1 is all, absent while B = 0.",
    ),
    Metric("weight_sync/bytes", "Bytes of the adapter's factors that were sent."),
    Metric("weight_sync/pack_s", "Seconds to pack the factors."),
    Metric("weight_sync/transfer_s", "Seconds to send them; generation goes on."),
    Metric("weight_sync/wire_s", "Of them, until the policy had received them."),
    Metric("weight_sync/pause_s", "Seconds of the pause call."),
    Metric("weight_sync/apply_s", "Seconds of the request that pauses, merges and resumes."),
    Metric("weight_sync/waited_s", "Seconds that the policy waited for the factors before it paused."),
    Metric("weight_sync/end_s", "Seconds of the pause that were left of the merge after the caches were reset."),
    Metric("weight_sync/drain_s", "Seconds until the requests in flight stood still."),
    Metric("weight_sync/put_back", "Running requests that the sync put back, to be computed again."),
    Metric("weight_sync/reset_s", "Seconds to reset the policy's caches."),
    Metric("weight_sync/merge_s", "Seconds to merge, while the policy is paused."),
    Metric("weight_sync/resume_s", "Seconds of the resume call."),
    Metric("weight_sync/paused_s", "Seconds in which the policy generated nothing."),
    Metric("weight_sync/verify_s", "Seconds to prove what is served, after the resume."),
    Metric(
        "weight_sync/canary_mean_abs_logprob_diff",
        "Of the canary prompt, between trainer and policy, in nats: mean of the scored or of the continued tokens.",
    ),
    Metric("weight_sync/canary_max_abs_logprob_diff", "The largest difference of one of its tokens."),
    Metric("idle/trainer", "Share of the step in which the trainer's device computes nothing."),
    Metric("idle/policy", "Share of the step in which the policy has no request to run."),
    Metric("time/<part>", "Share of the step: rollout_wait, train, sync, other; together 1.", alias="time_share"),
    Metric("policy/running", "Requests that the policy runs at a time, mean over the step."),
    Metric("policy/waiting", "Requests that wait for it."),
    Metric("policy/prompt_tok_s", "Prompt tokens a second that the policy reads."),
    Metric("policy/generated_tok_s", "Tokens a second that the policy samples."),
    Metric(
        "policy/preemptions",
        "Requests that vLLM put back in the step for want of KV cache, not for a weight sync.",
    ),
    Metric("policy/prefix_cache_hit_share", "Share of prompt tokens found in the prefix cache."),
    Metric("cpu/policy_cores", "Processor cores that vLLM's server uses."),
    Metric("cpu/trainer_cores", "Processor cores that the trainer and its rollout worker use."),
    Metric("push/backlog", "Complete checkpoints that are not on the Hub yet."),
    Metric("push/last_step", "Step of the newest checkpoint on the Hub."),
    Metric("push/last_success_age_s", "Seconds since a push succeeded."),
    counter("push/failures", "Pushes that failed and will be tried again."),
    Metric("costs/usd", "Dollars so far, machine and sandboxes."),
    Metric("costs/usd_per_step", "Dollars an optimizer step."),
    Metric("costs/gpu_hours", "GPU hours so far."),
    Metric("costs/sandbox_minutes", "Minutes of all sandboxes so far."),
)
"""Keys of metrics.jsonl, which the trainer's endpoint serves as they were at the last step."""

TRAINER: tuple[Metric, ...] = (
    Metric("step", "Optimizer steps done."),
    Metric("max_steps", "Optimizer steps that the recipe asks for (trainer.max_steps)."),
    Metric("step_age_seconds", "Seconds since the last optimizer step."),
    *STEP,
)
ENV: tuple[Metric, ...] = (
    Metric("rollouts_inflight", "Rollouts that the env server runs now, training and evaluation."),
    Metric("rollout_oldest_seconds", "Age of the oldest of them."),
    counter("env_rollouts", "Rollouts that ended since the env server's start."),
    counter("env_rollouts_failed", "Of them, unscorable ones by cause.", "cause"),
    Metric("sandboxes_open", "Sandboxes in the ledger that are not closed."),
)
EVALUATOR: tuple[Metric, ...] = (
    Metric("evaluation_cells", "Rollouts of the evaluation that goes on."),
    Metric("evaluation_cells_done", "Of them, those with an outcome."),
    Metric("pass_at_1", "pass@1 on the watched held-out tasks: base, latest, best.", labels=("arm",)),
    Metric("evaluated_step", "Optimizer step of the latest evaluated checkpoint."),
    counter("collapse_alarms", "Checkpoints that fell significantly below the best."),
)
WATCHDOG: tuple[Metric, ...] = (
    Metric("heartbeat_age_seconds", "Seconds since a service renewed its heartbeat.", labels=("service",)),
    Metric("phase_seconds", "Seconds that a service has been in its phase and step.", labels=("service", "phase")),
    Metric("incidents", "Incident bundles of the run."),
    Metric("stop_requested", "1 when the run was asked to stop."),
    Metric("exit_code", "Exit code of the training that has ended; absent while it goes on."),
)
_EXACT = {metric.key: metric for metric in STEP if not metric.label_names}
_LABELLED = tuple(metric for metric in STEP if metric.label_names)
SERVED = {"trainer": TRAINER, "env": ENV, "evaluator": EVALUATOR, "watchdog": WATCHDOG}


def describe(key: str) -> tuple[Metric, Labels]:
    """The metric of a key of metrics.jsonl and its labels' values; an unknown key is a gauge of its own."""
    if key in _EXACT:
        return _EXACT[key], ()
    for metric in _LABELLED:
        if found := metric.pattern.fullmatch(key):
            return metric, found.groups()
    return Metric(key, "Not described in services/common/metrics.py."), ()


# --- Reading ------------------------------------------------------------------------------------------------------


def of_trainer(run: RunDir, max_steps: int, now_s: float) -> Iterator[tuple[Metric, Labels, float]]:
    line = (run_dir.read_lines(run.metrics) or [{}])[-1]
    beat = health.read_heartbeats(run).get("trainer")
    named = {metric.key: metric for metric in TRAINER}
    yield named["step"], (), float(max(beat.step if beat else 0, line.get("step", 0)))
    yield named["max_steps"], (), float(max_steps)
    if "time_s" in line:
        yield named["step_age_seconds"], (), now_s - line["time_s"]
    for key, value in line.items():
        if key not in ("step", "time_s") and _is_number(value):
            yield *describe(key), float(value)


def of_env(run: RunDir, _max_steps: int, now_s: float) -> Iterator[tuple[Metric, Labels, float]]:
    named = {metric.key: metric for metric in ENV}
    open_projects = {line["project"]: line["event"] != "closed" for line in run_dir.read_lines(run.ledger)}
    yield named["sandboxes_open"], (), float(sum(open_projects.values()))
    beat = health.read_heartbeats(run).get("env")
    if beat is None:
        return
    yield named["rollouts_inflight"], (), float(beat.detail.get("inflight", 0))
    yield named["env_rollouts"], (), float(beat.detail.get("done", 0))
    for cause, count in beat.detail.get("failed", {}).items():
        yield named["env_rollouts_failed"], (cause,), float(count)
    started_s = [item["since_s"] for item in beat.detail.get("rollouts", ())]
    yield named["rollout_oldest_seconds"], (), now_s - min(started_s) if started_s else 0.0


def of_evaluator(run: RunDir, _max_steps: int, _now_s: float) -> Iterator[tuple[Metric, Labels, float]]:
    named = {metric.key: metric for metric in EVALUATOR}
    beat = health.read_heartbeats(run).get("evaluator")
    for key, detail in (("evaluation_cells", "cells"), ("evaluation_cells_done", "cells_done")):
        if beat is not None and detail in beat.detail:
            yield named[key], (), float(beat.detail[detail])
    summary = run_dir.read_json(run.eval / "summary.json") or {}
    yield named["collapse_alarms"], (), float(len(summary.get("collapse_alarms", ())))
    checkpoints = [entry for entry in summary.get("checkpoints", ()) if entry["pass_at_1"] is not None]
    best = [entry for entry in checkpoints if entry["label"] == summary.get("best")]
    base = [summary["base"]] if summary.get("base") else []
    for arm, entries in {"base": base, "latest": checkpoints[-1:], "best": best[-1:]}.items():
        for entry in (entry for entry in entries if entry["pass_at_1"] is not None):
            yield named["pass_at_1"], (arm,), float(entry["pass_at_1"])
    if checkpoints:
        yield named["evaluated_step"], (), float(checkpoints[-1]["step"])


def of_watchdog(run: RunDir, _max_steps: int, now_s: float) -> Iterator[tuple[Metric, Labels, float]]:
    named = {metric.key: metric for metric in WATCHDOG}
    for service, beat in health.read_heartbeats(run).items():
        yield named["heartbeat_age_seconds"], (service,), now_s - beat.time_s
        yield named["phase_seconds"], (service, beat.phase), now_s - beat.phase_since_s
    yield named["incidents"], (), float(sum(1 for _ in run.incidents.glob("[!.]*")))
    yield named["stop_requested"], (), float(run.stop_request.exists())
    if (result := run_dir.read_json(run.result)) is not None:
        yield named["exit_code"], (), float(result["exit_code"])


READERS: dict[str, Callable[[RunDir, int, float], Iterable[tuple[Metric, Labels, float]]]] = {
    "trainer": of_trainer,
    "env": of_env,
    "evaluator": of_evaluator,
    "watchdog": of_watchdog,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- Serving ------------------------------------------------------------------------------------------------------


class Collector:
    """What prometheus-client asks for at each scrape."""

    def __init__(self, service: str, run: RunDir, max_steps: int, clock: Callable[[], float] = time.time) -> None:
        self._read = READERS[service]
        self._service = service
        self._run = run
        self._max_steps = max_steps
        self._clock = clock

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric, labels, value in self._read(self._run, self._max_steps, self._clock()):
            family_of = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if metric.name not in families:
                families[metric.name] = family_of(metric.name, metric.help, labels=metric.label_names)
            families[metric.name].add_metric(labels, value)
        info = GaugeMetricFamily(f"{PREFIX}info", "Which run and service this is.", labels=("run", "service"))
        info.add_metric((self._run.path.name, self._service), 1.0)
        yield info
        yield from families.values()


@contextmanager
def serve(service: str, run: RunDir, max_steps: int = 0, host: str = "", port: int | None = None) -> Iterator[int]:
    """Serve the service's numbers at ``/metrics`` while the context lasts.

    A port that is taken costs the numbers, not the run. Yields: the port, 0 when it is not served.
    Args: host: address to listen on; default METRICS_HOST, which a container that others share sets, else all.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    host = host or os.environ.get("METRICS_HOST") or "0.0.0.0"
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(service, run, max_steps))
    try:
        server, thread = start_http_server(PORTS[service] if port is None else port, host, registry)
        network.only_from_its_network(server.socket, str(server.server_address[0]))
    except OSError as error:
        logger.warning("metrics are not served", extra={"port": PORTS[service], "error": str(error)})
        yield 0
        return
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
