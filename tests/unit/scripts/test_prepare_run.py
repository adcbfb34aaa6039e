"""`make prepare` against the local Hub: all that a run needs, in a lock beside its recipe; and what it says without."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest

from scripts import prepare_run
from services.common import recipe, tasks
from services.common.errors import NotReadyError, RecipeError
from services.policy import app, argv
from tests.hub.dataset import published
from tests.hub.server import LocalHub

ROOT = Path(__file__).resolve().parents[3]
MODEL = {
    "config.json": b'{"model_type": "lfm2", "conv_dim": 64}', "model.safetensors": b"weights",
    "tokenizer.json": b"{}", "README.md": b"not read",
}  # fmt: skip
RECIPE = """
[run]
name = "full"
[model]
id = "made/model"
max_model_len = 4096
[sampling]
max_completion_tokens = 64
[tasks]
train = "train"
heldout = "test"
"""


@dataclass
class Place:
    hub: LocalHub
    folder: Path
    commit: str

    @property
    def recipe(self) -> Path:
        return self.folder / "full.toml"

    @property
    def tasks_dir(self) -> Path:
        return self.folder / "tasks"

    @property
    def cache(self) -> Path:
        return self.folder / "hf"

    def prepare(self) -> int:
        return prepare_run.prepare(self.recipe, self.tasks_dir, self.cache, self.folder / "downloads")


@pytest.fixture
def place(server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("LOCKED_MODEL", raising=False)
    commit = server.commit("made/model", MODEL)
    test = server.commit("made/test", published(range(0, 6)), repo_type="dataset")
    train = server.commit("made/train", published(range(6, 30)), repo_type="dataset")
    found = Place(server, tmp_path, commit)
    found.recipe.write_text(RECIPE)
    found.tasks_dir.mkdir()
    (found.tasks_dir / "sources.toml").write_text(
        f'[test]\nrepo = "made/test"\nrevision = "{test}"\n'
        f'[train]\nrepo = "made/train"\nrevision = "{train}"\ntake = {{medium = 4, hard = 4}}\nseed = 42\n'
        'disjoint_from = ["test"]\n'
    )
    yield found


def test_after_it_the_recipe_is_whole_and_every_service_finds_what_it_needs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place.recipe.read_bytes()
    assert place.prepare() == 0
    assert place.recipe.read_bytes() == before
    cfg = recipe.load(place.recipe)
    assert cfg.model.revision == place.commit
    assert cfg.env.sandbox_base == "example/base:1", "what the tasks' Dockerfiles start from"
    assert len(tasks.load_suite(place.tasks_dir, "train")) == 8
    assert len(tasks.load_suite(place.tasks_dir, "test")) == 6
    tasks.check_image(tasks.load_suite(place.tasks_dir, "train"), "localhost:5000/me/opencode-rl-sandbox:cuda")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place.cache / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(place.cache / "hub"))
    assert app.cached_folder(cfg).name == place.commit
    assert not (app.cached_folder(cfg) / "README.md").exists()


def test_in_a_container_the_lock_comes_as_variables(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.prepare()
    lock = recipe.lock_path(place.recipe)
    inside = place.folder / "run" / "recipe.toml"
    inside.parent.mkdir()
    shutil.copy(place.recipe, inside)
    for line in lock.read_text().splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition("=")
            monkeypatch.setenv(name, value)
    assert recipe.load(inside).sha256() == recipe.load(place.recipe).sha256()


def test_a_second_call_asks_the_hub_nothing_and_changes_nothing(place: Place) -> None:
    place.prepare()
    lock = recipe.lock_path(place.recipe)
    text, asked = lock.read_text(), len(place.hub.requests)
    place.hub.commit("made/model", {"config.json": b"newer"})
    assert place.prepare() == 0
    assert (lock.read_text(), len(place.hub.requests)) == (text, asked)


def test_images_are_built_on_the_locked_base(place: Place) -> None:
    place.prepare()
    script = (ROOT / "scripts/build_images.sh").read_text()
    begin = script.index('if [ -z "${SANDBOX_BASE:-}" ]')
    part = script[begin : script.index("\n\n", begin)]
    shown = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{part}\nenv | grep SANDBOX_BASE'],
        env={"RECIPE": str(place.recipe), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "SANDBOX_BASE=example/base:1\n"


def test_without_a_hub_it_says_what_is_lacking(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("services.hub.client.ATTEMPTS", 1)
    with pytest.raises(NotReadyError) as refused:
        place.prepare()
    text = str(refused.value)
    assert "does not answer for made/model" in text
    assert "the commit of model made/model, and its weights" in text
    assert "pin file train.json" in text and "pin file test.json" in text
    assert not recipe.lock_path(place.recipe).exists()


def test_a_suite_that_comes_from_nowhere_is_named(place: Place) -> None:
    (place.tasks_dir / "sources.toml").unlink()
    with pytest.raises(RecipeError, match=r"suite test is not in .*sources\.toml there does not say"):
        place.prepare()


def test_a_lock_of_another_model_is_refused(place: Place) -> None:
    place.prepare()
    place.recipe.write_text(RECIPE.replace("made/model", "made/other"))
    with pytest.raises(RecipeError, match=r"names model made/other, and its lock made/model; run `make prepare` again"):
        recipe.load(place.recipe)
    other = place.hub.commit("made/other", MODEL)
    assert place.prepare() == 0
    assert recipe.load(place.recipe).model.revision == other


def test_tasks_that_start_from_several_images_are_refused(place: Place) -> None:
    cfg = recipe.load(place.recipe)
    for number, base in enumerate(("one:1", "two:2")):
        folder = place.tasks_dir / "train" / f"t{number}" / "environment"
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(f"FROM build:0 AS build\nFROM --platform=linux/amd64 {base}\n")
    with pytest.raises(RecipeError, match=r"start from 2 images \(one:1, two:2\).*env.sandbox_base"):
        prepare_run.sandbox_base(cfg, place.tasks_dir)


def test_before_it_policy_env_and_trainer_each_say_its_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = recipe.load(place.recipe)
    with pytest.raises(RecipeError, match="run `make prepare`"):
        recipe.require_weights(cfg)
    with pytest.raises(RecipeError, match="run `make prepare`"):
        argv.hub_revision(cfg)
    with pytest.raises(RecipeError, match="run `make prepare`"):
        tasks.load_suite(place.tasks_dir, "train")
    place.prepare()
    monkeypatch.setenv("HF_HOME", str(place.folder / "empty"))
    with pytest.raises(RecipeError, match="run `make prepare`"):
        recipe.require_weights(recipe.load(place.recipe))
    monkeypatch.setenv("HF_HOME", str(place.cache))
    recipe.require_weights(recipe.load(place.recipe))


def test_the_shipped_recipes_need_nothing_that_no_source_is_known_for() -> None:
    for path in sorted((ROOT / "data/recipes").glob("*.toml")):
        cfg = recipe.load(path)
        known = prepare_run.sources(ROOT / "data/tasks")
        for name in prepare_run.suites(cfg, ROOT / "data/tasks"):
            assert name in known or (ROOT / f"data/tasks/{name}.json").is_file(), path.name
    assert prepare_run.suites(recipe.load(ROOT / "data/recipes/lfm2.5-2.6b.toml"), ROOT / "data/tasks") == [
        "test",
        "train",
    ]
