"""Where a step's time goes, for ``metrics.jsonl``: shares of the trainer's step, and how busy the policy was meanwhile.

The trainer's part comes from TRL's own ``perf/`` numbers. The policy's comes from vLLM's metrics page: counters over
the step, and whether requests were running, which is a gauge and so is sampled, every ``SAMPLE_S`` on a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

SAMPLE_S = 0.5
"""Rendering the page takes a few milliseconds of the API server's time."""
TIMEOUT_S = 5.0

_NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_inference_time_seconds_sum", "process_cpu_seconds_total",
)  # fmt: skip
_LINE = re.compile(rf"^({'|'.join(_NAMES)})(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)

logger = logging.getLogger("trainer")


def step_shares(numbers: Mapping[str, float]) -> dict[str, float]:
    """``time/rollout_wait``, ``/train``, ``/sync`` and ``/other``: shares of the step's wall time, together 1; and
    ``idle/trainer``, the share in which the trainer computed nothing.

    Args: numbers: TRL's of one step. Returns: nothing for the first step, whose wall time TRL does not know.
    """
    step_s = numbers.get("perf/step_s")
    if not step_s:
        return {}
    parts = {
        "rollout_wait": numbers.get("perf/rollout_wait_s", 0.0),
        "train": numbers.get("perf/fwd_bwd_s", 0.0) + numbers.get("perf/optimizer_s", 0.0),
        "sync": numbers.get("perf/weight_sync_s", 0.0),
    }
    parts["other"] = max(0.0, step_s - sum(parts.values()))
    found = {f"time/{name}": seconds / step_s for name, seconds in parts.items()}
    return {**found, "idle/trainer": 1 - min(1.0, found["time/train"])}


class PolicyLoad:
    """Watches the policy from a thread of its own. A page that does not answer is no number, and never ends a run."""

    def __init__(self, policy_url: str, put_back: Callable[[], float] = lambda: 0.0) -> None:
        """Args: put_back: requests so far that weight syncs put back, which vLLM counts as preempted."""
        self._put_back = put_back
        self._put_back_before = self._put_back_unseen = 0.0
        self._url = f"{policy_url}/metrics"
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False)
        self._lock = threading.Lock()
        self._running: list[float] = []
        self._waiting: list[float] = []
        self._last: tuple[float, dict[str, float]] | None = None
        self._own_cpu_s = own_cpu_s()

    def start(self) -> None:
        threading.Thread(target=self._sample_for_ever, name="policy-load", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Since the last call: ``idle/policy``, share of the samples in which no request was running;
        ``policy/waiting``, mean over the samples; ``policy/running``, mean requests, from the seconds that those which
        ended had run; ``policy/prefix_cache_hit_share`` of prompt tokens; ``policy/prompt_tok_s``,
        ``policy/generated_tok_s``; ``policy/preemptions``, without those of weight syncs; ``cpu/policy_cores`` (vLLM's
        API server, without its engine) and ``cpu/trainer_cores`` (with the rollout worker), mean cores in use."""
        page = self.sample()
        with self._lock:
            running, self._running = self._running, []
            waiting, self._waiting = self._waiting, []
        now, before = time.monotonic(), self._last
        self._last = (now, page) if page else None
        found: dict[str, float] = {}
        if running:
            found["idle/policy"] = sum(value == 0 for value in running) / len(running)
            found["policy/waiting"] = sum(waiting) / len(waiting)
        if page:
            found |= self._without_put_back({} if before is None else _rates(before[1], page, now - before[0]))
        cpu_s = own_cpu_s()
        if before is not None:
            found["cpu/trainer_cores"] = (cpu_s - self._own_cpu_s) / (now - before[0])
        self._own_cpu_s = cpu_s
        return found

    def _without_put_back(self, rates: dict[str, float]) -> dict[str, float]:
        """Take the syncs' own from the preemptions. vLLM counts one when the request runs again, maybe a step later."""
        total = self._put_back()
        new, self._put_back_before = total - self._put_back_before, total
        if "policy/preemptions" not in rates:
            return rates
        counted, expected = rates["policy/preemptions"], new + self._put_back_unseen
        self._put_back_unseen = min(new, max(0.0, expected - counted))
        return {**rates, "policy/preemptions": max(0.0, counted - expected)}

    def sample(self) -> dict[str, float]:
        """Read the page once, and note the running and waiting requests. Returns: its numbers, empty on no answer."""
        try:
            response = self._client.get(self._url)
            response.raise_for_status()
        except httpx.HTTPError as error:
            logger.debug("no metrics of the policy: %s", error)
            return {}
        page: defaultdict[str, float] = defaultdict(float)
        for name, value in _LINE.findall(response.text):
            page[name] += float(value)  # engines of a data-parallel server, each with a line of its own
        with self._lock:
            if "vllm:num_requests_running" in page:
                self._running.append(page["vllm:num_requests_running"])
                self._waiting.append(page["vllm:num_requests_waiting"])
        return page

    def _sample_for_ever(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self.sample()


def _rates(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    change = {name: now[name] - before[name] for name in _NAMES if name in before and name in now}
    if any(value < 0 for name, value in change.items() if name.endswith(("_total", "_sum"))):
        return {}  # the policy was started again
    found = {
        "policy/running": change.get("vllm:request_inference_time_seconds_sum", 0.0) / seconds,
        "policy/prompt_tok_s": change.get("vllm:prompt_tokens_total", 0.0) / seconds,
        "policy/generated_tok_s": change.get("vllm:generation_tokens_total", 0.0) / seconds,
        "policy/preemptions": change.get("vllm:num_preemptions_total", 0.0),
    }
    if queries := change.get("vllm:prefix_cache_queries_total"):
        found["policy/prefix_cache_hit_share"] = change.get("vllm:prefix_cache_hits_total", 0.0) / queries
    if "process_cpu_seconds_total" in change:
        found["cpu/policy_cores"] = change["process_cpu_seconds_total"] / seconds
    return found


def own_cpu_s() -> float:
    """CPU seconds of this process and its living descendants, such as TRL's rollout worker."""
    total, pids = 0.0, [os.getpid()]
    while pids:
        process = Path(f"/proc/{pids.pop()}")
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime
            for thread in process.joinpath("task").iterdir():
                with contextlib.suppress(OSError):
                    pids += [int(child) for child in thread.joinpath("children").read_text().split()]
    return total
