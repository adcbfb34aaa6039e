"""The tool-call parser inside vLLM's real API server: it answers ``/health`` while long arguments are parsed.

``vllm launch render --enable-scale-out`` is the API server without an engine. Its ``derender`` route takes sampled
token ids through detokenizer and parser as a chat completion does, so the text can be chosen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.policy.argv import TOOL_PARSER, TOOL_PARSER_PLUGIN
from services.policy.lfm2_calls import TOOL_CALL_END, TOOL_CALL_START
from tests.contract.conftest import free_ports, serving

MODEL = Path(__file__).parents[3] / "data" / "models" / "tiny-lfm2"
ARGUMENT = "echo \"a 'quoted' b\" && " * 3200
"""74 kB, and every second quote in it is one that the surrounding argument's own quotes do not escape."""
ANSWERS = 16

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(MODEL), "--enable-scale-out",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--dtype", "float32",
        "--max-model-len", str(2 * len(ARGUMENT)), "--disable-uvicorn-access-log",
        "--enable-auto-tool-choice", "--tool-parser-plugin", str(TOOL_PARSER_PLUGIN), "--tool-call-parser", TOOL_PARSER,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    # The model's own limit is shorter; nothing is computed with it here.
    variables = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_NO_USAGE_STATS": "1"}
    with serving(command, variables, url, tmp_path_factory.mktemp("api") / "vllm.log"):
        yield url


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def derender(api: str, token_ids: list[int]) -> dict[str, Any]:
    """The message that vLLM answers a chat request with, when these tokens were sampled."""
    body = {
        "model": "policy",
        "chat_request": {"model": "policy", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS},
        "generate_response": {"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": "stop"}]},
    }
    response = httpx.post(f"{api}/v1/chat/completions/derender", json=body, timeout=60)
    assert response.status_code == 200, response.text[:2000]
    return response.json()["choices"][0]["message"]


def test_health_is_answered_while_long_arguments_full_of_inner_quotes_are_parsed(
    api: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = f"{TOOL_CALL_START}[bash(command='{ARGUMENT}')]{TOOL_CALL_END}"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as http:
        answers = [pool.submit(derender, api, token_ids) for _ in range(ANSWERS)]  # one after the other
        waits = []
        while not answers[-1].done():
            asked = time.monotonic()
            assert http.get(f"{api}/health").status_code == 200
            waits.append(time.monotonic() - asked)
    for answer in answers:
        (call,) = answer.result()["tool_calls"]
        assert call["function"]["name"] == "bash"
        assert json.loads(call["function"]["arguments"]) == {"command": ARGUMENT}
    print(f"/health answered {len(waits)} times meanwhile, after at most {max(waits) * 1e3:.0f} ms")
    # One that holds the API up is met after nearly every parse; what is wanted is hundreds of answers.
    assert len(waits) >= 2 * ANSWERS, "the parser holds up the API"
