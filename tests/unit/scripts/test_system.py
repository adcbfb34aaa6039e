"""The scripts that come before any Python of the project: an unfit system is named in one line."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OTHERS = {"macOS": ("Darwin", "arm64"), "arm64": ("Linux", "aarch64"), "Git for Windows": ("MINGW64_NT-10.0", "x86_64")}


def program(folder: Path, name: str, script: str) -> None:
    """FAKE of a program of the host."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def ended(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        [ROOT / "scripts" / script, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("script", ["ensure_docker.sh", "build_images.sh", "make_venv.sh"])
@pytest.mark.parametrize("system", OTHERS.values(), ids=OTHERS)
def test_another_system_is_named_in_one_line_before_anything_else(
    script: str, system: tuple[str, str], tmp_path: Path
) -> None:
    program(tmp_path / "bin", "uname", f'[ "$1" = -s ] && echo {system[0]} || echo {system[1]}')
    done = ended(script, tmp_path / "bin", *([str(tmp_path / "venv")] if script == "make_venv.sh" else []))
    assert done.returncode == 5
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert f"{system[0]} on {system[1]}" in done.stderr and "Linux on x86_64" in done.stderr


ENGINES = {
    "Podman": ("Podman Engine Conmon", "[]"),
    "rootless": ("Docker Engine - Community Engine", "[name=seccomp,profile=builtin name=rootless name=cgroupns]"),
}


@pytest.mark.parametrize("word", ENGINES)
def test_an_engine_that_is_not_supported_is_named_in_one_line(word: str, tmp_path: Path) -> None:
    kind, options = ENGINES[word]
    program(tmp_path / "bin", "docker", f'[ "$1" = info ] && echo "{options}" || echo "{kind}"')
    done = ended("ensure_docker.sh", tmp_path / "bin")
    assert done.returncode == 5
    assert len(done.stderr.splitlines()) == 1 and word in done.stderr


def test_an_old_python_is_named_before_pip_would_fail(tmp_path: Path) -> None:
    program(tmp_path / "bin", "old", '[ "$1" = --version ] && echo Python 3.9.2 || exit 1')
    environment = {**os.environ, "PYTHON": str(tmp_path / "bin/old")}
    script = [ROOT / "scripts/make_venv.sh", str(tmp_path / "venv")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "Python 3.9.2" in done.stderr and "3.11" in done.stderr and "make PYTHON=" in done.stderr


def test_make_makes_the_virtual_environment_before_it_builds_images() -> None:
    """Printed, not run; of a checkout that has neither."""
    for verb in ("smoke", "train", "learn", "resume", "eval", "test"):
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", verb], cwd=ROOT, capture_output=True, text=True, check=True
        )
        steps = [line for line in done.stdout.splitlines() if "make_venv.sh" in line or "build_images.sh" in line]
        assert ["make_venv" in step for step in steps] == [True, False], verb


def test_text_files_have_unix_line_ends_wherever_they_are_checked_out() -> None:
    asked = ["scripts/run.py", "scripts/ensure_docker.sh", "data/tasks/learn/heldout/total-pay-b/tests/test.sh"]
    done = subprocess.run(
        ["git", "check-attr", "eol", "binary", "--", *asked, "data/models/tiny-lfm2/model.safetensors"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in asked:
        assert f"{name}: eol: lf" in done.stdout
    assert "model.safetensors: binary: set" in done.stdout
