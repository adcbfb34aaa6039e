"""What `docker buildx bake` makes of images/docker-bake.hcl, for each variant; nothing is built."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bake(*targets: str, **variables: str) -> dict:
    command = ["docker", "buildx", "bake", "--file", "images/docker-bake.hcl", "--print", *targets]
    environment = {key: value for key, value in os.environ.items() if key not in ("VARIANT", "TAG", "REGISTRY", "BASE")}
    out = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout)["target"]


@pytest.mark.parametrize(("variant", "python"), [("cpu", "python-bookworm"), ("cuda", "python-cuda")])
def test_variant_decides_what_is_under_the_images_with_torch(variant: str, python: str) -> None:
    targets = bake("policy", "trainer", "env", "tools", "sandbox", VARIANT=variant)
    assert targets["policy"]["contexts"]["python"] == f"target:{python}"
    assert targets["trainer"]["contexts"]["policy-dependencies"] == "target:policy-dependencies"
    assert targets["env"]["contexts"]["python"] == "target:python-trixie"
    for name in ("policy", "trainer", "env", "tools", "sandbox"):
        assert targets[name]["tags"] == [f"local/opencode-rl-{name}:{variant}"]
    for name in ("policy", "trainer"):
        assert (ROOT / f"images/{name}/requirements.{variant}.txt").is_file()


def test_base_names_the_vendors_image_under_policy_and_trainer_alone() -> None:
    targets = bake("policy", "trainer", "env", VARIANT="cuda", BASE="vllm/vllm-openai:v0.31.0")
    assert targets["policy"]["contexts"]["python"] == "target:python-vendor"
    assert targets["policy-dependencies"]["contexts"]["python"] == "target:python-vendor"
    assert targets["python-vendor"]["args"]["BASE"] == "vllm/vllm-openai:v0.31.0"
    assert targets["env"]["contexts"]["python"] == "target:python-trixie"


def test_every_dependency_of_a_lock_has_a_hash() -> None:
    for lock in ROOT.glob("images/*/requirements*.txt"):
        text = lock.read_text()
        pins = [line for line in text.splitlines() if line and line[0].isalnum()]
        assert pins, lock
        assert all("==" in pin and pin.endswith("\\") for pin in pins), lock
