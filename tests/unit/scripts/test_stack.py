"""How scripts drive compose, with a FAKE docker on PATH that writes down what it was asked for."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from scripts.stack import ROOT, Interrupted, Stack, alone, check_variant
from services.common.errors import MachineError, RecipeError
from services.common.signals import StopFlag

FAKE = """#!/bin/sh
# FAKE docker: appends its arguments and environment to calls, then does what the case says.
printf '%s\\n' "$*" >> "$CALLS"
env > "$CALLS.env"
case "$*" in
  *"up --detach broken"*) echo "no such image" >&2; exit 17;;
  *"up --detach slow"*) exec sleep 30;;
  *"ps --all"*broken) echo "no such service" >&2; exit 14;;
  *"ps --all"*) echo "exited 4"; cut -d' ' -f6 "/proc/$$/stat" > "$CALLS.session";;
  *"ps --services"*) printf 'trainer\\nenv\\nenv\\n';;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    for name in ("COMPOSE_FILE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "calls"


@pytest.mark.parametrize(("variant", "files"), [("cpu", "compose.yaml:compose.cpu.yaml"), ("cuda", "compose.yaml")])
def test_the_variant_chooses_the_files_and_the_environment_is_the_run_s(calls: Path, variant: str, files: str) -> None:
    Stack(variant, {"RUN_NAME": "x"}, StopFlag())("up", "--detach", "env")
    assert calls.read_text() == "compose up --detach env\n"
    found = dict(line.split("=", 1) for line in Path(f"{calls}.env").read_text().splitlines() if "=" in line)
    assert (found["COMPOSE_FILE"], found["RUN_NAME"]) == (files, "x")


def test_another_variant_is_refused() -> None:
    with pytest.raises(RecipeError, match="VARIANT is 'rocm'; allowed: cpu, cuda"):
        check_variant("rocm")


def test_an_evaluator_s_command_gets_its_arguments_environment_and_a_width(calls: Path) -> None:
    stack = Stack("cpu", {}, StopFlag())
    assert stack.evaluator("eval", "--checkpoint", "2", IMAGE_IDS=json.dumps({"env": "sha256:1"})) == 0
    assert calls.read_text() == (
        'compose run --rm --no-deps --no-TTY --env=IMAGE_IDS={"env": "sha256:1"} --env=COLUMNS=120 '
        "evaluator python -m services.evaluator eval --checkpoint 2\n"
    )


def test_state_of_services_is_read_from_compose(calls: Path) -> None:
    stack = Stack("cpu", {}, StopFlag())
    assert stack.exit_code("trainer") == 4
    assert stack.running() == ["env", "trainer"]


def test_a_question_is_asked_in_a_session_of_its_own_where_ctrl_c_does_not_end_it(calls: Path) -> None:
    Stack("cpu", {}, StopFlag()).exit_code("trainer")
    session = int(Path(f"{calls}.session").read_text())
    assert session != os.getsid(0)


def test_a_question_that_failed_names_its_command_once_with_its_words(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack("cpu", {}, StopFlag())
    assert stack.guarded(lambda: stack.exit_code("broken") or 0) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert err.startswith("docker compose ps --all --format {{.State}} {{.ExitCode}} broken failed: no such service")


def test_a_failed_command_is_exit_code_3_with_its_words_and_the_logs(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack("cpu", {}, StopFlag())
    with pytest.raises(subprocess.CalledProcessError):
        stack("up", "--detach", "broken")
    assert stack.guarded(lambda: stack("up", "--detach", "broken")) == 3
    assert "no such image" in capsys.readouterr().err
    assert calls.read_text().splitlines()[-1] == "compose --profile * logs --tail 25"


def test_a_stop_request_ends_the_command_and_is_exit_code_130(calls: Path) -> None:
    stop = StopFlag()
    stack = Stack("cpu", {}, stop)
    threading.Timer(0.3, stop.set).start()  # the command itself takes 30 s and would end with 0
    assert stack.guarded(lambda: stack("up", "--detach", "slow")) == 130
    with pytest.raises(Interrupted):
        stack("up", "--detach", "slow")


def test_taking_down_is_done_whatever_was_asked_and_sandboxes_go_before_their_network(calls: Path) -> None:
    stop = StopFlag()
    stop.set()
    Stack("cpu", {}, stop).down()
    stopped, swept, removed = calls.read_text().splitlines()
    assert stopped == "compose --profile * stop"
    assert swept.startswith("container ls --all --filter label=opencode-rl.run ")
    assert removed == "compose --profile * down --remove-orphans"


# --- One command at a time ----------------------------------------------------------------------------------------

HOLDER = """
from scripts.stack import alone
with alone():
    print("held", flush=True)
    input()
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_a_second_command_is_refused_until_the_first_is_gone_however_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(MachineError, match=r"another command of this project .*`make status`"), alone():
            raise AssertionError("two commands at once")
        monkeypatch.setenv("COMPOSE_PROJECT_NAME", "other")
        with alone():
            pass  # its services are others
        monkeypatch.delenv("COMPOSE_PROJECT_NAME")
        if end == "killed":
            first.send_signal(signal.SIGKILL)
        else:
            first.stdin.write(b"\n")
            first.stdin.close()
        first.wait(10)
    for _ in range(2):
        with alone():
            pass
