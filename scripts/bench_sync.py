"""``python -m scripts.bench_sync run``: how long a weight sync stops generation, against TRL's own, on two GPUs.

GPU 1 serves a random model of LFM2.5-2.6B's shapes under load; this process is the trainer on GPU 0: the same model
with a PEFT adapter whose factors change before each sync. First our factor sync, after each of which the checksums of
all served weights are compared with the trainer's own merge; then both ends are killed in mid-transfer; then, in a new
server, TRL's own stream of all merged weights; then our sync with trainer and server on one GPU. Prints a table and
writes all figures as JSON to the folder ``$OUT`` when that is set.

Needs the packages of the trainer's and the policy's cuda images in one environment, two GPUs and 30 GB of disk.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console
from rich.table import Table

from services.common import recipe as recipes
from services.common.errors import NotReadyError, StackError
from services.common.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/models/tiny-lfm2"
MODEL = "lfm2.5-2.6b-random"
URL = "http://127.0.0.1:8000"
CONVOLUTIONS, ATTENTIONS = 20, 10
SHAPES: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 10752, "num_hidden_layers": 30,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": False,
    "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "max_position_embeddings": 128000,
    "layer_types": ["full_attention" if i % 3 == 2 else "conv" for i in range(30)],
}  # fmt: skip
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 512
SETTLE_S = 1.0
"""Between syncs: the server computes the kept requests again after each, and a real step takes longer."""
START_LIMIT_S = 420.0
ERROR_LIMIT_S = 30.0
PARALLEL = ("tensor", "data")
"""The server has both GPUs, one of them beside the trainer; so the factors go through the processor's memory."""
SHARED = ("one_gpu", *PARALLEL)
"""Phases in which the server uses the trainer's GPU."""
SHARED_SYNCS = 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)
Work = Annotated[Path, typer.Option(help="Scratch folder for the model, logs and load figures.")]


@app.command()
def run(
    work: Work = Path("/tmp/bench_sync"),
    syncs: Annotated[int, typer.Option(min=2)] = 50,
    in_flight: Annotated[int, typer.Option(min=1)] = 16,
    phases: Annotated[
        str, typer.Option(help="Of merge, factors, failures, full, one_gpu, tensor, data; joined by commas.")
    ] = "merge,factors,failures,full,one_gpu",
    compilation_config: Annotated[str, typer.Option(help="JSON, passed to vLLM.")] = "",
) -> None:
    """Build the model, start the servers, measure."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ["MODELS_DIR"] = str(work)
    wanted = phases.split(",")
    bench = Bench(work, syncs, in_flight, compilation_config)
    build_model(work / MODEL)
    model = trained_model(work / MODEL, bench.recipe("factors"))
    if "merge" in wanted:
        bench.note("merge", merge_alone(model, bench.recipe("factors")))
    if "factors" in wanted or "failures" in wanted:
        with bench.server("factors") as server:
            if "factors" in wanted:
                with bench.load("factors"):
                    bench.note("factors", factor_syncs(model, bench.recipe("factors"), syncs))
            if "failures" in wanted:
                with bench.load("trainer_killed"):
                    bench.attempt("trainer_killed", lambda: trainer_killed(model, bench.recipe("factors")))
                    bench.attempt(
                        "trainer_killed_on_the_wire", lambda: killed_on_the_wire(model, bench.recipe("factors"))
                    )
                bench.attempt("server_killed", lambda: server_killed(model, bench.recipe("factors"), server))
    if "full" in wanted:
        with bench.server("full"), bench.load("full"):
            bench.note("full", full_syncs(model, bench.recipe("full"), syncs))
    for mode in SHARED:
        if mode in wanted:
            with bench.server(mode), bench.load(mode):
                bench.note(mode, factor_syncs(model, bench.recipe(mode), SHARED_SYNCS))
    bench.print_table()


class Bench:
    """What all phases share: settings, the result so far, the servers and the load on them."""

    def __init__(self, work: Path, syncs: int, in_flight: int, compilation_config: str) -> None:
        self._work, self._in_flight, self._compilation_config = work, in_flight, compilation_config
        self.result: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"), "argv": sys.argv[1:], "syncs": syncs,
            "in_flight": in_flight, **machine(),
        }  # fmt: skip

    def recipe(self, mode: str) -> Recipe:
        """The recipe with the random model: of two GPUs for ``factors`` and ``full``, of one for ``SHARED``."""
        changes: dict[str, Any] = {"model.id": MODEL, "model.source": "local"}
        if mode in PARALLEL:
            changes[f"policy.{mode}_parallel_size"] = 2
        if mode in SHARED:
            return recipes.load(ROOT / "data/recipes/lfm2.5-2.6b-one-gpu.toml", changes)
        # Leaves room for W0 on the server's GPU, and for a trainer that sends a huge adapter.
        changes |= {"weight_sync.mode": mode, "policy.gpu_memory_utilization": 0.6, "trainer.forward": "adapter"}
        return recipes.load(ROOT / "data/recipes/lfm2.5-2.6b.toml", changes)

    def note(self, name: str, value: Any) -> None:
        """Keep a phase's figures, on disk at once: a later phase may fail."""
        self.result[name] = value
        console.print(name, {key: item for key, item in value.items() if key != "each"})
        (Path(os.environ.get("OUT") or self._work) / "bench_sync.json").write_text(json.dumps(self.result, indent=1))

    def attempt(self, name: str, phase: Callable[[], Any]) -> None:
        """``note`` a phase, or how it failed: what comes after it is still measured."""
        try:
            self.note(name, phase())
        except (StackError, subprocess.TimeoutExpired) as error:
            self.note(name, {"failed": f"{type(error).__name__}: {error}"[:1500]})

    @contextmanager
    def server(self, mode: str) -> Iterator[subprocess.Popen[bytes]]:
        """vLLM on GPU 1, or for ``one_gpu`` on the trainer's, or on both."""
        cfg, log = self.recipe(mode), self._work / f"vllm-{mode}.log"
        gpus = "0" if mode == "one_gpu" else "0,1" if mode in PARALLEL else "1"
        with served(cfg, log, self._compilation_config, gpus) as (process, start_s):
            self.note(f"server_{mode}", {"start_s": start_s})
            yield process

    @contextmanager
    def load(self, name: str) -> Iterator[None]:
        """Completions in a process of their own, so that this one's work does not slow them; figures at the end."""
        path = self._work / f"load-{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "scripts.bench_sync", "load", str(path), "--in-flight", str(self._in_flight)]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            time.sleep(8)  # until all are decoding
            if process.poll() is not None:
                raise NotReadyError(f"the load ended at once, with exit code {process.returncode}")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        self.note(f"load_{name}", json.loads(path.read_text()))

    def print_table(self) -> None:
        ours, full = self.result.get("factors", {}), self.result.get("full", {})
        table = Table("", "LoRA factors: median", "p95", "TRL's full stream: median", "p95", "ratio of medians")
        rows = (
            "pause",
            "drain",
            "reset",
            "merge",
            "end",
            "resume",
            "paused",
            "transfer",
            "wire",
            "apply",
            "total",
            "verify",
        )
        for row in (*rows, "bytes"):
            cells = []
            for side in (ours, full):
                cells += [shown(row, side[row][key]) if row in side else "-" for key in ("median", "p95")]
            if cells.count("-") == len(cells):
                continue
            known = row in ours and row in full
            table.add_row(row, *cells, f"{full[row]['median'] / ours[row]['median']:.1f}x" if known else "-")
        console.print(table)


@contextmanager
def served(
    cfg: Recipe, log: Path, compilation_config: str = "", gpus: str = "1"
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """vLLM as ``services.policy`` starts it, and how long it took; killed at the end.

    Raises: NotReadyError: with the end of its log.
    """
    from services.policy.argv import argv, environment

    device: Literal["cpu", "cuda"] = "cuda" if has_gpu() else "cpu"
    command = argv(cfg, "train", device, python=sys.executable)
    if compilation_config:
        command += ["--compilation-config", compilation_config]
    path = os.pathsep.join([str(plugin(log.parent)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {
        **os.environ,
        **environment(cfg, "train", device),
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": path,
    }
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=variables, stdout=stream, stderr=stream, start_new_session=True)
    try:
        while not healthy():
            if process.poll() is not None or time.monotonic() - started > START_LIMIT_S:
                tail = log.read_text(errors="replace")[-6000:]
                raise NotReadyError(f"vLLM did not come up (exit code {process.poll()}); its log ends:\n{tail}")
            time.sleep(0.5)
        yield process, time.monotonic() - started
    finally:
        kill(process)


# -- the model ---------------------------------------------------------------------------------------------------


def build_model(folder: Path) -> None:
    """Random weights in LFM2.5-2.6B's shapes, with the tiny model's tokenizer stretched to the vocabulary."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    special = {
        key: json.loads((TINY / "config.json").read_text())[f"{key}"] for key in ("bos_token_id", "eos_token_id")
    }
    config = Lfm2Config(**SHAPES, **special, pad_token_id=0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        model = Lfm2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="20GB")
    written = json.loads((folder / "config.json").read_text())
    # vLLM's LFM2 reads these; transformers does not write them.
    width = SHAPES["hidden_size"]
    written |= {
        "conv_dim": width, "conv_dim_out": width, "block_dim": width, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"<unused-{i}>": i for i in range(SHAPES["vocab_size"]) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def trained_model(folder: Path, cfg: Recipe) -> Any:
    """The trainer's model on GPU 0 with its adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.cuda.set_device(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")
    lora = LoraConfig(
        r=cfg.lora.r, lora_alpha=cfg.lora.alpha, target_modules=list(cfg.lora.target_modules), task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora)


def train_a_little(model: Any, step: int) -> None:
    """Other factors, as after an optimizer step."""
    import torch

    generator = torch.Generator("cuda:0").manual_seed(step)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 1e-3, generator=generator)
    torch.cuda.synchronize(0)


# -- what is measured --------------------------------------------------------------------------------------------


def merge_alone(model: Any, cfg: Recipe) -> dict[str, Any]:
    """All targets on GPU 0: the grouped kernels against the loop that defines their bits, and against PEFT's merge."""
    import torch

    from services.weight_sync import factors, grouped, names
    from services.weight_sync.checksum import checksum
    from services.weight_sync.merge import reference

    train_a_little(model, 0)
    pairs = factors.collect(names.lora_factors(model))
    pairs = {name: (a.bfloat16(), b.bfloat16()) for name, (a, b) in pairs.items()}
    base = {name: names.base_weight(model, name) for name in pairs}
    out = {name: torch.empty_like(weight) for name, weight in base.items()}

    def group() -> Any:
        return grouped.Group([grouped.Matrix(base[name], a, b, out[name]) for name, (a, b) in pairs.items()])

    def loop() -> None:
        for name, (a, b) in pairs.items():
            reference(base[name], a, b, cfg.lora_scale)

    tiles = {}
    chosen = grouped.COLUMNS, grouped.WARPS
    for grouped.COLUMNS, grouped.WARPS in ((512, 2), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), chosen):
        tried = group()
        tried.merge(cfg.lora_scale)
        merge_s = spread(timed(functools.partial(tried.merge, cfg.lora_scale), 10))
        tiles[f"{grouped.COLUMNS} columns, {grouped.WARPS} warps"] = merge_s["median"]
    whole = group()
    merged = whole.merged_sums(cfg.lora_scale)[0].tolist()
    found = whole.checksums().tolist()
    different, other_sums = [], []
    for i, (name, (a, b)) in enumerate(pairs.items()):
        expected = reference(base[name], a, b, cfg.lora_scale)
        if not torch.equal(out[name].view(torch.int16), expected.view(torch.int16)):
            different.append(name)
        # The definition of the checksum is its loop, which runs on the CPU.
        if i % 10 == 0 and not checksum(expected.cpu()) == merged[i] % 2**64 == found[i] % 2**64:
            other_sums.append(name)
    return {
        "targets": len(pairs),
        "parameters": sum(weight.numel() for weight in base.values()),
        "factor_parameters": sum(a.numel() + b.numel() for a, b in pairs.values()),
        "targets_with_other_bits": len(different),
        "targets_with_other_checksums": len(other_sums),
        "merge_s": spread(timed(lambda: whole.merge(cfg.lora_scale), 20)),
        "merge_s_by_tile": tiles,
        "checksums_s": spread(timed(lambda: whole.checksums(), 20)),
        "merged_checksums_s": spread(timed(lambda: whole.merged_sums(cfg.lora_scale), 20)),
        "copy_s": spread(timed(lambda: torch._foreach_copy_(list(out.values()), list(base.values())), 20)),
        "loop_s": spread(timed(loop, 3)),
    }


def factor_syncs(model: Any, cfg: Recipe, syncs: int) -> dict[str, Any]:
    """Our sync, as the trainer calls it. Every one is proved; a difference raises StoppedError."""
    sync = connected(model, cfg)
    one_sync(sync, model, 0)  # the first keeps W0 and compiles the kernel
    each = []
    for step in range(1, syncs + 1):
        found = one_sync(sync, model, step)
        if step % 10 == 0:
            found["receive_in_worker_s"] = sync._server.reports(60)[0]["receive_s"]
        each.append(found)
    sync.destroy()
    return {**summary(each), "proved_by_the_trainers_own_merge": syncs}


def full_syncs(model: Any, cfg: Recipe, syncs: int) -> dict[str, Any]:
    """TRL's client in the order of ``AsyncGRPOTrainer._sync_weight_merged``."""
    import torch
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    weights = list(_iter_vllm_named_params(model))
    info = {
        "names": [name for name, _ in weights],
        "dtype_names": [str(weight.dtype).split(".")[-1] for _, weight in weights],
        "shapes": [list(weight.shape) for _, weight in weights],
    }
    moved = sum(weight.numel() * weight.element_size() for _, weight in weights)
    PartialState()  # TRL's logger wants it
    client = WeightTransferClient(VLLMClient(URL), info)
    client.init_weight_transfer()
    each = []
    for step in range(syncs + 1):
        train_a_little(model, step)
        time.sleep(SETTLE_S)
        marks = [time.perf_counter()]

        def mark(marks: list[float] = marks) -> None:
            torch.cuda.synchronize(0)
            marks.append(time.perf_counter())

        client.pause()
        mark()
        model.merge_adapter()
        mark()
        client.send_weights((name, weight.detach()) for name, weight in _iter_vllm_named_params(model))
        mark()
        model.unmerge_adapter()
        mark()
        client.resume()
        mark()
        pause, merge, transfer, unmerge, resume = (b - a for a, b in itertools.pairwise(marks))
        each.append({
            "pause_s": pause, "merge_s": merge + unmerge, "transfer_s": transfer, "resume_s": resume,
            "paused_s": marks[-1] - marks[0], "total_s": marks[-1] - marks[0], "bytes": moved,
        })  # fmt: skip
    return summary(each[1:])  # the first warms up, as ours did


def trainer_killed(model: Any, cfg: Recipe) -> dict[str, Any]:
    """A trainer dies after the server began to receive: what the server says and when, and that it goes on."""
    from services.weight_sync.errors import WeightSyncError
    from services.weight_sync.policy_server import PolicyServer

    child = dying_trainer(after_s=0.0, rank=cfg.lora.r)
    server = PolicyServer(URL, cfg.policy.served_model_name)
    started = time.perf_counter()
    try:
        server.apply(1, ERROR_LIMIT_S, ERROR_LIMIT_S)
        message = "none: the server took a transfer that was never finished"
    except WeightSyncError as error:
        message = str(error)
    error_s = time.perf_counter() - started
    return {"exit_code": child, "error": message[:600], "error_s": error_s, **next_trainer(model, cfg)}


def killed_on_the_wire(model: Any, cfg: Recipe) -> dict[str, Any]:
    """A trainer is killed while 4 GB are on their way."""
    started = time.perf_counter()
    child = dying_trainer(after_s=0.004, rank=8192)
    return {"exit_code": child, "lived_s": time.perf_counter() - started, **next_trainer(model, cfg)}


def next_trainer(model: Any, cfg: Recipe) -> dict[str, Any]:
    """The trainer that comes after one that died is served, and proves it."""
    started = time.perf_counter()
    sync = connected(model, cfg)
    connected_s = time.perf_counter() - started
    after = one_sync(sync, model, 1)
    sync.destroy()
    return {
        "next_trainer_connected_after_s": connected_s,
        "next_trainer_served_after_s": time.perf_counter() - started,
        "its_sync": after,
    }


def dying_trainer(after_s: float, rank: int) -> int:
    command = [sys.executable, "-m", "scripts.bench_sync", "die", "--after-s", str(after_s), "--rank", str(rank)]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode


def server_killed(model: Any, cfg: Recipe, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The server dies after it was told to receive: what the trainer says and when."""
    sync = connected(model, cfg)
    one_sync(sync, model, 1)
    transport: Any = sync._transport
    broadcast = transport.broadcast

    def kill_then_broadcast(buffer: Any) -> None:
        kill(server)
        broadcast(buffer)

    transport.broadcast = kill_then_broadcast
    started = time.perf_counter()
    try:
        one_sync(sync, model, 2)
        message = "none: the sync succeeded"
    except StackError as error:
        message = f"{type(error).__name__}: {error}"
    return {"error": message[:600], "error_s": time.perf_counter() - started}


@app.command()
def die(after_s: float = 0.0, rank: int = 32) -> None:
    """A trainer that is killed ``after_s`` seconds into its broadcast; 0: after the server began to receive and before
    anything is sent. Started by ``run``."""
    import torch

    from services.weight_sync.client import LoraFactorSync

    os.environ.setdefault("MODELS_DIR", "/tmp/bench_sync")
    sync = LoraFactorSync(Bench(Path("/tmp/bench_sync"), 0, 0, "").recipe("factors"), URL, "cuda:0")
    sync.init_weight_transfer()
    transport: Any = sync._transport
    broadcast = transport.broadcast

    def kill_self() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def broadcast_and_die(buffer: torch.Tensor) -> None:
        if not after_s:
            kill_self()
        threading.Timer(after_s, kill_self).start()
        broadcast(buffer)
        time.sleep(60)

    transport.broadcast = broadcast_and_die
    inside, outside = SHAPES["hidden_size"], SHAPES["intermediate_size"]
    a, b = torch.zeros(rank, inside, device="cuda:0"), torch.zeros(outside, rank, device="cuda:0")
    names = [f"base_model.model.model.layers.{i}.feed_forward.w1.lora_" for i in range(20)]
    sync.send_weights((f"{name}{which}.weight", factor) for name in names for which, factor in (("A", a), ("B", b)))


def connected(model: Any, cfg: Recipe) -> Any:
    from services.weight_sync import names
    from services.weight_sync.client import LoraFactorSync

    sync = LoraFactorSync(cfg, URL, "cuda:0")
    sync.prove_with(base_weight=lambda target: names.base_weight(model, target))
    sync.init_weight_transfer()
    return sync


def one_sync(sync: Any, model: Any, step: int) -> dict[str, float]:
    """``paused_s`` and its parts are by the server's clock, the rest by this one; ``total_s`` is without the proof."""
    from services.weight_sync import names

    train_a_little(model, step)
    time.sleep(SETTLE_S)
    sync.send_weights(names.lora_factors(model))
    found = dict(sync.last_timings)
    parts = ("pack_s", "transfer_s", "apply_s")
    return {**found, "total_s": sum(found[part] for part in parts)}


# -- the load ----------------------------------------------------------------------------------------------------


@app.command()
def load(path: Path, in_flight: Annotated[int, typer.Option()] = 16) -> None:
    """Keep ``in_flight`` completions running until SIGTERM; then write how many came back whole."""
    counts: dict[str, Any] = {"completed": 0, "failed": 0, "cut_short": 0, "output_tokens": 0, "first_error": ""}
    started = time.monotonic()

    async def one(client: httpx.AsyncClient, chance: random.Random) -> None:
        while True:
            body = {
                "model": "policy", "prompt": [chance.randrange(64, SHAPES["vocab_size"]) for _ in range(PROMPT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 1.0,
            }  # fmt: skip
            try:
                answer = await client.post(f"{URL}/v1/completions", json=body)
                answer.raise_for_status()
                tokens = answer.json()["usage"]["completion_tokens"]
            except (httpx.HTTPError, KeyError, ValueError) as error:
                counts["failed"] += 1
                counts["first_error"] = counts["first_error"] or repr(error)
                await asyncio.sleep(0.5)
                continue
            counts["completed"] += 1
            counts["output_tokens"] += tokens
            counts["cut_short"] += tokens != OUTPUT_TOKENS

    async def all_of_them() -> None:
        tasks = []
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
            tasks = [asyncio.create_task(one(client, random.Random(i))) for i in range(in_flight)]
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            await stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    seconds = time.monotonic() - started
    path.write_text(json.dumps({**counts, "seconds": seconds, "tokens_per_s": counts["output_tokens"] / seconds}))


# -- helpers -----------------------------------------------------------------------------------------------------


def timed(function: Callable[[], None], times: int) -> list[float]:
    import torch

    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]}


def summary(each: list[dict[str, float]]) -> dict[str, Any]:
    """Median and p95 of every figure, under its name without the unit; ``each`` keeps them all."""
    keys = sorted({key for found in each for key in found} - {"version"})
    return {
        **{key.removesuffix("_s"): spread([found[key] for found in each if key in found]) for key in keys},
        "each": each,
    }


def shown(row: str, value: float) -> str:
    return f"{value / 1e6:.1f} MB" if row == "bytes" else f"{value * 1e3:.1f} ms"


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def healthy() -> bool:
    try:
        return httpx.get(f"{URL}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session: vLLM's engine is a process of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def plugin(work: Path) -> Path:
    """A folder for PYTHONPATH with the metadata that makes vLLM load our engine, as the images install it."""
    folder = work / "plugin"
    info = folder / "opencode_rl_weight_sync-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: opencode-rl-weight-sync\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlora_factor_sync = services.weight_sync.plugin:register\n"
        "[vllm.endpoint_plugins]\nlora_factor_sync = services.weight_sync.endpoint:WeightSyncEndpoint\n"
    )
    return folder


def machine() -> dict[str, Any]:
    import torch
    import vllm

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"gpus": names, "torch": torch.__version__, "vllm": vllm.__version__, "cuda": torch.version.cuda}


if __name__ == "__main__":
    app()
