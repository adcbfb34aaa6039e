"""What a rollout costs outside the agent, and what Harbor's and OpenEnv's defaults cost.

``python -m scripts.bench_rollout [--rollouts 5]``, on a machine with the cpu images. Real Harbor, OpenEnv, capture
proxy, sandboxes and OpenCode; a FAKE policy that answers at once, so that the agent's time is OpenCode's own. The two
take turns, one rollout at a time, in the same run and on the same task. "Stock" is Harbor's docker environment, agent
and Compose defaults and OpenEnv's configuration, but for one thing: Harbor installs node and the newest OpenCode in
every sandbox, which needs the internet; here stock takes the image's OpenCode, so its set-up is a lower bound.
At last each does ``--batch`` rollouts with ``--inflight`` of them at a time: rollouts a minute, which is what training
waits for where the model is small.

Exit 1 if a rollout failed, or if ours costs more than 5 s outside the agent in the median.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "local/opencode-rl-env:cpu"
TASK = "first-c"
FAKE_POLICY = ROOT / "tests/fakes/policy.py"
FAKE_PORT = 18001
PHASES = {
    "start": "container is asked for, until it runs",
    "healthcheck": "the task's own set-up in it",
    "set-up": "agent and its user",
    "agent start": "OpenCode, until its first model call",
    "agent run": "first model call until the agent is gone",
    "collect": "what it left",
    "verifier": "tests in place, graded",
    "stop": "container and network removed",
    "rest": "configuration before, capture's export after",
}
AGENT = ("agent start", "agent run")
MAX_OVERHEAD_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_rollout", description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=5, help="of each kind")
    parser.add_argument("--batch", type=int, default=16, help="rollouts of each kind for the rate; 0: no rate")
    parser.add_argument("--inflight", type=int, default=8, help="of the batch, at a time")
    parser.add_argument("--drive", choices=("ours", "stock"), help=argparse.SUPPRESS)  # inside the env image
    parser.add_argument("--capture-url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        return asyncio.run(drive(options.drive, options.capture_url))
    with ExitStack() as stack:
        drivers = {kind: stack.enter_context(driver(kind)) for kind in ("ours", "stock")}
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in drivers}
        for number in range(options.rollouts + 1):
            for kind, process in drivers.items():
                phases = ask(process)
                print(json.dumps({"kind": kind, "first": number == 0, **phases}), flush=True)
                if number:  # the first one imports Harbor and warms the engine's cache
                    found[kind].append(phases)
        rates = {}
        for kind, process in drivers.items() if options.batch else ():
            batch = ask(process, options.batch, options.inflight)
            print(json.dumps({"kind": kind, "inflight": options.inflight, **batch}), flush=True)
            rates[kind] = 60 * options.batch / batch["wall"] if not batch["failed"] else 0.0
    return report(found, rates, options.inflight)


def report(found: dict[str, list[dict[str, float]]], rates: dict[str, float], inflight: int) -> int:
    """Print the medians side by side. Returns: the exit code."""
    if any("error" in phases for kind in found.values() for phases in kind) or 0.0 in rates.values():
        print("a rollout failed; nothing is compared", file=sys.stderr)
        return 1
    medians = {
        kind: {name: statistics.median(p[name] for p in rollouts) for name in (*PHASES, "wall", "outside")}
        for kind, rollouts in found.items()
    }
    ours, stock = medians["ours"], medians["stock"]
    print("\n| phase | ours, s | share | stock, s | |\n|---|---|---|---|---|")
    for name, meaning in PHASES.items():
        print(f"| {name} | {ours[name]:.2f} | {ours[name] / ours['wall']:.0%} | {stock[name]:.2f} | {meaning} |")
    print(f"| **outside the agent** | **{ours['outside']:.2f}** | {ours['outside'] / ours['wall']:.0%} | "
          f"**{stock['outside']:.2f}** | {stock['outside'] / ours['outside']:.1f}x |")  # fmt: skip
    worst = max(phases["outside"] for phases in found["ours"])
    for name, rate in {"1": {kind: 60 / medians[kind]["wall"] for kind in medians}, str(inflight): rates}.items():
        if rate:
            print(f"| rollouts a minute, {name} in flight | {rate['ours']:.1f} | | {rate['stock']:.1f} | "
                  f"{rate['ours'] / rate['stock']:.1f}x |")  # fmt: skip
    print(f"\nours: worst {worst:.2f} s outside; whole rollout {ours['wall']:.2f} s, stock {stock['wall']:.2f} s")
    return int(ours["outside"] > MAX_OVERHEAD_S)


# -- on the host: a container a kind ---------------------------------------------------------------------------


@contextmanager
def driver(kind: str) -> Iterator[subprocess.Popen[str]]:
    """The env image, running this file with ``--drive``, on the network that this kind of sandbox reaches."""
    name = f"bench-rollout-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        work = Path(folder)
        work.chmod(0o777)
        shutil.copytree(ROOT / "data/tasks/smoke", work / "tasks/smoke")
        if kind == "ours":
            network = ["network", "create", "--internal", "--opt", "com.docker.network.bridge.inhibit_ipv4=true", name]
            docker(*network)
            stack.callback(docker, "network", "rm", name)
            place = ["--network", name, "--network-alias", "capture", "--env", f"SANDBOX_NETWORK={name}"]
            url = "http://capture:8101"
        else:
            (work / "tasks/smoke/train" / TASK / "environment/docker-compose.yaml").unlink()
            host = docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", "bridge").strip()
            place = ["--network", "host", "--env", "SANDBOX_NETWORK=none"]
            url = f"http://{host}:18101"
        sources = ("services", "scripts", "tests", "data")
        mounts = [part for path in sources for part in ("--volume", f"{ROOT / path}:/app/{path}:ro")]
        command = [
            "docker", "run", "--rm", "--interactive", "--init", "--name", name, *place, *mounts,
            "--volume", f"{work}:{work}", "--volume", "/var/run/docker.sock:/var/run/docker.sock",
            "--env", f"TASKS_DIR={work}/tasks", "--env", f"RUNS_DIR={work}/runs",
            IMAGE, "python", "-m", "scripts.bench_rollout", "--drive", kind, "--capture-url", url,
        ]  # fmt: skip
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                docker("rm", "--force", name)


def ask(process: subprocess.Popen[str], rollouts: int = 1, inflight: int = 1) -> dict[str, float]:
    """Have a driver do rollouts. Returns: the phases of one, or ``wall`` and ``failed`` of more."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{rollouts} {inflight}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the driver ended; its messages are above")
    found: dict[str, float] = json.loads(line)
    return found


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


# -- in the env image: a line of standard input is a number of rollouts, and how many of them at a time --------


class FakePolicy:
    """The FAKE policy as a process, so that its work is not done by the process that is measured."""

    def __init__(self, *commands: str) -> None:
        self._process = subprocess.Popen([sys.executable, str(FAKE_POLICY), str(FAKE_PORT), *commands])
        atexit.register(self._process.kill)
        self.url = f"http://127.0.0.1:{FAKE_PORT}"
        self._seen = 0
        while not self._answers():
            time.sleep(0.1)

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit(f"the fake policy ended with exit code {self._process.returncode}; its message is above")
        try:
            self._requests()
        except OSError:
            return False
        return True

    def _requests(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/requests", timeout=10) as response:
            found: list[dict[str, Any]] = json.load(response)
        return found

    def calls(self) -> list[float]:
        """When each call with tools arrived, of those since the last time this was asked."""
        requests = self._requests()
        new, self._seen = requests[self._seen :], len(requests)
        return [request["received_s"] for request in new if request.get("tools")]


async def drive(kind: str, capture_url: str) -> int:
    import dataclasses
    import os

    from openenv.core.harness.capture.sessions import Upstream
    from openenv.harbor import rollout, seams

    from services.common import recipe
    from services.common.run_dir import RunDir
    from services.env import agent, app, rollouts, suites
    from services.env.http import DataPlane

    cfg = recipe.load(ROOT / "data/recipes/smoke.toml", {"run.name": "bench"})
    run = RunDir.from_environment(cfg.run.name)
    run.prepare()
    tasks = Path(os.environ["TASKS_DIR"])
    task = tasks / "smoke/train" / TASK
    engine = FakePolicy((task / "solution/solve.sh").read_text().strip(), "cat answer.txt")

    app.quiet_libraries()
    places = app.Places.from_environment(cfg)
    service = app.capture_service(cfg, places)
    host, port = capture_url.removeprefix("http://").split(":")
    app.Server("capture", DataPlane(service.capture.app), app.bind(host, int(port)), "auto")
    stock = seams.SEAMS[agent.HARNESS]
    if kind == "ours":
        image = cfg.sandbox_image()
        app.prepare(cfg, run, places, suites.load(cfg, tasks), rollouts.Scoreboard(), image)
    else:
        run.trials.mkdir(parents=True)
        seams.SEAMS[agent.HARNESS] = dataclasses.replace(stock, import_path="scripts.bench_rollout_stock:StockOpenCode")
    upstream = Upstream(llm_url=f"{engine.url}/v1", model="policy")
    client, level = await service.capture.app.state.upstreams.resolve(upstream)

    async def one(slots: asyncio.Semaphore) -> Any:
        async with slots:
            return await rollout.run_rollout(
                task_dir=task, harness=agent.HARNESS, sandbox="docker", registry=service.capture.registry,
                intercept_url=capture_url, model="policy", trials_dir=run.trials, upstream=upstream, inference=client,
                capture_level=level, purpose="train", agent_timeout_sec=120, agent_step_limit=6,
                sampling={"temperature": 1.0},
            )  # fmt: skip

    for line in iter(sys.stdin.readline, ""):
        count, inflight = map(int, line.split())
        engine.calls()
        began, slots = time.monotonic(), asyncio.Semaphore(inflight)
        results = await asyncio.gather(*(one(slots) for _ in range(count)))
        if count == 1:
            answer = phases(results[0], run.trials, engine.calls())
        else:
            failed = sum(not result.ok or result.reward != 1.0 for result in results)
            answer = {"wall": round(time.monotonic() - began, 3), "failed": failed}
        print(json.dumps(answer), flush=True)
    return 0


def phases(result: Any, trials: Path, calls: list[float]) -> dict[str, Any]:
    """Seconds of each phase, ``wall`` and ``outside`` the agent. Args: calls: when each model call arrived."""
    if not result.ok or result.reward != 1.0 or not calls:
        return {"error": result.error or f"reward {result.reward}, {len(calls)} calls"}
    trial = json.loads((trials / result.trial_name / "result.json").read_text())

    def at(phase: str, edge: str) -> float:
        return datetime.fromisoformat((trial[phase] if phase else trial)[edge]).timestamp()

    edges = {
        "start": at("environment_setup", "finished_at") - at("", "started_at"),
        "healthcheck": at("agent_setup", "started_at") - at("environment_setup", "finished_at"),
        "set-up": at("agent_setup", "finished_at") - at("agent_setup", "started_at"),
        "agent start": calls[0] - at("agent_execution", "started_at"),
        "agent run": at("agent_execution", "finished_at") - calls[0],
        "collect": at("verifier", "started_at") - at("agent_execution", "finished_at"),
        "verifier": at("verifier", "finished_at") - at("verifier", "started_at"),
        "stop": at("", "finished_at") - at("verifier", "finished_at"),
    }
    edges["rest"] = result.wall_s - sum(edges.values())
    outside = result.wall_s - edges["agent start"] - edges["agent run"]
    return {name: round(value, 3) for name, value in {**edges, "wall": result.wall_s, "outside": outside}.items()}


if __name__ == "__main__":
    sys.exit(main())
