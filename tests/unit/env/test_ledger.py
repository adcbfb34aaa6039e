from pathlib import Path

from services.common import run_dir
from services.env.ledger import Ledger


def test_a_sandbox_is_open_from_its_intent_until_it_is_closed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sandboxes.jsonl")
    ledger.record("intent", "one")
    ledger.record("intent", "two", image="image")
    ledger.record("created", "one", container="0123")
    assert ledger.open_projects() == ["one", "two"]
    ledger.record("closed", "one")
    assert ledger.open_projects() == ["two"]


def test_a_line_cut_by_a_kill_hides_no_sandbox(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sandboxes.jsonl")
    ledger.record("intent", "one")
    with ledger.path.open("a") as stream:
        stream.write('{"event": "clo')
    assert ledger.open_projects() == ["one"]


def test_no_ledger_means_nothing_open(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "sandboxes.jsonl").open_projects() == []


def test_every_line_says_when(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sandboxes.jsonl")
    ledger.record("intent", "one", backend="docker")
    (line,) = run_dir.read_lines(ledger.path)
    assert line["backend"] == "docker"
    assert line["at"].endswith("Z")
