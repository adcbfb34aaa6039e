"""The Hub and Jobs: looked at only where this set-up uses them."""

from __future__ import annotations

from scripts.checks import Check, skipped
from scripts.doctor.setup import Setup

NAMES = ("hub-token", "jobs-timeout", "public-url")


def checks(setup: Setup) -> list[Check]:
    if setup.cfg.env.backend != "hf-sandbox" and not setup.environment.get("ADAPTER_REPO"):
        return [skipped(name, "no ADAPTER_REPO, and the backend is not hf-sandbox") for name in NAMES]
    return [skipped(name, "not written yet") for name in NAMES]
