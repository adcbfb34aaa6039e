"""A run goes on from the Hub where its machine is gone."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.costs import Meter
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Costs, Push
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
    with pytest.raises(NotReadyError, match="arrived 3 times with other bytes"):
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


def test_costs_metrics_and_the_account_of_samples_come_along_where_the_run_has_none(
    pushed: dict[str, bytes], server: LocalHub, run: RunDir
) -> None:
    records = {"costs.json": b'{"machines": [[0, 3600]]}', "metrics.jsonl": b"1", "trained.jsonl": b"2"}
    server.commit(REPO, records | {"result.json": b"{}", "eval/summary.json": b"{}"})
    run.trained.write_text("own")
    assert restore.newest(connect(), REPO, run) is not None
    assert (run.path / "costs.json").read_bytes() == records["costs.json"]
    assert (run.metrics.read_text(), run.trained.read_text()) == ("1", "own")
    assert not run.result.exists() and not run.eval.exists()
    assert not list(run.path.glob(".records*"))
    meter = Meter(run, Costs(trainer_usd_per_hour=10.0), clock=lambda: 7200.0)
    assert meter.update(10).usd == 10.0


def test_a_run_without_a_checkpoint_on_the_hub_has_cost_what_it_has_cost(server: LocalHub, run: RunDir) -> None:
    server.commit(REPO, {"costs.json": b"{}"})
    assert restore.newest(connect(), REPO, run) is None
    assert (run.path / "costs.json").exists()


def test_records_are_here_before_the_checkpoint_looks_complete(
    pushed: dict[str, bytes], server: LocalHub, run: RunDir
) -> None:
    """A run that has a checkpoint is not asked for again."""
    server.commit(REPO, {"costs.json": b"{}"})
    server.fail(Fault("GET", "/resolve/.*/costs.json", corrupt=True, times=9))
    with pytest.raises(NotReadyError, match=r"costs\.json of local/adapter arrived 3 times with other bytes"):
        restore.newest(connect(), REPO, run)
    assert run.complete_checkpoints() == [] and not (run.path / "costs.json").exists()
