"""Wiring of the env server: checks, the two listeners, the heartbeat, and the sweep at both ends."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import re
import secrets
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import CallToolAction, CallToolObservation
from openenv.core.env_server.types import ConcurrencyConfig
from openenv.harbor import rollout as openenv_rollout
from openenv.harbor.models import HarborState
from openenv.harbor.serving import HarborService

from services.common import control, health, metrics, network, run_dir, signals
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.env import agent, hub_sandbox, manifest, public, sandbox, suites, web
from services.env.docker import inspect, make_network
from services.env.hand_over import hand_over
from services.env.http import CancelOnDisconnect, DataPlane, FreshUpstreamPool
from services.env.rollouts import Allowed, RolloutEnvironment, Scoreboard
from services.env.state import OperatorRoutes, WithKey
from services.env.sweep import sweep

CONTROL_PORT = 8100
CAPTURE_PORT = 8101
PUBLIC_PORT = 8000
"""The one port that a Job or a Space makes public; the capture proxy is mounted there at ``/capture``."""
CLIENT_NAME = "harbor_env"
"""Path prefix that OpenEnv's HarborEnv client calls."""
SETUP_NETWORK = "opencode-rl-setup"
"""A sandbox's way out while its task's own set-up fetches data, and not after. Made when the recipe asks for it."""
SETUP_NETWORK_OPTIONS = {"com.docker.network.bridge.enable_icc": "false"}
"""No sandbox sees another there."""
GRACE_S = 5
IDLE_SESSION_S = 20.0
"""A session whose client is gone counts against the concurrency for this long; one at work has its socket open."""
BEAT_S = 2.0
SWITCH_S = 0.0005

KEPT_VARIABLES = frozenset(
    {
        "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONUNBUFFERED", "DOCKER_HOST",
        "DOCKER_CONFIG", "SSL_CERT_FILE", "SANDBOX_NETWORK", "OPENENV_HARBOR_TRIALS_DIR",
    }
)  # fmt: skip
"""All that is left in our environment: Harbor hands every variable to ``docker compose``, where a task can read it."""
BACKEND_VARIABLES = {
    "hf-sandbox": {"HF_TOKEN", "HF_ENDPOINT", "HF_HOME"},
    "daytona": {"DAYTONA_API_KEY", "DAYTONA_API_URL"},
    "e2b": {"E2B_API_KEY"},
    "modal": {"MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"},
}

logger = logging.getLogger("env")


@dataclass(frozen=True)
class Places:
    """What differs between machines."""

    tasks_dir: Path
    network: str
    """Docker network of the sandboxes; empty for backends without one."""
    control_host: str
    """Our own name on the network of trainer and evaluator."""
    capture_host: str
    """Our own name on the sandboxes' network."""
    capture_url: str
    """The capture proxy as a sandbox reaches it."""
    capture_port: int = CAPTURE_PORT
    setup_network: str | None = None
    """Docker network with a way out, for the time of a task's own set-up; None: the recipe grants none."""
    policy_urls: tuple[str, ...] = ()
    """The engines that a rollout may ask."""

    @property
    def is_public(self) -> bool:
        """Whether sandboxes come through an address that others know too, and a proxy that is not ours."""
        return self.capture_url.endswith(public.PREFIX)

    @classmethod
    def from_environment(cls, cfg: Recipe) -> Places:
        tasks_dir, network = os.environ.get("TASKS_DIR", ""), os.environ.get("SANDBOX_NETWORK", "")
        if not tasks_dir.startswith("/"):
            raise RecipeError(f"TASKS_DIR is {tasks_dir!r}; it must be an absolute path, the same on the host")
        if cfg.env.backend == "docker" and not network:
            raise RecipeError("SANDBOX_NETWORK is not set; it names the Docker network of the sandboxes and env alone")
        capture_host = os.environ.get("CAPTURE_HOST", "capture")
        # Each may be several, divided by commas.
        policies = f"{os.environ.get('POLICY_URL', '')},{os.environ.get('POLICY_EVAL_URL', '')}"
        # OpenEnv's name for the public host of its server: a Space's variable, and a Job's made like it.
        space_host = os.environ.get("SPACE_HOST", "")
        capture_port = int(os.environ.get("CAPTURE_PORT") or (PUBLIC_PORT if space_host else CAPTURE_PORT))
        own_url = f"https://{space_host}{public.PREFIX}" if space_host else f"http://{capture_host}:{capture_port}"
        return cls(
            tasks_dir=Path(tasks_dir),
            network=network,
            setup_network=SETUP_NETWORK if cfg.env.healthcheck_internet and cfg.env.backend == "docker" else None,
            control_host=os.environ.get("CONTROL_HOST", "env-control"),
            capture_host=capture_host,
            policy_urls=tuple(url.rstrip("/") for url in re.split(r"[,\s]+", policies) if url),
            capture_port=capture_port,
            capture_url=os.environ.get("CAPTURE_URL") or own_url,
        )


def serve(cfg: Recipe, run: RunDir) -> int:
    """Serve until SIGTERM or SIGINT; what the run has in the engine is removed before and after."""
    quiet_libraries()
    image = cfg.sandbox_image()
    places = Places.from_environment(cfg)
    provider = suites.load(cfg, places.tasks_dir)
    control_socket = bind(places.control_host, CONTROL_PORT)
    capture_socket = bind(places.capture_host, places.capture_port)
    # On the address of the control plane: no sandbox reaches it.
    serving = metrics.serve("env", run, host=places.control_host)
    with signals.stop_event() as stop, health.Pulse("env", run) as pulse, serving:
        if cfg.env.backend == "docker":
            check_engine(cfg, places.network, image)
            if places.setup_network:
                make_network(places.setup_network, SETUP_NETWORK_OPTIONS)
        sweep_backend(cfg, run)
        hand_over_trials(run)
        manifest.write(cfg, run, *provider.suites())
        record(cfg, run, image)
        board = Scoreboard()
        prepare(cfg, run, places, provider, board, image)
        service = capture_service(cfg, places)
        key = secrets.token_urlsafe(24)
        data_plane = DataPlane(service.capture.app)
        plane = public.Mounted(data_plane, key) if places.is_public else data_plane
        servers = [Server("capture", plane, capture_socket, "auto")]
        try:
            if places.is_public:
                public.preflight(places.capture_url, key)
            # Only now: who waits for the control plane may start rollouts.
            servers.append(Server("control", control_app(cfg, run, places.tasks_dir), control_socket))
            logger.info("serving", extra={"control": control_socket.getsockname(), "capture": places.capture_url})
            while not stop.wait(BEAT_S):
                for server in servers:
                    server.check()
                pulse.set("serving", **board.snapshot())
        finally:
            for server in servers:
                server.ask_to_stop()
            for server in servers:
                server.join()
            # Of a server that did not end in time the rollouts count as live; they end with this process.
            sweep_backend(cfg, run, keep_live=False)
            hand_over_trials(run)
    return 0


def hand_over_trials(run: RunDir) -> None:
    """A sandbox hands its files over when it ends; what it did not come to, because env was killed, this does."""
    if os.geteuid() == 0 and run.trials.is_dir():
        hand_over(run.trials, run_dir.host_user(run.path.parent))


def sweep_backend(cfg: Recipe, run: RunDir, *, keep_live: bool = True) -> int:
    """End what the run has left where its sandboxes run and no rollout of this process uses; nothing of another run.

    Args: keep_live: False: also what rollouts of this process use.
    Returns: how many sandboxes.
    """
    if cfg.env.backend == "docker":
        return sweep(run, keep=sandbox.Sandbox.live if keep_live else ())
    if cfg.env.backend == "hf-sandbox":
        return hub_sandbox.sweep(run, keep=hub_sandbox.HubSandbox.live if keep_live else ())
    return 0


def prepare(
    cfg: Recipe, run: RunDir, places: Places, provider: suites.SuiteProvider, board: Scoreboard, image: str
) -> None:
    """Put the recipe's numbers into the parts of OpenEnv and Harbor that read them at rollout time.

    Args: image: of every sandbox.
    """
    run.trials.mkdir(parents=True, exist_ok=True)
    keep_only(KEPT_VARIABLES | BACKEND_VARIABLES.get(cfg.env.backend, set()))
    os.environ["OPENENV_HARBOR_TRIALS_DIR"] = str(run.trials)
    overlay = sandbox.write_overlay(cfg, run, places.network, image)
    build = sandbox.bounded(openenv_rollout.build_trial_config, cfg, run, overlay, image, places.setup_network)
    openenv_rollout.build_trial_config = hub_sandbox.bounded(build, cfg, run, agent.UID, image)
    sandbox.Sandbox.configure(cfg)
    hub_sandbox.HubSandbox.configure(cfg)
    agent.register(cfg)
    allowed = Allowed(cfg.env.backend, frozenset(f"{url}/v1" for url in places.policy_urls))
    RolloutEnvironment.serve(provider, board, run.trials, cfg.rollout.outer_timeout_s, allowed)


def record(cfg: Recipe, run: RunDir, image: str) -> None:
    """Write ``runs/<run>/env.json``: what this service runs with."""
    sandbox_image = inspect("image", image) if cfg.env.backend == "docker" else None
    run_dir.write_json(
        run.path / "env.json",
        {
            "sandbox_image_id": sandbox_image["Id"] if sandbox_image else None,
            "openenv": importlib.metadata.version("openenv"),
            "harbor": importlib.metadata.version("harbor"),
            "recipe_sha256": cfg.sha256(),
            "recipe": cfg.model_dump(mode="json"),
        },
    )


def quiet_libraries() -> None:
    """Harbor logs whole commands at debug level, with configuration and prompts; they belong in the trial's own log."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
    for name in ("mcp", "fastmcp", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # At every rollout: that OpenCode cannot count its own steps. The proxy does.
    logging.getLogger("openenv.harbor.seams").setLevel(logging.ERROR)


def keep_only(names: frozenset[str] | set[str]) -> None:
    for name in set(os.environ) - names:
        del os.environ[name]


def capture_service(cfg: Recipe, places: Places) -> HarborService:
    """OpenEnv's capture proxy and session registry, for our own listener; every rollout names its engine."""
    # An export works on all ids of a rollout, in a thread of its own. With Python's 5 ms between two threads, each read
    # and write of a model call that goes on meanwhile waits that long.
    sys.setswitchinterval(SWITCH_S)
    os.environ["OPENENV_CAPTURE_ADMIN_KEY"] = secrets.token_urlsafe(24)
    service = HarborService(
        datasets=[cfg.tasks.train, cfg.tasks.heldout],
        capture_port=CAPTURE_PORT,
        capture_level="text",
        max_output_tokens=cfg.sampling.max_completion_tokens,
    )
    del os.environ["OPENENV_CAPTURE_ADMIN_KEY"]
    state = service.capture.app.state
    client, level = state.upstreams.default
    state.upstreams = FreshUpstreamPool(default_client=client, default_level=level)
    service.public_url = places.capture_url
    HarborService.set_current(service)
    return service


def control_app(cfg: Recipe, run: RunDir, tasks_dir: Path | None = None) -> Any:
    """Task API and ``run_rollout`` for trainer and evaluator, ``/state`` and ``/sweep`` for the watchdog.

    Args: tasks_dir: where the suites are, for OpenEnv's read-only pages at ``/web``; None: without them.
    """
    app = create_app(
        RolloutEnvironment,
        CallToolAction,
        CallToolObservation,
        state_cls=HarborState,
        env_name=CLIENT_NAME,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=cfg.rollout.max_inflight + cfg.evaluator.max_inflight,
            session_timeout=IDLE_SESSION_S,
        ),
        **({} if tasks_dir is None else web.pages(tasks_dir, [cfg.tasks.train, cfg.tasks.heldout])),
    )
    app = OperatorRoutes(CancelOnDisconnect(app), run, functools.partial(sweep_backend, cfg, run))
    return WithKey(web.ReadOnlyPages(app), control.issue(run))


# --- Engine and listeners -----------------------------------------------------------------------------------------


def check_engine(cfg: Recipe, network: str, image: str) -> None:
    """Raises: NotReadyError: no engine, no sandbox image with the right OpenCode, or a network with a way out."""
    details = inspect("image", image)
    if details is None:
        raise NotReadyError(f"image {image} is not on this engine; build it with `make images`, or set TAG")
    agent.check_image(cfg, image, details["Id"])
    found = inspect("network", network)
    if found is None:
        raise NotReadyError(f"network {network} does not exist; compose.yaml makes it")
    if not found["Internal"]:
        raise NotReadyError(f"network {network} is not internal: sandboxes would reach the internet; remove it first")
    if found["Options"].get("com.docker.network.bridge.inhibit_ipv4") != "true":
        logger.warning("the host itself has an address on the sandboxes' network", extra={"network": network})


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on the one address that our own name has, for who is on that address's network.

    Raises: NotReadyError: the name is unknown, the address foreign or taken, or the kernel too old.
    """
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except socket.gaierror:
        raise NotReadyError(f"{host} is no name of this container; compose.yaml gives env this network alias") from None
    # Asyncio switches Nagle's algorithm off only on sockets that name their protocol; with it, each reply waited 40 ms
    # for the sandbox's delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        network.only_from_its_network(listener, str(address[0]))
        listener.bind(address)
        listener.listen(512)
    except PermissionError:
        listener.close()
        raise NotReadyError(
            f"this kernel is {os.uname().release}, and 5.7 or newer is needed to listen on one network alone"
        ) from None
    except OSError as error:
        listener.close()
        raise NotReadyError(f"cannot listen on {host} ({address[0]}:{port}): {error.strerror or error}") from None
    return listener


class Server:
    """One uvicorn server in a thread of its own, so that neither listener waits for the other's work."""

    def __init__(
        self, name: str, app: Any, listener: socket.socket, loop: Literal["asyncio", "auto"] = "asyncio"
    ) -> None:
        """Args: loop: ``auto`` is uvloop, which is faster; the control plane's subprocesses are asyncio's."""
        self._name = name
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop=loop,
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
                # A result is megabytes of token ids on a local network; compressing them only costs CPU.
                ws_per_message_deflate=False,
                ws_ping_timeout=60.0,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name=f"{name}-server", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises: RuntimeError: the server ended by itself."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the {self._name} server ended")

    def ask_to_stop(self) -> None:
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until the open calls are cancelled; what does not end in time ends with the process."""
        self._thread.join(timeout=GRACE_S + 5)
