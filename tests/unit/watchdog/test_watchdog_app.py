"""The loop over a run directory that changes, with a FAKE clock and FAKE policy and env on real sockets."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common import control, health, recipe, run_dir
from services.common.errors import RecipeError
from services.common.health import Heartbeat
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.common.signals import StopFlag
from services.watchdog import app, incident
from services.watchdog.app import Watchdog
from services.watchdog.plan import SUPERVISOR_MARGIN_S

ROOT = Path(__file__).resolve().parents[3]


class FakePeer:
    """FAKE of a service with /health and /metrics; ``status`` is what it answers."""

    def __init__(self) -> None:
        self.status = 200
        self.posted: list[str] = []
        self.keys: dict[str, str | None] = {}
        """Path -> the Authorization that it was last asked with."""
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                peer.keys[self.path] = self.headers.get("Authorization")
                body = b"vllm:num_requests_running 3\n" if self.path == "/metrics" else b"{}"
                self.send_response(peer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                peer.posted.append(self.path)
                self.do_GET()

            def log_message(self, *_arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Scene:
    """A run, its peers, and a clock that only the test moves."""

    def __init__(self, folder: Path, policy: FakePeer, env: FakePeer, client: httpx.Client) -> None:
        self.now_s = time.time()
        self.cfg: Recipe = recipe.load(ROOT / "data/recipes/smoke.toml")
        self.run = RunDir(folder / "runs" / "test")
        self.run.prepare()
        self.policy, self.env, self.client = policy, env, client
        self.watchdog = self.start()

    def start(self) -> Watchdog:
        peers = {"policy": self.policy.url, "env": self.env.url}
        return Watchdog(self.cfg, self.run, peers, self.client, clock=lambda: self.now_s)

    def beat(self, service: str = "trainer", phase: str = "rollout", step: int = 0, pid: int = 1) -> None:
        value = Heartbeat(service, phase, step, self.now_s, self.now_s, pid, {})
        run_dir.write_json(self.run.heartbeats / service, asdict(value))

    def pass_time(self, seconds: float, **beat: Any) -> list[int | None]:
        """Look once a poll for so long, or until the watch ends; the trainer beats unless ``beat`` is empty."""
        codes: list[int | None] = [None]
        end = self.now_s + seconds
        while self.now_s < end and codes[-1] is None:
            self.now_s += self.cfg.watchdog.poll_s
            if beat:
                self.beat(**beat)
            codes.append(self.watchdog.turn())
        return codes

    def end(self, exit_code: int, reason: str = "done") -> None:
        self.write_now(self.run.result, {"exit_code": exit_code, "reason": reason, "step": 4})

    def write_now(self, path: Path, value: Any) -> None:
        run_dir.write_json(path, value)
        os.utime(path, (self.now_s, self.now_s))

    @property
    def stop(self) -> dict[str, Any] | None:
        return run_dir.read_json(self.run.stop_request)

    @property
    def bundles(self) -> list[Path]:
        return sorted(self.run.incidents.iterdir())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    policy, env = FakePeer(), FakePeer()
    with httpx.Client() as client:
        yield Scene(tmp_path, policy, env, client)
    policy.close()
    env.close()


def test_a_run_that_steps_is_watched_to_its_end_and_nothing_is_written(scene: Scene) -> None:
    for step in range(5):
        assert set(scene.pass_time(300, phase="rollout", step=step)) == {None}
    scene.end(0)
    assert scene.watchdog.turn() == 0
    assert scene.stop is None and scene.bundles == []


def test_a_stall_is_bundled_and_the_run_is_asked_to_stop_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.pass_time(300, phase="rollout", step=3)
    (scene.run.path / "trainer.log").write_text('{"event": "waiting for rollouts"}\n')
    run_dir.append_line(scene.run.metrics, {"step": 3, "reward": 0.5})
    with caplog.at_level(logging.ERROR):
        scene.pass_time(650, phase="rollout", step=3)
    first = scene.stop
    assert first is not None and first["by"] == "watchdog"
    assert "No optimizer step for" in first["reason"] and "after step 3" in first["reason"]
    (bundle,) = scene.bundles
    assert json.loads((bundle / "decision.json").read_text())["reason"] == first["reason"]
    assert json.loads((bundle / "observations.json").read_text())["beats"]["trainer"]["step"] == 3
    assert "waiting for rollouts" in (bundle / "trainer.log.tail").read_text()
    assert '"reward": 0.5' in (bundle / "metrics.jsonl.tail").read_text()
    assert "vllm:num_requests_running 3" in (bundle / "policy-metrics.txt").read_text()
    assert "-> 200" in (bundle / "env-health.txt").read_text()

    scene.pass_time(30, phase="rollout", step=3)
    assert scene.stop == first and scene.bundles == [bundle]
    assert sum("No optimizer step" in record.message for record in caplog.records) == 1
    scene.end(4, first["reason"])
    assert scene.watchdog.turn() == 4
    assert scene.bundles == [bundle]


def test_a_long_save_between_two_steps_is_no_stall(scene: Scene) -> None:
    scene.pass_time(550, phase="rollout", step=2)
    scene.pass_time(5, phase="saving", step=2)
    scene.pass_time(590, phase="rollout", step=2)
    assert scene.stop is None
    scene.pass_time(30, phase="rollout", step=2)
    assert scene.stop is not None


def test_a_dead_trainer_is_stopped_and_the_watch_ends_although_nobody_obeys(scene: Scene) -> None:
    scene.pass_time(60, phase="training", step=1)
    limits = scene.cfg.watchdog
    scene.pass_time(limits.heartbeat_s)
    assert scene.stop is None
    scene.pass_time(limits.poll_s)
    assert scene.stop is not None and "dead or frozen" in scene.stop["reason"]
    obeyed_by = limits.grace_s + SUPERVISOR_MARGIN_S
    assert scene.pass_time(obeyed_by)[-1] is None
    assert scene.pass_time(2 * limits.poll_s)[-1] == 4


def test_a_policy_that_answers_errors_is_named_within_the_heartbeat_limit(scene: Scene) -> None:
    scene.pass_time(60, phase="training", step=1)
    scene.policy.status = 503
    scene.pass_time(scene.cfg.watchdog.heartbeat_s + scene.cfg.watchdog.poll_s, phase="training", step=1)
    assert scene.stop is not None and scene.stop["reason"].startswith("policy has not answered")


def test_a_peer_that_never_answered_yet_is_not_held_against_the_run(scene: Scene) -> None:
    scene.policy.status = 503
    scene.pass_time(500, phase="starting", step=0)
    assert scene.stop is None


def test_a_peer_that_comes_back_in_time_is_forgiven(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    for _ in range(5):
        scene.policy.status = 503
        scene.pass_time(60, phase="rollout", step=1)
        scene.policy.status = 200
        scene.pass_time(10, phase="rollout", step=1)
    assert scene.stop is None


def test_what_an_earlier_attempt_left_behind_is_not_seen(scene: Scene) -> None:
    scene.beat(phase="failed", step=9)
    scene.write_now(scene.run.stop_request, {"reason": "old"})
    scene.now_s += 60
    scene.watchdog = scene.start()
    assert scene.watchdog.turn() is None
    assert set(scene.pass_time(60, phase="starting", step=0)) == {None}
    scene.end(0)
    assert scene.watchdog.turn() == 0


def test_a_run_that_has_ended_is_not_watched_again(scene: Scene) -> None:
    scene.end(4)
    scene.now_s += 3600
    scene.watchdog = scene.start()
    assert scene.watchdog.turn() == 4


def test_after_a_resume_the_watch_goes_on_and_may_stop_the_run_again(scene: Scene) -> None:
    control.issue(scene.run)
    scene.pass_time(60, phase="rollout", step=3)
    scene.pass_time(650, phase="rollout", step=3)
    assert scene.stop is not None and scene.stop["resume"] is True
    # The supervisor obeys: request and heartbeat go, and after a while a new process starts from an earlier step.
    scene.run.stop_request.unlink()
    (scene.run.heartbeats / "trainer").unlink()
    assert set(scene.pass_time(300)) == {None}
    assert scene.env.posted == ["/sweep"]
    key = control.headers(scene.run)["Authorization"]
    assert scene.env.keys["/sweep"] == scene.env.keys["/state"] == key
    assert set(scene.policy.keys.values()) == {None}
    scene.pass_time(300, phase="starting", step=2)
    scene.pass_time(550, phase="rollout", step=2)
    scene.pass_time(550, phase="rollout", step=3)
    assert scene.stop is None and len(scene.bundles) == 1
    scene.pass_time(100, phase="rollout", step=3)
    assert scene.stop is not None and len(scene.bundles) == 2


def test_a_supervisor_that_never_starts_training_again_ends_the_watch(scene: Scene) -> None:
    scene.pass_time(60, phase="rollout", step=3)
    (scene.run.heartbeats / "trainer").unlink()
    limits = scene.cfg.watchdog
    assert set(scene.pass_time(limits.start_limit_s)) == {None}
    assert scene.pass_time(2 * limits.poll_s)[-1] == 3


def test_a_policy_that_froze_in_the_middle_of_a_sync_is_named_within_a_minute(scene: Scene) -> None:
    scene.pass_time(60, phase="sync", step=1)
    scene.policy.status = 503
    frozen_s = scene.now_s
    while scene.stop is None:
        scene.pass_time(scene.cfg.watchdog.poll_s, phase="sync", step=1)
    assert scene.now_s - frozen_s <= 60
    assert scene.stop["reason"].startswith("policy has not answered") and "frozen" in scene.stop["reason"]


def test_a_policy_that_is_gone_is_named_although_it_comes_back_at_once(scene: Scene) -> None:
    scene.pass_time(60, phase="rollout", step=1)
    scene.policy.close()
    scene.pass_time(2 * scene.cfg.watchdog.poll_s, phase="rollout", step=1)
    assert scene.stop is not None and scene.stop["reason"].startswith("policy is gone")
    assert scene.stop["resume"] is True


@pytest.mark.parametrize("phase", ["starting", "compiling", "first_sync", "saving", "pushing", "evaluating"])
def test_a_silent_policy_disturbs_no_save_no_push_and_no_start(scene: Scene, phase: str) -> None:
    scene.pass_time(20, phase=phase, step=1)
    scene.policy.status = 503
    scene.pass_time(scene.cfg.watchdog.save_limit_s - 30, phase=phase, step=1)
    assert scene.stop is None


def rollout(scene: Scene, cause: str | None) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(scene.now_s))
    run_dir.append_line(scene.run.rollouts / "index.jsonl", {"at": at, "scored": cause is None, "cause": cause})


def test_a_share_of_unscorable_rollouts_above_the_recipe_s_stops_the_run(scene: Scene) -> None:
    limits = scene.cfg.rollout
    allowed = int(limits.max_unscorable_share * limits.unscorable_window)
    for number in range(allowed):
        rollout(scene, "capture" if number % 2 else "policy")
        rollout(scene, None)
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is None
    rollout(scene, "capture")  # the oldest two, one of each, leave the window
    rollout(scene, "capture")
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is not None and f"{allowed + 1} of the last {limits.unscorable_window}" in scene.stop["reason"]
    assert "capture 18, policy 15" in scene.stop["reason"]


def lose_all_in_flight(scene: Scene) -> None:
    for _ in range(scene.cfg.rollout.unscorable_window):
        rollout(scene, "env")


def test_rollouts_that_a_peer_takes_with_it_are_one_failure(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    scene.env.status = 503
    lose_all_in_flight(scene)
    scene.pass_time(20, phase="rollout", step=1)
    scene.env.status = 200
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is None


def test_an_env_that_was_replaced_between_two_looks_is_noticed_by_its_process(scene: Scene) -> None:
    scene.beat("env", "serving")
    scene.pass_time(20, phase="rollout", step=1)
    lose_all_in_flight(scene)
    scene.beat("env", "serving", pid=2)
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is None
    lose_all_in_flight(scene)  # of an env that stays: a bound that was crossed
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is not None and scene.stop["resume"] is False


def test_unscorable_rollouts_before_a_stop_do_not_count_after_it(scene: Scene) -> None:
    limits = scene.cfg.rollout
    for _ in range(int(limits.max_unscorable_share * limits.unscorable_window)):
        rollout(scene, "env")
    scene.pass_time(20, phase="rollout", step=1)
    scene.pass_time(scene.cfg.watchdog.stall_s + 20, phase="rollout", step=1)
    assert scene.stop is not None and scene.stop["resume"] is True
    scene.run.stop_request.unlink()  # as the supervisor does, which then starts the training process again
    scene.pass_time(20, phase="rollout", step=2)
    rollout(scene, "env")
    scene.pass_time(20, phase="rollout", step=2)
    assert scene.stop is None


def test_a_stop_that_a_full_disk_refuses_is_asked_for_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = run_dir.write_json, []

    def full_once(path: Path, value: Any) -> None:
        if path == scene.run.stop_request and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(run_dir, "write_json", full_once)
    scene.pass_time(20, phase="rollout", step=1)
    scene.pass_time(scene.cfg.watchdog.stall_s + 20, phase="rollout", step=1)
    assert refused and scene.stop is not None


def test_unscorable_rollouts_of_an_earlier_attempt_are_forgotten(scene: Scene) -> None:
    for _ in range(scene.cfg.rollout.unscorable_window):
        rollout(scene, "policy")
    scene.now_s += 60
    scene.watchdog = scene.start()
    scene.pass_time(20, phase="rollout", step=1)
    assert scene.stop is None


def test_a_trainer_that_never_came_ends_the_watch_with_3_and_leaves_no_stop_request(scene: Scene) -> None:
    codes = scene.pass_time(scene.cfg.watchdog.start_limit_s + 2 * scene.cfg.watchdog.poll_s)
    assert codes[-1] == 3
    assert scene.stop is None
    assert len(scene.bundles) == 1


def test_a_run_that_failed_by_itself_is_bundled_and_its_exit_code_passed_on(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    scene.end(1, "the training process ended with exit code 1")
    assert scene.watchdog.turn() == 1
    assert len(scene.bundles) == 1 and scene.stop is None


def test_a_run_that_a_person_stopped_is_no_incident(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    scene.end(143, "stopped by SIGTERM")
    assert scene.watchdog.turn() == 143
    assert scene.bundles == []


def test_a_stop_request_of_the_evaluator_is_respected(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    scene.write_now(scene.run.stop_request, {"reason": "collapse", "by": "evaluator"})
    scene.pass_time(60)
    assert scene.stop == {"reason": "collapse", "by": "evaluator"}


def test_a_stuck_evaluator_is_told_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.beat("evaluator", "evaluating", 300)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            scene.pass_time(300, phase="rollout", step=step)
    assert [record.levelname for record in caplog.records if "evaluator" in record.message] == ["WARNING"]
    assert scene.stop is None


def test_a_bundle_that_cannot_be_written_does_not_keep_a_stalled_run_alive(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incident, "write_bundle", full)
    scene.pass_time(60, phase="rollout", step=1)
    with caplog.at_level(logging.ERROR):
        scene.pass_time(700, phase="rollout", step=1)
    assert scene.stop is not None
    assert any(record.message == "no incident bundle" for record in caplog.records)


def test_a_bundle_names_the_peer_that_gave_nothing(scene: Scene) -> None:
    scene.pass_time(20, phase="rollout", step=1)
    scene.env.close()
    scene.end(1)
    assert scene.watchdog.turn() == 1
    assert "no answer from" in (scene.bundles[0] / "env-health.txt").read_text()


def test_a_bundle_has_its_name_only_when_it_is_whole(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident, "_page", lambda *_: 1 / 0)
    scene.end(1)
    with pytest.raises(ZeroDivisionError):
        scene.watchdog.turn()
    assert [bundle.name for bundle in scene.bundles if not bundle.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("size", "expected"), [(100, b"one\ntwo\nthree\n"), (9, b"three\n"), (6, b"three\n"), (5, b""), (0, b"")]
)
def test_a_tail_starts_with_a_whole_line(tmp_path: Path, size: int, expected: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert incident.tail(path, size) == expected


def test_the_loop_ends_at_once_on_sigterm(scene: Scene) -> None:
    stop = StopFlag()
    stop.set()
    with health.Pulse("watchdog", scene.run) as pulse:
        assert scene.watchdog.watch(pulse, stop) == 0
    assert health.read_heartbeats(scene.run)["watchdog"].phase == "done"


def test_the_loop_returns_the_run_s_exit_code(scene: Scene) -> None:
    scene.end(4)
    with health.Pulse("watchdog", scene.run) as pulse:
        assert scene.watchdog.watch(pulse, StopFlag()) == 4


def test_missing_urls_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLICY_URL", raising=False)
    monkeypatch.delenv("ENV_URL", raising=False)
    with pytest.raises(RecipeError, match="POLICY_URL and ENV_URL not set"):
        app.peers_from_environment()
    monkeypatch.setenv("POLICY_URL", "http://policy:8000/")
    monkeypatch.setenv("ENV_URL", "http://env:8100")
    assert app.peers_from_environment() == {"policy": "http://policy:8000", "env": "http://env:8100"}
