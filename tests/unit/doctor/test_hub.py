"""The Hub's checks: skipped where it is not used, and broken in each way where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from scripts import checks
from scripts.doctor import hub
from scripts.doctor.setup import Setup

Broken = Callable[..., Setup]


def test_a_set_up_without_the_hub_skips_it(setup: Setup) -> None:
    assert {check.state for check in hub.checks(setup)} == {"skipped"}


def test_what_a_job_needs_is_listed_under_names_of_its_own(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake_preflight(_api: object, repository: str, run_name: str) -> Iterator[checks.Check]:
        asked.append((repository, run_name))
        yield checks.bad_recipe("token", "no token is set", "set HF_TOKEN")

    monkeypatch.setattr(hub.preflight, "hub", fake_preflight)
    found = hub.checks(broken(environment={"ADAPTER_REPO": "you/adapter"}))
    assert [(check.name, check.state) for check in found] == [
        ("hub-token", "fail"), ("hub-jobs-timeout", "ok"), ("hub-public-url", "skipped"),
    ]  # fmt: skip
    assert asked == [("you/adapter", "smoke")]


@pytest.mark.parametrize(
    ("timeout", "steps", "state"), [("30m", 4, "fail"), ("2h", 1000, "warn"), ("72h", 1000, "ok"), ("2h", 20, "ok")]
)
def test_a_job_must_be_given_the_time_that_its_steps_take(broken: Broken, timeout: str, steps: int, state: str) -> None:
    assert hub.timeout(broken(hf_job__timeout=timeout, trainer__max_steps=steps)).state == state


def test_a_public_url_must_be_https_and_answer(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(**environment: str) -> Setup:
        image = "ghcr.io/you/opencode-rl-sandbox@sha256:" + "0" * 64
        return broken(env__backend="hf-sandbox", env__sandbox_image=image, environment=environment)

    assert hub.public_url(setup()).state == "skipped"
    plain = hub.public_url(setup(CAPTURE_URL="http://job--8000.hf.jobs/capture"))
    assert plain.state == "fail" and plain.error.exit_code == 2
    asked: list[str] = []

    def answer(url: str, timeout: float) -> httpx.Response:
        asked.append(url)
        return httpx.Response(401)

    monkeypatch.setattr(hub.httpx, "get", answer)
    assert hub.public_url(setup(SPACE_HOST="job--8000.hf.jobs")).state == "ok"
    assert asked == ["https://job--8000.hf.jobs/capture/health"]

    def silent(url: str, timeout: float) -> httpx.Response:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(hub.httpx, "get", silent)
    gone = hub.public_url(setup(SPACE_HOST="job--8000.hf.jobs"))
    assert gone.state == "fail" and "ConnectError" in gone.found
