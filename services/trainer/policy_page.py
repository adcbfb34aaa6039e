"""What the policy server says of itself on its own pages: its tool-call counters and its effective settings."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx

from services.common.errors import NotReadyError

TIMEOUT_S = 5.0
_COUNTER = re.compile(r'^lfm2_tool_calls_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
"""Of ``services.policy.parser_metrics``, in Prometheus' text format."""
_EXPECTED = {
    ("model_config", "generation_config"): "vllm",
    ("model_config", "override_generation_config"): {},
    ("model_config", "logprobs_mode"): "processed_logprobs",
}
"""vLLM's settings by section and name. ``vllm``: its own neutral sampling, whatever generation_config.json says."""

logger = logging.getLogger("trainer")


def tool_calls(page: str) -> dict[str, float]:
    """``tool_calls/parsed``, ``/repaired`` and ``/unparsed`` since the server's start, from its ``/metrics``."""
    return {f"tool_calls/{outcome}": float(count) for outcome, count in _COUNTER.findall(page)}


class ToolCallCounts:
    """Asks the policy at each optimizer step. No answer is no number, and never ends a run."""

    def __init__(self, policy_url: str) -> None:
        self._url = f"{policy_url}/metrics"

    def metrics(self) -> dict[str, float]:
        try:
            response = httpx.get(self._url, timeout=TIMEOUT_S, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("no tool-call counters of the policy", extra={"url": self._url, "error": str(error)})
            return {}
        return tool_calls(response.text)


def require_neutral_sampling(policy_url: str) -> None:
    """Refuse a policy whose server would sample otherwise than the recipe says, or report other log-probabilities.

    Penalties and truncation of a model's generation_config.json must not be what a call without parameters gets.
    Raises: NotReadyError: with each setting that was found, and the one that is needed.
    """
    url = f"{policy_url}/server_info"
    try:
        response = httpx.get(url, params={"config_format": "json"}, timeout=60.0, trust_env=False)
        response.raise_for_status()
        problems = unlike_the_recipe(response.json()["vllm_config"])
    except (httpx.HTTPError, KeyError) as error:
        raise NotReadyError(f"{url} does not tell the policy's settings: {type(error).__name__}: {error}") from None
    if problems:
        raise NotReadyError(
            f"the policy at {policy_url} runs with {'; '.join(problems)}. Sampled tokens would not be those of the "
            "recipe's full-vocabulary sampling; start it with `python -m services.policy`, which sets all of them"
        )


def unlike_the_recipe(vllm_config: dict[str, Any]) -> list[str]:
    """Each setting that differs, as ``section.name = found, not needed``. Raises: KeyError: it is not told at all."""
    found = {(section, name): vllm_config[section][name] for section, name in _EXPECTED}
    return [
        f"{section}.{name} = {found[section, name]!r}, not {needed!r}"
        for (section, name), needed in _EXPECTED.items()
        if (found[section, name] or {}) != (needed or {})
    ]
