"""The job image, for real: the smoke recipe in one container under supervisord, as `make job-smoke`. Takes minutes.

Not part of `make test`: `scripts/test.sh job`, or `make test-job`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common import run_dir
from services.common.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
SPEAKING = {"job", "env", "policy", "trainer", "policy-eval", "evaluator"}
"""The watchdog says nothing while all goes well."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs directory, and the images built."""
    subprocess.run([ROOT / "scripts/build_images.sh", "cpu", "default", "job"], check=True, capture_output=True)
    made = tmp_path_factory.mktemp("runs")
    made.chmod(0o755)
    return made


def start(runs: Path, name: str, steps: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RECIPE": str(ROOT / "data/recipes/smoke.toml"),
        "RUNS_DIR": str(runs),
        "RUN_NAME": name,
        "MAX_STEPS": str(steps),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.job_smoke"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def smoke(runs: Path) -> tuple[RunDir, str]:
    """A finished run, and all that the container printed."""
    process = start(runs, "jobtest", STEPS)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output[-8000:]
    return RunDir(runs / "jobtest"), output


def test_training_ended_well_and_the_container_with_its_exit_code(smoke: tuple[RunDir, str]) -> None:
    result = run_dir.read_json(smoke[0].result)
    assert result is not None and (result["exit_code"], result["step"]) == (0, STEPS)
    assert [line["step"] for line in run_dir.read_lines(smoke[0].metrics)] == list(range(1, STEPS + 1))


def test_the_final_evaluation_ran_in_the_same_container(smoke: tuple[RunDir, str]) -> None:
    final = run_dir.read_json(smoke[0].eval / "final_results.json")
    assert final is not None and final["adapter"]["pass_at_1"] is not None and final["base"]["pass_at_1"] is not None


def test_every_program_s_lines_have_its_name(smoke: tuple[RunDir, str]) -> None:
    found = set(re.findall(r"^\[([a-z-]+)\] ", smoke[1], flags=re.MULTILINE))
    assert SPEAKING <= found <= SPEAKING | {"watchdog"}


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


def test_a_container_that_is_stopped_saves_the_adapter_and_leaves_nothing(runs: Path) -> None:
    process, run = start(runs, "jobstop", 500), RunDir(runs / "jobstop")
    try:
        deadline_s = time.monotonic() + 600
        while not run_dir.read_lines(run.metrics):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    result = run_dir.read_json(run.result)
    assert result is not None and result["exit_code"] == process.returncode == 143, output[-4000:]
    assert [checkpoint.step for checkpoint in run.complete_checkpoints()][-1] == result["step"] >= 1
    left = ["docker", "ps", "--all", "--quiet", "--filter", "label=opencode-rl.run=jobstop"]
    assert subprocess.run(left, capture_output=True, check=True).stdout == b""
