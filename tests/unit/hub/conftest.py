"""A local Hub for the pushes, and waits that take no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.run_dir import CONFIG, READY, WEIGHTS, RunDir, write_text


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were asked to be waited, ours and huggingface_hub's; none is."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "smoke")
    made.checkpoints.mkdir(parents=True)
    return made


@pytest.fixture
def save(run: RunDir) -> Callable[..., Path]:
    def make(step: int, fill: bytes = b"1", *, ready: bool = True) -> Path:
        folder = run.checkpoints / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        for name in (WEIGHTS, CONFIG, "optimizer.pt", "rollout_state.json"):
            (folder / name).write_bytes(name.encode() + fill)
        if ready:
            write_text(folder / READY, f"at {fill.decode()}")
        return folder

    return make
