"""A rollout whose model calls go through a FAKE Jobs proxy, which strips Authorization: real OpenCode, real env.

Env serves as in a Job: the capture proxy mounted at /capture of port 8000, the control plane on another address, and
nothing for sandboxes but what the proxy passes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.common import run_dir
from tests.stack.test_env_rollout import GONE_LIMIT_S, IMAGE, START_LIMIT_S, TASK, Stack, docker, wait_for

PROXY_PORT = 8080


class JobStack(Stack):
    """Sandboxes know the proxy; only the proxy knows env's public port."""

    def start_env(self) -> None:
        docker(
            "run", "--detach", "--name", f"{self.name}-proxy", *self.options(),
            "--network", self.network("control"), IMAGE,
            "python", "/tests/fakes/jobs_proxy.py", str(PROXY_PORT), "http://job:8000",
        )  # fmt: skip
        docker("network", "connect", "--alias", "jobs-proxy", self.network("sandboxes"), f"{self.name}-proxy")
        docker(
            "create", "--name", f"{self.name}-env", *self.options(), "--cap-drop", "ALL",
            *(part for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL") for part in ("--cap-add", name)),
            "--security-opt", "no-new-privileges:true", "--volume", "/var/run/docker.sock:/var/run/docker.sock",
            "--env", f"SANDBOX_NETWORK={self.network('sandboxes')}", "--env", "CAPTURE_HOST=job",
            "--env", "POLICY_URL=http://right:8000",
            "--env", "CAPTURE_PORT=8000", "--env", f"CAPTURE_URL=http://jobs-proxy:{PROXY_PORT}/capture",
            "--network", self.network("control"), "--network-alias", "env-control", "--network-alias", "job",
            IMAGE, "python", "-m", "services.env",
        )  # fmt: skip
        docker("network", "connect", self.network("train"), f"{self.name}-env")
        # The preflight asks as a sandbox does: through the proxy, by the name that sandboxes know.
        docker("network", "connect", self.network("sandboxes"), f"{self.name}-env")
        docker("start", f"{self.name}-env")
        wait_for(self.healthy, START_LIMIT_S)

    def passed_on(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in docker("logs", f"{self.name}-proxy").splitlines()]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStack]:
    with JobStack.started(tmp_path_factory) as stack:
        yield stack


def test_env_asked_its_own_public_address_before_it_served(stack: JobStack) -> None:
    first = stack.passed_on()[0]
    assert first["path"] == "/capture/health" and "x-api-key" in first["came"]


def test_a_rollout_is_captured_and_rewarded_although_authorization_never_arrives(stack: JobStack) -> None:
    right = (TASK / "solution" / "solve.sh").read_text().strip()
    outcome = stack.rollouts(right=stack.policy("right", right, "cat answer.txt"))["right"]
    assert (outcome["cause"], outcome["reward"], outcome["trained_turns"]) == (None, 1.0, 3)
    calls = [line for line in stack.passed_on() if line["path"] == "/capture/v1/chat/completions"]
    assert len(calls) == 3
    for call in calls:
        # OpenCode sends its key in both; one of them gets through.
        assert call["stripped"] == ["authorization"] and "x-api-key" in call["came"]


def test_the_rollout_is_in_the_ledger_and_its_sandbox_is_gone(stack: JobStack) -> None:
    wait_for(lambda: not stack.sandboxes(), GONE_LIMIT_S)
    events = [line["event"] for line in run_dir.read_lines(stack.run.ledger)]
    assert events == ["intent", "created", "closed"]
