"""vLLM's control plane over HTTP. Each call names its phase and has its own time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from services.weight_sync.errors import WeightSyncError

POLL_S = 0.5
CONTROL_TIMEOUT_S = 10.0
"""For calls that wait for at most one decode step."""
MARGIN_S = 5.0
"""What a call waits beyond the server's own limit, so that the server's error arrives and not ours."""


class PolicyServer:
    """The endpoints of ``vllm serve`` in development mode that a weight sync needs.

    Args: url: as ``http://policy:8000``. model: the served model's name, for scoring.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/")
        self.model = model
        # A connection a call: vLLM's server closes one after an error and after 5 s without a request, and a call
        # that meets the closing (the resume after a failed merge, say) would be lost.
        self._http = httpx.Client(base_url=self.url, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def host(self) -> str:
        return httpx.URL(self.url).host

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 80

    def close(self) -> None:
        self._http.close()

    def wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.check_health("wait for the server")
                return
            except WeightSyncError as error:
                if time.monotonic() > deadline:
                    problem = f"not there after {timeout_s:g} s: {error.problem}"
                    raise WeightSyncError(self.url, error.phase, problem) from None
            time.sleep(POLL_S)

    def check_health(self, phase: str = "ask for its health") -> None:
        self._call("GET", "/health", phase, CONTROL_TIMEOUT_S)

    def is_paused(self) -> bool:
        return bool(self._json("GET", "/is_paused", "ask whether it is paused", CONTROL_TIMEOUT_S)["is_paused"])

    def pause(self, timeout_s: float) -> None:
        """Stop scheduling; running requests are kept. Their blocks and the prefix and state caches are dropped.

        ``clear_cache`` preempts the running requests and resets the prefix cache once the engine is idle, so each
        kept request is computed again from its tokens under the new weights, and no block of the old policy is
        found by a later one. (The endpoint's help says the flag is ignored for mode=keep; the engine obeys it.)
        """
        self._call("POST", "/pause", "pause", timeout_s, params={"mode": "keep", "clear_cache": "true"})

    def resume(self) -> None:
        self._call("POST", "/resume", "resume", CONTROL_TIMEOUT_S)

    def world_size(self) -> int:
        """Workers that join the group: tensor x pipeline x data parallel."""
        return int(self._json("GET", "/get_world_size", "ask for its world size", CONTROL_TIMEOUT_S)["world_size"])

    def init_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        body = {"init_info": init_info}
        self._call("POST", "/init_weight_transfer_engine", "connect", timeout_s, json=body)

    def stage(self, info: dict[str, Any], timeout_s: float) -> None:
        """The workers begin to receive. Args: info: of ``LoraFactorsEngine.stage``."""
        self._collective("stage", "weight_sync_stage", timeout_s, info)

    def apply(self, version: int, staged_timeout_s: float, timeout_s: float, resume: bool = True) -> dict[str, Any]:
        """Pause, merge what is staged, resume. Returns: what ``endpoint.apply`` returns."""
        body = {"version": version, "timeout_s": staged_timeout_s, "resume": resume}
        answer: dict[str, Any] = self._json("POST", "/weight_sync/apply", "apply", timeout_s, json=body)
        return answer

    def reports(self, timeout_s: float) -> list[dict[str, Any]]:
        """``LoraFactorsEngine.report`` of every worker."""
        reports: list[dict[str, Any]] = self._collective("ask for its checksums", "weight_sync_report", timeout_s)
        return reports

    def complete(self, prompt_ids: Sequence[int], max_tokens: int, timeout_s: float) -> tuple[list[int], list[float]]:
        """Greedy continuation: (token ids, their log-probabilities). It may use the prefix cache."""
        choice = self._completion("continue the canary", timeout_s, prompt_ids, max_tokens=max_tokens, logprobs=0)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def score(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Log-probability of each token but the first, given those before it. Never uses the prefix cache."""
        choice = self._completion("score the canary", timeout_s, token_ids, max_tokens=1, prompt_logprobs=0)
        scored = choice["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], scored, strict=True)]

    def _collective(
        self, phase: str, method: str, timeout_s: float, arguments: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of ``worker.WeightSyncWorker`` on every worker."""
        body = {"method": method, "kwargs": arguments or {}}
        results: list[Any] = self._json("POST", "/collective_rpc", phase, timeout_s, json=body)["results"]
        return results

    def _completion(self, phase: str, timeout_s: float, token_ids: Sequence[int], **options: Any) -> dict[str, Any]:
        body = {
            "model": self.model, "prompt": list(token_ids), "temperature": 0, "return_token_ids": True, **options
        }  # fmt: skip
        choice: dict[str, Any] = self._json("POST", "/v1/completions", phase, timeout_s, json=body)["choices"][0]
        return choice

    def _json(self, method: str, path: str, phase: str, timeout_s: float, **options: Any) -> Any:
        return self._call(method, path, phase, timeout_s, **options).json()

    def _call(self, method: str, path: str, phase: str, timeout_s: float, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, timeout=timeout_s, **options)
        except httpx.TimeoutException:
            raise WeightSyncError(self.url, phase, f"no answer to {path} within {timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise WeightSyncError(self.url, phase, f"{path}: {error or type(error).__name__}") from None
        if response.status_code == 404:
            raise WeightSyncError(
                self.url, phase,
                f"it has no {path}; the policy must run with VLLM_SERVER_DEV_MODE=1 (services.policy does)",
            )  # fmt: skip
        if response.status_code != 200:
            raise WeightSyncError(self.url, phase, f"{path} answered {response.status_code}: {response.text[:2000]}")
        return response
