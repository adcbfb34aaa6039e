"""Fixtures for the contract tests of more than one image: heavy imports stay inside the functions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from services.common.recipe import Recipe

START_LIMIT_S = 600


@dataclass(frozen=True)
class VllmServer:
    """A real ``vllm serve`` on the CPU, started with the project's own argv and environment."""

    url: str
    recipe: Recipe
    model: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The training policy on a small random LFM2. One for the session: it takes over a minute to start."""
    from services.policy.argv import argv, environment

    models = tmp_path_factory.mktemp("models")
    make_random_lfm2(models / "random-lfm2")
    port, sync_port = free_ports(2)
    recipe = small_recipe(sync_port)
    os.environ["MODELS_DIR"] = str(models)
    command = argv(recipe, "train", "cpu", python=sys.executable)
    command[command.index("--port") + 1] = str(port)
    command[command.index("--host") + 1] = "127.0.0.1"
    url = f"http://127.0.0.1:{port}"
    with serving(command, environment(recipe, "train", "cpu"), url, models / "vllm.log") as process:
        yield VllmServer(url, recipe, models / "random-lfm2", process)


@contextlib.contextmanager
def serving(command: list[str], variables: dict[str, str], url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, from when it is healthy. Args: variables: set over this process's own environment."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        wait_until_healthy(url, process, log)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def small_recipe(sync_port: int) -> Recipe:
    from services.common.recipe import Recipe

    return Recipe.model_validate(
        {
            "run": {"name": "contract"},
            "model": {"id": "random-lfm2", "source": "local", "dtype": "float32", "max_model_len": 2048},
            "lora": {"r": 4, "alpha": 8},
            "sampling": {"max_completion_tokens": 1024},
            "tasks": {"train": "a", "heldout": "b"},
            "rollout": {"max_inflight": 8},
            "policy": {"max_num_seqs": 8, "omp_threads": 1, "enforce_eager": True},
            "weight_sync": {
                "transport": "gloo", "port": sync_port, "canary_every": 2, "canary_mean_abs_logprob_diff": 1e-4,
                "canary_max_abs_logprob_diff": 1e-4,
                "init_timeout_s": 60, "pause_timeout_s": 30, "transfer_timeout_s": 20,
            },
        }
    )  # fmt: skip


def make_random_lfm2(folder: Path) -> None:
    """Convolution and attention layers, byte tokenizer, 0.5 M weights large enough that each of them matters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|startoftext|>", "<|im_end|>"]
    pieces = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    ).save_pretrained(folder)
    hidden = 128  # two heads of 64: vLLM's CPU attention takes no smaller head
    torch.manual_seed(0)
    Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=320, hidden_size=hidden, intermediate_size=2 * hidden, block_auto_adjust_ff_dim=False,
            num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, conv_L_cache=3,
            layer_types=["conv", "full_attention"] * 2, max_position_embeddings=4096, initializer_range=0.15,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).save_pretrained(folder)  # fmt: skip
    config = folder / "config.json"
    # transformers does not write what vLLM reads.
    sizes = {"conv_dim": hidden, "conv_dim_out": hidden, "block_dim": hidden, "block_ff_dim": 2 * hidden}
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start (exit code {process.poll()}):\n" + log.read_text(errors="replace")[-6000:])
