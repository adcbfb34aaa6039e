"""The loop: look, decide, act; and the only acts there are."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

import httpx

from services.common import control, run_dir
from services.common.errors import RecipeError
from services.common.health import Pulse
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.signals import StopFlag
from services.watchdog import incident
from services.watchdog.observe import Observer
from services.watchdog.plan import Decision, Observations, plan

logger = logging.getLogger("watchdog")
PEER_VARIABLES = {"policy": "POLICY_URL", "env": "ENV_URL"}
SWEEP_TIMEOUT_S = 60.0
EXIT_SIGTERM = 143
"""Exit code of a run that a person stopped: nothing to diagnose."""


def peers_from_environment() -> dict[str, str]:
    """Raises: RecipeError: a URL is not set."""
    if missing := [variable for variable in PEER_VARIABLES.values() if not os.environ.get(variable)]:
        raise RecipeError(f"{' and '.join(missing)} not set; compose.yaml gives the watchdog both")
    return {name: os.environ[variable].rstrip("/") for name, variable in PEER_VARIABLES.items()}


class Watchdog:
    """Watches one run to its end."""

    def __init__(
        self,
        cfg: Recipe,
        run: RunDir,
        peers: Mapping[str, str],
        client: httpx.Client,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = cfg.watchdog
        self._rollout_limits = cfg.rollout
        self._run = run
        self._peers = peers
        self._client = client
        self._clock = clock
        self._observer = Observer(run, peers, client, clock(), cfg.rollout.unscorable_window)
        self._alerted: set[str] = set()
        self._stopped = False
        """A stop was asked for, and what it left has not been swept yet."""

    def watch(self, pulse: Pulse, stop: StopFlag) -> int:
        """Returns: the run's exit code, 3 when no trainer ever came, 4 when the run was stopped, 0 on SIGTERM."""
        pulse.set("watching")
        while not stop.is_set():
            if (exit_code := self.turn()) is not None:
                return exit_code
            stop.wait(self._limits.poll_s)
        return 0

    def turn(self) -> int | None:
        """Look, decide and act once. Returns: the exit code at the end, else None."""
        now_s = self._clock()
        seen = self._observer.look(now_s)
        decision = plan(seen, self._limits, self._rollout_limits, now_s)
        if self._stopped and seen.stop_seen_s is None:
            self._after_stop()
        match decision.action:
            case "alert" if decision.subject not in self._alerted:
                self._alerted.add(decision.subject)
                logger.warning(decision.reason, extra={"subject": decision.subject})
            case "stop":
                self._stop_run(decision, seen)
            case "end":
                return self._end(decision, seen)
        return None

    def _stop_run(self, decision: Decision, seen: Observations) -> None:
        logger.error(decision.reason, extra={"subject": decision.subject})
        # Evidence first: what is asked next changes it.
        request = {
            "reason": decision.reason,
            "at": run_dir.utc_now(),
            "by": "watchdog",
            "resume": decision.resume,
            "incident": self._bundle(decision, seen),
        }
        try:
            run_dir.write_json(self._run.stop_request, request)
        except OSError as error:  # a full disk; the next turn decides again
            logger.error("the stop could not be asked for", extra={"error": str(error)})
        else:
            self._stopped = True

    def _after_stop(self) -> None:
        """The supervisor has obeyed: nobody waits for the sandboxes of the ended process any more."""
        self._stopped = False
        self._alerted.clear()
        self._observer.forget_rollouts()
        self._sweep()

    def _sweep(self) -> None:
        """Ask env, which alone reaches the engine, to remove sandboxes that no rollout of its own runs in."""
        try:
            answer = self._client.post(
                f"{self._peers['env']}/sweep", headers=control.headers(self._run), timeout=SWEEP_TIMEOUT_S
            )
            logger.info("sandboxes swept", extra={"status": answer.status_code, "answer": answer.text[:200]})
        except httpx.HTTPError as error:
            logger.warning("env cannot sweep now; it will when it starts or ends", extra={"error": str(error)})

    def _end(self, decision: Decision, seen: Observations) -> int:
        code = decision.exit_code or 0
        if code not in (0, EXIT_SIGTERM) and not self._stopped:
            self._bundle(decision, seen)
        logger.log(logging.ERROR if code else logging.INFO, decision.reason)
        self._sweep()
        return code

    def _bundle(self, decision: Decision, seen: Observations) -> str | None:
        """Name of the bundle. Evidence is wanted, but a full disk must not keep a stalled run alive."""
        try:
            folder = incident.write_bundle(self._run, decision, seen, self._peers, self._client)
        except OSError as error:
            logger.error("no incident bundle", extra={"error": str(error)})
            return None
        logger.error("incident bundle written", extra={"folder": str(folder)})
        return folder.name
