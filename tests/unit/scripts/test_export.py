"""An exported adapter: what is written, what the card says and does not say, and the push to a Hub."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from scripts import export_adapter, run_recipe
from scripts.export import card, facts
from services.common import recipe, run_dir, tasks
from services.common.errors import NotReadyError, RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import RunDir
from services.evaluator.adapters import CONFIG, WEIGHTS
from services.hub import client as hub
from tests.fakes.evaluation import write_adapter, write_safetensors
from tests.fakes.run import evaluation
from tests.hub.server import Fault, LocalHub

ROOT = Path(__file__).resolve().parents[3]
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cfg() -> Recipe:
    return recipe.load(
        ROOT / "data/recipes/lfm2.5-2.6b.toml",
        {"model.revision": REVISION, "tasks.train": "smoke/train", "tasks.heldout": "smoke/heldout"},
    )


@pytest.fixture
def run(tmp_path: Path, cfg: Recipe, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A finished run of the full recipe, with two checkpoints; the second one is evaluated."""
    run = RunDir(tmp_path / "runs" / "full")
    run.prepare()
    for step in (100, 200):
        folder = run.checkpoints / f"checkpoint-{step}"
        write_adapter(folder, cfg, fill=step % 90, base_model_name_or_path="/hf/some/path", peft_version="0.21.2")
        run_dir.write_text(folder / run_dir.READY, "now\n")
    suites = {name: tasks.load_suite(ROOT / "data/tasks", name) for name in ("smoke/train", "smoke/heldout")}
    lock = next((ROOT / "images/trainer").glob("requirements.cuda.txt"))
    run_dir.write_json(
        run.manifest,
        {
            "recipe": cfg.model_dump(mode="json"),
            "git_revision": "f" * 40,
            "model": {"id": cfg.model.id, "revision": REVISION},
            "tasks": {
                name: {"tasks": len(found), "sha256": tasks.suite_sha256(found)} for name, found in suites.items()
            },
            "images": {"trainer": "sha256:" + "a" * 64},
            "image_labels": {"trainer": {"opencode-rl.lock": f"sha256:{recipe.file_sha256(lock)}"}},
        },
    )
    run_dir.write_json(run.eval / "checkpoint-200_results.json", _results(run, 200))
    run_dir.write_json(run.eval / "summary.json", {"best": "checkpoint-200"})
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    monkeypatch.setenv("HF_CACHE", str(tmp_path / "cache"))
    for name in ("RUN_NAME", "RECIPE", "MAX_STEPS"):
        monkeypatch.delenv(name, raising=False)
    return run


def _results(run: RunDir, step: int) -> dict[str, Any]:
    value = evaluation()
    value["adapter"] |= {
        "label": f"checkpoint-{step}",
        "adapter_sha256": recipe.file_sha256(run.checkpoints / f"checkpoint-{step}" / WEIGHTS),
    }
    return value | {
        "attempts": 1,
        "greedy": False,
        "tasks": {f"t{i}": {} for i in range(4)},
        "conditions": {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, "max_completion_tokens": 4096},
    }


@pytest.fixture
def command() -> Callable[..., tuple[int, str]]:
    app = export_adapter.typer.Typer()
    app.command()(export_adapter.main)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, " ".join((result.stdout + result.stderr).split())

    return call


def test_without_push_the_export_is_written_and_no_request_leaves(
    run: RunDir, server: LocalHub, command: Callable[..., tuple[int, str]]
) -> None:
    code, out = command("--base-license", "other")
    assert code == 0, out
    folder = run.path / "export" / "checkpoint-200"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", CONFIG, WEIGHTS, "recipe.toml", "results.json",
    ]  # fmt: skip
    assert (folder / WEIGHTS).read_bytes() == (run.checkpoints / "checkpoint-200" / WEIGHTS).read_bytes()
    config = json.loads((folder / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("LiquidAI/LFM2.5-2.6B", REVISION)
    assert config["peft_version"] == "0.21.2" and config["r"] == 32
    assert recipe.load(folder / "recipe.toml") == run_recipe.of(run)
    assert "Nothing was pushed" in out and server.requests == []


def test_the_card_says_what_is_known(run: RunDir, cfg: Recipe, command: Callable[..., tuple[int, str]]) -> None:
    assert command("--base-license", "apache-2.0")[0] == 0
    text = (run.path / "export" / "checkpoint-200" / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["license"], data["library_name"]) == (cfg.model.id, "apache-2.0", "peft")
    assert data["model-index"][0]["results"][0]["metrics"][0] == {"type": "pass@1", "value": 0.75}
    for said in (
        "Step 200 of run `full`",
        "| base | 0.250 | 0.046 - 0.699 | 1 of 4 |",
        "| checkpoint-200 | 0.750 | 0.301 - 0.954 | 3 of 4 |",
        "2 only with the adapter",
        "exact McNemar p = 0.500",
        "1 rollouts failed for another reason",
        'PeftModel.from_pretrained(base, "checkpoint-200")',
        f"vllm serve {cfg.model.id} --revision {REVISION} --enable-lora --max-lora-rank 32",
        "r 32, alpha 64",
        "| training | smoke/train | 8 | shipped with the project |",
        "| held out | smoke/heldout | 4 | shipped with the project |",
        "| trl | 1.15.0 |",
        "| peft | 0.21.2 |",
        "| git revision | " + "f" * 40,
        f"`{cfg.sha256()}`",
    ):
        assert said in text, said


def test_a_checkpoint_without_results_does_not_borrow_those_of_another(
    run: RunDir, command: Callable[..., tuple[int, str]]
) -> None:
    code, out = command("100", "--base-license", "mit")
    assert code == 0 and "These weights have no results" in out
    folder = run.path / "export" / "checkpoint-100"
    text = (folder / "README.md").read_text()
    assert "These weights have not been evaluated." in text and "model-index" not in text
    assert not (folder / "results.json").exists()


def test_results_of_the_same_name_and_other_weights_do_not_count(run: RunDir) -> None:
    sha256 = recipe.file_sha256(run.checkpoints / "checkpoint-200" / WEIGHTS)
    assert facts.find_results(run, sha256) is not None
    assert facts.find_results(run, "0" * 64) is None


def test_the_final_results_are_preferred_where_they_are_of_these_weights(run: RunDir) -> None:
    final = _results(run, 200)
    final["suite"] = "final"
    run_dir.write_json(run.eval / "final_results.json", final)
    sha256 = recipe.file_sha256(run.checkpoints / "checkpoint-200" / WEIGHTS)
    assert facts.find_results(run, sha256)["suite"] == "final"  # type: ignore[index]


def test_versions_come_only_from_the_very_lock_that_the_images_were_made_from(run: RunDir) -> None:
    manifest = json.loads(run.manifest.read_text())
    manifest["image_labels"]["trainer"]["opencode-rl.lock"] = "sha256:" + "0" * 64
    run_dir.write_json(run.manifest, manifest)
    cfg = run_recipe.of(run)
    found = facts.collect(
        run, run.complete_checkpoints()[0], cfg, tasks_dir=ROOT / "data/tasks", license_id="mit", cache_dir=run.path
    )
    assert found.versions == {"OpenCode": "1.18.33"}
    assert "| trl |" not in card.make(found, "x")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4]), "is truncated"),
        (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json"),
        (
            lambda folder: write_safetensors(
                folder / WEIGHTS,
                {
                    f"base_model.model.model.layers.0.{module}.lora_{x}.default.weight": b"1234"
                    for module in ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3")
                    for x in "AB"
                },
            ),
            "lora_A.default.weight; PEFT takes base_model.model.<module>.lora_A",
        ),
    ],
)
def test_an_adapter_that_others_could_not_load_is_refused(
    run: RunDir, command: Callable[..., tuple[int, str]], spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run.checkpoints / "checkpoint-200")
    code, out = command("200", "--base-license", "mit")
    assert code == 2 and message in out
    assert not (run.path / "export").exists()


# --- The licence of the base --------------------------------------------------------------------------------------

CARD = "---\nlicense: other\nlicense_name: lfm1.0\nlicense_link: LICENSE\n---\n# Base\n"


def test_the_licence_is_that_of_the_base_at_its_pinned_revision(
    run: RunDir, server: LocalHub, cfg: Recipe, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    server.commit(cfg.model.id, {"README.md": CARD.encode()}, oid=REVISION)
    server.commit(cfg.model.id, {"README.md": b"---\nlicense: mit\n---\n"})
    cache = tmp_path / "cache" / "hub"
    assert facts.base_license(cfg, cache) is None and server.requests == []
    found = facts.base_license(cfg, cache, hub.connect())
    assert found == facts.License("other", "lfm1.0", "LICENSE")
    server.requests.clear()
    assert facts.base_license(cfg, cache) == found, "from the cache"
    assert command("200")[0] == 0 and server.requests == []
    text = (run.path / "export" / "checkpoint-200" / "README.md").read_text()
    assert "license_name: lfm1.0" in text and "That of the base: lfm1.0 (LICENSE)." in text


def test_an_unknown_licence_is_said_and_keeps_the_export_from_the_hub(
    run: RunDir, server: LocalHub, command: Callable[..., tuple[int, str]]
) -> None:
    code, out = command("200", "--push", "--repo", "local/export")
    assert code == 2 and "give it with --base-license" in out
    assert ("model", "local/export") not in server.repos
    assert "unknown" in (run.path / "export" / "checkpoint-200" / "README.md").read_text()


# --- The push -----------------------------------------------------------------------------------------------------


def test_a_push_is_one_commit_of_the_export_and_of_nothing_else_in_the_folder(
    run: RunDir, server: LocalHub, command: Callable[..., tuple[int, str]]
) -> None:
    private = run.path / "export" / "checkpoint-200" / "notes.txt"
    run_dir.write_text(private, "mine")
    code, out = command("200", "--base-license", "mit", "--push", "--repo", "local/export")
    assert code == 0, out
    head = server.repo("local/export").at("main")
    assert f"at commit {head.oid}" in out
    folder = run.path / "export" / "checkpoint-200"
    pushed = {path: content for path, content in head.files.items() if path != ".gitattributes"}
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir() if path != private}
    assert b'PeftModel.from_pretrained(base, "local/export")' in pushed["README.md"]


def test_what_was_pushed_can_be_evaluated_by_its_name(
    run: RunDir, server: LocalHub, cfg: Recipe, command: Callable[..., tuple[int, str]]
) -> None:
    command("200", "--base-license", "mit", "--push", "--repo", "local/export")
    found = export_adapter.checkpoints.find(run, "hub:local/export")
    assert (found.path / WEIGHTS).read_bytes() == (run.checkpoints / "checkpoint-200" / WEIGHTS).read_bytes()


def test_a_push_that_landed_although_the_hub_said_500_is_not_pushed_twice(
    run: RunDir, server: LocalHub, command: Callable[..., tuple[int, str]]
) -> None:
    server.fail(Fault("POST", "/commit/", status=500, after_effect=True))
    code, out = command("200", "--base-license", "mit", "--push", "--repo", "local/export")
    assert code == 0, out
    titles = [commit.title for commit in server.repo("local/export").history("main")]
    assert titles == ["Export checkpoint-200", "initial commit"]


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (Fault("POST", "/commit/", status=412), 0, "Pushed to"),
        (Fault("POST", "/commit/", status=503, times=99), NotReadyError.exit_code, "try again later"),
        (Fault("POST", "/repos/create", status=403, times=99), RecipeError.exit_code, "check HF_TOKEN"),
    ],
)
def test_a_hub_that_fails_is_waited_for_or_named(
    run: RunDir,
    server: LocalHub,
    command: Callable[..., tuple[int, str]],
    fault: Fault,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the attempts, huggingface_hub's own included
    server.fail(fault)
    found, out = command("200", "--base-license", "mit", "--push", "--repo", "local/export")
    assert found == code and message in out, out


def test_a_push_needs_a_name(run: RunDir, command: Callable[..., tuple[int, str]]) -> None:
    code, out = command("--push")
    assert code == 2 and "--push needs --repo owner/name" in out


def test_an_unknown_checkpoint_lists_those_that_exist(run: RunDir, command: Callable[..., tuple[int, str]]) -> None:
    code, out = command("300")
    assert code == 2 and "complete there: 100, 200" in out


def test_a_base_that_is_not_in_the_cache_cannot_be_merged(
    run: RunDir, server: LocalHub, command: Callable[..., tuple[int, str]]
) -> None:
    code, out = command("200", "--base-license", "mit", "--merged")
    assert code == NotReadyError.exit_code and "is not in" in out and os.environ["HF_CACHE"] in out.replace(" ", "")
