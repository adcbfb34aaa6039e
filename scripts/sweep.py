"""``python -m scripts.sweep``: remove the sandboxes that runs of this machine have left in the engine.

For the time when no env server is there to do it: after one was killed, and before its network is removed. Only runs
below RUNS_DIR are touched, and of those only what carries their label or stands open in their ledger.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.errors import run_main
from services.common.run_dir import RunDir
from services.env.docker import docker
from services.env.ledger import Ledger
from services.env.sweep import LABEL, sweep

ROOT = Path(__file__).resolve().parent.parent


def sweep_all(runs_dir: Path) -> int:
    """Sweep every run that has something left. Returns: containers removed. Raises: DockerError: no engine."""
    listed = docker("container", "ls", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.Label "{LABEL}"}}}}')
    labelled = set(listed.split())
    runs = [RunDir(path) for path in sorted(runs_dir.glob("[!.]*/"))]
    return sum(sweep(run) for run in runs if run.path.name in labelled or Ledger(run.ledger).open_projects())


def main() -> int:
    removed = sweep_all(Path(os.environ.get("RUNS_DIR") or ROOT / "runs").resolve())
    if removed:
        print(f"{removed} sandboxes removed")
    return 0


if __name__ == "__main__":
    run_main(main)
