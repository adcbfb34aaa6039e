import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.run_dir import RunDir
from services.env import sweep as sweeping
from services.env.docker import DockerError, docker
from services.env.ledger import Ledger
from services.env.sweep import LABEL, PROJECT_LABEL, sweep

FAKES = Path(__file__).resolve().parents[2] / "fakes"


class Engine:
    """What the fake docker CLI has."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state.json"

    def holds(self, containers: dict[str, dict[str, str]], networks: dict[str, dict[str, str]] | None = None) -> None:
        self._state.write_text(json.dumps({"container": containers, "network": networks or {}}))

    def left(self, kind: str = "container") -> set[str]:
        found: dict[str, Any] = json.loads(self._state.read_text())
        return set(found[kind])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    shutil.copy(FAKES / "docker_cli.py", tmp_path / "docker")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path / "state.json"))
    engine = Engine(tmp_path)
    engine.holds({})
    return engine


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "mine")


def test_only_the_runs_own_containers_go(engine: Engine, run: RunDir) -> None:
    engine.holds({"a": {LABEL: "mine"}, "b": {LABEL: "another"}, "c": {}})
    assert sweep(run) == 1
    assert engine.left() == {"b", "c"}


def test_ledger_finds_a_container_that_never_got_its_label(engine: Engine, run: RunDir) -> None:
    Ledger(run.ledger).record("intent", "project-1")
    engine.holds({"a": {PROJECT_LABEL: "project-1"}, "b": {PROJECT_LABEL: "project-2"}})
    assert sweep(run) == 1
    assert engine.left() == {"b"}
    assert Ledger(run.ledger).open_projects() == []


def test_sandboxes_in_use_stay_with_their_ledger_entries(engine: Engine, run: RunDir) -> None:
    for project in ("used", "orphan"):
        Ledger(run.ledger).record("intent", project)
    engine.holds({name: {LABEL: "mine", PROJECT_LABEL: name} for name in ("used", "orphan", "unknown")})
    assert sweep(run, keep={"used"}) == 2
    assert engine.left() == {"used"}
    assert Ledger(run.ledger).open_projects() == ["used"]


def test_a_sandbox_that_starts_during_a_sweep_stays(
    engine: Engine, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: set[str] = set()

    def starts_meanwhile(*arguments: str) -> str:
        if not live:
            live.add("new")
            engine.holds({"a": {LABEL: "mine", PROJECT_LABEL: "new"}, "b": {LABEL: "mine", PROJECT_LABEL: "old"}})
        return docker(*arguments)

    monkeypatch.setattr(sweeping, "docker", starts_meanwhile)
    assert sweep(run, keep=live) == 1
    assert engine.left() == {"a"}


def test_networks_of_open_sandboxes_go_and_the_shared_one_stays(engine: Engine, run: RunDir) -> None:
    Ledger(run.ledger).record("intent", "project-1")
    engine.holds({}, {"n1": {PROJECT_LABEL: "project-1"}, "shared": {PROJECT_LABEL: "opencode-rl"}})
    sweep(run)
    assert engine.left("network") == {"shared"}


def test_sweeping_twice_changes_nothing_more(engine: Engine, run: RunDir) -> None:
    engine.holds({"a": {LABEL: "mine"}})
    Ledger(run.ledger).record("intent", "project-1")
    sweep(run)
    lines = run.ledger.read_text()
    assert sweep(run) == 0
    assert run.ledger.read_text() == lines


def test_refused_removal_is_an_error_and_keeps_the_ledger_open(
    engine: Engine, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(run.ledger).record("intent", "project-1")
    monkeypatch.setenv("FAKE_DOCKER", "/nowhere/state.json")
    with pytest.raises(DockerError, match="container ls"):
        sweep(run)
    assert Ledger(run.ledger).open_projects() == ["project-1"]


def test_missing_docker_cli_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DockerError, match="docker CLI is not installed"):
        docker("version")
