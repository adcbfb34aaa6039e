"""Each precondition that can be broken without an engine: one message, the right exit code, nothing started."""

import shutil
import socket
from pathlib import Path

import pytest

from scripts import preflight
from services.common import recipe
from services.common.errors import MachineError, RecipeError, StackError

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ROOT / "data/recipes/smoke.toml"


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "data/tasks", tmp_path / "tasks")
    return tmp_path / "tasks"


def refusal(error: type[StackError], exit_code: int, *words: str):
    """Expect one message with all the words, from the class whose exit code a caller sees."""
    assert error.exit_code == exit_code
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


def test_shipped_recipe_tasks_and_model_pass() -> None:
    cfg = recipe.load(SMOKE)
    preflight.check_tasks(cfg, ROOT / "data/tasks")
    preflight.check_model(cfg, ROOT / "data/models")


def test_a_processor_without_avx2_is_refused_for_the_cpu_images_only() -> None:
    old = "flags\t\t: fpu sse4_2 avx\n"
    with refusal(MachineError, 5, "AVX2"):
        preflight.check_cpu("cpu", old)
    preflight.check_cpu("cuda", old)
    preflight.check_cpu("cpu", "flags\t\t: fpu avx avx2\n")


def test_too_little_memory_names_both_numbers() -> None:
    with refusal(MachineError, 5, r"4\.0 GB", "12 GB"):
        preflight.check_memory("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n")


def test_too_little_disk_names_both_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**10, 10**10, 10**9))
    with refusal(MachineError, 5, r"1\.0 GB", "10 GB"):
        preflight.check_disk(tmp_path)


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with refusal(MachineError, 5, str(port), "ENV_PORT"):
            preflight.check_port(port)


def test_a_missing_task_stops_with_its_name(suites: Path) -> None:
    gone = sorted((suites / "smoke/train").iterdir())[0]
    shutil.rmtree(gone)
    with refusal(RecipeError, 2, gone.name):
        preflight.check_tasks(recipe.load(SMOKE), suites)


def test_a_task_without_an_image_stops_with_its_name(suites: Path) -> None:
    task = sorted((suites / "smoke/train").iterdir())[0]
    text = (task / "task.toml").read_text()
    (task / "task.toml").write_text("\n".join(line for line in text.splitlines() if "docker_image" not in line))
    with refusal(RecipeError, 2, task.name, "docker_image"):
        preflight.check_tasks(recipe.load(SMOKE), suites)


def test_two_tasks_with_one_instruction_are_refused(suites: Path) -> None:
    first, second = sorted((suites / "smoke/train").iterdir())[:2]
    shutil.copy(first / "instruction.md", second / "instruction.md")
    with refusal(RecipeError, 2, second.name):
        preflight.check_tasks(recipe.load(SMOKE), suites)


def test_an_unknown_suite_or_model_lists_what_there_is() -> None:
    with refusal(RecipeError, 2, "smoke/nothing"):
        preflight.check_tasks(recipe.load(SMOKE, {"tasks.train": "smoke/nothing"}), ROOT / "data/tasks")
    with refusal(RecipeError, 2, "no-such-model", "tiny-lfm2"):
        preflight.check_model(recipe.load(SMOKE, {"model.id": "no-such-model"}), ROOT / "data/models")


def test_changed_weights_are_refused_with_both_hashes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "data/models", tmp_path / "models")
    cfg = recipe.load(SMOKE, {"model.revision": "sha256:" + "0" * 64})
    with refusal(RecipeError, 2, "0000", "sha256"):
        preflight.check_model(cfg, tmp_path / "models")


def test_a_hub_model_without_a_commit_is_refused() -> None:
    cfg = recipe.load(ROOT / "data/recipes/lfm2.5-2.6b.toml", {"model.revision": None})
    with refusal(RecipeError, 2, "40-character"):
        preflight.check_model(cfg, ROOT / "data/models")
