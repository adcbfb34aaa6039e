"""The evaluation of one set of weights, and the wiring that all commands share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from services.common import run_dir
from services.common import tasks as suites
from services.common.errors import NotReadyError, RecipeError
from services.common.health import Pulse
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.common.signals import StopFlag
from services.evaluator import adapters, cells, checkpoints, curve, pool, probe, results, rollout
from services.evaluator.cells import BASE, Arm, Cell, CellStore, Conditions, Outcome
from services.evaluator.results import Question

HTTP_TIMEOUT_S = 300.0
"""Of one call to policy-eval: loading an adapter waits for the engine."""
BASE_ARM = Arm(BASE)
logger = logging.getLogger("evaluator")

Announce = Callable[[Cell, Outcome, int, int], None]
"""Told of each cell that ended: cell, outcome, how many of how many are done."""


class StoppedEarlyError(Exception):
    """SIGTERM or SIGINT arrived; scored cells are kept, and the next start goes on from there."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the other services are; differs between compose and a Job."""

    env_url: str
    policy_eval_url: str

    @classmethod
    def from_environment(cls) -> Peers:
        missing = [name for name in ("ENV_URL", "POLICY_EVAL_URL") if not os.environ.get(name)]
        if missing:
            raise RecipeError(f"{' and '.join(missing)} not set; compose.yaml gives the evaluator both")
        return cls(os.environ["ENV_URL"].rstrip("/"), os.environ["POLICY_EVAL_URL"].rstrip("/"))


class Evaluator:
    """Evaluates checkpoints against the base under one set of conditions, and keeps the results."""

    def __init__(
        self,
        cfg: Recipe,
        run: RunDir,
        peers: Peers,
        tasks_dir: Path,
        pulse: Pulse,
        stop: StopFlag,
        *,
        greedy: bool = False,
        images: Mapping[str, str] | None = None,
        announce: Announce | None = None,
        connect: Callable[[], rollout.Client] | None = None,
    ) -> None:
        """Args: images: name -> id of the images that run now; None: those of the run's manifest.
        connect: makes a client of the env server; None: OpenEnv's own."""
        self.cfg = cfg
        self.run = run
        self.stop = stop
        self.pulse = pulse
        manifest = run_dir.read_json(run.manifest) or {}
        self.under: Conditions = cells.conditions(cfg, {"images": images} if images else manifest, greedy=greedy)
        self.trained: Conditions = cells.conditions(cfg, manifest)
        """Those of the run: only under the same does a result compare with the points of its curve."""
        self.store = CellStore(run.eval / "cells.jsonl", self.under)
        self._tasks = suites.load_suite(tasks_dir, cfg.tasks.heldout, limit=cfg.evaluator.final_tasks)
        self._peers = peers
        self._http = httpx.Client(timeout=HTTP_TIMEOUT_S)
        self._policy = adapters.PolicyEval(peers.policy_eval_url, self._http)
        self._announce = announce
        self._connect = connect or functools.partial(rollout.connect, cfg, peers.env_url, run)
        self._probed = False

    def question(self, limit: int | None = None, names: Sequence[str] = ()) -> Question:
        """The held-out tasks to ask: the first ``limit`` of the suite, or those named.

        Raises: RecipeError: a name that the suite lacks.
        """
        chosen = results.choose(self.cfg.tasks.heldout, self._tasks, limit, names)
        return Question(
            self.cfg.tasks.heldout,
            {task.name: suites.files_sha256(task.folder) for task in chosen},
            self.cfg.evaluator.attempts,
        )

    @functools.cached_property
    def watch_question(self) -> Question:
        """What every checkpoint is asked, so that the points of the curve compare."""
        return self.question(self.cfg.evaluator.watch_tasks)

    def evaluate(self, checkpoint: Checkpoint | None, question: Question) -> dict[str, Any]:
        """Run the missing cells of the base and, unless None, of the checkpoint; return the results.

        Raises: AdapterNotReadyError: the checkpoint cannot be used now. NotReadyError: a peer never answered.
            httpx.HTTPError: policy-eval went away. StoppedEarlyError: a stop was requested. Scored cells are kept.
        """
        self._wait_for_peers()
        # One evaluation at a time on the run's policy-eval: two would unload each other's adapter and compute
        # the same cells twice.
        with _locked(self.run.eval / ".lock"):
            self.store.reload()
            self._policy.forget()
            self._remove_snapshots()
            if checkpoint is None:
                busy = self._run_missing(question, {BASE_ARM: self._policy.base_name()}, step=0)
                value = results.compile_results(self.store, question, self.under, BASE_ARM, None)
                return {**value, "sandboxes_busy_share": busy}
            # It stays until the next evaluation or the end: rotation may delete the checkpoint, and it may be the best.
            adapter = adapters.snapshot(checkpoint, self.run.eval / adapters.SNAPSHOTS, self.cfg.lora)
            value = self._evaluate_adapter(adapter, question, checkpoint.step)
            return {**value, "step": checkpoint.step, "adapter_is_zero": adapter.zero}

    def close(self) -> None:
        """Remove the copy of the adapter that was loaded last, if nothing reads it any more."""
        with contextlib.suppress(httpx.HTTPError):
            self._remove_snapshots()
        self._http.close()

    def _remove_snapshots(self) -> None:
        """Of earlier evaluations, and of evaluators that were killed, whose rollouts may still run."""
        if self._policy.is_idle():
            shutil.rmtree(self.run.eval / adapters.SNAPSHOTS, ignore_errors=True)

    def _evaluate_adapter(self, adapter: adapters.Adapter, question: Question, step: int) -> dict[str, Any]:
        arm, canary, busy = Arm(adapter.label, adapter.sha256), None, None
        if self.store.missing(question.cells([BASE_ARM, arm])):
            if not self._probed:
                probe.check_every_kind(self._policy, adapter)
                self._probed = True
            canary = self._policy.load(adapter)
            try:
                busy = self._run_missing(question, {BASE_ARM: self._policy.base_name(), arm: adapter.name}, step=step)
            finally:
                self._policy.unload(adapter.name)
        value = results.compile_results(self.store, question, self.under, BASE_ARM, arm)
        return {**value, "canary_max_abs_logprob_diff": canary, "sandboxes_busy_share": busy}

    def _run_missing(self, question: Question, models: dict[Arm, str], step: int) -> float | None:
        """Run the cells that have no score.

        Args: models: arm -> the name under which policy-eval serves it.
        Returns: share of the time in which the allowed sandboxes were in use; None when no cell was missing.
        """
        wanted = question.cells(models)
        todo = self.store.missing(wanted)
        if not todo:
            return None
        runner = self._runner()
        done = len(wanted) - len(todo)
        busy_s = 0.0
        lock = threading.Lock()
        self.pulse.set("evaluating", step=step, cells_done=done, cells=len(wanted))

        def work(cell: Cell) -> None:
            nonlocal done, busy_s
            outcome = runner(cell, models[cell.arm])
            self.store.add(cell, outcome)
            with lock:
                done += 1
                busy_s += outcome.wall_s
                self.pulse.set(cells_done=done)
                self._tell(cell, outcome, done, len(wanted))

        workers = min(self.cfg.evaluator.max_inflight, len(todo))
        begin_s = time.monotonic()
        if not pool.run_all(todo, work, workers, self.stop):
            raise StoppedEarlyError
        share = busy_s / (workers * (time.monotonic() - begin_s))
        logger.info("cells done", extra={"step": step, "cells": len(todo), "sandboxes_busy_share": round(share, 3)})
        return share

    def _tell(self, cell: Cell, outcome: Outcome, done: int, total: int) -> None:
        logger.log(
            logging.INFO if outcome.scored else logging.WARNING,
            "cell scored" if outcome.scored else "cell has no score",
            extra={
                "label": cell.arm.label, "task": cell.task, "attempt": cell.attempt, "reward": outcome.reward,
                "cause": outcome.cause, "error": outcome.error, "wall_s": outcome.wall_s, "done": done, "cells": total,
            },
        )  # fmt: skip
        if self._announce is not None:
            self._announce(cell, outcome, done, total)

    def _runner(self) -> rollout.Runner:
        client = self._connect()
        try:
            index = rollout.locate(client, self.cfg.tasks.heldout, self._tasks)
        finally:
            client.close()
        return rollout.Runner(
            connect=self._connect,
            suite=self.cfg.tasks.heldout,
            index=index,
            under=self.under,
            llm_url=f"{self._peers.policy_eval_url}/v1",
            backend=self.cfg.env.backend,
            retries=self.cfg.evaluator.infrastructure_retries,
        )

    def _wait_for_peers(self) -> None:
        """Raises: NotReadyError: a peer did not answer within recipe.watchdog.start_limit_s."""
        for url in (self._peers.policy_eval_url, self._peers.env_url):
            try:
                _healthy(self._http, f"{url}/health", self.cfg.watchdog.start_limit_s)
            except httpx.HTTPError as error:
                raise NotReadyError(
                    f"{url}/health did not answer within {self.cfg.watchdog.start_limit_s:.0f} s: {error}"
                ) from None

    # --- Files ----------------------------------------------------------------------------------------------------

    def record_checkpoint(self, value: dict[str, Any]) -> dict[str, Any]:
        """Write the results of a checkpoint on the watched tasks, the summary and the curve; return the summary."""
        run_dir.write_json(self.run.eval / f"{value['adapter']['label']}{results.SUFFIX}", value)
        return self.record_summary()

    def record_summary(self) -> dict[str, Any]:
        summary = results.write_summary(self.run.eval, collapse_drop=self.cfg.evaluator.collapse_drop)
        checkpoints.keep_best(self.run, summary)
        curve.draw(summary, run_dir.read_lines(self.run.metrics), self.run.eval / "curve.png")
        return summary

    def from_store(self, value: dict[str, Any], question: Question) -> dict[str, Any] | None:
        """The results for other tasks of the checkpoint that ``value`` holds, if no cell is missing."""
        arm = Arm(value["adapter"]["label"], value["adapter"]["adapter_sha256"])
        if self.store.missing(question.cells([BASE_ARM, arm])):
            return None
        own = results.compile_results(self.store, question, self.under, BASE_ARM, arm)
        return {**value, **own}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _healthy(client: httpx.Client, url: str, limit_s: float) -> None:
    """Raises: httpx.HTTPError: the last failure, after ``limit_s``."""

    @retry(
        retry=retry_if_exception_type(httpx.HTTPError),
        stop=stop_after_delay(limit_s),
        wait=wait_exponential(multiplier=0.5, max=10),
        reraise=True,
    )
    def probe() -> None:
        client.get(url, timeout=10).raise_for_status()

    probe()
