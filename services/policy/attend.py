"""vLLM as a child of ours: what it says also goes to the run's log, a heartbeat says that it lives, and an end that
nobody asked for has an exit code that says so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from services.common import health, signals
from services.common.run_dir import RunDir

ENDED = 70
"""Exit code for a vLLM that ended by itself and said 0, as it does after its engine died. No code of
``services.common.errors``: to start it again may help."""
POLL_S = 1.0
PROBE_TIMEOUT_S = 3.0
KEPT_LINES = 10_000
"""Of what is said before the run's folder is there."""


def attend(command: Sequence[str], environment: Mapping[str, str], name: str, run: RunDir | None, url: str) -> int:
    """Run vLLM to its end; SIGTERM and SIGINT are passed on.

    Args: name: of log and heartbeat. run: None: nothing is written. url: where it answers once it serves.
    Returns: its exit code, 128 + n if signal n ended it, or ``ENDED``.
    """
    os.umask(0o002)  # as log.setup does it: the group of the host's user may change the run's files
    with signals.stop_event() as stop, contextlib.ExitStack() as stack:
        child = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=signals.die_with_parent,
        )  # fmt: skip
        assert child.stdout is not None
        relay = threading.Thread(target=_relay, args=(child.stdout, run.path / f"{name}.log" if run else None))
        relay.start()
        pulse, asked = None, False
        while child.poll() is None:
            if pulse is None and run is not None and run.heartbeats.is_dir():
                pulse = _pulse(stack, name, run)
            if pulse is not None and pulse.phase == "starting" and _answers(url):
                pulse.set("serving")
            if asked:
                _wait(child)
            elif stop.wait(POLL_S):
                child.send_signal(signal.SIGTERM)
                asked = True
        relay.join()
        code = exit_code(child.returncode, asked)
        if pulse is not None and code and not asked:
            pulse.set("failed", error=f"vLLM ended with {child.returncode}")
    return code


def exit_code(returned: int, asked: bool) -> int:
    """Args: returned: as subprocess has it. asked: whether somebody wanted it to end."""
    if returned < 0:
        return 128 - returned
    return returned if returned or asked else ENDED


def _pulse(stack: contextlib.ExitStack, name: str, run: RunDir) -> health.Pulse | None:
    with contextlib.suppress(OSError):  # a folder that is not ours to write: vLLM serves all the same
        return stack.enter_context(health.Pulse(name, run))
    return None


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=PROBE_TIMEOUT_S) as response:
        return bool(response.status == 200)
    return False


def _wait(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(POLL_S)


def _relay(output: IO[bytes], log: Path | None) -> None:
    """To our own output, and to the log from when its folder is there: env makes it, and starts beside us."""
    kept: list[bytes] = []
    for line in output:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if log is None:
            continue
        kept.append(line)
        with contextlib.suppress(OSError):  # not there yet, or a full disk: said again with the next line
            if log.parent.is_dir():
                with log.open("ab") as stream:
                    stream.write(b"".join(kept))
                kept.clear()
        del kept[:-KEPT_LINES]
