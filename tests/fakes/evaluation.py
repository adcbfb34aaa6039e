"""FAKES for tests of the evaluator: adapters without a model, and an env server without sandboxes."""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.common.recipe import Recipe
from services.evaluator import rollout


def write_adapter(folder: Path, cfg: Recipe, *, fill: int = 1, layers: int = 2, **config: Any) -> None:
    """PEFT's two files of an adapter of the recipe's shape; ``fill`` is the byte that all B are made of."""
    tensors: dict[str, bytes] = {}
    for layer in range(layers):
        for module in cfg.lora.target_modules:
            prefix = f"base_model.model.model.layers.{layer}.block.{module}"
            tensors[f"{prefix}.lora_A.weight"] = b"\3" * 16
            tensors[f"{prefix}.lora_B.weight"] = bytes([fill]) * 16
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    values = {
        "peft_type": "LORA",
        "r": cfg.lora.r,
        "lora_alpha": cfg.lora.alpha,
        "target_modules": list(cfg.lora.target_modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(values | config))


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def result(**changes: Any) -> SimpleNamespace:
    """A rollout's result in the fields of OpenEnv's HarborRolloutResult: two turns, graded 1, all in order."""
    turn = SimpleNamespace(
        text="",
        tool_calls=[{"name": "bash", "arguments": "{}"}],
        completion_token_ids=[5, 6, 7],
        sampling_params={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
    )
    last = SimpleNamespace(**{**vars(turn), "tool_calls": [], "text": "Done.", "completion_token_ids": [8]})
    values = {
        "reward": 1.0,
        "error": None,
        "exception_type": None,
        "rollout_type": "eval",
        "capture_level": "tokens",
        "n_trainable_tokens": 0,
        "findings": [],
        "turns": [turn, last],
        "wall_s": 12.5,
        "trial_name": "oe-lines-a-1",
    }
    return SimpleNamespace(**values | changes)


@dataclass
class FakeEnv:
    """FAKE of the env server, at the seam of ``rollout.Client``: no socket, scripted verdicts."""

    tasks: list[Any]
    verdict: Callable[[str, str, int], Any]
    """(model, task, how many times this pair ran before) -> a result, or an exception to raise."""
    suite: str = "smoke/heldout"
    calls: list[dict[str, Any]] = field(default_factory=list)
    open_clients: int = 0
    most_at_once: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def connect(self) -> rollout.Client:
        with self._lock:
            self.open_clients += 1
        return FakeClient(self)

    def ran(self) -> Counter[tuple[str, str]]:
        return Counter((call["model"], call["task"]) for call in self.calls)


@dataclass
class FakeClient:
    env: FakeEnv

    def splits(self) -> list[dict[str, Any]]:
        return [{"name": "smoke/train", "num_tasks": 1}, {"name": self.env.suite, "num_tasks": len(self.env.tasks)}]

    def num_tasks(self, split: str = "") -> int:
        return len(self.env.tasks)

    def get_task_range(self, split: str, start: int = 0, stop: int = 20) -> list[Any]:
        # The other way round than the suite: an index must be looked up.
        shown = [
            SimpleNamespace(index=i, task_name=task.name, instruction=task.instruction.strip())
            for i, task in enumerate(reversed(self.env.tasks))
        ]
        return shown[start:stop]

    def run_rollout(self, **arguments: Any) -> Any:
        name = list(reversed(self.env.tasks))[arguments["task_index"]].name
        with self.env._lock:
            before = self.env.ran()[arguments["model"], name]
            self.env.calls.append({**arguments, "task": name})
            self.env.most_at_once = max(self.env.most_at_once, self.env.open_clients)
        verdict = self.env.verdict(arguments["model"], name, before)
        if isinstance(verdict, BaseException):
            raise verdict
        wanted = dict(arguments["eval_sampling"])
        for turn in verdict.turns:
            turn.sampling_params = wanted if turn.sampling_params is not None else {}
        return verdict

    def close(self) -> None:
        with self.env._lock:
            self.env.open_clients -= 1
