"""The numbers that the four endpoints serve, read from a FAKE run and scraped over HTTP."""

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common import metrics, run_dir
from services.common.run_dir import RunDir
from tests.fakes import run as fake


def scrape(service: str, run: RunDir, max_steps: int = 0) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name without prefix, values of the labels) -> number."""
    with metrics.serve(service, run, max_steps, "127.0.0.1", port=0) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    return {
        (sample.name.removeprefix(metrics.PREFIX), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_trainer_serves_the_last_step_under_documented_names(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    more = {
        "ratio/staleness_2": 1.01,
        "rollouts/unscorable": 3.0,
        "rollouts/unscorable/policy": 2.0,
        "of/another-age": 7,
    }
    fake.step(run, 5, 0.75, **more)
    found = scrape("trainer", run, max_steps=9)
    assert found["step", ()] == 5 and found["max_steps", ()] == 9
    assert found["reward", ()] == 0.75
    assert found["ratio_by_staleness", ("2",)] == 1.01
    assert found["rollouts_unscorable_total", ()] == 3
    assert found["rollouts_unscorable_by_cause_total", ("policy",)] == 2
    assert found["of_another_age", ()] == 7
    assert found["info", ("done", "trainer")] == 1


def test_env_serves_rollouts_in_flight_with_the_age_of_the_oldest(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    rollouts = [{"task": "a", "since_s": fake.T0 - 90}, {"task": "b", "since_s": fake.T0 - 30}]
    fake.beat(run, "env", "serving", inflight=2, rollouts=rollouts, done=9, failed={"policy": 2})
    found = {name: value for (name, _labels), value in _collected("env", run).items()}
    assert found["rollouts_inflight"] == 2 and found["rollout_oldest_seconds"] == 90
    assert found["env_rollouts"] == 9 and found["env_rollouts_failed"] == 2 and found["sandboxes_open"] == 1


def _collected(service: str, run: RunDir) -> dict[tuple[str, tuple[str, ...]], float]:
    read = metrics.READERS[service](run, 0, fake.T0)
    return {(metric.name.removeprefix(metrics.PREFIX), labels): value for metric, labels, value in read}


def test_evaluator_serves_base_latest_and_best(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.prepare()
    checkpoints = [
        {"label": f"checkpoint-{step}", "step": step, "pass_at_1": rate}
        for step, rate in ((2, 0.5), (4, 0.25), (6, None))
    ]
    summary = {"base": {"pass_at_1": 0.125}, "best": "checkpoint-2", "checkpoints": checkpoints, "collapse_alarms": [1]}
    run_dir.write_json(run.eval / "summary.json", summary)
    fake.beat(run, "evaluator", "evaluating", cells=8, cells_done=3)
    found = scrape("evaluator", run)
    assert [found["pass_at_1", (arm,)] for arm in ("base", "latest", "best")] == [0.125, 0.25, 0.5]
    assert found["evaluated_step", ()] == 4 and found["collapse_alarms_total", ()] == 1
    assert (found["evaluation_cells", ()], found["evaluation_cells_done", ()]) == (8, 3)


def test_watchdog_serves_the_age_of_every_heartbeat(tmp_path: Path) -> None:
    run = fake.finished(tmp_path)
    run_dir.write_json(run.stop_request, {"reason": "x"})
    found = _collected("watchdog", run)
    assert found["heartbeat_age_seconds", ("trainer",)] == 0
    assert found["phase_seconds", ("trainer", "done")] == 0
    assert found["stop_requested", ()] == 1 and found["exit_code", ()] == 0


@pytest.mark.parametrize("service", metrics.PORTS)
def test_a_run_that_wrote_nothing_yet_has_an_endpoint(tmp_path: Path, service: str) -> None:
    assert scrape(service, RunDir(tmp_path / "new"))["info", ("new", service)] == 1


def test_a_taken_port_costs_the_numbers_and_not_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with metrics.serve("env", RunDir(tmp_path), host="127.0.0.1", port=port) as served:
            assert served == 0


def test_names_are_unique_and_fit_for_prometheus() -> None:
    for service, table in metrics.SERVED.items():
        names = [metric.name for metric in table]
        assert len(set(names)) == len(names), service
        assert all(name.replace("_", "").isalnum() and name.islower() for name in names)
    keys = [metric.key for metric in metrics.STEP]
    assert len(set(keys)) == len(keys)
