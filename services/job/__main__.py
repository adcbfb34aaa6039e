"""``python -m services.job [train|watch|policy]``: the container's own process; exit codes as everywhere.

The exit code of ``train`` is the trainer's, or that of the final evaluation where training ended well.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from services.common import log, recipe, run_dir, signals
from services.common.errors import RecipeError, StackError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.job import places
from services.job.conductor import Conductor, Stopped
from services.job.supervisor import Supervisor

VENVS = places.ROOT / "venvs"
CONFIG = places.ROOT / "job" / "supervisord.conf"
logger = logging.getLogger("job")


def main() -> int:
    role = _role(sys.argv[1:])
    os.environ |= places.variables(role, os.environ)
    folder = Path(os.environ["JOB_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RECIPE"] = str(places.write_recipe(os.environ, folder))
    log.setup("job")
    for handler in logging.getLogger().handlers:  # as services.job.prefix does it for the others
        handler.setFormatter(_Prefixed(handler.formatter))
    cfg = recipe.from_environment()
    run = RunDir.from_environment(cfg.run.name)
    run.prepare()
    with signals.stop_event() as stop:
        prepare(cfg, role)
        os.environ["JOB_SOCKET"] = str(folder / "supervisor.sock")
        Path(os.environ["JOB_SOCKET"]).unlink(missing_ok=True)
        command = [str(VENVS / "job/bin/python"), "-m", "supervisor.supervisord", "--configuration", str(CONFIG)]
        supervisor = Supervisor(command, Path(os.environ["JOB_SOCKET"]))
        conductor = Conductor(cfg, supervisor, _urls(), stop, push=bool(os.environ.get("ADAPTER_REPO")))
        try:
            return conductor.conduct(role)
        except Stopped:
            logger.warning("stopping: the step ends, the adapter is saved")
            supervisor.shut_down()
            return int((run_dir.read_json(run.result) or {}).get("exit_code", 128 + signal.SIGTERM))
        except StackError as error:
            logger.error(str(error))
            raise
        finally:
            supervisor.shut_down()


class _Prefixed(logging.Formatter):
    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return "[job] " + self._inner.format(record)


def _role(arguments: list[str]) -> places.Role:
    for role in places.ROLES:
        if arguments in ([role], [] if role == "train" else [role]):
            return role
    raise RecipeError(f"arguments are {arguments}; allowed: {', '.join(places.ROLES)}")


def _urls() -> dict[str, str]:
    urls = {"env": os.environ["ENV_URL"], "policy-eval": os.environ["POLICY_EVAL_URL"]}
    if not os.environ.get("POLICY_ALIAS"):
        urls["policy"] = f"http://127.0.0.1:{places.POLICY_PORT}"
    return urls


def prepare(cfg: Recipe, role: places.Role) -> None:
    """Fetch what is pinned: weights at their commit, tasks by their hashes. Nothing is installed.

    Raises: RecipeError, NotReadyError: by exit code; the program's own lines say why.
    """
    tasks_dir = Path(os.environ["TASKS_DIR"])
    places.check_pins(os.environ, tasks_dir)
    tools = str(VENVS / "tools/bin/python")
    if cfg.model.source == "hub":
        _run(tools, "-m", "services.hub", "weights")
    if role != "policy":
        _run(tools, "-m", "services.hub", "tasks")


def _run(*command: str) -> None:
    logger.info("preparing", extra={"command": list(command[1:])})
    if code := subprocess.run(command, check=False).returncode:
        error = StackError(f"{' '.join(command[2:])} ended with exit code {code}")
        error.exit_code = code
        raise error


if __name__ == "__main__":
    run_main(main)
