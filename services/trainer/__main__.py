"""``python -m services.trainer``: keep one training process going until the run ends.

The only one that acts on the training process. It starts it, forwards SIGTERM, obeys ``stop.json`` (dump the stacks,
ask, wait, kill), starts it again from the newest checkpoint as often as the recipe allows, and writes ``result.json``
last. It loads no torch. Should its container be killed with it, the next one goes on where ``attempts.jsonl`` ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.common import health, log, metrics, recipe, run_dir, signals
from services.common.errors import run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.trainer import policy_versions, supervise, tracker
from services.trainer.supervise import Attempts, Verdict

POLL_S = 0.5
DUMP_TIMEOUT_S = 20
DUMPS = {
    "trainer-stacks.txt": ["py-spy", "dump", "--subprocesses", "--pid", "{pid}"],
    "gpus.txt": ["nvidia-smi"],
}
"""File of an incident -> the command whose output it gets; here, because only here the process can be looked into."""

logger = logging.getLogger("trainer-supervisor")


def main() -> int:
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    run.path.mkdir(parents=True, exist_ok=True)
    log.setup("trainer-supervisor", run.path)
    if (ended := run_dir.read_json(run.result)) is not None:
        logger.warning("the run has ended already; `make resume` goes on with it", extra=ended)
        return int(ended["exit_code"])
    recipe.require_weights(cfg)
    serving = metrics.serve("trainer", run, cfg.trainer.max_steps)
    with signals.stop_event() as stop, health.Pulse("supervisor", run) as pulse, serving, tracker.follow(run, cfg):
        pulse.set("watching")
        exit_code = Supervisor(cfg, run, stop).keep_going()
        mirror(cfg)
        return exit_code


def mirror(cfg: Recipe) -> None:
    """Push what is not on the Hub yet, this run's result among it: who follows the repository learns that it ended.

    Nothing depends on it: a failure is told, and the run's exit code stays.
    """
    if not os.environ.get("ADAPTER_REPO"):
        return
    try:
        done = subprocess.run([sys.executable, "-m", "services.hub", "push"], timeout=cfg.push.flush_s, check=False)
    except subprocess.TimeoutExpired:
        logger.error("the run is not wholly on the Hub", extra={"waited_s": cfg.push.flush_s})
    else:
        if done.returncode:
            logger.error("the run is not wholly on the Hub", extra={"exit_code": done.returncode})


class Supervisor:
    """One run's training process, as often as it takes."""

    def __init__(self, cfg: Recipe, run: RunDir, stop: signals.StopFlag) -> None:
        self._limits = cfg.watchdog
        self._run = run
        self._stop = stop
        self._attempts = Attempts(run)

    def keep_going(self) -> int:
        """Returns: the run's exit code."""
        verdict = self._left_by_a_killed_one()
        while verdict is None or verdict.resume:
            if verdict is not None and (ended := self._back_off(verdict)) is not None:
                verdict = ended
                break
            verdict = supervise.bounded(self._attempt(), self._attempts.resumes(), self._limits)
            self._attempts.record_end(verdict, self._step())
        run_dir.write_json(
            self._run.result,
            {
                "exit_code": verdict.exit_code,
                "reason": verdict.reason,
                "step": self._step(),
                "resumes": self._attempts.resumes(),
                "at": run_dir.utc_now(),
            },
        )
        return verdict.exit_code

    def _left_by_a_killed_one(self) -> Verdict | None:
        """The verdict on an attempt whose supervisor was killed before it could give one; None: there was none."""
        asked = run_dir.read_request(self._run.stop_request)
        if not self._attempts.open():
            # Whatever lies there is about another attempt.
            self._run.stop_request.unlink(missing_ok=True)
            return None
        if asked is not None:
            verdict = supervise.judge(0, asked, began=True)
        else:
            verdict = Verdict(1, "the trainer's container was killed", resume=True)
        verdict = supervise.bounded(verdict, self._attempts.resumes(), self._limits)
        self._attempts.record_end(verdict, self._step())
        return verdict

    def _back_off(self, verdict: Verdict) -> Verdict | None:
        """Wait before the next attempt. Returns: why there is none after all."""
        seconds = supervise.backoff_s(self._attempts.resumes(), self._limits)
        # Written after the one that was obeyed: by a person who wants the end, not another attempt.
        if (asked := run_dir.read_final_request(self._run.stop_request)) is not None:
            return supervise.judge(0, asked, began=True)
        logger.warning("training starts again", extra={"reason": verdict.reason, "in_s": seconds})
        self._run.stop_request.unlink(missing_ok=True)
        # The dead process's: nobody may take it for the next one's.
        (self._run.heartbeats / "trainer").unlink(missing_ok=True)
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._stop.wait(min(left_s, POLL_S))
            if (asked := self._asked()) is not None:
                return supervise.judge(0, {**asked, "resume": False}, began=True)
        return None

    def _attempt(self) -> Verdict:
        """One training process, from start to end."""
        newest = self._run.complete_checkpoints()[-1:]
        self._attempts.record_start(newest[0].path.name if newest else None)
        # The last process's: nobody may take it for the next one's.
        (self._run.heartbeats / "trainer").unlink(missing_ok=True)
        # A session of its own: what the process leaves behind when it is killed, TRL's worker too, is in its group.
        child = subprocess.Popen([sys.executable, "-m", "services.trainer.train"], start_new_session=True)
        asked: dict[str, Any] | None = None
        kill_at: float | None = None
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
            if asked is None and (asked := self._asked()) is not None:
                logger.warning("stopping training", extra={"reason": asked["reason"]})
                if asked.get("by") != "signal":
                    dump(child.pid, self._run, asked.get("incident"))
                child.send_signal(signal.SIGTERM)
                kill_at = time.monotonic() + self._limits.grace_s
            if kill_at is not None and time.monotonic() >= kill_at:
                logger.error("training did not stop in time and is killed", extra={"grace_s": self._limits.grace_s})
                child.kill()
                kill_at = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        began = bool(run_dir.read_lines(self._run.path / policy_versions.FILE))
        beat = health.read_heartbeats(self._run).get("trainer")
        return supervise.judge(code, asked, began=began, error=beat.detail.get("error", "") if beat else "")

    def _asked(self) -> dict[str, Any] | None:
        if self._stop.is_set():
            return supervise.BY_SIGNAL
        return run_dir.read_request(self._run.stop_request)

    def _step(self) -> int:
        beat = health.read_heartbeats(self._run).get("trainer")
        newest = self._run.complete_checkpoints()[-1:]
        return beat.step if beat else newest[0].step if newest else 0


def dump(pid: int, run: RunDir, incident: str | None) -> None:
    """Put the stacks of the training process and the table of GPUs into the incident's folder, as far as possible.

    Args: incident: name of the folder that the watchdog made.
    """
    folder = run.incidents / Path(incident or f"supervisor-{run_dir.utc_now().replace(':', '')}").name
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in DUMPS.items():
        with (folder / name).open("w") as output:
            try:
                subprocess.run(
                    [part.format(pid=pid) for part in command],
                    stdout=output, stderr=subprocess.STDOUT, timeout=DUMP_TIMEOUT_S, check=False,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                output.write(f"nothing to see: {error}\n")


if __name__ == "__main__":
    run_main(main)
