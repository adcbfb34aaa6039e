"""The running policy: an OpenCode request and back, token ids, log-probabilities of what was sampled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from scripts.checks import Check, not_ready, ok, skipped, warn
from scripts.doctor.setup import Setup, output_of
from scripts.stack import ROOT
from services.common import tasks
from services.common.errors import RecipeError
from services.env.opencode import DENIED_TOOLS

NAMES = ("policy-tool-call", "policy-tokens", "policy-logprobs")
PROBE = ROOT / "scripts/doctor/probe_policy.py"
REQUESTS = ROOT / "scripts/tiny_policy/opencode_requests.json"
"""What OpenCode really sends: recorded."""
TIMEOUT_S = 120.0
MAX_DIFFERENCE = 0.02
"""In nats; the same as the trainer's own check at its start."""
NOT_RUNNING = "policy is not running"
MEND = "start it with `python -m services.policy`, which passes the right flags: `make down`, then `make train`"


def opencode_request(setup: Setup) -> dict[str, Any]:
    """The first request of a rollout: OpenCode's system prompt and tools, and a task's instruction."""
    recorded = json.loads(REQUESTS.read_text(encoding="utf-8"))["agent"]
    try:
        instruction = tasks.load_suite(setup.tasks_dir, setup.cfg.tasks.train)[0].instruction
    except (RecipeError, IndexError):
        instruction = "List the files."
    return {
        "messages": [{"role": "system", "content": recorded["system"]}, {"role": "user", "content": instruction}],
        "tools": [tool for tool in recorded["tools"] if tool["function"]["name"] not in DENIED_TOOLS],
    }


def ask(setup: Setup) -> Mapping[str, Any]:
    """Run the probe where the policy can be reached: in its container, or here when POLICY_URL is given.

    Returns: what it found; ``{"skipped": why}`` when there is no policy to ask.
    """
    url, name = setup.environment.get("POLICY_URL", ""), setup.cfg.policy.served_model_name
    request = json.dumps(json.dumps(opencode_request(setup)))
    script = f'import os\nos.environ["PROBE_REQUEST"] = {request}\n' + PROBE.read_text(encoding="utf-8")
    if url:
        command = ["python3", "-", url.rstrip("/"), name]
    elif container := setup.container("policy"):
        command = ["docker", "exec", "--interactive", container, "python", "-", "http://127.0.0.1:8000", name]
    else:
        return {"skipped": NOT_RUNNING}
    code, text = output_of(*command, timeout_s=TIMEOUT_S, text=script)
    try:
        return dict(json.loads(text.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"chat": {"status": 0, "error": f"exit code {code}: {text[-200:]}"}, "sampling": {"error": "not asked"}}


def checks(found: Mapping[str, Any]) -> list[Check]:
    if "skipped" in found:
        return [skipped(name, found["skipped"]) for name in NAMES]
    return [tool_call(found["chat"]), tokens(found["chat"]), logprobs(found["sampling"])]


def tool_call(chat: Mapping[str, Any]) -> Check:
    """A real OpenCode request, a call that the parser reads, the call's result, and an answer to that."""
    name = NAMES[0]
    if chat["status"] != 200:
        mend = f"{MEND}; a 400 that names tool_choice means that no tool parser is set"
        return not_ready(
            name, f"an OpenCode request is answered with {chat['status'] or 'nothing'}: {chat['error']}", mend
        )
    if chat["raw_call"]:
        return not_ready(name, "a tool call came back as text: the parser did not read it", MEND)
    if not chat["calls"]:
        mend = "look at rollouts with `make traces`; an untrained model may call none"
        return warn(name, "the model called no tool in three answers, so the parser is not proved", mend)
    if not chat["arguments_are_json"]:
        return not_ready(name, f"arguments of {chat['calls'][0]} are no JSON object", MEND)
    if chat["follow_status"] != 200:
        found = f"the call's result is answered with {chat['follow_status']}: {chat['follow_error']}"
        return not_ready(name, found, MEND)
    return ok(name, f"call of {', '.join(chat['calls'])} read, its result answered")


def tokens(chat: Mapping[str, Any]) -> Check:
    name = NAMES[1]
    if chat["status"] != 200:
        return skipped(name, "the policy did not answer")
    if not chat["tokens"]:
        return not_ready(name, "an answer carries no log-probabilities", MEND)
    if bad := [token for token in chat["tokens"] if not re.fullmatch(r"token_id:\d+", token)]:
        return not_ready(name, f"tokens come as text ({bad[0]!r}), not as ids", MEND)
    if not all(math.isfinite(value) and value <= 0 for value in chat["logprobs"]):
        return not_ready(name, f"log-probabilities are {chat['logprobs']}", MEND)
    return ok(name, "exact token ids with a log-probability each")


def logprobs(sampling: Mapping[str, Any]) -> Check:
    """Nothing is applied that was not asked for, and what was asked for is in the log-probabilities."""
    name = NAMES[2]
    if "error" in sampling:
        return not_ready(name, f"the policy gives no log-probabilities: {sampling['error']}", MEND)
    if not sampling["without_parameters"] <= MAX_DIFFERENCE:
        found = f"a call that asks for nothing differs by {sampling['without_parameters']:.3g} nats from a neutral one"
        return not_ready(name, found, MEND)
    if sampling["half_temperature"] <= MAX_DIFFERENCE:
        return not_ready(name, "log-probabilities are those from before the sampling parameters", MEND)
    return ok(name, f"full vocabulary, processed ({sampling['half_temperature']:.2g} nats at half the temperature)")
