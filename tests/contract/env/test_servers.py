"""The two listeners, with OpenEnv's real applications behind them."""

import asyncio
import json
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openenv.core.harness.capture import sse
from openenv.core.harness.capture.sessions import Upstream
from openenv.harbor.serving import HarborService
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from services.common import control, metrics
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import APP_UID, RunDir
from services.common.tasks import COMPOSE_FILE, load_suite
from services.env import app, http
from services.env.http import CancelOnDisconnect, DataPlane, FreshUpstreamPool
from services.env.rollouts import Allowed, RolloutEnvironment, Scoreboard, phase_timings
from services.env.suites import SuiteProvider, load
from tests.fakes import policy

ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "data" / "tasks"
ALLOWED = Allowed("docker", frozenset({"http://policy:8000/v1", "http://policy-eval:8000/v1"}))
ASKED: dict[str, Any] = {
    "harness": "opencode", "sandbox": "docker", "reward_key": "", "keep_sandbox": False, "force_build": False,
    "llm_url": "http://policy:8000/v1", "model": "policy", "agent_timeout_sec": 60.0, "agent_step_limit": 4,
    "sampling": {"temperature": 1.0}, "purpose": "train",
}  # fmt: skip
"""Arguments of a rollout as the trainer gives them."""


def control_header(key: str) -> dict[str, str]:
    return {"Authorization": control._basic(key)}


PLACES = app.Places(TASKS, "sandboxes", "env-control", "capture", "http://capture:8101")


# --- The capture proxy --------------------------------------------------------------------------------------------


@pytest.fixture
def service(cfg: Recipe) -> HarborService:
    return app.capture_service(cfg, PLACES)


@pytest.fixture
def capture(service: HarborService) -> TestClient:
    return TestClient(DataPlane(service.capture.app))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/sessions"), ("POST", "/sessions"), ("GET", "/sessions/x"), ("DELETE", "/sessions/x"),
        ("GET", "/sessions/x/rollout"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/v1/models"),
        ("POST", "/v1/messages"), ("POST", "/v1/responses"), ("POST", "/v1/chat/completions/"), ("POST", "//sessions"),
        ("PUT", "/v1/chat/completions"), ("GET", "/v1/chat/completions"),
    ],
)  # fmt: skip
def test_sandbox_finds_nothing_but_model_calls(capture: TestClient, method: str, path: str) -> None:
    assert capture.request(method, path, json={}).status_code == 404


def test_admin_key_is_not_needed_to_be_kept_out(service: HarborService, capture: TestClient) -> None:
    assert capture.get("/sessions", headers={"x-api-key": service.admin_key}).status_code == 404


def test_health_says_that_it_lives(capture: TestClient) -> None:
    assert capture.get("/health").json()["status"] == "ok"


def test_only_a_living_sessions_key_is_served(
    service: HarborService, capture: TestClient, start_policy: Callable[..., str]
) -> None:
    session = service.capture.registry.create(upstream=Upstream(llm_url=start_policy() + "/v1", model="policy"))
    call = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}

    def status(key: str) -> int:
        return capture.post("/v1/chat/completions", json=call, headers={"x-api-key": key}).status_code

    assert status("") == 401
    assert status("s000000000000000000000000") == 401
    assert status(session.session_id) == 200
    service.capture.registry.delete(session.session_id)
    assert status(session.session_id) == 401


def test_call_without_a_length_or_with_a_huge_one_is_refused_unread(
    capture: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_REQUEST_BYTES", 10)
    assert capture.post("/v1/chat/completions", content=b"x" * 11).status_code == 413
    assert capture.post("/v1/chat/completions", content=iter([b"x"])).status_code == 413


class Call:
    """A model call as the server sees it, byte by byte."""

    def __init__(self, plane: DataPlane, key: str, size: int = 2) -> None:
        self._plane = plane
        headers = [(b"content-length", str(size).encode()), (b"authorization", f"Bearer {key}".encode())]
        path = "/v1/chat/completions"
        self._scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self.go = asyncio.Event()
        self.was_read = False
        self.status = 0

    async def _receive(self) -> dict[str, Any]:
        self.was_read = True
        await self.go.wait()
        return {"type": "http.request", "body": b"[]", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def answer(self) -> int:
        await self._plane(self._scope, self._receive, self._send)
        return self.status


@pytest.mark.parametrize("key", ["", "s000000000000000000000000"])
def test_a_body_is_not_read_for_a_key_that_is_unknown(service: HarborService, key: str) -> None:
    async def scene() -> None:
        call = Call(DataPlane(service.capture.app), key, http.MAX_REQUEST_BYTES)
        call.go.set()
        assert await call.answer() == 401
        assert not call.was_read

    asyncio.run(scene())


@pytest.mark.parametrize(("open_calls", "size"), [(http.MAX_CALLS, 2), (1, http.MAX_REQUEST_BYTES)])
def test_what_one_session_has_in_flight_is_bounded_and_others_do_not_notice(
    service: HarborService, open_calls: int, size: int
) -> None:
    plane, create = DataPlane(service.capture.app), service.capture.registry.create
    greedy, other = create().session_id, create().session_id

    async def scene() -> None:
        calls = [Call(plane, greedy, size) for _ in range(open_calls)]
        running = [asyncio.create_task(call.answer()) for call in calls]
        await asyncio.sleep(0)
        assert all(call.was_read for call in calls)
        over, beside = Call(plane, greedy), Call(plane, other)
        over.go.set()
        beside.go.set()
        assert await over.answer() == 429 and not over.was_read
        assert await beside.answer() == 400  # OpenEnv's own answer to a body that is a list
        for call in calls:
            call.go.set()
        assert await asyncio.gather(*running) == [400] * open_calls
        again = Call(plane, greedy)
        again.go.set()
        assert await again.answer() == 400

    asyncio.run(scene())


def test_an_openenv_without_its_handler_of_model_calls_is_refused_at_start() -> None:
    with pytest.raises(RuntimeError, match="no handler of model calls"):
        DataPlane(Starlette())


def test_a_finished_stream_is_one_body_and_one_that_is_kept_alive_stays_a_stream(
    service: HarborService, capture: TestClient, start_policy: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = service.capture.registry.create(upstream=Upstream(llm_url=start_policy() + "/v1", model="policy"))
    call = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}

    def stream() -> tuple[str, dict[str, str]]:
        answer = capture.post("/v1/chat/completions", json=call, headers={"x-api-key": session.session_id})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.text, dict(answer.headers)

    with capture:  # one event loop for both: the connection to the engine stays
        at_once, headers = stream()
        assert headers["content-length"] == str(len(at_once))
        answer_of = policy.completion
        monkeypatch.setattr(policy, "completion", lambda *asked: (time.sleep(0.5), answer_of(*asked))[1])
        monkeypatch.setattr(sse, "KEEPALIVE_INTERVAL_S", 0.05)
        kept_alive, headers = stream()
    assert "content-length" not in headers
    assert kept_alive.startswith(sse.KEEPALIVE)

    def events(text: str) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    [one], [other] = events(at_once), events(kept_alive)
    assert one["choices"] == other["choices"]
    assert one["choices"][0]["delta"]["role"] == "assistant"


def test_output_cap_is_the_recipes(service: HarborService, cfg: Recipe) -> None:
    assert service.capture.app.state.max_output_tokens == cfg.sampling.max_completion_tokens


def test_engine_that_was_away_is_asked_again(start_policy: Callable[..., str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = FreshUpstreamPool(default_client=None, default_level="text")
    upstream = Upstream(llm_url=f"http://127.0.0.1:{port}/v1", model="policy")
    assert asyncio.run(pool.resolve(upstream))[1] == "text"
    start_policy(port=port)
    client, level = asyncio.run(pool.resolve(upstream))
    assert level == "tokens"
    assert asyncio.run(pool.resolve(upstream))[0] is client


# --- The control plane --------------------------------------------------------------------------------------------


@pytest.fixture
def provider(cfg: Recipe) -> SuiteProvider:
    provider = load(cfg, TASKS)
    RolloutEnvironment.serve(provider, Scoreboard(), Path("/nowhere"), cfg.rollout.outer_timeout_s, ALLOWED)
    return provider


@pytest.fixture
def control_plane(cfg: Recipe, provider: SuiteProvider, run: RunDir) -> Iterator[TestClient]:
    with TestClient(app.control_app(cfg, run)) as client:
        yield client


def test_task_api_serves_the_pinned_tasks_in_order(cfg: Recipe, run: RunDir, control_plane: TestClient) -> None:
    pinned = load_suite(TASKS, cfg.tasks.train)
    control_plane.headers.update(control.headers(run))
    assert control_plane.get("/harbor_env/splits").json() == [
        {"name": cfg.tasks.train, "num_tasks": len(pinned)},
        {"name": cfg.tasks.heldout, "num_tasks": 4},
    ]
    answer = control_plane.post("/harbor_env/task_range", json={"split": cfg.tasks.train, "start": 0, "stop": 100})
    served = [(task["index"], task["task_name"], task["instruction"]) for task in answer.json()["tasks"]]
    assert served == [(index, task.name, task.instruction.strip()) for index, task in enumerate(pinned)]


def test_control_plane_has_no_web_pages(run: RunDir, control_plane: TestClient) -> None:
    assert control_plane.get("/web", headers=control.headers(run)).status_code == 404


@pytest.mark.parametrize("headers", [{}, control_header("other"), {"Authorization": "Basic !"}, {"Authorization": ""}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/state"), ("POST", "/sweep"), ("GET", "/harbor_env/splits"), ("POST", "/harbor_env/task"),
        ("POST", "/reset"), ("POST", "/step"), ("GET", "/state/"), ("GET", "/docs"), ("GET", "/openapi.json"),
        ("GET", "/schema"), ("GET", "/metadata"), ("POST", "/mcp"), ("POST", "/health"), ("GET", "/health/"),
        ("GET", "/web"), ("GET", "/nothing"),
    ],
)  # fmt: skip
def test_control_plane_wants_the_runs_key_for_all_but_its_health(
    control_plane: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    assert control_plane.request(method, path, headers=headers).status_code == 401
    assert control_plane.get("/health", headers=headers).status_code == 200


def test_control_planes_websocket_wants_the_runs_key(run: RunDir, control_plane: TestClient) -> None:
    for headers in ({}, control_header("other")):
        with pytest.raises(WebSocketDisconnect), control_plane.websocket_connect("/ws", headers=headers):
            pass
    with control_plane.websocket_connect("/ws", headers=control.headers(run)):
        pass


def test_key_of_the_control_plane_is_the_services_and_outlives_a_restart(run: RunDir) -> None:
    assert control.headers(run) == {}
    key = control.issue(run)
    assert len(key) >= 40 and control.issue(run) == key == control.read(run)
    found = run.control_key.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 0, APP_UID)
    assert [path.name for path in run.path.iterdir()] == [run.control_key.name]


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"llm_url": "http://policy:8000/pause?mode=abort&x="}, "llm_url is 'http://policy:8000/pause"),
        ({"llm_url": ""}, "llm_url is ''; allowed: 'http://policy-eval:8000/v1', 'http://policy:8000/v1'"),
        ({"llm_url": "http://policy:8000"}, "llm_url is"), ({"llm_url": "http://169.254.169.254/v1"}, "llm_url is"),
        ({"harness": "evil.module:Class"}, "harness is 'evil.module:Class'; allowed: 'opencode'"),
        ({"harness": "claude-code"}, "harness is"), ({"sandbox": "e2b"}, "sandbox is 'e2b'; allowed: 'docker'"),
        ({"keep_sandbox": True}, "keep_sandbox is True"), ({"force_build": True}, "force_build is"),
        ({"api_key": "k"}, "api_key is"), ({"auth_header": "Host"}, "auth_header is"),
        ({"provider": "anthropic"}, "provider is"), ({"purpose": "auto"}, "purpose is"),
        ({"sampling": None}, "sampling is not set"), ({"agent_step_limit": 0}, "agent_step_limit is not set"),
        ({"agent_timeout_sec": 0.0}, "agent_timeout_sec is not set"),
        ({"purpose": "eval"}, "eval_sampling is not set"),
    ],
)  # fmt: skip
def test_a_rollout_is_asked_of_our_policies_in_our_sandbox_with_our_agent_only(
    provider: SuiteProvider, differs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        asyncio.run(RolloutEnvironment()._run_rollout("smoke/train", 0, **{**ASKED, **differs}))


def test_a_policy_that_env_was_not_started_with_is_not_allowed(cfg: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKS_DIR", "/tasks")
    monkeypatch.setenv("SANDBOX_NETWORK", "sandboxes")
    monkeypatch.setenv("POLICY_URL", "http://policy:8000/, http://another:1")
    monkeypatch.setenv("POLICY_EVAL_URL", "http://policy-eval:8000")
    urls = app.Places.from_environment(cfg).policy_urls
    assert urls == ("http://policy:8000", "http://another:1", "http://policy-eval:8000")


def test_task_that_is_not_served_is_refused_by_number(provider: SuiteProvider) -> None:
    with pytest.raises(IndexError, match=r"99 out of range \(8 tasks in 'smoke/train'\)"):
        provider.task_dir("smoke/train", 99)
    with pytest.raises(ValueError, match="unknown split 'other'"):
        provider.num_tasks("other")


def test_failed_rollout_is_counted_by_cause(provider: SuiteProvider) -> None:
    board = RolloutEnvironment.board
    HarborService._instance = None
    asyncio.run(RolloutEnvironment()._run_rollout("smoke/train", 0, **ASKED))
    assert board.snapshot() == {"inflight": 0, "rollouts": [], "done": 1, "failed": {"env": 1}}


# --- A client that goes away --------------------------------------------------------------------------------------


class Socket:
    """FAKE websocket of an ASGI server: what the client sends, in order."""

    def __init__(self) -> None:
        self.sends: asyncio.Queue[dict[str, Any]] = asyncio.Queue()


async def call(session: Any, socket: Socket) -> None:
    async def send(_message: Any) -> None: ...

    await CancelOnDisconnect(session)({"type": "websocket"}, socket.sends.get, send)


def test_work_of_a_client_that_is_gone_is_cancelled() -> None:
    ended: list[str] = []

    async def session(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.receive"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def scene() -> None:
        socket = Socket()
        await socket.sends.put({"type": "websocket.receive"})
        task = asyncio.create_task(call(session, socket))
        await asyncio.sleep(0.05)
        assert ended == []
        await socket.sends.put({"type": "websocket.disconnect"})
        await asyncio.wait_for(task, 5)

    asyncio.run(scene())
    assert ended == ["cancelled"]


def test_idle_session_ends_by_reading_the_disconnect() -> None:
    read: list[str] = []

    async def session(scope: Any, receive: Any, send: Any) -> None:
        while not read or read[-1] != "websocket.disconnect":
            read.append((await receive())["type"])
        await asyncio.sleep(0.05)  # its own clean-up
        read.append("cleaned up")

    async def scene() -> None:
        socket = Socket()
        await socket.sends.put({"type": "websocket.connect"})
        task = asyncio.create_task(call(session, socket))
        await asyncio.sleep(0.05)
        await socket.sends.put({"type": "websocket.disconnect"})
        await asyncio.wait_for(task, 5)

    asyncio.run(scene())
    assert read == ["websocket.connect", "websocket.disconnect", "cleaned up"]


def test_error_of_a_session_is_not_swallowed() -> None:
    async def session(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        asyncio.run(call(session, Socket()))


# --- What env does besides --------------------------------------------------------------------------------------


def test_the_last_sweep_spares_nothing_and_one_on_the_way_what_is_in_use(
    cfg: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[str]] = []
    monkeypatch.setattr(app, "sweep", lambda _run, keep: kept.append(set(keep)) or 0)
    monkeypatch.setattr(app.sandbox.Sandbox, "live", {"used"})
    app.sweep_backend(cfg, run)
    app.sweep_backend(cfg, run, keep_live=False)
    assert kept == [{"used"}, set()]


def test_a_task_that_could_reach_the_host_is_not_served(cfg: Recipe, tmp_path: Path) -> None:
    for suite in (cfg.tasks.train, cfg.tasks.heldout):
        shutil.copytree(TASKS / suite, tmp_path / suite)
    compose = tmp_path / cfg.tasks.train / "first-c" / COMPOSE_FILE
    load(cfg, tmp_path)
    for text, said in (
        ("services: {main: {volumes: ['/:/host']}}", "first-c: .* sets volumes for main"),
        ("services: {main: {}, other: {image: x}}", "first-c: .* has network default; allowed: sandbox"),
        ("services: {main: {}}\nnetworks: {train: {external: true}}", "first-c: .* has network train"),
        ("services: {main: {cpus: !reset null}}", "first-c: .* is not valid YAML"),
    ):
        compose.write_text(text)
        with pytest.raises(RecipeError, match=said):
            load(cfg, tmp_path)


# --- Start --------------------------------------------------------------------------------------------------------


def test_name_that_is_not_ours_is_one_clear_message() -> None:
    with pytest.raises(NotReadyError, match="no-such-name is no name of this container"):
        app.bind("no-such-name", 0)


def test_taken_port_is_one_clear_message() -> None:
    with app.bind("localhost", 0) as taken, pytest.raises(NotReadyError, match="Address already in use"):
        app.bind("localhost", taken.getsockname()[1])


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(NotReadyError, match=r"cannot listen on 192\.0\.2\.1"):
        app.bind("192.0.2.1", 8100)


def device(listener: socket.socket) -> bytes:
    return listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_a_listener_takes_what_arrives_on_the_interface_of_its_address_and_nothing_else() -> None:
    """Asked of the kernel; that a sandbox is kept out so is in the stack tests."""
    own = socket.gethostbyname(socket.gethostname())
    assert not own.startswith("127."), "this needs a container with a network"
    with app.bind(socket.gethostname(), 0) as listener:
        assert listener.getsockname()[0] == own
        assert device(listener).decode() in {found for _, found in socket.if_nameindex()} - {"lo"}
        socket.create_connection(listener.getsockname(), 2).close()  # its own container's health check
    with app.bind("127.0.0.1", 0) as inside, app.bind("0.0.0.0", 0) as public:
        assert device(inside) == device(public) == b""
    with metrics.serve("env", RunDir(Path("/nowhere")), host=own, port=0) as port:
        socket.create_connection((own, port), 2).close()


def test_phases_of_a_rollout_are_harbors(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    at = "2026-11-29T15:22:5{}Z".format
    path.write_text(
        json.dumps({"agent_execution": {"started_at": at("1.000000"), "finished_at": at("3.250000")}, "verifier": None})
    )
    assert phase_timings(path) == {"agent": 2.25}
    assert phase_timings(tmp_path / "missing.json") == {}
