"""The model call that goes to the engine: built anew from what an agent asked, never passed on.

The engine knows fields that change what is sampled, for how long, and from where it fetches; and its error messages
repeat what the caller wrote. So only the fields here exist, each of the type that it must have. What OpenCode
1.18.33 sends is a part of them. Everything else that a call holds is left out; a wrong type in one of them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from openenv.core.harness.capture.upstream import NON_POLICY_SAMPLING

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")


class MalformedCallError(ValueError):
    """The body is no model call as an agent makes it."""


class ModelCall(dict[str, Any]):
    """A built call. OpenEnv takes a deep copy of each for its answer, and reads nothing of it but ``model``."""

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {key: self[key] for key in ("model", "stream") if key in self}


def build(body: bytes, cap: int) -> ModelCall:
    """The call as the engine may see it, but for the session's own sampling, which OpenEnv adds.

    Args: body: as it came, JSON. cap: most tokens of the answer; fewer only if the agent asks for fewer.
    Raises: MalformedCallError: what is wrong with it.
    """
    asked = _parsed(body)
    call = ModelCall(messages=_listed(asked, "messages", _message, MAX_MESSAGES))
    if asked.get("tools"):
        call["tools"] = _listed(asked, "tools", _tool, MAX_TOOLS)
        if (choice := asked.get("tool_choice")) is not None:
            _demand(choice in ("auto", "none"), "tool_choice must be auto or none")
            call["tool_choice"] = choice
    if asked.get("stream") is not None:
        _demand(type(asked["stream"]) is bool, "stream must be true or false")
        call["stream"] = asked["stream"]
    if isinstance(asked.get("model"), str):
        call["model"] = asked["model"]  # what the answer is labelled with; the engine gets the session's own
    wanted = asked.get("max_tokens")
    call["max_tokens"] = min(wanted, cap) if type(wanted) is int and wanted > 0 else cap
    call.update(NON_POLICY_SAMPLING)
    return call


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(body)  # half a surrogate pair, which JavaScript writes
        except (ValueError, RecursionError):
            raise MalformedCallError("body must be JSON") from None
    _demand(isinstance(value, dict), "body must be a JSON object")
    return value


def _listed(asked: Mapping[str, Any], name: str, item: Callable[[Any], dict[str, Any]], most: int) -> list[Any]:
    values = asked.get(name)
    if not isinstance(values, list) or not 0 < len(values) <= most:
        raise MalformedCallError(f"{name} must be a list of 1 to {most}")
    return [item(value) for value in values]


def _message(value: Any) -> dict[str, Any]:
    _demand(isinstance(value, dict) and value.get("role") in ROLES, f"a message must have a role of {', '.join(ROLES)}")
    message = {"role": value["role"], "content": _content(value.get("content"))}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if value.get(name) is not None:
            message[name] = _text(value[name], name)
    if value.get("tool_calls"):
        message["tool_calls"] = _listed(value, "tool_calls", _tool_call, MAX_TOOLS)
    return message


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    _demand(isinstance(value, list) and len(value) <= MAX_MESSAGES, "content must be a text or a list of texts")
    return [_text_part(part) for part in value]


def _text_part(value: Any) -> dict[str, Any]:
    """Nothing but text: an image may be an address that the engine would fetch."""
    _demand(isinstance(value, dict) and value.get("type") == "text", "a part of content must be of type text")
    return {"type": "text", "text": _text(value.get("text"), "text")}


def _tool_call(value: Any) -> dict[str, Any]:
    _demand(isinstance(value, dict) and isinstance(value.get("function"), dict), "a tool call must have a function")
    asked = value["function"]
    function = {name: _text(asked.get(name), name) for name in ("name", "arguments")}
    return {"id": _text(value.get("id"), "id"), "type": "function", "function": function}


def _tool(value: Any) -> dict[str, Any]:
    _demand(isinstance(value, dict) and isinstance(value.get("function"), dict), "a tool must have a function")
    asked = value["function"]
    function: dict[str, Any] = {"name": _text(asked.get("name"), "name")}
    if asked.get("description") is not None:
        function["description"] = _text(asked["description"], "description")
    if asked.get("parameters") is not None:
        _demand(isinstance(asked["parameters"], dict), "parameters of a tool must be an object")
        function["parameters"] = asked["parameters"]
    return {"type": "function", "function": function}


def _text(value: Any, name: str) -> str:
    _demand(isinstance(value, str), f"{name} must be a text")
    return value


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise MalformedCallError(otherwise)
