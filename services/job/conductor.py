"""Which program runs when: the order in time that ``scripts.run`` keeps on a host, for one container.

supervisord starts again what a signal killed; the trainer's own parent resumes training, and obeys the watchdog, which
only writes a file. So the conductor acts on no process while training goes on: it starts, waits, and at the end stops.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from typing import Protocol

from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.common.signals import StopFlag
from services.job.places import Role
from services.job.supervisor import Program

POLL_S = 1.0
PROBE_TIMEOUT_S = 5.0
logger = logging.getLogger("job")


class Programs(Protocol):
    """What the conductor needs of supervisord."""

    def start(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...
    def look(self, name: str) -> Program: ...


class Stopped(Exception):
    """SIGTERM or SIGINT arrived."""


class Conductor:
    def __init__(self, cfg: Recipe, programs: Programs, urls: dict[str, str], stop: StopFlag, *, push: bool) -> None:
        """Args: urls: program -> its base URL, of those that others wait for. push: mirror the run to ADAPTER_REPO."""
        self._cfg = cfg
        self._programs = programs
        self._urls = urls
        self._stop = stop
        self._push = push

    def conduct(self, role: Role) -> int:
        """Returns: the exit code of what the container is for. Raises: Stopped. NotReadyError. SupervisorError."""
        match role:
            case "train":
                return self._train()
            case "watch":
                return self._watch()
            case "policy":
                self._start_servers("policy")
                return self._wait_for("policy")

    def _train(self) -> int:
        self._start_servers(*(["policy", "env"] if "policy" in self._urls else ["env"]))
        self._start("watchdog", "trainer")
        code = self._wait_for("trainer")
        logger.info("training ended", extra={"exit_code": code})
        self._programs.stop("watchdog")
        self._programs.stop("policy")
        if code == 0:
            self._start_servers("policy-eval")
            self._start("evaluator")
            code = self._wait_for("evaluator")
            logger.info("final evaluation ended", extra={"exit_code": code})
        self._mirror()
        return code

    def _watch(self) -> int:
        self._start_servers("policy-eval", "env")
        self._start("evaluator", *(["mirror"] if self._push else []))
        code = self._wait_for("evaluator")
        if self._push:
            self._programs.stop("mirror")  # it pushes once more before it ends
        return code

    def _mirror(self) -> None:
        """What is not on the Hub yet, result.json and the evaluation included; a failure is told, and costs no run."""
        if not self._push:
            return
        self._start("push")
        if code := self._wait_for("push"):
            logger.error("the run is not wholly on the Hub", extra={"exit_code": code})

    def _start(self, *names: str) -> None:
        for name in names:
            logger.info("starting", extra={"program": name})
            self._programs.start(name)

    def _start_servers(self, *names: str) -> None:
        """Start all, then wait until each answers. Raises: NotReadyError: one ended, or took too long."""
        self._start(*names)
        waited_s = 0.0
        for name in names:
            while not _answers(self._urls[name]):
                if (code := self._programs.look(name).exit_code) is not None:
                    raise NotReadyError(f"{name} ended with exit code {code} before it served; its lines say why")
                if waited_s > self._cfg.watchdog.start_limit_s:
                    raise NotReadyError(
                        f"{name} did not answer within watchdog.start_limit_s = {self._cfg.watchdog.start_limit_s:g} s"
                    )
                self._pause()
                waited_s += POLL_S
            logger.info("serving", extra={"program": name, "waited_s": waited_s})

    def _wait_for(self, name: str) -> int:
        """The exit code of a program, once it has ended for good."""
        while (code := self._programs.look(name).exit_code) is None:
            self._pause()
        return code

    def _pause(self) -> None:
        if self._stop.wait(POLL_S):
            raise Stopped


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=PROBE_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
