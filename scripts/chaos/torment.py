"""One run, tormented: wait for the phase, strike, wait until the run gets on again, note how long that took."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from scripts.chaos import faults
from scripts.chaos.faults import Fault
from services.common import health, run_dir
from services.common.run_dir import RunDir
from services.common.signals import StopFlag

POLL_S = 0.005
"""A sync of the tiny policy takes a quarter of a second."""
PHASE_LIMIT_S = 240.0
RECOVERY_LIMIT_S = 420.0
NAMED_LIMIT_S = 60.0
RESUMED = ("policy", "trainer", "training")
"""Victims without which the training process ends, and is started again."""


@dataclass
class Outcome:
    """What came of one fault. Seconds are wall seconds on this machine."""

    fault: str
    struck_at: float
    step: int
    phase_seen: str
    """The trainer's phase just after the blow, by its heartbeat; a kill of the trainer freezes it."""
    what: str = ""
    """By the run's own files: how the attempt ended, or that training went on."""
    named_s: float | None = None
    """Until the watchdog's bundle named the victim; only of a victim that was frozen."""
    back_s: float | None = None
    """Until the victim answered or beat again."""
    step_s: float | None = None
    """Until the next optimizer step."""
    recovered: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class RunOver(Exception):
    """The run ended before the fault could be made."""


class Torment:
    """Args: stop: a person wants to end it. say: called with one line of progress."""

    def __init__(self, run: RunDir, stop: StopFlag, say: Callable[[str], None]) -> None:
        self._run = run
        self._stop = stop
        self._say = say
        self._struck_after = 0
        self._frozen: list[int] = []

    def strike(self, fault: Fault) -> Outcome:
        """Wait for a new checkpoint and then for the fault's phase, make the fault, and wait for the recovery.

        Raises: RunOver: the run ended first. TimeoutError: the phase never came.
        """
        outcome = self._hit(fault)
        self._say(f"{fault.name} at step {outcome.step}, phase {outcome.phase_seen}")
        if fault.freeze:
            self._wait_until_named(fault, outcome)
        self._wait_for_recovery(fault, outcome)
        outcome.what = self._what(outcome)
        self._say(f"  {outcome.what}; back {_s(outcome.back_s)}, next step {_s(outcome.step_s)}")
        return outcome

    def _newest(self) -> int:
        return max((found.step for found in self._run.complete_checkpoints()), default=0)

    def _hit(self, fault: Fault) -> Outcome:
        # One more than at the last blow: the run gets on between two of them, and resumes from a checkpoint.
        after = self._struck_after + 1
        until = time.monotonic() + PHASE_LIMIT_S
        pids: list[int] = []
        looked = 0.0
        while time.monotonic() < until:
            if self._run.result.exists() or self._stop.is_set():
                raise RunOver
            beat = health.read_heartbeats(self._run).get("trainer")
            ready = beat is not None and time.time() - beat.time_s < 15 and self._newest() >= after
            if ready and time.monotonic() - looked > (1.0 if fault.victim == "sandbox" else 3.0):
                # Asking the engine takes longer than some phases: it is asked ahead.
                looked = time.monotonic()
                try:
                    pids = faults.processes(fault.victim, self._run.path.name)
                except faults.Gone:
                    pids = []
            if ready and pids and beat is not None and beat.phase == fault.phase:
                try:
                    faults.send(pids, signal.SIGSTOP if fault.freeze else signal.SIGKILL)
                except faults.Gone:
                    pids = []
                    continue
                struck = time.time()
                seen = health.read_heartbeats(self._run).get("trainer")
                self._frozen = pids if fault.freeze else []
                self._struck_after = self._newest()
                return Outcome(fault.name, struck, beat.step, seen.phase if seen else "")
            time.sleep(POLL_S)
        raise TimeoutError(f"{fault.name}: the trainer did not come to phase {fault.phase} in {PHASE_LIMIT_S:g} s")

    def _wait_until_named(self, fault: Fault, outcome: Outcome) -> None:
        while time.time() - outcome.struck_at < 2 * NAMED_LIMIT_S and outcome.named_s is None:
            for path in self._run.incidents.glob("watchdog-*/decision.json"):
                decision = run_dir.read_json(path) or {}
                if path.stat().st_mtime >= outcome.struck_at and decision.get("subject") == fault.victim:
                    outcome.named_s = round(time.time() - outcome.struck_at, 1)
            time.sleep(0.2)
        faults.send(self._frozen, signal.SIGCONT)

    def _wait_for_recovery(self, fault: Fault, outcome: Outcome) -> None:
        until = outcome.struck_at + RECOVERY_LIMIT_S
        while time.time() < until and not self._stop.is_set():
            now = time.time()
            if outcome.back_s is None and self._is_back(fault, outcome):
                outcome.back_s = round(now - outcome.struck_at, 1)
            if outcome.step_s is None and self._stepped(fault, outcome):
                outcome.step_s = round(now - outcome.struck_at, 1)
            ended = self._run.result.exists()
            if outcome.step_s is not None and (outcome.back_s is not None or ended):
                outcome.recovered = True
                return
            if ended and outcome.step_s is None:
                outcome.recovered = (run_dir.read_json(self._run.result) or {}).get("exit_code") == 0
                return
            time.sleep(0.2)

    def _is_back(self, fault: Fault, outcome: Outcome) -> bool:
        if fault.victim == "sandbox":
            return True  # nobody waits for that one; the group goes on without it
        if fault.freeze:
            lines = run_dir.read_lines(self._run.attempts)
            return any(line["event"] == "started" and line["time_s"] > outcome.struck_at for line in lines)
        service = "trainer" if fault.victim == "training" else fault.victim
        if service != "policy":
            beat = health.read_heartbeats(self._run).get(service)
            return beat is not None and beat.time_s > outcome.struck_at + 1 and beat.phase != "starting"
        versions = run_dir.read_lines(self._run.path / "policy_versions.jsonl")
        return any(line.get("served_s", 0) > outcome.struck_at for line in versions[-3:])

    def _stepped(self, fault: Fault, outcome: Outcome) -> bool:
        """Whether an optimizer step came after the blow; of one that ends the training process, after its return."""
        since_s = outcome.struck_at
        if fault.victim in RESUMED:
            if outcome.back_s is None:
                return False
            since_s += outcome.back_s
        return any(line["time_s"] > since_s for line in run_dir.read_lines(self._run.trained)[-2:])

    def _what(self, outcome: Outcome) -> str:
        ends = [line for line in run_dir.read_lines(self._run.attempts) if line["event"] == "ended"]
        reasons = [line["reason"] for line in ends if line["time_s"] > outcome.struck_at]
        return "; then ".join(reasons) if reasons else "training went on"


def _s(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f} s"
