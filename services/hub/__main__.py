"""``python -m services.hub push | follow``: mirror a run to ADAPTER_REPO, once or while it goes on.

``weights`` fetches the recipe's model at its commit into HF_HOME, for servers that download nothing themselves;
``tasks`` fetches the recipe's suites that TASKS_DIR lacks, as their pin files there say.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from services.common import log, recipe, run_dir, signals
from services.common.errors import RecipeError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.hub.client import connect, first_line, messages, patiently
from services.hub.commits import FAILURES
from services.hub.pushes import EVAL_RECORDS, RECORDS, Pusher, writer
from services.hub.tasks.fetch import fetch_absent

WAIT_FOR_WRITER_S = 60.0
WEIGHT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Of a model's repository; what it has besides is not read."""
logger = logging.getLogger("hub")


def main() -> int:
    parser = argparse.ArgumentParser(prog="services.hub", description=__doc__)
    parser.add_argument("command", choices=("push", "follow", "weights", "tasks"))
    parser.add_argument("--eval-only", action="store_true", help="only eval/: where another machine trains the run")
    parser.add_argument("--every", type=float, default=60.0)
    arguments = parser.parse_args()
    cfg = recipe.from_environment()
    if arguments.command == "weights":
        return weights(cfg)
    if arguments.command == "tasks":
        fetch_absent(Path(os.environ["RECIPE"]), Path(os.environ["TASKS_DIR"]))
        return 0
    run = RunDir.from_environment(cfg.run.name)
    repo = repository()
    log.setup("hub", run.path)
    pusher = Pusher(connect(), repo, run, cfg.push)
    if arguments.command == "follow":
        return follow(pusher, run, arguments.eval_only, arguments.every)
    return push(pusher, run, cfg, repo, arguments.eval_only)


def repository() -> str:
    """Raises: RecipeError: ADAPTER_REPO is not set."""
    repo = os.environ.get("ADAPTER_REPO", "")
    if not repo:
        raise RecipeError("ADAPTER_REPO is not set; it names the Hub repository of the run's adapters, owner/name")
    return repo


def weights(cfg: Recipe) -> int:
    """Raises: RecipeError: no commit is pinned, or it is not there. NotReadyError: the Hub does not answer."""
    if cfg.model.source != "hub" or cfg.model.revision is None:
        raise RecipeError(f"model.revision is {cfg.model.revision}; a Hub model needs its full 40-character commit")
    api = connect()
    with messages(cfg.model.id, api.endpoint, again="what was downloaded is kept"):
        folder = patiently(api.snapshot_download)(
            cfg.model.id, revision=cfg.model.revision, allow_patterns=list(WEIGHT_FILES)
        )
    print(f"{cfg.model.id} at {cfg.model.revision}: {folder}", flush=True)
    return 0


def push(pusher: Pusher, run: RunDir, cfg: Recipe, repo: str, eval_only: bool) -> int:
    """Everything that is not there yet. Raises: RecipeError, NotReadyError: with what to do."""
    with messages(repo, os.environ.get("HF_ENDPOINT") or "the Hub"):
        deadline_s = time.monotonic() + WAIT_FOR_WRITER_S
        while True:
            with writer(run) as ours:
                if ours:
                    mirror(pusher, run, eval_only)
                    return 0
            if time.monotonic() > deadline_s:
                raise RecipeError(f"another process pushes {run.path.name} now; let it end")
            time.sleep(1)


def mirror(pusher: Pusher, run: RunDir, eval_only: bool) -> None:
    """Push what is missing, the records last, and whatever became of the rest: who follows the repository waits for
    ``result.json``.

    Raises: ``commits.FAILURES``: the first of them.
    """
    if eval_only:
        pusher.push_records(EVAL_RECORDS)
        return
    try:
        _push_adapters(pusher, run)
    except FAILURES:
        try:
            pusher.push_records(RECORDS)
        except FAILURES as error:
            logger.error("the records are not on the Hub either", extra={"error": first_line(error)})
        raise
    pusher.push_records(RECORDS)


def _push_adapters(pusher: Pusher, run: RunDir) -> None:
    for checkpoint in pusher.backlog():
        pusher.push(checkpoint)
    if (run_dir.read_json(run.result) or {}).get("exit_code") == 0:
        pusher.push_final_adapter()


def follow(pusher: Pusher, run: RunDir, eval_only: bool, every_s: float) -> int:
    """Until SIGTERM, and once more then. What fails is tried again the next time."""
    with signals.stop_event() as stop:
        while True:
            stopping = stop.wait(every_s)
            try:
                with writer(run) as ours:
                    if ours:
                        mirror(pusher, run, eval_only)
            except FAILURES as error:
                logger.error("the run is not mirrored", extra={"error": str(error).splitlines()[:1]})
            if stopping:
                return 0


if __name__ == "__main__":
    run_main(main)
