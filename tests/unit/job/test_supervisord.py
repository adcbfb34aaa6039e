"""A real supervisord with small programs in place of the services, and the rules of images/job/supervisord.conf."""

import configparser
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.job.prefix import Lines
from services.job.supervisor import Supervisor, SupervisorError
from services.policy import attend

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "images/job/supervisord.conf"


def rules() -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parsed.read(CONFIG)
    return parsed


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Start supervisord with the real configuration, its commands replaced: program -> shell script.

    ``first`` is a shell script that runs before it in the same process.
    """
    started: list[Supervisor] = []

    def run(*, first: str = "", **scripts: str) -> tuple[Supervisor, Path]:
        config = rules()
        config.remove_option("supervisord", "user")
        for section in [name for name in config.sections() if name.startswith("program:")]:
            name = section.removeprefix("program:")
            config.remove_option(section, "user")
            script = scripts.get(name.replace("-", "_"), "exit 0")
            (tmp_path / f"{name}.sh").write_text(script)
            config.set(section, "command", f"/bin/bash {tmp_path}/{name}.sh")
        config.set("eventlistener:output", "command", f"{sys.executable} -m services.job.prefix")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        with (tmp_path / "supervisord.conf").open("w") as stream:
            config.write(stream)
        variables = {
            "JOB_DIR": str(tmp_path), "JOB_SOCKET": str(tmp_path / "s.sock"), "POLICY_GPU": "1", "TRAINER_GPU": "0",
            "EVALUATOR": "final", "APP_USER": "app", "ENV_USER": "root",
        }  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        output = tmp_path / "output"
        command = [
            sys.executable,
            "-m",
            "supervisor.supervisord",
            "--configuration",
            str(tmp_path / "supervisord.conf"),
        ]
        shell = ["/bin/bash", "-c", f'{first}\nexec "$@" >> {output} 2>&1', "-", *command]
        started.append(Supervisor(shell, tmp_path / "s.sock"))
        return started[0], output

    yield run
    for supervisor in started:
        if supervisor.process.poll() is None:  # an orderly end takes a second for each program
            supervisor._rpc.stopAllProcesses()
            supervisor.process.kill()
            supervisor.process.wait()


def wait_for(condition, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_exit_code_is_the_program_s_and_every_line_has_its_name(start) -> None:
    supervisor, output = start(trainer="echo one; echo two >&2; printf last; exit 4", policy="sleep 60")
    supervisor.start("policy")
    supervisor.start("trainer")
    wait_for(lambda: supervisor.look("trainer").exit_code is not None)
    assert supervisor.look("trainer").exit_code == 4
    assert supervisor.look("policy").running and supervisor.look("policy").exit_code is None
    wait_for(lambda: output.read_text().count("[trainer]") == 3)
    assert "[trainer] one\n[trainer] two\n[trainer] last\n" in output.read_text()


def test_a_socket_that_nobody_listens_on_yet_is_waited_for(start, tmp_path: Path) -> None:
    """supervisord binds it, gives it its name, and only then listens."""
    bound = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('s.sock'); time.sleep(0.5)"
    supervisor, _ = start(first=f'cd {tmp_path}; {sys.executable} -c "{bound}"; rm s.sock; cd {ROOT}')
    assert not supervisor.look("trainer").running


def test_what_a_signal_killed_is_started_again_and_what_ended_by_itself_is_not(start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    supervisor, _ = start(trainer=f"[ -e {tmp_path}/end ] && end=1; echo $$ >> {pids}; [ $end ] && exit 0; sleep 60")
    supervisor.start("trainer")
    wait_for(lambda: pids.exists() and pids.read_text().count("\n") == 1)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    wait_for(lambda: pids.read_text().count("\n") == 2)
    assert supervisor.look("trainer").exit_code is None
    (tmp_path / "end").touch()
    os.kill(int(pids.read_text().split()[1]), signal.SIGKILL)
    wait_for(lambda: supervisor.look("trainer").exit_code == 0)
    time.sleep(1.5)
    assert pids.read_text().count("\n") == 3


@pytest.mark.parametrize(("code", "starts"), [(attend.ENDED, 2), (2, 1)])
def test_a_policy_whose_engine_died_is_started_again_and_one_that_was_refused_is_not(
    start, tmp_path: Path, code: int, starts: int
) -> None:
    seen = tmp_path / "starts"
    supervisor, _ = start(policy=f"echo up >> {seen}; [ $(wc -l < {seen}) = 2 ] && sleep 60; exit {code}")
    supervisor.start("policy")
    wait_for(lambda: seen.exists() and seen.read_text().count("up") == starts)
    wait_for(lambda: supervisor.look("policy").running is (starts == 2))
    time.sleep(1.5)
    assert seen.read_text().count("up") == starts
    assert supervisor.look("policy").running is (starts == 2)


def test_a_stop_is_a_sigterm_to_the_program_itself(start) -> None:
    supervisor, output = start(policy_eval="trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    supervisor.start("policy-eval")
    wait_for(lambda: "[policy-eval] ready" in output.read_text())
    supervisor.stop("policy-eval")
    wait_for(lambda: "[policy-eval] saved" in output.read_text())
    assert not supervisor.look("policy-eval").running
    supervisor.stop("policy-eval")  # stopped already


def test_everything_ends_in_reverse_order_the_trainer_before_its_peers(start, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    script = f"trap 'echo $0 >> {ends}; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    supervisor, output = start(env=script, policy=script, watchdog=script, trainer=script)
    for name in ("policy", "env", "watchdog", "trainer"):
        supervisor.start(name)
    wait_for(lambda: output.read_text().count("ready") == 4)
    supervisor.shut_down()
    order = [Path(line).stem for line in ends.read_text().split()]
    assert order == ["trainer", "watchdog", "policy", "env"]
    with pytest.raises(SupervisorError, match="supervisord ended"):
        supervisor.look("trainer")


def test_the_commands_are_those_of_compose() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ours = {
        name.removeprefix("program:"): rules()[name]["command"].split(maxsplit=1)[1]
        for name in rules().sections()
        if name.startswith("program:")
    }
    for name, service in services.items():
        command = [str(part) for part in service["command"]]
        if name == "evaluator":  # what it does is chosen when it starts, there and here
            assert ours[name] == "-m services.evaluator %(ENV_EVALUATOR)s" and command[1:3] == [
                "-m",
                "services.evaluator",
            ]
        elif name in ours:
            assert ours[name] == " ".join(command[1:]), name
    assert set(services) - set(ours) <= {"dash"}, "a service that a Job lacks"  # dash is for people on the machine


def test_policy_and_trainer_have_a_gpu_each() -> None:
    for name, gpu in (("policy", "POLICY_GPU"), ("trainer", "TRAINER_GPU"), ("policy-eval", "POLICY_GPU")):
        assert f'CUDA_VISIBLE_DEVICES="%(ENV_{gpu})s"' in rules()[f"program:{name}"]["environment"]


def test_pieces_of_output_become_lines_of_their_program() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.add("trainer", "one\ntw")
    lines.add("policy", "other\n")
    lines.add("trainer", "o\nlast words")
    lines.ended("trainer")
    lines.ended("policy")
    assert out.getvalue() == "[trainer] one\n[policy] other\n[trainer] two\n[trainer] last words\n"


def test_the_configuration_names_no_variable_that_nobody_sets() -> None:
    from services.job import places

    buffer = io.StringIO()
    rules().write(buffer)
    used = set(re.findall(r"%\(ENV_(\w+)\)s", buffer.getvalue()))
    assert used <= set(places.variables("train", {})) | {"JOB_SOCKET", "PATH"}
