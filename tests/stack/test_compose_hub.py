"""The Hub's token: in the two services that push and follow, as a file, and nowhere in the configuration."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "hf_planted_secret_value"


def test_trainer_and_evaluator_get_the_token_as_a_file() -> None:
    command = ["docker", "compose", "-f", "compose.yaml", "-f", "compose.cpu.yaml", "-f", "compose.hub.yaml"]
    done = subprocess.run(
        [*command, "--profile", "*", "config", "--format", "json"],
        cwd=ROOT, env={**os.environ, "HF_TOKEN": PLANTED}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert PLANTED not in done.stdout
    services = json.loads(done.stdout)["services"]
    holders = {name for name, service in services.items() if service.get("secrets")}
    assert holders == {"trainer", "evaluator"}
    for name in holders:
        assert services[name]["environment"]["HF_TOKEN_PATH"] == "/run/secrets/hf_token"
        assert "ADAPTER_REPO" in services[name]["environment"]
