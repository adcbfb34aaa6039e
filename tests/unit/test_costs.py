"""Costs: seconds and prices in, dollars out; what a restart must not forget."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import costs
from services.common.recipe import Costs
from services.common.run_dir import RunDir, append_line

PRICES = Costs(trainer_usd_per_hour=10.0, sandbox_usd_per_hour=0.01, gpus=2)


def test_an_hour_of_the_machine_and_an_hour_of_each_of_32_sandboxes() -> None:
    found = costs.spent(PRICES, 3600.0, 32 * 3600.0)
    assert (found.gpu_hours, found.sandbox_minutes) == (2.0, 1920.0)
    assert found.usd == pytest.approx(10.32)
    assert found.per_step(40) == pytest.approx(0.258)
    assert found.per_step(0) is None


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_costs_of_two_parts_add_up(machine: float, more: float, sandboxes: float, others: float) -> None:
    parts = costs.spent(PRICES, machine, sandboxes).usd + costs.spent(PRICES, more, others).usd
    assert costs.spent(PRICES, machine + more, sandboxes + others).usd == pytest.approx(parts)


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("30m", 1800), ("72h", 259200), ("3d", 259200)])
def test_durations(text: str, expected: int) -> None:
    assert costs.seconds(text) == expected


def test_the_estimate_is_the_most_that_the_timeout_allows() -> None:
    assert costs.estimate(PRICES, 32, 72 * 3600) == costs.Estimate(pytest.approx(10.32), pytest.approx(743.04), 72.0)


def ledger(event: str, project: str, second: int) -> dict[str, str]:
    return {"event": event, "project": project, "at": f"2026-01-01T00:00:{second:02}Z"}


def test_a_sandbox_counts_from_its_intent_until_it_is_closed_or_now() -> None:
    count = costs.SandboxSeconds()
    count.add([ledger("intent", "a", 0), ledger("created", "a", 2), ledger("intent", "b", 5)])
    start_s = 1767225600.0  # 2026-01-01T00:00:00Z
    assert count.until(start_s + 10) == 10 + 5
    count.add([ledger("closed", "a", 20), ledger("closed", "a", 30), ledger("closed", "unknown", 30)])
    assert count.until(start_s + 50) == 20 + 45


def test_a_restart_on_another_machine_adds_its_time_and_one_on_the_same_does_not_count_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    now = [1000.0]

    def start() -> costs.Meter:
        return costs.Meter(run, PRICES, clock=lambda: now[0])

    monkeypatch.setenv("MACHINE_SINCE_S", "500")
    now[0] = 1000.0
    assert start().update(1).machine_s == 500
    now[0] = 1300.0
    assert start().update(2).machine_s == 800  # the same machine: its pause costs too
    monkeypatch.setenv("MACHINE_SINCE_S", "9000")
    now[0] = 9100.0
    assert start().update(3).machine_s == 900  # between the two machines nothing was rented
    kept = json.loads((tmp_path / "costs.json").read_text())
    assert kept["machines"] == [[500.0, 1300.0], [9000.0, 9100.0]]
    assert kept["usd_per_step"] == pytest.approx(900 / 3600 * 10 / 3)


def test_the_meter_follows_the_ledger(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    now = [1767225600.0]
    meter = costs.Meter(run, PRICES, clock=lambda: now[0])
    append_line(run.ledger, ledger("intent", "a", 0))
    now[0] += 60
    assert meter.update(0).sandbox_minutes == 1.0
    append_line(run.ledger, ledger("closed", "a", 30))
    assert meter.update(0).sandbox_minutes == 0.5
