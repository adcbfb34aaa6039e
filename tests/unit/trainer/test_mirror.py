"""The trainer's parent tells the Hub how the run ended, whatever way it ended."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from services.common import recipe
from services.trainer.__main__ import mirror
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "smoke"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"exit_code": 4, "reason": "stalled"}))
    monkeypatch.chdir(ROOT)
    with LocalHub() as hub:
        given = {"RECIPE": str(ROOT / "data/recipes/smoke.toml"), "RUNS_DIR": str(tmp_path), "ADAPTER_REPO": "local/a"}
        for name, value in {**hub.environment(), **given, "HF_HUB_OFFLINE": "1"}.items():
            monkeypatch.setenv(name, value)
        yield hub, recipe.load(ROOT / "data/recipes/smoke.toml", {"push.flush_s": 30.0, "push.retry_for_s": 1.0})
    huggingface_hub.close_session()


def test_a_run_that_was_stopped_is_known_by_its_result_on_the_hub(environment) -> None:
    hub, cfg = environment
    mirror(cfg)
    assert json.loads(hub.repo("local/a").at("main").files["result.json"])["exit_code"] == 4


def test_a_hub_that_refuses_costs_nothing_but_a_line(environment, caplog: pytest.LogCaptureFixture) -> None:
    hub, cfg = environment
    hub.fail(Fault(times=99, status=403))
    mirror(cfg)
    assert [record.message for record in caplog.records] == ["the run is not wholly on the Hub"]


def test_without_a_repository_nothing_is_asked(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, cfg = environment
    monkeypatch.delenv("ADAPTER_REPO")
    mirror(cfg)
    assert hub.requests == []
