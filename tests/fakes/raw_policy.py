"""FAKE of the policy server that samples given texts; what the agent gets of them is the project's own parser's work.

``python raw_policy.py PORT TEXT...``: one TEXT a turn, as the model would sample it, markers included, and at the end
``Done.``. The text goes through ``services.policy`` as in vLLM's plugin, with the tools that the request declares; all
else is ``policy.py``, which lies beside this file.
"""

from __future__ import annotations

import json
from typing import Any

import policy

from services.policy.lfm2_calls import Tool
from services.policy.lfm2_stream import CallStream, Output


def answer(request: dict[str, Any], texts: list[str]) -> tuple[dict[str, Any], str]:
    """As ``policy.answer``: the assistant's message, and the text that it was sampled as."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    if not request.get("tools") or turn >= len(texts):
        return {"role": "assistant", "content": policy.DONE, "tool_calls": []}, policy.DONE
    functions = [entry["function"] for entry in request["tools"]]
    stream = CallStream({function["name"]: Tool.from_schema(function["parameters"]) for function in functions})
    output = Output.joined([stream.feed(texts[turn]), stream.finish()])
    calls = [
        {
            "id": f"call_{turn}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(output.calls)
    ]
    return {"role": "assistant", "content": output.content or None, "tool_calls": calls}, texts[turn]


if __name__ == "__main__":
    policy.answer = answer
    policy.main()
