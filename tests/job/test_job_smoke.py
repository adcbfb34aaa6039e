"""The job image, for real: the smoke recipe in one container under supervisord, as `make job-smoke`. Takes minutes.

Not part of `make test`: `scripts/test.sh job`, or `make test-job`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.common import run_dir
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
PROGRAMS = ("job", "env", "policy", "watchdog", "trainer", "policy-eval", "evaluator")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """A finished run, and all that the container printed."""
    runs = tmp_path_factory.mktemp("runs")
    runs.chmod(0o755)
    subprocess.run([ROOT / "scripts/build_images.sh", "cpu", "default", "job"], check=True, capture_output=True)
    environment = {
        **os.environ,
        "RECIPE": str(ROOT / "data/recipes/smoke.toml"),
        "RUNS_DIR": str(runs),
        "RUN_NAME": "jobtest",
        "MAX_STEPS": str(STEPS),
    }
    done = subprocess.run(
        [sys.executable, "-m", "scripts.job_smoke"],
        cwd=ROOT, env=environment, timeout=1500, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return RunDir(runs / "jobtest"), done.stdout


def test_training_ended_well_and_the_container_with_its_exit_code(smoke: tuple[RunDir, str]) -> None:
    result = run_dir.read_json(smoke[0].result)
    assert result is not None and (result["exit_code"], result["step"]) == (0, STEPS)
    assert [line["step"] for line in run_dir.read_lines(smoke[0].metrics)] == list(range(1, STEPS + 1))


def test_the_final_evaluation_ran_in_the_same_container(smoke: tuple[RunDir, str]) -> None:
    final = run_dir.read_json(smoke[0].eval / "final_results.json")
    assert final is not None and final["adapter"]["pass_at_1"] is not None and final["base"]["pass_at_1"] is not None


def test_every_program_s_lines_have_its_name(smoke: tuple[RunDir, str]) -> None:
    found = set(re.findall(r"^\[([a-z-]+)\] ", smoke[1], flags=re.MULTILINE))
    assert found == set(PROGRAMS)


def test_sandboxes_came_through_the_public_mount_and_are_gone(smoke: tuple[RunDir, str]) -> None:
    events = [line["event"] for line in run_dir.read_lines(smoke[0].ledger)]
    assert events.count("intent") == events.count("closed") > 0
    left = ["docker", "ps", "--all", "--quiet", "--filter", "label=opencode-rl.run=jobtest"]
    assert subprocess.run(left, capture_output=True, check=True).stdout == b""


def test_the_manifest_names_the_job_s_image(smoke: tuple[RunDir, str]) -> None:
    manifest = run_dir.read_json(smoke[0].manifest)
    assert manifest is not None and re.fullmatch(r"sha256:[0-9a-f]{64}", manifest["images"]["job"])


def test_costs_are_counted_from_the_container_s_start(smoke: tuple[RunDir, str]) -> None:
    costs = run_dir.read_json(smoke[0].path / "costs.json")
    assert costs is not None and costs["steps"] == STEPS
    first = run_dir.read_lines(smoke[0].metrics)[0]
    assert costs["machines"][0][0] < first["time_s"] and costs["sandbox_minutes"] > 0
