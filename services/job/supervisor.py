"""supervisord as the conductor sees it: start, stop and ask, over its own socket."""

from __future__ import annotations

import subprocess
import time
import xmlrpc.client
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.states import ProcessStates
from supervisor.xmlrpc import SupervisorTransport

from services.common.errors import StackError

START_LIMIT_S = 30.0
KILLED = -1
"""supervisord's exit status of a process that a signal ended; by images/job/supervisord.conf it is started again."""


class SupervisorError(StackError):
    """supervisord ended, or a program cannot be started at all."""


@dataclass(frozen=True, slots=True)
class Program:
    running: bool
    exit_code: int | None
    """Of one that has ended for good; None while it runs, is started again, or was never started."""


class Supervisor:
    """One supervisord, child of this process."""

    def __init__(self, command: list[str], socket: Path) -> None:
        self.process = subprocess.Popen(command)
        transport = SupervisorTransport(None, None, f"unix://{socket}")
        self._rpc: Any = xmlrpc.client.ServerProxy("http://supervisor", transport=transport).supervisor
        self._wait_until_it_answers(socket, transport)

    def _wait_until_it_answers(self, socket: Path, transport: SupervisorTransport) -> None:
        """The socket's file is there a moment before anything listens on it."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self._rpc.getState()
                return
            except OSError as error:
                transport.close()  # or the next call finds the failed one half begun
                self.check()
                if time.monotonic() > deadline_s:
                    raise SupervisorError(
                        f"supervisord did not answer at {socket} within {START_LIMIT_S:.0f} s: {error}"
                    ) from None
            time.sleep(0.05)

    def check(self) -> None:
        """Raises: SupervisorError: it ended."""
        if (code := self.process.poll()) is not None:
            raise SupervisorError(f"supervisord ended with exit code {code}; its messages are above")

    def start(self, name: str) -> None:
        self._rpc.startProcess(name, False)

    def stop(self, name: str) -> None:
        """Stop one and wait for it; one that does not run is stopped already."""
        try:
            self._rpc.stopProcess(name, True)
        except xmlrpc.client.Fault as fault:
            if "NOT_RUNNING" not in fault.faultString:
                raise

    def look(self, name: str) -> Program:
        """Raises: SupervisorError: supervisord ended, or gave the program up."""
        self.check()
        info = self._rpc.getProcessInfo(name)
        state = info["state"]
        if state == ProcessStates.FATAL:
            raise SupervisorError(
                f"{name} cannot be started: {info['spawnerr'] or 'it ended at once, again and again'}"
            )
        ended = state in (ProcessStates.EXITED, ProcessStates.STOPPED) and info["stop"] > 0
        code = info["exitstatus"] if ended and info["exitstatus"] != KILLED else None
        return Program(state in (ProcessStates.STARTING, ProcessStates.RUNNING), code)

    def shut_down(self) -> None:
        """End all programs, in the reverse order of their priorities, and wait."""
        self.process.terminate()
        self.process.wait()
