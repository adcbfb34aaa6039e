"""FAKE of the env server: OpenEnv's real websocket and Task API, with rollouts that were written down beforehand."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import CallToolAction, CallToolObservation, MCPEnvironment
from openenv.core.env_server.types import Observation, State
from openenv.harbor.models import HarborRolloutResult, HarborTurn

from services.env.state import WithKey

SPLIT = "smoke/train"
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


def turn(number: int, prompt: list[int], completion: list[int], **differs: Any) -> HarborTurn:
    good: dict[str, Any] = {
        "turn": number, "node_id": f"n{number}", "finish_reason": "tool_calls", "prompt_token_ids": prompt,
        "completion_token_ids": completion, "per_token_logps": [-0.5] * len(completion),
        "loss_mask": [0] * len(prompt) + [1] * len(completion), "n_tools": 8, "sampling_params": SAMPLING,
        "tool_calls": [{"name": "bash", "arguments": '{"command": "ls"}'}],
    }  # fmt: skip
    return HarborTurn(**good | differs)


def result(**differs: Any) -> HarborRolloutResult:
    turns = [turn(0, [1, 2, 3], [4, 5]), turn(1, [1, 2, 3, 4, 5, 6], [7], finish_reason="stop", tool_calls=[])]
    good: dict[str, Any] = {
        "ok": True, "reward": 1.0, "rollout_type": "train", "turns": turns, "n_turns": 2, "n_trainable_tokens": 3,
        "atif": "match", "wall_s": 12.5,
    }  # fmt: skip
    return HarborRolloutResult(**good | differs)


class FakeHarborServer:
    """Serves until ``stop``. ``answer`` maps the arguments of a call to a result, an exception, or seconds to wait.
    ``key``: of env's control plane, which the real gate then asks for."""

    def __init__(
        self, instructions: list[str], answer: Callable[[dict[str, Any]], Any], port: int = 0, key: str = ""
    ) -> None:
        self.calls: list[dict[str, Any]] = []
        self._answer = answer
        environment = partial(FakeHarborEnvironment, instructions, self._run_rollout)
        app = create_fastapi_app(
            environment, CallToolAction, CallToolObservation, max_concurrent_envs=16, env_name="harbor_env"
        )
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        served = WithKey(app, key) if key else app
        self._server = uvicorn.Server(uvicorn.Config(served, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    async def _run_rollout(self, call: dict[str, Any]) -> str:
        self.calls.append(call)
        found = self._answer(call)
        if isinstance(found, float):
            await asyncio.sleep(found)
            found = result()
        if isinstance(found, Exception):
            raise found
        return str(found.model_dump_json())


class FakeHarborEnvironment(MCPEnvironment):
    """One session, as OpenEnv makes it: the tool ``run_rollout`` and the tasks."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, instructions: list[str], run: Callable[[dict[str, Any]], Awaitable[str]]) -> None:
        mcp = FastMCP("fake")

        @mcp.tool
        async def run_rollout(
            split: str = "", task_index: int = 0, harness: str = "", sandbox: str = "", reward_key: str = "",
            keep_sandbox: bool = False, force_build: bool = False, llm_url: str = "", model: str = "",
            api_key: str = "", auth_header: str = "", agent_timeout_sec: float = 0.0, agent_step_limit: int = 0,
            sampling: dict[str, Any] | None = None, purpose: str = "auto",
        ) -> str:  # fmt: skip
            return await run({name: value for name, value in locals().items() if name != "run"})

        super().__init__(mcp)
        self._instructions = instructions

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=None)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=None)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return await super().step_async(action, timeout_s=timeout_s or 60.0, **kwargs)

    @property
    def state(self) -> State:
        return State()

    def list_splits(self) -> list[dict[str, Any]]:
        return [{"name": SPLIT, "num_tasks": len(self._instructions)}]

    def num_tasks(self, split: str) -> int:
        return len(self._instructions)

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return [self.get_task(split, index) for index in range(len(self._instructions))[start:stop]]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        name = f"task-{index}"
        return {"index": index, "task_id": name, "task_name": name, "instruction": self._instructions[index]}
