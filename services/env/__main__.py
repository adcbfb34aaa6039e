"""``python -m services.env`` serves tasks and rollouts; with ``sweep``, it removes the sandboxes of the run."""

from __future__ import annotations

import sys

from services.common import log, recipe
from services.common.errors import RecipeError, run_main
from services.common.run_dir import RunDir


def main() -> int:
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    match sys.argv[1:]:
        case []:
            run.prepare()
            log.setup("env", run.path)
            from services.env.app import serve  # heavy imports only after the recipe is known to be good

            return serve(cfg, run)
        case ["sweep"]:
            log.setup("env-sweep")
            from services.env.sweep import sweep

            sweep(run)
            return 0
    raise RecipeError(f"arguments are {sys.argv[1:]}; allowed: none, or sweep")


if __name__ == "__main__":
    run_main(main)
