"""`make doctor` on this machine, for real: without a policy, and with the real one of the smoke recipe running."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOKE = {"RECIPE": str(ROOT / "data/recipes/smoke.toml"), "COMPOSE_FILE": "compose.yaml:compose.cpu.yaml"}
POLICY = ("policy-tool-call", "policy-tokens", "policy-logprobs")


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.doctor", "--variant", "cpu", "--json"],
        cwd=ROOT, env={**os.environ, **SMOKE, **environment}, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in found["checks"]}


def test_nothing_fails_here_and_what_was_not_looked_at_is_skipped() -> None:
    code, found = doctor()
    here = ("memory", "disk")  # of which other work on the machine may have taken its part
    assert {
        name: check for name, check in found.items() if check["state"] in ("fail", "warn") and name not in here
    } == {}
    assert code == 0
    assert {found[name]["found"] for name in POLICY} == {"policy is not running"}
    assert found["sandbox"]["found"].endswith("doing nothing earns 0, the reference solution 1")
    # What only the trainer image can say was asked of it.
    assert {found[name]["state"] for name in ("trl-release", "eos-token", "agent-budget", "chat-template")} == {"ok"}


def test_a_broken_set_up_fails_with_its_exit_code() -> None:
    code, found = doctor(TAG="no-such-tag")
    assert (code, found["images"]["state"]) == (3, "fail")
    assert found["trl-release"]["state"] == "skipped"
    code, found = doctor(CAPTURE_URL="https://0a1b.gradio.live/capture", TAG="no-such-tag")
    assert (code, found["stall-watchdog"]["state"]) == (2, "fail")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tests/test.sh", "echo 1 > /logs/verifier/reward.txt\n", "doing nothing earns 1"),
        ("solution/solve.sh", "true\n", "the reference solution earns 0"),
    ],
)
def test_a_suite_that_would_teach_nothing_is_found_before_a_run(
    file: str, text: str, words: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "data/tasks/smoke", tmp_path / "smoke")
    for task in (tmp_path / "smoke" / "train").iterdir():
        (task / file).write_text(text)
    code, found = doctor(TASKS_DIR=str(tmp_path))
    assert (code, found["sandbox"]["state"]) == (2, "fail")
    assert words in found["sandbox"]["found"]


@pytest.fixture
def policy() -> Iterator[None]:
    def compose(*arguments: str) -> None:
        command = ["docker", "compose", *arguments]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **SMOKE}, check=True, capture_output=True, timeout=800)

    try:
        compose("up", "--detach", "--wait", "policy")
        yield
    finally:
        compose("down", "--remove-orphans")


@pytest.mark.usefixtures("policy")
def test_a_running_policy_is_asked_as_opencode_asks_it() -> None:
    code, found = doctor()
    assert {name: found[name]["state"] for name in POLICY} == dict.fromkeys(POLICY, "ok"), found
    assert code == 0
