"""Faults of an engine, through OpenEnv's real proxy, export and turns: each is caught under its name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.sessions import Upstream
from openenv.harbor.models import turns_from_document
from starlette.testclient import TestClient

from services.common.recipe import Recipe
from services.env import app
from services.env.http import DataPlane
from services.trainer.capture_gate import breaches
from tests.contract.env.test_servers import PLACES

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


def captured(cfg: Recipe, policy_url: str, *, turns: int = 1, tools: bool = True) -> Any:
    """Calls of an agent through the proxy, as the result that OpenEnv makes of them."""
    service = app.capture_service(cfg, PLACES)
    session = service.capture.registry.create(
        upstream=Upstream(llm_url=policy_url + "/v1", model="policy"),
        capture_level="tokens",
        sampling={"temperature": 1.0},
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "do it"}]
    with TestClient(DataPlane(service.capture.app)) as client:
        for _ in range(turns):
            body = {"model": "policy", "messages": messages} | ({"tools": TOOLS} if tools else {})
            answer = client.post("/v1/chat/completions", json=body, headers={"x-api-key": session.session_id})
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages = [*messages, message, {"role": "tool", "tool_call_id": "call_0", "content": "ok"}]
    document = export_session(session, include_messages=True, capture_level="tokens")
    found = turns_from_document(document)
    rows = [finding for row in document["sequences"] for finding in row["validation"]]
    return SimpleNamespace(
        rollout_type="train",
        turns=found,
        findings=[*document["validation"], *rows],
        param_fixes=[],
        atif="match",
        exception_type=None,
        n_trainable_tokens=sum(sum(turn.loss_mask) for turn in found if turn.trainable and not turn.discarded),
    )


def names(cfg: Recipe, rollout: Any, *, fatal: bool) -> set[str]:
    return {breach.name for breach in breaches(rollout, cfg.sampling) if breach.fatal is fatal}


def test_faithful_engine_passes(cfg: Recipe, start_policy: Callable[..., str]) -> None:
    rollout = captured(cfg, start_policy("ls", "cat x"), turns=3)
    assert len(rollout.turns) == 3
    assert names(cfg, rollout, fatal=True) == set()
    assert names(cfg, rollout, fatal=False) == set()


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("ids_in_text_only", "no_prompt_ids"),
        ("no_ids", "no_prompt_ids"),
        ("short_logprobs", "logprob_misalign"),
        ("other_id", "no_logprobs"),  # the proxy drops log-probabilities that belong to another token
        ("empty", "nothing_trainable"),
    ],
)
def test_fault_makes_the_rollout_unscorable(
    fault: str, name: str, cfg: Recipe, start_policy: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = captured(cfg, start_policy("ls", fault=fault))
    assert name in names(cfg, rollout, fatal=True)


def test_call_cut_by_the_output_cap_is_counted(cfg: Recipe, start_policy: Callable[..., str]) -> None:
    rollout = captured(cfg, start_policy("ls", fault="cut"))
    assert names(cfg, rollout, fatal=True) == set()
    assert names(cfg, rollout, fatal=False) == {"cut_by_length"}


def test_session_whose_only_call_is_the_title_request_is_never_trained(
    cfg: Recipe, start_policy: Callable[..., str]
) -> None:
    assert "no_agent_call" in names(cfg, captured(cfg, start_policy(), tools=False), fatal=True)
