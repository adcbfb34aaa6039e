"""Checkpoints on a Hub: the real client against tests/hub, faults included."""

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import Checkpoint, RunDir
from services.evaluator import checkpoints, final
from services.evaluator.adapters import CONFIG, WEIGHTS
from services.evaluator.app import Evaluator
from services.evaluator.watch import watch
from services.hub import adapters as hub
from services.hub.client import ATTEMPTS, connect
from services.hub.pushes import reopen
from tests.fakes.evaluation import FakeEnv, write_adapter
from tests.hub.server import Fault, LocalHub

REPO = "local/adapter"
Files = Callable[..., dict[str, bytes]]


@pytest.fixture
def files(tmp_path: Path, cfg: Recipe) -> Files:
    """Files of a checkpoint as the trainer pushes them: adapter, optimizer, marker."""

    def make(folder: str, fill: int = 1, *, ready: bool = True) -> dict[str, bytes]:
        local = tmp_path / "made" / str(fill)
        write_adapter(local, cfg, fill=fill)
        found = {f"{folder}{name}": (local / name).read_bytes() for name in (WEIGHTS, CONFIG)}
        found[f"{folder}optimizer.pt"] = b"large"
        return found | ({f"{folder}READY": b"now\n"} if ready else {})

    return make


def downloads(server: LocalHub) -> list[str]:
    return sorted(
        {request.path for request in server.requests if request.method == "GET" and "/resolve/" in request.path}
    )


# --- Names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hub:me/a", hub.Reference("me/a", "main", None)),
        ("hub:me/a@v1.0", hub.Reference("me/a", "v1.0", None)),
        ("hub:me/a@refs/pr/3:300", hub.Reference("me/a", "refs/pr/3", 300)),
        ("hub:me/a@main:checkpoint-300", hub.Reference("me/a", "main", 300)),
        ("hub:me/a:2", hub.Reference("me/a", "main", 2)),
    ],
)
def test_a_reference_names_repository_revision_and_step(text: str, expected: hub.Reference) -> None:
    assert hub.Reference.parse(text) == expected
    assert hub.Reference.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["hub:", "hub:me", "hub:me/a@", "hub:me/a@main:best", "hub:me/a/b", "hub:me/a@x@y"])
def test_another_text_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(RecipeError, match=r"names no adapter on the Hub; allowed: hub:owner/name@revision\[:step\]"):
        hub.Reference.parse(text)


# --- One adapter by name ------------------------------------------------------------------------------------------


def test_only_the_adapter_s_two_files_are_fetched_at_a_full_commit(server: LocalHub, files: Files, run: RunDir) -> None:
    first = server.commit(REPO, files("checkpoints/checkpoint-2/", 1) | files("checkpoints/checkpoint-4/", 2))
    server.commit(REPO, files("checkpoints/checkpoint-2/", 9))
    found = checkpoints.find(run, f"hub:{REPO}@{first}:2")
    assert found.step == 2
    assert (found.path / WEIGHTS).read_bytes() == files("", 1)[WEIGHTS]
    assert downloads(server) == [
        f"/{REPO}/resolve/{first}/checkpoints/checkpoint-2/{name}" for name in (CONFIG, WEIGHTS)
    ]
    assert sorted(path.name for path in found.path.iterdir()) == ["READY", CONFIG, WEIGHTS]


def test_a_branch_a_tag_and_a_short_commit_become_a_full_one(server: LocalHub, files: Files) -> None:
    old = server.commit(REPO, files("checkpoint-2/"))
    server.repo(REPO).tags["v1"] = old
    new = server.commit(REPO, {"README.md": b"x"})
    for revision, commit in (("main", new), ("v1", old), (old[:9], old), (old, old)):
        assert hub.resolve(hub.Reference(REPO, revision)) == hub.Reference(REPO, commit, 2)


def test_a_short_commit_that_means_two_is_refused_with_both(server: LocalHub, files: Files) -> None:
    ids = ["abcdef1" + "0" * 33, "abcdef1" + "1" * 33]
    for number, oid in enumerate(ids):
        server.commit(REPO, files("checkpoint-2/", number + 1), oid=oid)
    with pytest.raises(RecipeError, match=f"abcdef1 means 2 commits of {REPO}: {ids[1]}, {ids[0]}"):
        hub.resolve(hub.Reference(REPO, "abcdef1"))


def test_without_a_step_the_adapter_at_the_top_is_meant_or_else_the_newest_checkpoint(
    server: LocalHub, files: Files, run: RunDir
) -> None:
    server.commit(
        REPO, files("checkpoint-2/", 1) | files("checkpoint-10/", 2) | files("checkpoint-11/", 3, ready=False)
    )
    assert checkpoints.find(run, f"hub:{REPO}").step == 10
    server.commit(REPO, files("", 4, ready=False))
    found = checkpoints.find(run, f"hub:{REPO}")
    assert (found.path / WEIGHTS).read_bytes() == files("", 4)[WEIGHTS]
    assert not found.path.name.startswith("checkpoint-")


def test_a_checkpoint_without_its_marker_does_not_exist_and_the_others_are_listed(
    server: LocalHub, files: Files, run: RunDir
) -> None:
    server.commit(REPO, files("checkpoint-2/") | files("checkpoint-4/", 2, ready=False))
    with pytest.raises(RecipeError, match=rf"checkpoint 4 is not in {REPO} at [0-9a-f]{{40}}; complete there: 2$"):
        checkpoints.find(run, f"hub:{REPO}:4")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hub:local/none", "model local/none is not on http"),
        (f"hub:{REPO}@v9", f"{REPO} has no branch, tag or commit v9 on http"),
        (f"hub:{REPO}@" + "0" * 40, f"{REPO} has no such revision on http"),
        (f"hub:{REPO}@0000000", f"0000000 means 0 commits of {REPO}"),
        (f"hub:{REPO}", f"an adapter is not in {REPO} at .* complete there: none"),
    ],
)
def test_what_is_not_there_is_one_message(server: LocalHub, run: RunDir, reference: str, message: str) -> None:
    server.commit(REPO, {"README.md": b"empty"})
    with pytest.raises(RecipeError, match=message):
        checkpoints.find(run, reference)


def test_what_is_here_by_full_commit_needs_no_hub(server: LocalHub, files: Files, run: RunDir) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    exact = hub.resolve(hub.Reference(REPO))
    first = checkpoints.find(run, str(exact))
    server.fail(Fault(times=99, status=500))
    server.requests.clear()
    assert checkpoints.find(run, str(exact)) == first
    assert server.requests == []


def test_a_download_that_was_cut_is_not_taken_for_whole_and_goes_on(
    server: LocalHub, files: Files, run: RunDir
) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    server.fail(Fault("GET", rf"/resolve/.*/{WEIGHTS}", status=500, times=ATTEMPTS))
    with pytest.raises(NotReadyError, match="try again later"):
        checkpoints.find(run, f"hub:{REPO}")
    assert list(run.eval.rglob("READY")) == []
    assert checkpoints.find(run, f"hub:{REPO}").step == 2


def test_a_failure_that_passes_is_waited_out(server: LocalHub, files: Files, run: RunDir) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    server.fail(Fault("GET", "/tree/", status=503), Fault("GET", rf"/resolve/.*/{CONFIG}", status=502))
    assert checkpoints.find(run, f"hub:{REPO}").step == 2


def test_bytes_that_changed_on_the_way_are_fetched_again_and_never_used(
    server: LocalHub, files: Files, run: RunDir
) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    server.fail(Fault("GET", rf"/resolve/.*/{WEIGHTS}", corrupt=True))
    found = checkpoints.find(run, f"hub:{REPO}")
    assert (found.path / WEIGHTS).read_bytes() == files("", 1)[WEIGHTS]
    server.commit(REPO, files("checkpoint-4/", 2))
    server.fail(Fault("GET", rf"/resolve/.*/{WEIGHTS}", corrupt=True, times=99))
    with pytest.raises(NotReadyError, match="arrived 3 times with other bytes"):
        checkpoints.find(run, f"hub:{REPO}:4")


def test_an_adapter_of_the_hub_is_compared_and_is_no_point_of_the_run_s_curve(
    server: LocalHub, files: Files, make_evaluator: Callable[..., Evaluator], run: RunDir, env: FakeEnv
) -> None:
    commit = server.commit(REPO, files("checkpoint-2/"))
    console = Console(file=io.StringIO(), width=160)
    assert final.one(make_evaluator(), f"hub:{REPO}@main", None, [], console) == 0
    label = f"hub-local--adapter-{commit[:12]}-checkpoint-2"
    value = json.loads((run.eval / "other" / f"{label}-3-tasks_results.json").read_text())
    assert value["adapter"]["label"] == label and value["adapter"]["pass_at_1"] == 1.0
    assert list(run.eval.glob("*_results.json")) == [] and not (run.eval / "summary.json").exists()


# --- The watcher --------------------------------------------------------------------------------------------------


@pytest.fixture
def source(server: LocalHub, run: RunDir) -> hub.HubSource:
    return hub.HubSource(hub.AdapterRepo(REPO), run.eval / hub.MIRROR, last_step=4)


def test_a_watcher_follows_the_hub_to_the_recipe_s_last_step(
    server: LocalHub, files: Files, source: hub.HubSource, make_evaluator: Callable[..., Evaluator], run: RunDir,
    env: FakeEnv,
) -> None:  # fmt: skip
    server.commit(REPO, files("checkpoints/checkpoint-2/", 1) | files("checkpoints/checkpoint-4/", 2))
    assert watch(make_evaluator(), source) == 0
    summary = json.loads((run.eval / "summary.json").read_text())
    assert [point["step"] for point in summary["checkpoints"]] == [2, 4]
    assert checkpoints.find(run, "final").step == 4 and checkpoints.find(run, "best").step == 2
    env.calls.clear()
    server.requests.clear()
    assert watch(make_evaluator(), hub.HubSource(hub.AdapterRepo(REPO), run.eval / hub.MIRROR, last_step=4)) == 0
    assert env.calls == [] and downloads(server) == []


def test_a_checkpoint_counts_once_its_marker_is_pushed(server: LocalHub, files: Files, source: hub.HubSource) -> None:
    server.commit(REPO, files("checkpoint-4/", ready=False))
    assert source.complete() == [] and not source.ended()
    server.commit(REPO, {"checkpoint-4/READY": b"now\n"})
    assert [found.step for found in source.complete()] == [4] and source.ended()


def test_a_commit_that_changes_no_adapter_costs_no_download(
    server: LocalHub, files: Files, source: hub.HubSource
) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    first = source.complete()
    server.requests.clear()
    server.commit(REPO, {"eval/summary.json": b"{}"})
    assert source.complete() == first and downloads(server) == []
    server.requests.clear()
    source.complete()
    assert [request.path for request in server.requests] == [f"/api/models/{REPO}/revision/main"]


def test_a_step_that_was_pushed_again_is_another_checkpoint(
    server: LocalHub, files: Files, source: hub.HubSource
) -> None:
    server.commit(REPO, files("checkpoint-2/", 1))
    first = source.complete()[0]
    server.commit(REPO, files("checkpoint-2/", 2))
    second = source.complete()[0]
    assert (first.step, second.step) == (2, 2) and first.path != second.path


def test_a_run_that_ended_before_its_last_step_is_known_by_its_result(
    server: LocalHub, files: Files, source: hub.HubSource
) -> None:
    server.commit(REPO, files("checkpoint-2/"))
    source.complete()
    assert not source.ended()
    server.commit(REPO, {"result.json": b"{}"})
    source.complete()
    assert source.ended()


def test_a_run_that_goes_on_has_not_ended(server: LocalHub, files: Files, source: hub.HubSource) -> None:
    server.commit(REPO, files("checkpoint-2/") | {"result.json": b"{}"})
    source.complete()
    assert source.ended()
    reopen(connect(), REPO, retry_for_s=10)
    assert [found.step for found in source.complete()] == [2] and not source.ended()
    before = server.repo(REPO).at("main").oid
    reopen(connect(), REPO, retry_for_s=10)
    assert server.repo(REPO).at("main").oid == before


def test_a_hub_that_is_away_or_has_no_repository_yet_is_asked_again(
    server: LocalHub, files: Files, source: hub.HubSource, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert source.complete() == []
    server.commit(REPO, files("checkpoint-2/"))
    server.fail(Fault("GET", "/api/models", status=503, times=1))
    with caplog.at_level(logging.WARNING):
        source.complete()
    assert [record.message for record in caplog.records] == ["the Hub is asked again later"] * 2
    assert [found.step for found in source.complete()] == [2]
    server.fail(Fault("GET", "/api/models", status=503, times=1))
    assert [found.step for found in source.complete()] == [2]


def test_two_folders_of_one_step_are_refused_with_both(server: LocalHub, files: Files, source: hub.HubSource) -> None:
    server.commit(REPO, files("a/checkpoint-2/", 1) | files("b/checkpoint-2/", 2))
    with pytest.raises(RecipeError, match="a/checkpoint-2/ and b/checkpoint-2/ are the same step"):
        source.complete()


def test_the_run_s_own_checkpoint_is_preferred_to_one_from_the_hub(
    server: LocalHub,
    files: Files,
    source: hub.HubSource,
    add_checkpoint: Callable[..., Checkpoint],
    run: RunDir,
) -> None:
    server.commit(REPO, files("checkpoint-2/", 1))
    brought = source.complete()[0]
    assert checkpoints.find(run, "2") == brought
    own = add_checkpoint(2)
    assert checkpoints.find(run, "2") == own
