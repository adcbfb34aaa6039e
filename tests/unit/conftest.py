"""Fixtures of more than one folder of unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import huggingface_hub
import pytest

from tests.hub.server import LocalHub


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A local Hub, which this process's own calls go to."""
    with LocalHub() as started:
        for name, value in started.environment().items():
            monkeypatch.setenv(name, value)
        yield started
    huggingface_hub.close_session()
