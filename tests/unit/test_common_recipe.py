"""The recipe: what is refused, and with which message."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common import recipe
from services.common.errors import RecipeError
from services.common.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "data/recipes").glob("*.toml"))
MINIMAL = """
[run]
name = "r"
[model]
id = "owner/name"
max_model_len = 1000
[sampling]
max_completion_tokens = 100
[tasks]
train = "a"
heldout = "b"
"""

Load = Callable[[str], Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load the minimal recipe with a text added; a key of one of its sections is written ``section.key = value``."""

    def loaded(added: str = "") -> Recipe:
        path = tmp_path / "recipe.toml"
        path.write_text(added + "\n" + MINIMAL if not added.lstrip().startswith("[") else MINIMAL + added)
        return recipe.load(path)

    return loaded


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert recipe.load(path).run.name


def test_the_full_recipe_has_the_numbers_of_the_original() -> None:
    cfg = recipe.load(ROOT / "data/recipes/lfm2.5-2.6b.toml")
    assert (cfg.lora.r, cfg.lora.alpha, cfg.lora_scale, len(cfg.lora.target_modules)) == (32, 64, 2.0, 7)
    assert (cfg.trainer.max_steps, cfg.trainer.learning_rate, cfg.trainer.groups_per_step) == (1000, 1e-6, 1)
    assert (cfg.rollout.num_generations, cfg.rollout.max_tool_calling_iterations, cfg.rollout.max_staleness) == (
        8,
        32,
        4,
    )
    assert (cfg.sampling.temperature, cfg.sampling.top_p, cfg.sampling.top_k) == (1.0, 1.0, 0)
    assert cfg.sampling.max_completion_tokens == 4096
    assert cfg.reward.tool_efficiency_bonus == 0.1
    assert (cfg.evaluator.watch_tasks, cfg.evaluator.final_tasks, cfg.trainer.save_steps) == (100, 250, 100)
    assert cfg.watchdog.stall_s == 1800


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            "[trainer]\nlearing_rate = 1",
            r"trainer\.learing_rate: unknown key; allowed in this section: .*learning_r",
        ),
        ("[trainers]\n", r"trainers: unknown key; allowed in this section: .*trainer"),
        ("[trainer]\nmax_steps = 0", r"trainer\.max_steps: found 0; .*greater than 0"),
        ("[trainer]\nmax_steps = 'many'", r"trainer\.max_steps: found 'many'"),
        ("[trainer]\nmax_steps = 1.5", r"trainer\.max_steps: found 1\.5"),
        ("[lora]\ndropout = 0.1", r"lora\.dropout: found 0\.1"),
        ("[lora]\ntarget_modules = 'q_proj'", r"lora\.target_modules: found 'q_proj'"),
        ("[env]\nbackend = 'podman'", r"env\.backend: found 'podman'; .*'docker'.*'hf-sandbox'"),
        ("[evaluator]\ncollapse_drop = 1.5", r"evaluator\.collapse_drop: found 1\.5"),
        (
            "[rollout]\nnum_generations = 8\nmax_inflight = 4",
            "max_inflight is 4 and num_generations 8; max_inflight must be at least num_generations",
        ),
        (
            "[rollout]\nagent_timeout_s = 900\nbuild_timeout_s = 100\nsetup_timeout_s = 700\nverifier_timeout_s = 100\n"
            "outer_timeout_s = 1800",
            r"outer_timeout_s is 1800\.0; it must exceed build \+ setup \+ agent \+ verifier = 1800\.0",
        ),
        ("[evaluator]\nwatch_tasks = 9\nfinal_tasks = 8", "watch_tasks is 9 and final_tasks 8"),
        (
            "[policy]\nmax_num_seqs = 15",
            r"policy\.max_num_seqs is 15 and rollout\.max_inflight 16; .* or they queue",
        ),
        ("[env]\ndocker_starts_per_minute = 0", r"env\.docker_starts_per_minute: found 0; .*greater than 0"),
        ("[trainer]\nattn_implementation = 'eager'", r"attn_implementation: found 'eager'; .*'varlen'.*'sdpa'"),
        (
            "[trainer]\ngroups_per_step = 6\n[rollout]\nmax_open_groups = 5",
            "max_open_groups is 5; allowed: 6 to 30",
        ),
    ],
)
def test_a_bad_value_is_named_with_what_was_found_and_what_is_allowed(load: Load, added: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load(added)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("added", "value"),
    [
        ("[trainer]\nmax_steps = '4'", "'4'"),
        ("[trainer]\nmax_steps = true", "True"),
        ("[trainer]\nlearning_rate = '1e-6'", "'1e-6'"),
        ("[trainer]\ngradient_checkpointing = 'no'", "'no'"),
        ("[evaluator]\ncollapse_stops = 1", "1"),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(load: Load, added: str, value: str) -> None:
    with pytest.raises(RecipeError, match=f"found {value}"):
        load(added)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("top_p", "0.95"),
        ("top_k", "50"),
        ("min_p", "0.05"),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", "0.5"),
        ("frequency_penalty", "-0.5"),
    ],
)
def test_sampling_that_is_not_the_policy_s_own_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL.replace("[sampling]", f"[sampling]\n{key} = {value}"))
    with pytest.raises(RecipeError, match=rf"sampling\.{key} is {value}; only \S+ is allowed"):
        recipe.load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_completion_tokens = 100", "max_completion_tokens = 1000", "is 1000 and model.max_model_len 1000"),
        ('heldout = "b"', 'heldout = "a"', "tasks.train and tasks.heldout are both 'a'"),
        ('name = "r"', 'name = "../r"', r"run\.name: found '../r'"),
        ('name = "r"', 'name = "R"', r"run\.name: found 'R'"),
        ('id = "owner/name"', 'id = "o/n"\nrevision = "main"', r"model\.revision: found 'main'"),
        ("[sampling]\nmax_completion_tokens = 100", "", r"sampling: missing; it has no default"),
        ('train = "a"\n', "", r"tasks\.train: missing; it has no default"),
        ("[run]", "run = 3\n[other]", r"run: found 3"),
    ],
)
def test_values_that_do_not_go_together_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    assert old in MINIMAL
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(RecipeError, match=message):
        recipe.load(path)


def test_every_wrong_key_is_in_the_one_message(load: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        load("[trainer]\nmax_steps = 0\nsave_steps = -1\nunknown = 1\n[lora]\nr = 0")
    for part in ("trainer.max_steps", "trainer.save_steps", "trainer.unknown", "lora.r"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[run", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (None, "does not exist; set RECIPE to a file")],
)
def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        recipe.load(path)


def test_a_folder_in_the_place_of_a_recipe_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        recipe.load(tmp_path)


def test_a_recipe_cannot_be_changed_after_it_was_checked(load: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().trainer.max_steps = 5  # type: ignore[misc]


def test_the_hash_is_of_the_meaning_and_not_of_the_text(load: Load, tmp_path: Path) -> None:
    written_out = load("[trainer]\nmax_steps = 1000 # the default\n[lora]\nr = 32")
    assert written_out.sha256() == load().sha256()
    assert load("[trainer]\nmax_steps = 999").sha256() != load().sha256()


def test_name_and_steps_may_come_from_the_environment(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setenv("RECIPE", str(tmp_path / "recipe.toml"))
    for name in ("RUN_NAME", "MAX_STEPS"):
        monkeypatch.setenv(name, "")
    assert (recipe.from_environment().run.name, recipe.from_environment().trainer.max_steps) == ("r", 1000)
    monkeypatch.setenv("RUN_NAME", "other")
    monkeypatch.setenv("MAX_STEPS", "20")
    assert (recipe.from_environment().run.name, recipe.from_environment().trainer.max_steps) == ("other", 20)


@pytest.mark.parametrize(
    "steps",
    ["-1", "0", "ten", "1.5", "²"],
)
def test_a_number_of_steps_that_is_none_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    load()
    monkeypatch.setenv("RECIPE", str(tmp_path / "recipe.toml"))
    monkeypatch.setenv("MAX_STEPS", steps)
    with pytest.raises(RecipeError, match=r"MAX_STEPS|max_steps"):
        recipe.from_environment()


def test_no_recipe_named_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECIPE", raising=False)
    with pytest.raises(RecipeError, match="RECIPE is not set"):
        recipe.from_environment()


@pytest.mark.parametrize("override", [{"run.name": "x"}, {"evaluator.watch_tasks": 2}, {"trainer.max_steps": 3}])
def test_an_override_is_checked_like_the_file(load: Load, tmp_path: Path, override: dict[str, Any]) -> None:
    load()
    recipe.load(tmp_path / "recipe.toml", override)
    with pytest.raises(RecipeError, match=r"trainer\.nope: unknown key"):
        recipe.load(tmp_path / "recipe.toml", {**override, "trainer.nope": 1})


def test_the_common_package_is_light() -> None:
    """Standard library and pydantic: the smallest service starts in a fraction of a second."""
    code = (
        "import sys; from services.common import causes, errors, health, log, recipe, run_dir, signals, tasks; "
        "sys.exit(str({'torch', 'vllm', 'transformers', 'httpx', 'rich', 'numpy'} & set(sys.modules) or 'light'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "light"
