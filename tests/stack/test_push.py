"""`make push` against a real registry, with small images in place of ours."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from scripts import push
from scripts.hf import digests, preflight, registry
from scripts.hf.digests import NAMES, REFERENCE
from services.common.errors import NotReadyError, RecipeError
from services.env import manifest
from tests.stack.registry import serve

TAG = "pushtest"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(scope="module")
def owner(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host/owner`` with an image of each name on this engine, none of them in the registry yet."""
    client = docker.from_env()
    folder = tmp_path_factory.mktemp("images")
    tags = []
    for name in NAMES:
        (folder / "name").write_text(name)
        (folder / "Dockerfile").write_text("FROM scratch\nCOPY name /name\n")
        tags.append(f"{host}/me/opencode-rl-{name}:{TAG}")
        subprocess.run(["docker", "build", "--quiet", "--tag", tags[-1], folder], check=True, capture_output=True)
    yield f"{host}/me"
    for tag in tags:
        client.images.remove(tag, force=True)


def test_all_images_are_pushed_and_named_by_the_registry_s_digest(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "digests.json"
    monkeypatch.setattr(digests, "PATH", path)
    monkeypatch.setenv("TAG", TAG)
    assert push._push(owner, "cpu", build=False) == 0
    found = digests.load(path)
    assert found.variant == "cpu"
    assert set(found.images) == set(NAMES) and len(set(found.images.values())) == len(NAMES)
    for name, reference in found.images.items():
        assert REFERENCE.match(reference) and reference.startswith(f"{owner}/opencode-rl-{name}@sha256:")
        # Whoever has only the reference can pull it.
        assert registry.find(reference) is None
        assert (
            subprocess.run(["docker", "pull", "--quiet", reference], capture_output=True, check=False).returncode == 0
        )


def test_the_manifest_of_a_local_run_names_the_pushed_digest(owner: str) -> None:
    reference = push.push(docker.from_env(), f"{owner}/opencode-rl-env", TAG)
    image = manifest._image(f"{owner}/opencode-rl-env:{TAG}")
    assert image is not None and image["digest"] == reference


def test_what_is_not_pushed_is_seen_before_a_job_is_submitted(owner: str, host: str, tmp_path: Path) -> None:
    pushed = push.push(docker.from_env(), f"{owner}/opencode-rl-sandbox", TAG)
    images = dict.fromkeys(NAMES, pushed)
    images["job"] = f"{owner}/opencode-rl-job@sha256:{'0' * 64}"
    path = tmp_path / "digests.json"
    path.write_text(json.dumps({"variant": "cuda", "revision": "r", "images": images}))
    found = {check.name: check for check in preflight.images(path, revision="r")}
    assert found["image sandbox"].state == "ok"
    assert found["image job"].state == "fail" and f"{host} answers 404" in found["image job"].found


def test_a_registry_that_is_away_is_one_message(owner: str) -> None:
    assert "does not answer" in str(registry.find(f"127.0.0.1:9/me/x@sha256:{'0' * 64}"))
    client = docker.from_env()
    client.images.get(f"{owner}/opencode-rl-env:{TAG}").tag("127.0.0.1:9/me/opencode-rl-env", TAG)
    try:
        with pytest.raises(NotReadyError, match=r"127\.0\.0\.1:9/me/opencode-rl-env:pushtest"):
            push.push(client, "127.0.0.1:9/me/opencode-rl-env", TAG)
    finally:
        client.images.remove(f"127.0.0.1:9/me/opencode-rl-env:{TAG}")
    with pytest.raises(NotReadyError, match="is not on this engine"):
        push.push(client, f"{owner}/opencode-rl-none", TAG)


@pytest.mark.parametrize("name", ["", "local"])
def test_a_push_to_nowhere_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="REGISTRY is not set"):
        push._push(name, "cpu", build=False)
