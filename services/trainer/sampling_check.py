"""Does the policy sample from the full vocabulary when a call asks for nothing else, and report what it sampled from?

A model's generation_config.json may ask for penalties and truncation, which an engine applies to every call that does
not say otherwise. Asked of the engine's behaviour, not of its settings: vLLM's ``/server_info`` needs pip in the image,
and what counts is what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from services.common.errors import NotReadyError

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
PROMPT = "one two three one two three one two three one two"
"""Its likely next tokens are in it, so that a repetition penalty shows."""
NUM_TOKENS = 20
BOUND = 0.02
"""In nats. The same prompt computed twice in bf16 differs by less; a temperature of 0.95 or a penalty of 1.05 by
more."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SamplingReport:
    """Largest differences of the most likely tokens' log-probabilities from those of a call with ``NEUTRAL``."""

    without_parameters: float
    half_temperature: float
    """Must be large: log-probabilities are reported after the sampling parameters were applied."""


def measure(policy_url: str, model: str) -> SamplingReport:
    """Raises: NotReadyError: the policy does not answer with log-probabilities."""
    neutral = _next_token(policy_url, model, NEUTRAL)
    return SamplingReport(
        without_parameters=_difference(neutral, _next_token(policy_url, model, {})),
        half_temperature=_difference(neutral, _next_token(policy_url, model, {**NEUTRAL, "temperature": 0.5})),
    )


def check(policy_url: str, model: str) -> SamplingReport:
    """``measure``, and refuse to train with such a policy.

    Raises: NotReadyError: with what was found and how to start it.
    """
    report = measure(policy_url, model)
    problem = ""
    if not report.without_parameters <= BOUND:
        problem = (
            "applies penalties, truncation or a temperature to a call that asks for none (log-probabilities differ by "
            f"{report.without_parameters:.3g} nats, allowed {BOUND}); a generation_config.json may not do that"
        )
    elif report.half_temperature <= BOUND:
        problem = "reports log-probabilities from before the sampling parameters, not of what it samples from"
    if problem:
        raise NotReadyError(
            f"the policy at {policy_url} {problem}. Start it with `python -m services.policy`, which passes "
            "--generation-config vllm and --logprobs-mode processed_logprobs"
        )
    return report


def _next_token(policy_url: str, model: str, sampling: dict[str, float]) -> dict[str, float]:
    """The most likely tokens after ``PROMPT`` and their log-probabilities."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "logprobs": NUM_TOKENS, **sampling}
    try:
        response = httpx.post(f"{policy_url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
        response.raise_for_status()
        found: dict[str, float] = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
    except (httpx.HTTPError, LookupError, TypeError) as error:
        raise NotReadyError(
            f"the policy at {policy_url} gives no log-probabilities: {type(error).__name__}: {error}"
        ) from None
    return found


def _difference(neutral: dict[str, float], other: dict[str, float]) -> float:
    """Over the likelier half of ``neutral``, so that no rounding decides which tokens are compared."""
    likely = sorted(neutral, key=lambda token: -neutral[token])[: max(1, len(neutral) // 2)]
    return max(abs(neutral[token] - other.get(token, float("-inf"))) for token in likely)
