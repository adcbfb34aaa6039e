"""``python -m services.trainer``: supervise one training process.

The parent loads no torch. It forwards SIGTERM, obeys the watchdog's ``stop.json`` (ask, wait, kill, after
dumping the stacks), and writes ``result.json`` last, whatever way the child ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.common import health, log, metrics, recipe, run_dir, signals
from services.common.errors import StoppedError, run_main
from services.common.run_dir import RunDir
from services.trainer import tracker

POLL_S = 0.5


def main() -> int:
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    run.path.mkdir(parents=True, exist_ok=True)
    logger = log.setup("trainer-supervisor", run.path)
    run.stop_request.unlink(missing_ok=True)
    run.result.unlink(missing_ok=True)
    serving = metrics.serve("trainer", run, cfg.trainer.max_steps)
    with signals.stop_event() as stop, serving, tracker.follow(run, cfg):
        child = subprocess.Popen([sys.executable, "-m", "services.trainer.train"])
        asked: dict[str, Any] | None = None
        kill_at: float | None = None
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
            if asked is None and (asked := _stop_asked(run, stop)) is not None:
                logger.warning("stopping training", extra={"reason": asked["reason"]})
                if asked.get("by") != "signal":
                    _dump_stacks(child.pid, run)
                child.send_signal(signal.SIGTERM)
                kill_at = time.monotonic() + cfg.watchdog.grace_s
            if kill_at is not None and time.monotonic() >= kill_at:
                logger.error("training did not stop in time and is killed", extra={"grace_s": cfg.watchdog.grace_s})
                child.kill()
                kill_at = None
    exit_code, reason = _verdict(code, asked)
    beat = health.read_heartbeats(run).get("trainer")
    run_dir.write_json(
        run.result,
        {"exit_code": exit_code, "reason": reason, "step": beat.step if beat else 0, "at": run_dir.utc_now()},
    )
    return exit_code


def _stop_asked(run: RunDir, stop: signals.StopFlag) -> dict[str, Any] | None:
    if stop.is_set():
        return {"reason": "SIGTERM", "by": "signal"}
    return run_dir.read_json(run.stop_request)


def _verdict(code: int, asked: dict[str, Any] | None) -> tuple[int, str]:
    """Exit code and reason of the run; a negative code is the signal that killed the child."""
    if asked is not None and asked.get("by") != "signal":
        return StoppedError.exit_code, asked["reason"]
    if asked is not None:
        return 128 + signal.SIGTERM, "stopped by SIGTERM"
    if code < 0:
        return 1, f"the training process was killed by {signal.Signals(-code).name}"
    return code, "done" if code == 0 else f"the training process ended with exit code {code}"


def _dump_stacks(pid: int, run: RunDir) -> None:
    """py-spy's view of the training process, beside the watchdog's bundle; best effort."""
    folder = run.incidents / run_dir.utc_now().replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    with Path(folder / "trainer-stacks.txt").open("w") as output:
        try:
            subprocess.run(
                ["py-spy", "dump", "--subprocesses", "--pid", str(pid)],
                stdout=output, stderr=subprocess.STDOUT, timeout=20, check=False, env=os.environ,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            output.write(f"no stacks: {error}\n")


if __name__ == "__main__":
    run_main(main)
