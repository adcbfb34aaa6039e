"""A run's checkpoints and results on the Hub: ``checkpoint-N/`` as soon as it is complete, the records at the end.

A checkpoint is one commit with READY in it, so that a reader of the repository sees all of it or nothing. In the same
commit is what a run must not forget when it goes on elsewhere (``PROGRESS``). One process writes at a time: an advisory
lock on the run sees to that on one machine, the parent of each commit elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from services.common import run_dir
from services.common.recipe import Push
from services.common.run_dir import CONFIG, READY, WEIGHTS, Checkpoint, RunDir
from services.hub.client import first_line
from services.hub.commits import FAILURES, commit, ensure_repository

LOG = "pushes.jsonl"
"""In the run: one line for each checkpoint that is on the Hub."""
RESULT = "result.json"
PROGRESS = ("costs.json", "metrics.jsonl", "trained.jsonl")
"""Records that grow with every step: pushed with each checkpoint, since a killed machine pushes nothing more."""
RECORDS = ("manifest.json", RESULT, *PROGRESS, "eval/*.json", "eval/*.png")
EVAL_RECORDS = tuple(pattern for pattern in RECORDS if pattern.startswith("eval/"))
RETRY_EVERY_S = 60.0
"""A backlog is taken up again after this long, and at every new checkpoint."""
logger = logging.getLogger("hub")


@dataclass(frozen=True, slots=True)
class Identity:
    """A resumed run may write a step again: then its READY is another."""

    step: int
    ready_ns: int


class Pusher:
    """Pushes what is complete and not pushed yet. One thread; ``backlog`` may be called from others. All else may take
    minutes."""

    def __init__(
        self, api: HfApi, repo: str, run: RunDir, limits: Push, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._api = api
        self._repo = repo
        self._run = run
        self._limits = limits
        self._sleep = sleep
        self._pushed: set[Identity] = set()
        self._has_repository = False
        for line in run_dir.read_lines(run.path / LOG):
            if line["repo"] == repo:
                self._pushed.add(Identity(line["step"], line["ready_ns"]))

    def backlog(self) -> list[Checkpoint]:
        """Complete checkpoints that are not known to be on the Hub, oldest step first."""
        found = []
        for checkpoint in self._run.complete_checkpoints():
            with contextlib.suppress(FileNotFoundError):  # rotated away meanwhile
                if identity(checkpoint) not in self._pushed:
                    found.append(checkpoint)
        return found

    def push(self, checkpoint: Checkpoint) -> str:
        """Push one; return its commit. Raises: ``commits.FAILURES``."""
        with run_dir.in_use(checkpoint.path), self._progress() as progress:  # rotation leaves it alone
            mark = identity(checkpoint)
            files = {
                f"{checkpoint.path.name}/{path.relative_to(checkpoint.path).as_posix()}": path
                for path in checkpoint.path.rglob("*")
                if path.is_file()
            }
            began_s = time.monotonic()
            made = self._commit(files | progress, f"{checkpoint.path.name} of {self._run.path.name}")
        self._pushed.add(mark)
        seconds = round(time.monotonic() - began_s, 2)
        run_dir.append_line(
            self._run.path / LOG,
            {
                "at": run_dir.utc_now(), "repo": self._repo, "step": mark.step, "ready_ns": mark.ready_ns,
                "commit": made, "wall_s": seconds,
            },
        )  # fmt: skip
        logger.info("checkpoint is on the Hub", extra={"step": mark.step, "commit": made, "wall_s": seconds})
        return made

    def push_records(self, patterns: tuple[str, ...] = RECORDS) -> str | None:
        """Push the run's records as they are now; None when there is none. Raises: ``commits.FAILURES``."""
        files = {
            path.relative_to(self._run.path).as_posix(): path
            for pattern in patterns
            for path in self._run.path.glob(pattern)
            if path.is_file() and not path.name.startswith(".")
        }
        return self._commit(files, f"Records of {self._run.path.name}") if files else None

    def push_final_adapter(self) -> str | None:
        """Put the newest adapter at the top of the repository, where PEFT looks for it."""
        complete = self._run.complete_checkpoints()
        if not complete:
            return None
        with run_dir.in_use(complete[-1].path):
            files = {name: complete[-1].path / name for name in (WEIGHTS, CONFIG)}
            return self._commit(files, f"Adapter of {complete[-1].path.name}")

    def reopen(self) -> None:
        """Take the result of before out of the repository. Raises: ``commits.FAILURES``."""
        self._ensure()
        reopen(self._api, self._repo, self._limits.retry_for_s, self._sleep)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[dict[str, Path]]:
        """Copies of the records that grow: training writes on, and a try that comes again must find the same bytes."""
        with tempfile.TemporaryDirectory() as aside:
            yield {
                name: Path(shutil.copy(self._run.path / name, aside))
                for name in PROGRESS
                if (self._run.path / name).is_file()
            }

    def _commit(self, files: dict[str, Path], message: str) -> str:
        self._ensure()
        return commit(self._api, self._repo, files, message, self._limits.retry_for_s, self._sleep)

    def _ensure(self) -> None:
        if not self._has_repository:
            ensure_repository(self._api, self._repo)
            self._has_repository = True


def reopen(api: HfApi, repo: str, retry_for_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Take ``result.json`` out of the repository: who follows it must not take a run that goes on for ended.

    Raises: ``commits.FAILURES``.
    """
    commit(api, repo, {}, "The run goes on", retry_for_s, sleep, without=(RESULT,))


def identity(checkpoint: Checkpoint) -> Identity:
    return Identity(checkpoint.step, (checkpoint.path / READY).stat().st_mtime_ns)


@contextlib.contextmanager
def writer(run: RunDir) -> Iterator[bool]:
    """Whether this process is the one that writes; it is until the block ends, or the process dies."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run.path / ".pushes.lock").open("w") as stream:
        yield run_dir.lock_now(stream.fileno())


class BackgroundPushes:
    """A ``Pusher`` in a thread of its own. Nothing that it meets reaches the caller; no method but ``close`` waits."""

    def __init__(self, pusher: Pusher, run: RunDir, retry_every_s: float = RETRY_EVERY_S) -> None:
        self._pusher = pusher
        self._run = run
        self._retry_every_s = retry_every_s
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._reopened = False
        self._failures = 0
        self._last_step = 0
        self._last_success_s = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="pushes", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is a new checkpoint."""
        self._wake.set()

    def metrics(self) -> dict[str, float]:
        """For ``metrics.jsonl``: what waits, what went last, how long ago (since the start, before the first)."""
        return {
            "push/backlog": float(len(self._pusher.backlog())),
            "push/last_step": float(self._last_step),
            "push/last_success_age_s": round(time.monotonic() - self._last_success_s, 1),
            "push/failures": float(self._failures),
        }

    def close(self, wait_s: float) -> bool:
        """Push what is left, for ``wait_s`` at most. Returns: whether all is on the Hub."""
        self._closing.set()
        self._wake.set()
        self._thread.join(wait_s)
        left = [checkpoint.step for checkpoint in self._pusher.backlog()]
        if left:
            logger.error("checkpoints are not on the Hub", extra={"steps": left, "waited_s": wait_s})
        return not left

    def _work(self) -> None:
        while True:
            self._wake.clear()  # before the look at `closing`: a close after it wakes the wait below
            closing = self._closing.is_set()
            try:
                self._pass(closing)
            except Exception:  # the thread's last line of defence: a bug here must not end the pushes, nor training
                self._failures += 1
                logger.exception("pushes failed")
            if closing:
                return
            self._wake.wait(self._retry_every_s)

    def _pass(self, closing: bool) -> None:
        with writer(self._run) as ours:
            if not ours:
                return
            if not self._reopened and not closing:  # a run that ends overwrites the result anyway
                self._reopen()
            for checkpoint in self._pusher.backlog():
                try:
                    self._pusher.push(checkpoint)
                except FAILURES as error:
                    self._failures += 1
                    logger.error(
                        "checkpoint is not pushed", extra={"step": checkpoint.step, "error": first_line(error)}
                    )
                else:
                    self._last_step = checkpoint.step
                    self._last_success_s = time.monotonic()

    def _reopen(self) -> None:
        try:
            self._pusher.reopen()
        except FAILURES as error:
            self._failures += 1
            logger.error("the result of before is still on the Hub", extra={"error": first_line(error)})
        else:
            self._reopened = True
