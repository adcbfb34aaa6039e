"""What becomes of a run when its training process ends: done, stopped for good, or started again. No torch here."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from services.common import run_dir
from services.common.errors import GaveUpError, MachineError, RecipeError, StoppedError
from services.common.recipe import Watchdog as Limits
from services.common.run_dir import RunDir

FINAL = (RecipeError.exit_code, StoppedError.exit_code, MachineError.exit_code)
"""Exit codes of the training process that another start would only repeat."""
SIGTERM_CODE = 128 + signal.SIGTERM
BY_SIGNAL = {"reason": "stopped by SIGTERM", "by": "signal"}


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    """Of the run, if it ends here."""
    reason: str
    resume: bool = False
    """Start again from the newest checkpoint, if the recipe still allows it."""


def judge(code: int, asked: dict[str, Any] | None, *, began: bool, error: str = "") -> Verdict:
    """What to do after the training process ended.

    Args:
        code: its exit code; a negative one is the signal that killed it.
        asked: the stop request that it was ended for, if any.
        began: whether the run ever got as far as serving a policy. What fails before would fail again.
        error: its last words.
    """
    if asked is not None and asked.get("by") == "signal":
        return Verdict(SIGTERM_CODE, asked["reason"])
    if asked is not None:
        return Verdict(StoppedError.exit_code, asked["reason"], resume=bool(asked.get("resume")))
    if code == 0:
        return Verdict(0, "done")
    if code < 0:
        return Verdict(1, f"the training process was killed by {signal.Signals(-code).name}", resume=True)
    reason = f"the training process ended with exit code {code}" + (f": {error}" if error else "")
    return Verdict(code, reason, resume=began and code not in FINAL)


def bounded(verdict: Verdict, resumes: int, limits: Limits) -> Verdict:
    """The verdict under the recipe's bound on resumes. Args: resumes: how many there were."""
    if not verdict.resume or resumes < limits.max_resumes:
        return verdict
    if limits.max_resumes == 0:
        return replace(verdict, resume=False)
    reason = (
        f"{verdict.reason}; it was the end of attempt {resumes + 1}, and watchdog.max_resumes is {limits.max_resumes}"
    )
    return Verdict(GaveUpError.exit_code, reason)


def backoff_s(resumes: int, limits: Limits) -> float:
    """Seconds before the next resume. Args: resumes: how many there were."""
    return float(min(limits.resume_backoff_s * 2**resumes, limits.max_backoff_s))


class Attempts:
    """``attempts.jsonl``: starts and ends of the training process, in whichever container they happened."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.attempts

    def started(self) -> int:
        """Attempts since the run began, or since a person resumed it."""
        return sum(line["event"] == "started" for line in self._lines())

    def resumes(self) -> int:
        return max(0, self.started() - 1)

    def open(self) -> bool:
        """Whether the last attempt has no end: its supervisor was killed with it."""
        lines = self._lines()
        return bool(lines) and lines[-1]["event"] == "started"

    def record_start(self, checkpoint: str | None) -> None:
        self._write("started", attempt=self.started() + 1, checkpoint=checkpoint)

    def record_end(self, verdict: Verdict, step: int) -> None:
        self._write("ended", attempt=self.started(), step=step, reason=verdict.reason, resume=verdict.resume)

    def record_person(self, before: Any) -> None:
        """A person resumes the run; attempts are counted from here. Args: before: result.json as it was."""
        self._write("resumed by a person", before=before)

    def _write(self, event: str, **detail: Any) -> None:
        run_dir.append_line(self._path, {"event": event, "at": run_dir.utc_now(), "time_s": time.time(), **detail})

    def _lines(self) -> list[dict[str, Any]]:
        lines = run_dir.read_lines(self._path)
        for index in range(len(lines) - 1, -1, -1):
            if lines[index]["event"] not in ("started", "ended"):
                return lines[index + 1 :]
        return lines
