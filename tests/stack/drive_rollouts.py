"""Runs rollouts as the trainer does and prints what came of each: run inside an image, by test_env_rollout.py.

``python drive_rollouts.py SPEC``: SPEC is JSON, a list of {"id", "task", "policy_url", "agent_timeout_s"}; all run
at the same time.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.common import recipe
from services.common.run_dir import RunDir
from services.trainer.session import HarborSessionFactory, UnscorableRollout

SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


def run(spec: dict[str, Any]) -> dict[str, Any]:
    cfg = recipe.load(Path(os.environ["RECIPE"]), {"rollout.agent_timeout_s": spec["agent_timeout_s"]})
    run_dir = RunDir.from_environment(cfg.run.name)
    factory = HarborSessionFactory(cfg, "http://env-control:8100", spec["policy_url"], run_dir, SAMPLING)
    session = factory.create(spec["task"], seed=0, episode_id=spec["id"])
    outcome: dict[str, Any] = {"id": spec["id"], "cause": None, "timed_out": False}
    try:
        session.wait_for_completion()
    except UnscorableRollout as error:
        outcome |= {"cause": error.cause.value, "error": error.detail}
    except TimeoutError:
        outcome["timed_out"] = True
    if outcome["cause"] is None:
        outcome["trained_turns"] = len(session.fetch_training_trace().turns)
    outcome["reward"] = session.verify([]).env_reward
    session.close()
    return outcome


def main() -> None:
    specs = json.loads(sys.argv[1])
    with ThreadPoolExecutor(len(specs)) as pool:
        for outcome in pool.map(run, specs):
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
