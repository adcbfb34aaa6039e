"""Adapters on their way into ``policy-eval``: snapshot, load under a new name, prove delivery, unload.

The server holds pristine base weights. Its prefix cache is keyed by adapter name, and it may read an adapter's path
again, so every adapter gets a name with its own hash in it and a path that nobody writes to any more.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.common import recipe as recipes
from services.common.errors import NotReadyError
from services.common.recipe import Lora
from services.common.run_dir import CONFIG, WEIGHTS, Checkpoint
from services.evaluator.tensors import TensorFile, TruncatedError

SNAPSHOTS = "adapters"
"""Folder below ``eval/`` of the copy that is loaded."""
METRICS_TIMEOUT_S = 10.0
CANARY_TOKENS = 16
CANARY_PROMPT = (
    "You are a careful engineer. List the files of the working directory, read the one that the question names, "
    "and write the answer to answer.txt. Use the bash tool for every step, one command at a time."
)
ZERO_BYTES = b"\0\x80"
"""All that 0.0 and -0.0 are made of, in any floating-point format."""
_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_FACTOR = re.compile(r"\.(?P<module>[A-Za-z0-9_]+)\.lora_(?P<factor>[AB])\.(?:default\.)?weight$")


Position = tuple[str, list[float]]
"""A generated token, and the log-probabilities of the likeliest ones in its place, highest first."""


class AdapterNotReadyError(Exception):
    """The adapter is truncated, changing, or not the one the recipe describes: left for later."""


class NotInEffectError(AdapterNotReadyError):
    """The server took the adapter, and answers as the base does."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A snapshot of a checkpoint's adapter that nobody writes to any more."""

    label: str
    """``checkpoint-N``."""
    name: str
    """Model name in ``policy-eval``: the label and the start of the hash."""
    path: Path
    sha256: str
    zero: bool
    """All B are zero: the adapter is the base, and no canary can tell them apart."""


def snapshot(checkpoint: Checkpoint, into: Path, lora: Lora) -> Adapter:
    """Copy the adapter of a complete checkpoint to ``into/<name>`` and check the copy.

    Raises: AdapterNotReadyError: with what was found.
    """
    label = checkpoint.path.name
    source = checkpoint.path / WEIGHTS
    try:
        before = recipes.file_sha256(source)
        name = f"{label}-{before[:12]}"
        target = into / name
        # A request of a killed evaluator may still read an earlier copy, so a whole one is not written over.
        if not (target / WEIGHTS).is_file() or recipes.file_sha256(target / WEIGHTS) != before:
            target.mkdir(parents=True, exist_ok=True)
            for file in (CONFIG, WEIGHTS):
                shutil.copyfile(checkpoint.path / file, target / file)
    except FileNotFoundError as error:
        raise AdapterNotReadyError(f"{label} has no {Path(error.filename).name}") from None
    if recipes.file_sha256(target / WEIGHTS) != before:
        shutil.rmtree(target)
        raise AdapterNotReadyError(f"{label} changed while it was read")
    try:
        zero = inspect(target, lora)
    except AdapterNotReadyError:
        shutil.rmtree(target)
        raise
    return Adapter(label, name, target, before, zero)


def inspect(folder: Path, lora: Lora) -> bool:
    """Check that the files are whole and hold the recipe's adapter; return whether all B are zero.

    Raises: AdapterNotReadyError: truncated, another rank, a module without its A or B, or a target without any.
    """
    try:
        weights = TensorFile.open(folder / WEIGHTS)
    except TruncatedError as error:
        raise AdapterNotReadyError(str(error)) from None
    config = _read_config(folder / CONFIG)
    if (config.get("r"), config.get("lora_alpha")) != (lora.r, lora.alpha):
        raise AdapterNotReadyError(
            f"r and lora_alpha are {config.get('r')} and {config.get('lora_alpha')}, "
            f"the recipe has {lora.r} and {lora.alpha}"
        )
    factors: dict[str, set[str]] = {}
    modules = set()
    for key in weights.header:
        match = _FACTOR.search(key)
        if match is None:
            raise AdapterNotReadyError(f"tensor {key} is no LoRA factor")
        factors.setdefault(f"{key[: match.start()]}.{match['module']}", set()).add(match["factor"])
        modules.add(match["module"])
    if single := sorted(module for module, found in factors.items() if found != {"A", "B"}):
        raise AdapterNotReadyError(f"{len(single)} modules lack their A or B, {single[0]} first")
    if modules != set(lora.target_modules):
        raise AdapterNotReadyError(f"its modules are {sorted(modules)}, the recipe has {sorted(lora.target_modules)}")
    return not any(weights.read(key).strip(ZERO_BYTES) for key in weights.header if ".lora_B." in key)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise AdapterNotReadyError(f"{path.name} is not valid JSON") from None
    return value if isinstance(value, dict) else {}


class PolicyEval:
    """``policy-eval``, vLLM with LoRA on pristine base weights."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url.rstrip("/")
        self._client = client

    def models(self) -> dict[str, str | None]:
        """Served model -> its base, None for the base itself."""
        cards = self._get("/v1/models")["data"]
        return {card["id"]: card.get("parent") for card in cards}

    def base_name(self) -> str:
        """Raises: NotReadyError: not exactly one base model is served."""
        bases = [name for name, parent in self.models().items() if parent is None]
        if len(bases) != 1:
            raise NotReadyError(f"{self.url} serves {len(bases)} base models ({bases}); policy-eval serves exactly one")
        return bases[0]

    def load(self, adapter: Adapter) -> float:
        """Load the adapter and prove that it is the one that answers.

        Returns: largest absolute difference of the canary's log-probabilities from the base's, in nats.
        Raises: AdapterNotReadyError: the server refuses it. NotInEffectError: it answers as the base does.
        """
        if adapter.name not in self.models():
            body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
            response = self._client.post(f"{self.url}/v1/load_lora_adapter", json=body)
            if response.is_error:
                raise AdapterNotReadyError(f"{adapter.label}: the server refuses it: {response.text[:400]}")
        difference, noise = self._canary(adapter.name)
        # A stray response of the base, or an adapter of which no module matched, gives the base's own values again.
        if difference <= noise and not adapter.zero:
            self.unload(adapter.name)
            raise NotInEffectError(
                f"{adapter.label}: canary log-probabilities differ from the base's by {difference:.3g}, and the "
                f"base's from themselves by {noise:.3g}; the adapter is not in effect"
            )
        return difference

    def unload(self, name: str) -> None:
        """Forget the adapter; one that is not loaded is no error."""
        response = self._client.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": name})
        if response.status_code != httpx.codes.NOT_FOUND:
            response.raise_for_status()

    def forget(self) -> None:
        """Unload every adapter: one that a killed evaluator left behind takes no further request."""
        for name, parent in self.models().items():
            if parent is not None:
                self.unload(name)

    def is_idle(self) -> bool:
        """Whether no request is running or waiting.

        Until then an adapter's files must stay, unloaded or not: vLLM reads them again when a request in flight
        finds its adapter evicted, and its engine ends if it cannot.
        """
        response = self._client.get(f"{self.url}/metrics", timeout=METRICS_TIMEOUT_S)
        response.raise_for_status()
        return not any(float(count) for count in _IN_FLIGHT.findall(response.text))

    def _canary(self, name: str) -> tuple[float, float]:
        """Largest difference of the adapter from the base, and of the base from itself (batching may move it)."""
        base = self.base_name()
        first, again, adapted = self._logprobs(base), self._logprobs(base), self._logprobs(name)
        return _distance(first, adapted), _distance(first, again)

    def _logprobs(self, model: str) -> list[Position]:
        """The likeliest continuations at each of the first tokens of a greedy answer to the canary prompt.

        Not the prompt's own log-probabilities: computing those while another adapter's request is in the batch ends
        vLLM 0.31's engine (its LoRA logits take one row a request).
        """
        body = {
            "model": model, "prompt": CANARY_PROMPT, "max_tokens": CANARY_TOKENS, "temperature": 0, "ignore_eos": True,
            "logprobs": 5,
        }  # fmt: skip
        response = self._client.post(f"{self.url}/v1/completions", json=body)
        response.raise_for_status()
        found = response.json()["choices"][0]["logprobs"]
        return [
            (token, sorted(top.values(), reverse=True))
            for token, top in zip(found["tokens"], found["top_logprobs"], strict=True)
        ]

    def _get(self, path: str) -> Any:
        response = self._client.get(f"{self.url}{path}")
        response.raise_for_status()
        return response.json()


def _distance(a: list[Position], b: list[Position]) -> float:
    """Largest absolute difference, up to the first token that differs: after it the two have other prompts."""
    largest = 0.0
    for (token_a, top_a), (token_b, top_b) in zip(a, b, strict=True):
        largest = max([largest, *(abs(x - y) for x, y in zip(top_a, top_b, strict=False))])
        if token_a != token_b:
            break
    return largest
