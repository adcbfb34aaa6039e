"""FAKE of ``policy-eval``: the LoRA and canary routes of vLLM 0.31, without a model. Standard library only.

Log-probabilities are made from what answers: the base has fixed ones, an adapter those plus a shift that is read
from its weights, so that an adapter of zeros answers as the base does. ``deaf`` names answer as the base although
they are loaded, as a server would that matched none of their modules; ``deaf_to`` is part of the path of modules that
are matched in no adapter.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE_NAME = "policy"
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="policy"}} {running:.1f}
vllm:num_requests_waiting{{engine="0",model_name="policy"}} 0.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="policy",reason="capacity"}} 7.0
"""


class FakePolicyEval:
    """A server on a free loopback port; ``url`` says where."""

    def __init__(self) -> None:
        self.adapters: dict[str, Path] = {}
        self.loads: list[dict[str, Any]] = []
        """Of adapters; the evaluator's probes are in ``probes``."""
        self.probes: list[str] = []
        self.unloads: list[str] = []
        self.deaf: set[str] = set()
        self.deaf_to: str | None = None
        self.noise = 0.0
        """Added to every second answer: two answers of one model differ by it."""
        self.healthy = True
        self.requests_running = 0
        self._answers = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    self._reply({}, 200 if fake.healthy else 503)
                elif self.path == "/metrics":
                    self._reply(METRICS.format(running=fake.requests_running))
                elif self.path == "/v1/models":
                    self._reply({"object": "list", "data": fake.cards()})
                else:
                    self._reply({"error": {"message": "not found"}}, 404)

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                value, status = fake.post(self.path, request)
                self._reply(value, status)

            def _reply(self, value: Any, status: int = 200) -> None:
                body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def cards(self) -> list[dict[str, Any]]:
        base = {"id": BASE_NAME, "object": "model", "parent": None}
        return [base, *({"id": name, "object": "model", "parent": BASE_NAME} for name in self.adapters)]

    def post(self, path: str, request: dict[str, Any]) -> tuple[Any, int]:
        match path:
            case "/v1/load_lora_adapter":
                return self._load(request)
            case "/v1/unload_lora_adapter":
                self.unloads.append(request["lora_name"])
                if self.adapters.pop(request["lora_name"], None) is None:
                    return {"error": {"message": "cannot be found"}}, 404
                return "Success", 200
            case "/v1/completions":
                return self._complete(request)
        return {"error": {"message": "not found"}}, 404

    def _load(self, request: dict[str, Any]) -> tuple[Any, int]:
        if request["lora_name"].startswith("probe-"):
            self.probes.append(request["lora_name"])
        else:
            self.loads.append(request)
        name, path = request["lora_name"], Path(request["lora_path"])
        if name in self.adapters:
            return {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}, 400
        if not (path / "adapter_model.safetensors").is_file():
            return {"error": {"message": f"No adapter found for {path}"}}, 404
        self.adapters[name] = path
        return "Success", 200

    def _complete(self, request: dict[str, Any]) -> tuple[Any, int]:
        model = request["model"]
        if model != BASE_NAME and model not in self.adapters:
            return {"error": {"message": f"The model `{model}` does not exist."}}, 404
        shift = 0.0 if model == BASE_NAME or model in self.deaf else _shift(self.adapters[model], self.deaf_to)
        self._answers += 1
        shift += self.noise * (self._answers % 2)
        top = [{f"token_id:{i}{j}": -1.0 - i / 8 - j + shift for j in range(5)} for i in range(request["max_tokens"])]
        logprobs = {
            "tokens": [max(found, key=lambda token: found[token]) for found in top],
            "token_logprobs": [max(found.values()) for found in top],
            "top_logprobs": top,
        }
        return {"choices": [{"index": 0, "text": "x", "logprobs": logprobs}]}, 200


def _shift(folder: Path, deaf_to: str | None) -> float:
    """0 for an adapter whose B are all zero; else something that depends on its bytes."""
    data = (folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    total = 0
    for key, entry in header.items():
        if ".lora_B." in key and not (deaf_to and deaf_to in key):
            start, end = entry["data_offsets"]
            total += sum(data[8 + length + start : 8 + length + end])
    return total / 1e4
