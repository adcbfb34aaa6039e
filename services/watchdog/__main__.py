"""``python -m services.watchdog``: watch the run that RECIPE and RUN_NAME name, to its end."""

from __future__ import annotations

from services.common import health, log, metrics, recipe, signals
from services.common.errors import run_main
from services.common.run_dir import RunDir


def main() -> int:
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    import httpx

    from services.watchdog import app

    peers = app.peers_from_environment()
    log.setup("watchdog", run.path)
    with (
        signals.stop_event() as stop,
        httpx.Client() as client,
        health.Pulse("watchdog", run) as pulse,
        metrics.serve("watchdog", run),
    ):
        code = app.Watchdog(cfg, run, peers, client).watch(pulse, stop)
        # A run that has ended needs no watchdog, however it ended: Compose starts one that failed again.
        return 0 if run.result.exists() else code


if __name__ == "__main__":
    run_main(main)
