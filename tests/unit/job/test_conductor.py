"""The order in time of a container's programs, with a FAKE supervisord and real HTTP servers to wait for."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.common import recipe
from services.common.errors import NotReadyError
from services.common.signals import StopFlag
from services.job import conductor as conducting
from services.job.conductor import Conductor, Stopped
from services.job.supervisor import Program

ROOT = Path(__file__).resolve().parents[3]
CFG = recipe.load(ROOT / "data/recipes/smoke.toml", {"watchdog.start_limit_s": 2.0})


class FakePrograms:
    """Programs that end as told: name -> exit codes, one a start; None runs for ever."""

    def __init__(self, ends: dict[str, int | None]) -> None:
        self.ends = ends
        self.log: list[str] = []
        self.running: set[str] = set()

    def start(self, name: str) -> None:
        self.log.append(f"+{name}")
        self.running.add(name)

    def stop(self, name: str) -> None:
        self.log.append(f"-{name}")
        self.running.discard(name)

    def look(self, name: str) -> Program:
        code = self.ends.get(name)
        return Program(code is None and name in self.running, code if name in self.running else None)


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "POLL_S", 0.01)


@pytest.fixture
def urls() -> Iterator[dict[str, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield dict.fromkeys(("policy", "env", "policy-eval"), f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()


def conductor(
    programs: FakePrograms, urls: dict[str, str], stop: StopFlag | None = None, push: bool = True
) -> Conductor:
    return Conductor(CFG, programs, urls, stop or StopFlag(), push=push)


def test_a_run_is_trained_evaluated_and_mirrored_in_this_order(urls: dict[str, str]) -> None:
    programs = FakePrograms({"trainer": 0, "evaluator": 0, "push": 0})
    assert conductor(programs, urls).conduct("train") == 0
    assert programs.log == [
        "+policy", "+env", "+watchdog", "+trainer", "-watchdog", "-policy", "+policy-eval", "+evaluator", "+push",
    ]  # fmt: skip


@pytest.mark.parametrize("code", [1, 2, 3, 4, 143])
def test_training_that_ended_badly_is_not_evaluated_and_its_exit_code_is_the_container_s(
    urls: dict[str, str], code: int
) -> None:
    programs = FakePrograms({"trainer": code, "push": 0})
    assert conductor(programs, urls).conduct("train") == code
    assert "+evaluator" not in programs.log and programs.log[-1] == "+push"


def test_an_evaluation_that_fails_is_seen_in_the_exit_code(urls: dict[str, str]) -> None:
    assert conductor(FakePrograms({"trainer": 0, "evaluator": 3, "push": 0}), urls).conduct("train") == 3


def test_a_mirror_that_fails_costs_no_run_and_without_a_repository_there_is_none(urls: dict[str, str]) -> None:
    assert conductor(FakePrograms({"trainer": 0, "evaluator": 0, "push": 3}), urls).conduct("train") == 0
    programs = FakePrograms({"trainer": 0, "evaluator": 0})
    assert conductor(programs, urls, push=False).conduct("train") == 0
    assert "+push" not in programs.log


def test_a_server_that_ends_before_it_serves_is_named_with_its_exit_code(urls: dict[str, str]) -> None:
    programs = FakePrograms({"policy": 2})
    with pytest.raises(NotReadyError, match="policy ended with exit code 2 before it served"):
        conductor(programs, {**urls, "policy": "http://127.0.0.1:9"}).conduct("train")
    assert "+trainer" not in programs.log


def test_a_server_that_never_answers_is_named(urls: dict[str, str]) -> None:
    with pytest.raises(NotReadyError, match=r"env did not answer within watchdog\.start_limit_s = 2 s"):
        conductor(FakePrograms({}), {**urls, "env": "http://127.0.0.1:9"}).conduct("train")


def test_a_watch_follows_the_hub_until_the_evaluator_is_done(urls: dict[str, str]) -> None:
    programs = FakePrograms({"evaluator": 0})
    assert conductor(programs, urls).conduct("watch") == 0
    assert programs.log == ["+policy-eval", "+env", "+evaluator", "+mirror", "-mirror"]


def test_a_policy_of_another_job_is_neither_started_nor_waited_for(urls: dict[str, str]) -> None:
    del urls["policy"]
    programs = FakePrograms({"trainer": 1, "push": 0})
    conductor(programs, urls).conduct("train")
    assert programs.log[:3] == ["+env", "+watchdog", "+trainer"]


def test_a_stop_request_ends_the_wait(urls: dict[str, str]) -> None:
    stop = StopFlag()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Stopped):
        conductor(FakePrograms({}), urls, stop).conduct("train")
