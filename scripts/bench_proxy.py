"""What the capture proxy adds to a model call, and whether its memory stays flat: ``python -m scripts.bench_proxy``.

The proxy is env's own: its ASGI app, engine pool and server, in a process of its own, in the env image (this script
starts itself there). A STUB takes the policy's place: it answers after a time that it notes in its answer, so that what
remains of a call is overhead. Each call is OpenCode's in kind and size: a streamed chat completion of 40 kB that grows
with each turn, answered with 10,300 prompt ids and more, 128 sampled ids and their log-probabilities. Rollouts of 8
calls each go on at 1, 32 and 128 in flight, straight to the stub and through the proxy in turn; every finished rollout
is exported and deleted, as env does it.

Exit 1 if the added latency exceeds 3 ms (median) or 10 ms (95th percentile) anywhere, if a call failed or a turn was
not captured, or if memory grew over the last 8,000 of 10,000 calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

CALLS_A_ROLLOUT = 8
SYSTEM_BYTES, TOOL_BYTES, TURN_BYTES = 22_000, 18_000, 2_000
PROMPT_TOKENS, TURN_TOKENS, SAMPLED_TOKENS = 10_300, 600, 128
MAX_P50_MS, MAX_P95_MS, MAX_GROWTH = 3.0, 10.0, 0.02


@dataclass(frozen=True)
class Load:
    inflight: int
    generation_s: float
    """Mean time of the stub's answer, each within half of it: what vLLM took for a 10k-token prompt and 256 tokens at
    32 in flight was 2.3 s. Alone it may be short, as nothing waits for anything."""
    direct: int
    proxied: int
    """Calls."""


LOADS = (Load(1, 0.05, 400, 400), Load(32, 2.3, 800, 800), Load(128, 2.3, 2_000, 10_000))
QUICK = (Load(1, 0.05, 40, 40), Load(32, 0.5, 160, 160), Load(128, 1.0, 512, 1_024))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_proxy", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls, to see that it runs; judges nothing")
    options = parser.parse_args()
    if importlib.util.find_spec("openenv") is None:
        return in_env_image(sys.argv[1:])
    return asyncio.run(bench(QUICK if options.quick else LOADS, judge=not options.quick))


def in_env_image(arguments: list[str]) -> int:
    image = os.environ.get("ENV_IMAGE", "local/opencode-rl-env:cpu")
    mounts = [part for name in ("services", "scripts", "data") for part in ("-v", f"{ROOT / name}:/app/{name}:ro")]
    command = ["docker", "run", "--rm", "--init", "--network", "none", *mounts, image]
    return subprocess.run([*command, "python", "-m", "scripts.bench_proxy", *arguments], check=False).returncode


# -- the stub: an ASGI app, in a process of its own ------------------------------------------------------------


class Stub:
    """Answers as vLLM does. ``x-generation-s`` of the query is not needed: the mean comes with the model's name."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._ids = [self._random.randrange(65_536) for _ in range(PROMPT_TOKENS + 64 * TURN_TOKENS)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        arrived = time.perf_counter()
        mean = float(body.partition(b'"seconds-')[2].partition(b'"')[0] or 0)
        if mean:
            await asyncio.sleep(mean * self._random.uniform(0.5, 1.5))
        answer = self._models() if scope["method"] == "GET" else self._completion(body, arrived)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _models(self) -> bytes:
        return json.dumps({"object": "list", "data": [{"id": "policy", "object": "model"}]}).encode()

    def _completion(self, body: bytes, arrived: float) -> bytes:
        turn = body.count(b'"role":"assistant"') + body.count(b'"role": "assistant"')
        start = PROMPT_TOKENS + turn * TURN_TOKENS
        sampled = self._ids[start : start + SAMPLED_TOKENS]
        entries: list[dict[str, Any]] = [
            {"token": f"token_id:{i}", "logprob": -0.25, "bytes": None, "top_logprobs": []} for i in sampled
        ]
        choice = {
            "index": 0, "finish_reason": "stop", "logprobs": {"content": entries}, "token_ids": sampled,
            "message": {"role": "assistant", "content": "HELD", "tool_calls": []},
        }  # fmt: skip
        usage = {"prompt_tokens": start, "completion_tokens": SAMPLED_TOKENS, "total_tokens": start + SAMPLED_TOKENS}
        answer = json.dumps({
            "id": f"chatcmpl-{time.time_ns()}", "object": "chat.completion", "created": int(time.time()),
            "model": "policy", "choices": [choice], "prompt_token_ids": self._ids[:start], "usage": usage,
        })  # fmt: skip
        return answer.replace('"HELD"', f'"held {time.perf_counter() - arrived:.6f} s"', 1).encode()


def serve_stub(port: Connection) -> None:
    import uvicorn

    from services.env.app import bind

    listener = bind("127.0.0.1", 0)
    port.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(Stub(), lifespan="off", log_config=None, access_log=False)).run([listener])


# -- the proxy: env's own parts, in a process of its own -------------------------------------------------------


class Used(NamedTuple):
    """By the proxy's process."""

    resident_mb: float
    cpu_s: float
    gc_s: float
    """Of it, in the garbage collector, which stops everything else."""


class Collecting:
    """Seconds that this process spent in the garbage collector."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def serve_proxy(pipe: Connection, stub_url: str) -> None:
    """Serve, and take orders over the pipe: ``new`` session, ``end`` one as a rollout does, ``used`` so far."""
    from openenv.core.harness.capture.export import export_session
    from openenv.core.harness.capture.sessions import Upstream

    from services.common import recipe
    from services.env import app
    from services.env.http import DataPlane

    collecting = Collecting()
    cfg = recipe.load(ROOT / "data/recipes/smoke.toml")
    os.environ |= {"TASKS_DIR": "/nowhere", "SANDBOX_NETWORK": "none"}  # a rollout would need them
    service = app.capture_service(cfg, app.Places.from_environment(cfg))
    listener = app.bind("127.0.0.1", 0)
    server = app.Server("capture", DataPlane(service.capture.app), listener, "auto")
    registry, pool = service.capture.registry, service.capture.app.state.upstreams
    upstream = Upstream(llm_url=f"{stub_url}/v1", model="policy")
    _, level = asyncio.run(pool.resolve(upstream))
    pipe.send((listener.getsockname()[1], level))
    while True:
        order, argument = pipe.recv()
        if order == "new":
            pipe.send(registry.create(upstream=upstream, capture_level=level, purpose="train").session_id)
        elif order == "end":
            session = registry.get(argument)
            document = export_session(session, capture_level=level)
            turns = session.graph.stats()["n_turns"]
            registry.delete(argument)
            pipe.send((turns, bool(document), list(session.findings)))
        elif order == "used":
            server.check()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
            pipe.send(Used(resident, time.process_time(), collecting.seconds))


# -- the client ------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    overhead_ms: list[float] = field(default_factory=list)
    failed: int = 0
    uncaptured: int = 0
    memory_mb: list[tuple[int, float]] = field(default_factory=list)
    """(calls done, resident set of the proxy)."""
    wall_s: float = 0.0

    def p(self, share: float) -> float:
        return sorted(self.overhead_ms)[min(len(self.overhead_ms) - 1, int(share * len(self.overhead_ms)))]


class Proxy:
    """The proxy process, from here."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = asyncio.Lock()

    async def order(self, name: str, argument: str = "") -> Any:
        async with self._lock:
            self._pipe.send((name, argument))
            return await asyncio.to_thread(self._pipe.recv)


def bodies(generation_s: float) -> list[bytes]:
    """The calls of one rollout, each a conversation longer by a turn."""
    tools = [
        {"type": "function", "function": {"name": f"tool{n}", "description": "d" * (TOOL_BYTES // 10),
                                          "parameters": {"type": "object", "properties": {}}}}
        for n in range(10)
    ]  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s" * SYSTEM_BYTES},
        {"role": "user", "content": f'How many rows? "seconds-{generation_s}"'.replace('"', "")},
    ]
    found = []
    for _ in range(CALLS_A_ROLLOUT):
        request = {
            "model": "policy", "messages": messages, "tools": tools, "tool_choice": "auto", "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 1.0, "user": f"seconds-{generation_s}",
        }  # fmt: skip
        found.append(json.dumps(request, separators=(",", ":")).encode())
        messages = [
            *messages,
            {"role": "assistant", "content": "held"},
            {"role": "user", "content": "t" * TURN_BYTES},
        ]
    return found


async def run(load: Load, calls: int, url: str, proxy: Proxy | None) -> Measured:
    """``load.inflight`` rollouts at a time, until ``calls`` calls are done; through the proxy if there is one."""
    import httpx

    measured, requests, left = Measured(), bodies(load.generation_s), calls // CALLS_A_ROLLOUT
    started = time.perf_counter()

    async def call(client: Any, body: bytes, key: str) -> None:
        began = time.perf_counter()
        response = await client.post(url, content=body, headers={"x-api-key": key, "content-type": "application/json"})
        total = time.perf_counter() - began
        text = response.text
        _, found, rest = text.partition("held ")
        if response.status_code != 200 or not found:
            measured.failed += 1
            return
        measured.overhead_ms.append(1000 * (total - float(rest.partition(" s")[0])))
        if proxy is not None and len(measured.overhead_ms) % 500 == 0:
            used = await proxy.order("used")
            measured.memory_mb.append((len(measured.overhead_ms), used.resident_mb))

    async def agent(client: Any, number: int) -> None:
        nonlocal left
        await asyncio.sleep(load.generation_s * number / load.inflight)  # they do not start as one
        while left > 0:
            left -= 1
            key = await proxy.order("new") if proxy else "nobody"
            for body in requests:
                await call(client, body, key)
            if proxy:
                turns, exported, findings = await proxy.order("end", key)
                measured.uncaptured += (CALLS_A_ROLLOUT - turns) + (not exported) + len(findings)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(agent(client, number) for number in range(load.inflight)))
    measured.wall_s = time.perf_counter() - started
    return measured


async def bench(loads: tuple[Load, ...], judge: bool) -> int:
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(target: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        processes.append(process)
        return ours

    try:
        stub_url = f"http://127.0.0.1:{start(serve_stub).recv()}"
        pipe = start(serve_proxy, stub_url)
        proxy_port, level = pipe.recv()
        if level != "tokens":
            print(f"the proxy measured the stub as {level!r}, which must be 'tokens'", file=sys.stderr)
            return 1
        proxy_url = f"http://127.0.0.1:{proxy_port}"
        failed = [await compare(load, stub_url, proxy_url, Proxy(pipe)) for load in loads]
    finally:
        for process in processes:
            process.terminate()
    return int(judge and any(failed))


async def compare(load: Load, stub_url: str, proxy_url: str, proxy: Proxy) -> bool:
    """Print one row. Returns: whether a bound was missed."""
    await run(load, load.inflight * CALLS_A_ROLLOUT // 4, f"{proxy_url}/v1/chat/completions", proxy)  # warm
    direct = await run(load, load.direct, f"{stub_url}/v1/chat/completions", None)
    before = await proxy.order("used")
    proxied = await run(load, load.proxied, f"{proxy_url}/v1/chat/completions", proxy)
    after = await proxy.order("used")
    added = {name: proxied.p(share) - direct.p(share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    late = [mb for calls, mb in proxied.memory_mb if calls >= 0.2 * load.proxied]
    growth = (late[-1] - late[0]) / late[0] if len(late) > 1 else 0.0
    mean_s = load.generation_s + statistics.mean(proxied.overhead_ms) / 1000
    print(json.dumps({
        "inflight": load.inflight,
        "generation_s": load.generation_s,
        "calls": len(proxied.overhead_ms),
        "calls_per_s": round(len(proxied.overhead_ms) / proxied.wall_s, 1),
        "direct_ms": {name: round(direct.p(share), 2) for name, share in (("p50", 0.5), ("p95", 0.95))},
        "proxied_ms": {name: round(proxied.p(share), 2) for name, share in (("p50", 0.5), ("p95", 0.95))},
        "added_ms": {name: round(value, 2) for name, value in added.items()},
        "call_ratio": round(mean_s / (load.generation_s + statistics.mean(direct.overhead_ms) / 1000), 4),
        "proxy_cpu_ms_a_call": round(1000 * (after.cpu_s - before.cpu_s) / len(proxied.overhead_ms), 2),
        "proxy_gc_ms_a_call": round(1000 * (after.gc_s - before.gc_s) / len(proxied.overhead_ms), 2),
        "failed": direct.failed + proxied.failed,
        "uncaptured": proxied.uncaptured,
        "rss_mb": [round(mb) for _, mb in proxied.memory_mb],
        "growth": round(growth, 4),
    }), flush=True)  # fmt: skip
    return (
        added["p50"] > MAX_P50_MS or added["p95"] > MAX_P95_MS or growth > MAX_GROWTH
        or direct.failed + proxied.failed + proxied.uncaptured > 0
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
