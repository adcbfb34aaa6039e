"""The HTML pages in a real browser: no complaint in its console, no request to elsewhere, no overflow on a phone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.traces import page, reader
from scripts.traces.reader import TokenText
from services.common import run_dir
from services.common.run_dir import RunDir
from tests.browser import DESKTOP, PHONE, Browser, chromium
from tests.fakes import run as fake
from tests.fakes.traces import HOSTILE, captured, hostile

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"{os.environ.get('REGISTRY', 'local')}/opencode-rl-trainer:{os.environ.get('TAG', 'cpu')}"
SEND = """
import sys
from pathlib import Path
from services.common import recipe
from services.common.run_dir import RunDir
from services.trainer import tracker
with tracker.follow(RunDir(Path(sys.argv[1])), recipe.load(Path("/recipe.toml"))):
    pass
"""
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
SHOWN = "Array.from(document.querySelectorAll('.rollout')).filter(e => !e.hidden).map(e => e.dataset.listed)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def screenshots(tmp_path: Path) -> Path:
    """Where pictures for a person go; SCREENSHOTS keeps them."""
    return Path(os.environ.get("SCREENSHOTS") or tmp_path)


def written(run: RunDir) -> str:
    """URL of the run's page of traces."""
    records = reader.choose(run)
    text = page.render(run.path.name, (reader.load(run, record) for record in records), TokenText(None), len(records))
    path = run.path / "traces.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "readable")
    captured(run, "aa", reward=1.0, completion_tokens=10, output="a\nb", verifier="ok")
    captured(run, "bb", reward=0.0, completion_tokens=90, task="a-task-with-a-rather-long-name-and-no-space-in-it" * 2)
    captured(run, "cc", reward=None, cause="agent_crash", completion_tokens=0, error="x" * 300)
    return run


@SIZES
def test_traces_render_without_complaint_and_fit(
    browser: Browser, run: RunDir, size: tuple[int, int], tmp_path: Path
) -> None:
    tab = browser.new_page(size)
    url = written(run)
    tab.open(url)
    tab.run("for (const e of document.querySelectorAll('details')) e.open = true")
    tab.screenshot(screenshots(tmp_path) / f"traces-{size[0]}.png")
    assert tab.overflow_px() == 0
    assert tab.complaints == [] and tab.requested == [url]
    assert tab.run("document.getElementById('count').textContent") == "3 of 3 shown"


def test_traces_are_found_filtered_and_ordered(browser: Browser, run: RunDir) -> None:
    tab = browser.new_page(DESKTOP)
    tab.open(written(run))

    def choose(**values: str) -> list[str]:
        for name, value in values.items():
            tab.run(f"{{const e = document.getElementById('{name}'); e.value = '{value}'; "
                    "e.dispatchEvent(new Event('input'));}")  # fmt: skip
        return list(tab.run(SHOWN))

    assert choose() == ["0", "1", "2"]  # newest first: failed, wrong, correct
    assert choose(order="worst") == ["1", "2", "0"]
    assert choose(order="longest") == ["1", "2", "0"]
    assert choose(order="listed", show="failed") == ["0"]
    assert choose(show="wrong") == ["1"]
    assert choose(show="all", find="RATHER-LONG") == ["1"]
    assert choose(find="nowhere") == []


@SIZES
def test_nothing_that_an_agent_wrote_runs_loads_or_shows_as_markup(
    browser: Browser, size: tuple[int, int], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "hostile")
    hostile(run)
    tab = browser.new_page(size)
    url = written(run)
    tab.open(url)
    tab.run("for (const e of document.querySelectorAll('details')) e.open = true")
    tab.screenshot(screenshots(tmp_path) / f"hostile-{size[0]}.png")
    assert tab.run("document.title") == "Rollouts of hostile"
    assert tab.complaints == [] and tab.requested == [url]
    assert tab.run("document.querySelectorAll('script').length") == 1
    assert tab.run("document.querySelectorAll('img, svg, b, iframe, object, a').length") == 0
    assert tab.run("document.querySelectorAll('.rollout').length") == len(HOSTILE)
    assert tab.overflow_px() == 0


def test_the_pages_policy_stops_a_script_that_slipped_through(browser: Browser, run: RunDir) -> None:
    url = written(run)
    path = run.path / "traces.html"
    slipped = "<script>document.title='owned'</script><img src='https://example.org/x.png'>"
    path.write_text(path.read_text().replace("<main", f"{slipped}<main", 1))
    tab = browser.new_page(DESKTOP)
    tab.open(url)
    assert tab.run("document.title") == "Rollouts of readable"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


# --- The dashboard --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of trackio's dashboard, as the compose service shows it, with what our tracker sent of a FAKE run."""
    runs = tmp_path_factory.mktemp("runs")
    run = fake.finished(runs, "looked-at")
    for folder in (runs, run.path, runs / run_dir.TRACKIO):
        os.chmod(folder, 0o777)
    subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--volume", f"{runs}:/runs",
         "--volume", f"{ROOT}/data/recipes/smoke.toml:/recipe.toml:ro",
         IMAGE, "python", "-c", SEND, f"/runs/{run.path.name}"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert run_dir.read_json(run.path / "tracker.json") == {"step": 4}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "COMPOSE_FILE": "compose.dash.yaml", "COMPOSE_PROJECT_NAME": "opencode-rl-pages",
        "RUNS_DIR": str(runs), "DASH_PORT": str(port), "TAG": IMAGE.rpartition(":")[2],
    }  # fmt: skip

    def compose(*arguments: str) -> None:
        command = ["docker", "compose", "--profile", "dash", *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=180)

    try:
        compose("up", "--detach", "--wait", "dash")
        yield f"http://127.0.0.1:{port}"
    finally:
        compose("down", "--remove-orphans")


@SIZES
def test_the_dashboard_shows_the_runs_without_complaint_and_fits(
    browser: Browser, dashboard: str, size: tuple[int, int], tmp_path: Path
) -> None:
    tab = browser.new_page(size)
    tab.open(f"{dashboard}/?project=opencode-rl")
    tab.wait_until("document.body.innerText.includes('reward')")
    tab.screenshot(screenshots(tmp_path) / f"dashboard-{size[0]}.png")
    assert tab.complaints == []
    assert [url for url in tab.requested if not url.startswith((dashboard, "data:", "blob:"))] == []
    assert tab.overflow_px() == 0
