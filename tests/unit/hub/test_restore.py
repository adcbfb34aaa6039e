"""A run goes on from the Hub where its machine is gone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Push
from services.common.run_dir import READY, WEIGHTS, RunDir
from services.hub import restore
from services.hub.client import connect
from services.hub.pushes import Pusher
from tests.hub.server import Fault, LocalHub

REPO = "local/adapter"
Save = Callable[..., Path]


@pytest.fixture
def pushed(server: LocalHub, run: RunDir, save: Save, waits: list[float]) -> dict[str, bytes]:
    """Checkpoints 2 and 10 are on the Hub, and no longer here. Returns: the files of the newer one."""
    pusher = Pusher(connect(), REPO, run, Push())
    for step in (2, 10):
        save(step, str(step).encode())
        pusher.push(run.complete_checkpoints()[-1])
    server.commit(REPO, {"checkpoint-12/" + WEIGHTS: b"not complete"})
    held = {path.name: path.read_bytes() for path in (run.checkpoints / "checkpoint-10").iterdir()}
    shutil.rmtree(run.checkpoints)
    return held


def test_the_newest_complete_checkpoint_comes_back_as_it_was(pushed: dict[str, bytes], run: RunDir) -> None:
    found = restore.newest(connect(), REPO, run)
    assert found is not None and found.step == 10
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == pushed
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-10"]
    assert run.complete_checkpoints() == [found]


def test_a_download_that_is_cut_leaves_nothing_that_looks_complete_and_goes_on(
    pushed: dict[str, bytes], server: LocalHub, run: RunDir
) -> None:
    server.fail(Fault("GET", f"/resolve/.*/checkpoint-10/{WEIGHTS}", corrupt=True, times=9))
    with pytest.raises(NotReadyError, match="arrived with other bytes"):
        restore.newest(connect(), REPO, run)
    assert run.complete_checkpoints() == [] and not list(run.checkpoints.glob(f"checkpoint-*/{READY}"))
    server.heal()
    assert restore.newest(connect(), REPO, run) is not None


def test_an_empty_repository_has_nothing_and_a_missing_one_is_an_error(server: LocalHub, run: RunDir) -> None:
    server.create_repo(REPO)
    assert restore.newest(connect(), REPO, run) is None
    with pytest.raises(RecipeError, match="local/none is not on"):
        restore.newest(connect(), "local/none", run)


def test_only_who_asks_for_it_resumes_from_the_hub(
    pushed: dict[str, bytes], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTER_REPO", REPO)
    assert restore.from_environment() is None
    monkeypatch.setenv("RESUME_FROM_HUB", "1")
    fetch = restore.from_environment()
    assert fetch is not None
    found = fetch(run)
    assert found is not None and found.step == 10
    monkeypatch.delenv("ADAPTER_REPO")
    with pytest.raises(RecipeError, match="ADAPTER_REPO is not set"):
        restore.from_environment()
