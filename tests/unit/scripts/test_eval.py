"""``make eval`` up to where containers start: run, recipe, checkpoint and tasks, each found or refused before."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import scripts.eval as script
from scripts import run_recipe
from services.common import recipe, run_dir
from services.common.errors import MachineError, RecipeError
from services.common.run_dir import RunDir
from tests.fakes.evaluation import write_adapter
from tests.hub.server import LocalHub

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ROOT / "data/recipes/smoke.toml"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run = RunDir(tmp_path / "runs" / "first")
    run.prepare()
    cfg = recipe.load(SMOKE, {"run.name": "first", "trainer.learning_rate": 5e-5})
    run_dir.write_json(run.manifest, {"recipe": cfg.model_dump(mode="json")})
    for step in (2, 4):
        folder = run.checkpoints / f"checkpoint-{step}"
        write_adapter(folder, cfg, fill=step)
        run_dir.write_text(folder / run_dir.READY, "now\n")
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    for name in ("CKPT", "N", "TASKS", "GREEDY", "RUN_NAME", "RECIPE", "MAX_STEPS"):
        monkeypatch.delenv(name, raising=False)
    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What would be run in containers, instead of running it."""
    found: dict[str, object] = {}

    class FakeStack:
        """FAKE of Stack: no docker."""

        def __init__(self, variant: str, environment: dict[str, str], _stop: object) -> None:
            found["variant"], found["environment"] = variant, environment
            found["recipe"] = recipe.load(Path(environment["RECIPE"]))

        def __call__(self, *arguments: str) -> int:
            found["up"] = arguments
            return 0

        def evaluator(self, *arguments: str, **environment: str) -> int:
            found["evaluator"], found["given"] = arguments, environment
            return 0

        def running(self) -> list[str]:
            return []

        def guarded(self, work):
            return work()

        def down(self) -> None:
            found["down"] = True

    monkeypatch.setattr(script, "Stack", FakeStack)
    monkeypatch.setattr(script.report, "require", lambda _setup: None)
    monkeypatch.setattr(script, "image_ids", lambda *_: {"env": "sha256:e"})
    return found


def _main(monkeypatch: pytest.MonkeyPatch, **environment: str) -> tuple[int, str]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app = script.typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, [])
    return result.exit_code, result.stderr


def test_make_s_variables_become_the_evaluator_s_arguments(
    run: RunDir, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = _main(monkeypatch, CKPT="2", N="3", TASKS="", GREEDY="1", VARIANT="cuda")
    assert code == 0, err
    assert asked["evaluator"] == ("eval", "--checkpoint", "checkpoint-2", "--n", "3", "--greedy")
    assert asked["up"] == ("up", "--detach", "--wait", "policy-eval", "env")
    assert asked["variant"] == "cuda" and asked["down"] is True
    assert asked["given"] == {"IMAGE_IDS": '{"env": "sha256:e"}'}


def test_the_recipe_is_the_run_s_own_and_not_that_of_today(
    run: RunDir, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _main(monkeypatch, RECIPE=str(SMOKE))[0] == 0
    found = asked["recipe"]
    assert isinstance(found, recipe.Recipe)
    assert (found.run.name, found.trainer.learning_rate) == ("first", 5e-5)
    assert found.sha256() == run_recipe.of(run).sha256()


@pytest.mark.parametrize(
    ("name", "found"),
    [("4", "checkpoint-4"), ("final", "checkpoint-4"), ("checkpoint-2", "checkpoint-2"), ("base", "base")],
)
def test_a_checkpoint_is_found_before_anything_starts(run: RunDir, name: str, found: str) -> None:
    assert script.find(run, name) == found


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CKPT": "300"}, "checkpoint 300 is not in .*; complete there: 2, 4; allowed too: best, final, base"),
        ({"CKPT": "best"}, "no checkpoint is evaluated"),
        ({"CKPT": "hub:me"}, "names no adapter on the Hub"),
        ({"TASKS": "lines-a,nope"}, "nope: no such task in smoke/heldout; there: .*lines-a"),
        ({"RUN_NAME": "none"}, "run none is not in .*; there: first"),
        ({"VARIANT": "rocm"}, "allowed: cpu, cuda"),
    ],
)
def test_what_does_not_exist_is_exit_code_2_and_nothing_starts(
    run: RunDir, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    environment: dict[str, str], message: str,
) -> None:  # fmt: skip
    import re

    code, err = _main(monkeypatch, **environment)
    assert code == 2 and re.search(message, err.replace("\n", " ")), err
    assert "up" not in asked and "evaluator" not in asked


def test_a_stack_that_is_in_use_is_left_alone(
    run: RunDir, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.Stack, "running", lambda _: ["env", "trainer"])
    code, err = _main(monkeypatch)
    assert code == MachineError.exit_code and "env, trainer of this project run already" in err
    assert "up" not in asked and "down" not in asked


def test_an_adapter_of_the_hub_is_brought_here_and_named_by_full_commit(server: LocalHub, run: RunDir) -> None:
    folder = run.checkpoints / "checkpoint-2"
    files = {f"checkpoint-7/{path.name}": path.read_bytes() for path in folder.iterdir()}
    commit = server.commit("local/adapter", files)
    name = script.find(run, "hub:local/adapter@main")
    assert name == f"hub:local/adapter@{commit}:7"
    server.requests.clear()
    assert script.checkpoints.find(run, name).step == 7  # as the container does, which has no Hub
    assert server.requests == []


# --- The recipe of a run ------------------------------------------------------------------------------------------


def test_a_run_without_a_manifest_takes_recipe_under_its_own_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.manifest.unlink()
    with pytest.raises(RecipeError, match=r"run first has no manifest\.json, so RECIPE is read: RECIPE is not set"):
        run_recipe.of(run)
    monkeypatch.setenv("RECIPE", str(SMOKE))
    assert run_recipe.of(run).run.name == "first"


def test_a_recipe_of_another_version_is_refused_with_the_key(run: RunDir) -> None:
    value = json.loads(run.manifest.read_text())
    value["recipe"]["trainer"]["gone"] = 1
    run_dir.write_json(run.manifest, value)
    with pytest.raises(
        RecipeError, match=r"made with another version of the project: .*manifest\.json.*\n.*trainer\.gone"
    ):
        run_recipe.of(run)


@pytest.mark.parametrize("path", sorted((ROOT / "data/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_written_out_means_the_same(path: Path, tmp_path: Path) -> None:
    cfg = recipe.load(path)
    (tmp_path / "recipe.toml").write_text(run_recipe.to_toml(cfg))
    assert recipe.load(tmp_path / "recipe.toml") == cfg
