"""Docker sandboxes start at the recipe's rate, across all rollouts of the process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harbor.environments.docker.docker import DockerEnvironment

from services.common import recipe
from services.env.sandbox import Sandbox
from services.env.start_rate import StartRate

ROOT = Path(__file__).resolve().parents[3]


def test_the_recipes_rate_is_the_one_of_all_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "rate", Sandbox.rate)  # put back afterwards
    Sandbox.configure(recipe.load(ROOT / "data/recipes/smoke.toml", {"env.docker_starts_per_minute": 30}))
    waits = [Sandbox.rate.turn_s() for _ in range(3)]
    assert waits[0] == 0
    assert waits[1:] == pytest.approx([2, 4], abs=1.5)  # less what passed between the calls


def test_a_sandbox_asks_for_its_turn_before_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    class Waits(StartRate):
        def turn_s(self) -> float:
            order.append("turn")
            return 0.0

    async def start(_self: Any, _force_build: bool) -> None:
        order.append("engine")
        raise RuntimeError("far enough")

    monkeypatch.setattr(Sandbox, "rate", Waits(60))
    monkeypatch.setattr(DockerEnvironment, "start", start)
    sandbox = object.__new__(Sandbox)
    sandbox._project, sandbox._start_timeout_s = "p", 10.0
    sandbox._ledger = type("Ledger", (), {"record": lambda *_a, **_k: None})()
    sandbox._image = "image"
    with pytest.raises(RuntimeError, match="far enough"):
        asyncio.run(sandbox.start(False))
    Sandbox.live.discard("p")
    assert order == ["turn", "engine"]
