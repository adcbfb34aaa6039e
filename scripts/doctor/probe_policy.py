"""Runs inside the policy's container, fed on stdin (its network lets nobody else in): one real OpenCode request and
back, and how the policy samples. Prints what it found as JSON; ``scripts.doctor.policy`` judges.

Standard library only. Arguments: base URL, served model name. PROBE_REQUEST: OpenCode's request, as JSON.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 20
TRIES = 3


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:500]
    except (OSError, ValueError) as error:
        return 0, f"{type(error).__name__}: {error}"


def chat(url: str, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask as OpenCode does until the model calls a tool, answer the call, and ask again."""
    asked = {**request, "model": model, "tool_choice": "auto", "stream": False, "logprobs": True, "max_tokens": 96,
             "temperature": 1.0}  # fmt: skip
    status, raw = 0, False
    answer: Any = None
    calls: list[Any] = []
    for _ in range(TRIES):
        # Without a seed of its own: such a request can end vLLM 0.31's engine on a CPU (services/policy/README.md).
        status, answer = post(f"{url}/v1/chat/completions", asked)
        if status != 200:
            return {"status": status, "error": answer}
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        raw = "<|tool_call_start|>" in (message.get("content") or "")
        if calls:
            break
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    found = {
        "status": status,
        "calls": [call["function"]["name"] for call in calls],
        "arguments_are_json": all(_is_json(call["function"]["arguments"]) for call in calls),
        "raw_call": raw,
        "tokens": [item["token"] for item in content][:8],
        "logprobs": [item["logprob"] for item in content][:8],
    }
    if calls:
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "a.txt\nb.txt"}
        follow = {**asked, "messages": [*asked["messages"], message, result], "max_tokens": 8}
        found["follow_status"], answer = post(f"{url}/v1/chat/completions", follow)
        found["follow_error"] = "" if found["follow_status"] == 200 else answer
    return found


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def next_token(url: str, model: str, **sampling: float) -> dict[str, float]:
    body = {
        "model": model,
        "prompt": "one two three one two three one two",
        "max_tokens": 1,
        "logprobs": 20,
        **sampling,
    }
    status, answer = post(f"{url}/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {answer}")
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


def sampling(url: str, model: str) -> dict[str, float]:
    """Largest differences from a call with neutral parameters: of one with none, and at half the temperature."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    first = next_token(url, model, **neutral)
    likely = sorted(first, key=lambda token: -first[token])[:10]

    def difference(other: dict[str, float]) -> float:
        return max(abs(first[token] - other.get(token, -99.0)) for token in likely)

    half = {**neutral, "temperature": 0.5}
    return {
        "without_parameters": difference(next_token(url, model)),
        "half_temperature": difference(next_token(url, model, **half)),
    }


def main(url: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {"chat": chat(url, model, json.loads(os.environ["PROBE_REQUEST"]))}
    try:
        found["sampling"] = sampling(url, model)
    except (RuntimeError, LookupError, TypeError) as error:
        found["sampling"] = {"error": f"{type(error).__name__}: {error}"}
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
