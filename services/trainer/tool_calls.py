"""The policy's own counters of tool calls, for ``metrics.jsonl``."""

from __future__ import annotations

import logging
import re

import httpx

TIMEOUT_S = 5.0
_COUNTER = re.compile(r'^lfm2_tool_calls_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
"""Of ``services.policy.parser_metrics``, in Prometheus' text format."""

logger = logging.getLogger("trainer")


class ToolCallCounts:
    """Asks the policy at each optimizer step. No answer is no number, and never ends a run."""

    def __init__(self, policy_url: str) -> None:
        self._url = f"{policy_url}/metrics"

    def metrics(self) -> dict[str, float]:
        """``tool_calls/parsed``, ``/repaired`` and ``/unparsed`` since the policy's start."""
        try:
            response = httpx.get(self._url, timeout=TIMEOUT_S, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("no tool-call counters of the policy", extra={"url": self._url, "error": str(error)})
            return {}
        return {f"tool_calls/{outcome}": float(count) for outcome, count in _COUNTER.findall(response.text)}
