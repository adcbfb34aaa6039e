"""FAKE of the policy server: answers as vLLM 0.31 does, with token ids and log-probabilities, from a script.

Not a model. One token a byte of a plain rendering of the conversation, so that a later prompt starts with the earlier
one and its completion, exactly as a chat template that keeps its prefix does. Standard library only:
``python policy.py PORT COMMAND...`` calls ``bash`` once for each COMMAND and then says that it is done. ``FAULT``
in the environment bends the answers in one named way, for the checks of the capture.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

LOGPROB = -0.25
DONE = "Done."


def render_message(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = "".join(
        render_call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    )
    return f"<|im_start|>{message['role']}\n{content}{calls}<|im_end|>\n"


def render_call(name: str, arguments: dict[str, Any]) -> str:
    listed = ", ".join(f"{key}={json.dumps(value)}" for key, value in sorted(arguments.items()))
    return f"<|tool_call_start|>[{name}({listed})]<|tool_call_end|>"


def render_prompt(request: dict[str, Any]) -> str:
    tools = json.dumps(request.get("tools") or [], sort_keys=True)
    return tools + "".join(render_message(message) for message in request["messages"]) + "<|im_start|>assistant\n"


def answer(request: dict[str, Any], commands: list[str]) -> tuple[dict[str, Any], str]:
    """The next assistant message of the script, and the text that it was sampled as."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    if not request.get("tools") or turn >= len(commands):
        return {"role": "assistant", "content": DONE, "tool_calls": []}, DONE
    arguments = {"command": commands[turn], "description": "step"}
    call = {
        "id": f"call_{turn}",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps(arguments)},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}, render_call("bash", arguments)


def completion(request: dict[str, Any], commands: list[str], fault: str = "") -> dict[str, Any]:
    message, sampled = answer(request, commands)
    prompt_ids = list(render_prompt(request).encode())
    token_ids = list((sampled + "<|im_end|>\n").encode())
    scale = 1.0 / (request.get("temperature") or 1.0)
    logprobs = [
        {
            "token": f"token_id:{token}",
            "logprob": LOGPROB,
            "bytes": None,
            # A fixed gap over the temperature, as processed log-probabilities have it.
            "top_logprobs": [
                {"token": "token_id:1", "logprob": -1.0 * scale},
                {"token": "token_id:2", "logprob": -3.0 * scale},
            ]
            if request.get("top_logprobs")
            else [],
        }
        for token in token_ids
    ]
    finish = "tool_calls" if message["tool_calls"] else "stop"
    response: dict[str, Any] = {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": {"content": logprobs},
                "finish_reason": finish,
                "token_ids": token_ids,
            }
        ],
        "prompt_token_ids": prompt_ids,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(prompt_ids) + len(token_ids),
            "prompt_tokens_details": None,
        },
    }
    if fault and request.get("tools"):
        FAULTS[fault](response)
    return response


def _ids_in_text_only(response: dict[str, Any]) -> None:
    response["choices"][0]["token_ids"] = None
    response["prompt_token_ids"] = None


def _no_ids(response: dict[str, Any]) -> None:
    _ids_in_text_only(response)
    response["choices"][0]["logprobs"] = None


def _short_logprobs(response: dict[str, Any]) -> None:
    response["choices"][0]["logprobs"]["content"].pop()


def _other_id(response: dict[str, Any]) -> None:
    response["choices"][0]["logprobs"]["content"][1]["token"] = "token_id:7"


def _usage(response: dict[str, Any]) -> None:
    response["usage"]["completion_tokens"] += 1


def _empty(response: dict[str, Any]) -> None:
    response["choices"][0] |= {
        "message": {"role": "assistant", "content": "", "tool_calls": []},
        "token_ids": [],
        "logprobs": {"content": []},
        "finish_reason": "stop",
    }
    response["usage"]["completion_tokens"] = 0


def _cut(response: dict[str, Any]) -> None:
    response["choices"][0]["finish_reason"] = "length"


FAULTS = {
    "ids_in_text_only": _ids_in_text_only,
    "no_ids": _no_ids,
    "short_logprobs": _short_logprobs,
    "other_id": _other_id,
    "usage": _usage,
    "empty": _empty,
    "cut": _cut,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    commands: ClassVar[list[str]] = []
    requests: ClassVar[list[dict[str, Any]]] = []
    model = "policy"

    def do_GET(self) -> None:
        if self.path == "/requests":
            self._reply(self.requests)
        else:
            self._reply({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({**request, "received_s": time.time()})
        self._reply(completion(request, self.commands, os.environ.get("FAULT", "")))

    def _reply(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass


def main() -> None:
    port, *Handler.commands = sys.argv[1:]
    ThreadingHTTPServer(("0.0.0.0", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
