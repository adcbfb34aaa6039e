"""A made-up dataset in the layout of FineEnvs/SmolDataEnvs, for tests: no task of it is real."""

from __future__ import annotations

TIERS = ("easy", "medium", "hard")
GRADER = b"print(1)\n"

TASK_TOML = """\
version = "1.0"
# A comment that must survive.
[metadata]
gold_answer = "{number}"
difficulty_tier = "{tier}"
difficulty_level = {level}
notebook_id = "notebook-{notebook}"
question = "What is {number}?"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
memory = "2G"

[environment.env]
HF_BUCKET = "someone/data"
BUCKET_PREFIX = "notebook-{notebook}"
TOKEN = "${{HF_TOKEN:-none}}"

[environment.healthcheck]
command = "python3 /opt/pull_bucket.py"
interval_sec = 5.0
retries = 10
"""


def published_task(number: int, *, notebook: int | None = None, instruction: str | None = None) -> dict[str, bytes]:
    """Files of task ``number``, relative to its folder; its tier goes easy, medium, hard, easy, ..."""
    tier = TIERS[number % 3]
    toml = TASK_TOML.format(
        number=number, tier=tier, level=number % 5 + 1, notebook=number if notebook is None else notebook
    )
    return {
        "task.toml": toml.encode(),
        "instruction.md": (instruction or f"Answer question {number}.\n").encode(),
        "environment/Dockerfile": b"FROM example/base:1\n",
        "environment/pull_bucket.py": b"import os\n",
        "tests/test.sh": b"#!/bin/sh\npython3 /tests/grader.py > /logs/verifier/reward.txt\n",
        "tests/grader.py": GRADER,
    }


def published(numbers: range | list[int]) -> dict[str, bytes]:
    """A whole repository: ``tasks/t0000/...``."""
    return {
        f"tasks/t{number:04}/{path}": content for number in numbers for path, content in published_task(number).items()
    } | {"registry.json": b"{}", "README.md": b"made up"}
