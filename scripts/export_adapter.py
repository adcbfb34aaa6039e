"""``python -m scripts.export_adapter``: a checkpoint as others can use it, and on ``--push`` on the Hub.

Writes adapter files that PEFT and vLLM load, a model card with what is known of the run and its results, the
recipe, and with ``--merged`` the whole model. Without ``--push`` nothing leaves this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
import typer
from huggingface_hub import HfApi
from rich.console import Console
from rich.table import Table
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from scripts import run_recipe, run_view
from scripts.export import ADAPTER_FILES, MERGED_FILES, RECIPE, RESULTS, card
from scripts.export.facts import Facts, collect
from scripts.stack import ROOT, folder
from services.common import run_dir
from services.common.errors import NotReadyError, RecipeError, run_main
from services.common.recipe import Recipe
from services.common.run_dir import CONFIG, WEIGHTS, RunDir
from services.evaluator import checkpoints
from services.hub import client as hub

CONFLICT = 412
console = Console()


def main(
    checkpoint: Annotated[
        str | None, typer.Argument(help="a step, best, final or hub:owner/name@rev; default: best if there is one")
    ] = None,
    run: Annotated[str | None, typer.Option(help="name of the run; default: RUN_NAME, or the newest")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to write to; default: export/ in the run")] = None,
    merged: Annotated[bool, typer.Option(help="the whole model with the adapter in it, too")] = False,
    base_license: Annotated[
        str | None, typer.Option(help="where the base's card does not say, e.g. apache-2.0")
    ] = None,
    push: Annotated[bool, typer.Option(help="push to the Hub; without it nothing leaves this machine")] = False,
    repo: Annotated[
        str | None, typer.Option(help="owner/name to push to; the merged model goes to NAME-merged")
    ] = None,
    public: Annotated[bool, typer.Option(help="make a new repository public")] = False,
) -> None:
    """Export a checkpoint's adapter."""

    def work() -> int:
        if push and not repo:
            raise RecipeError("--push needs --repo owner/name, the repository to push to")
        found = run_view.find_run(run)
        api = hub.connect() if push else None
        written = export(found, checkpoint, out, merged=merged, license_id=base_license, repo=repo, api=api)
        if api is not None and repo:
            publish(api, written, repo, public=public)
        else:
            console.print("Nothing was pushed. To publish it: --push --repo owner/name")
        return 0

    run_main(work)


@dataclass(frozen=True)
class Written:
    folders: dict[str, tuple[Path, tuple[str, ...]]]
    """What follows the repository's name -> folder that goes there, and which of its files."""
    license_known: bool


def export(
    run: RunDir,
    name: str | None,
    out: Path | None,
    *,
    merged: bool,
    license_id: str | None,
    repo: str | None,
    api: HfApi | None,
) -> Written:
    """Write the export and show what it is. Args: api: of the Hub; None: no request is made.

    Raises: RecipeError: no such checkpoint, or one that could not be loaded by others.
    """
    cfg = run_recipe.of(run)
    name = name or ("best" if (run_dir.read_json(run.eval / "summary.json") or {}).get("best") else "final")
    found = checkpoints.find(run, name)
    cache_dir = folder("HF_CACHE", str(Path.home() / ".cache/huggingface")) / "hub"
    facts = collect(
        run, found, cfg,
        tasks_dir=folder("TASKS_DIR", "data/tasks"), license_id=license_id, cache_dir=cache_dir, api=api,
    )  # fmt: skip
    target = (out or run.path / "export" / found.path.name).resolve()
    folders: dict[str, tuple[Path, tuple[str, ...]]] = {"": (target, ADAPTER_FILES)}
    write_adapter(facts, target, repo or target.name)
    if merged:
        whole = target.with_name(f"{target.name}-merged")
        write_merged(facts, target, whole, f"{repo or target.name}-merged", cache_dir)
        folders["-merged"] = (whole, MERGED_FILES)
    written = Written(folders, facts.license is not None)
    _show(facts, written)
    return written


def write_adapter(facts: Facts, target: Path, name: str) -> None:
    """The adapter's two files, card, recipe and results. The config names the base as others find it."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(facts.checkpoint.path / WEIGHTS, target / WEIGHTS)
    config = json.loads((facts.checkpoint.path / CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = facts.cfg.model.id  # in the container it was a path
    config["revision"] = facts.cfg.model.revision if facts.cfg.model.source == "hub" else None
    run_dir.write_json(target / CONFIG, config)
    run_dir.write_text(target / "README.md", card.make(facts, name))
    run_dir.write_text(target / RECIPE, run_recipe.to_toml(facts.cfg))
    (target / RESULTS).unlink(missing_ok=True)  # of an earlier export
    if facts.results is not None:
        run_dir.write_json(target / RESULTS, facts.results)


def write_merged(facts: Facts, adapter: Path, target: Path, name: str, cache_dir: Path) -> None:
    base = base_folder(facts.cfg, cache_dir)
    target.mkdir(parents=True, exist_ok=True)
    how = facts.cfg.model.dtype, facts.cfg.weight_sync.rounding
    arguments = [str(base), str(adapter), str(target), *how]
    if importlib.util.find_spec("torch") is not None:
        from scripts.export.merge import write_merged as merge

        merge(base, adapter, target, *how)
    else:
        _in_trainer_image(arguments, read=[base, adapter], write=target)
    run_dir.write_text(target / "README.md", card.make(facts, name, merged=True))
    run_dir.write_text(target / RECIPE, run_recipe.to_toml(facts.cfg))


def base_folder(cfg: Recipe, cache_dir: Path) -> Path:
    """Folder with the base's weights. Raises: NotReadyError: a Hub model that is not in the cache."""
    if cfg.model.source == "local":
        return folder("MODELS_DIR", "data/models") / cfg.model.id
    try:
        return Path(
            huggingface_hub.snapshot_download(
                cfg.model.id, revision=cfg.model.revision, cache_dir=cache_dir, local_files_only=True
            )
        )
    except huggingface_hub.errors.LocalEntryNotFoundError:
        raise NotReadyError(
            f"{cfg.model.id} at {cfg.model.revision} is not in {cache_dir}; download it there first, or set HF_CACHE"
        ) from None


def _in_trainer_image(arguments: list[str], *, read: list[Path], write: Path) -> None:
    """Run ``scripts.export.merge`` there, every folder under its own path, without a network."""
    tag = os.environ.get("TAG") or os.environ.get("VARIANT") or "cpu"
    image = f"{os.environ.get('REGISTRY', 'local')}/opencode-rl-trainer:{tag}"
    # A cached Hub model is a folder of links to files beside it.
    mounts = [f"--volume={path}:{path}:ro" for path in {path.parents[1] if path.parent.name == "snapshots" else path
                                                        for path in read}]  # fmt: skip
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=none", f"--user={os.getuid()}:{os.getgid()}", *mounts,
         f"--volume={write}:{write}", f"--volume={ROOT}:/src:ro", "--workdir=/src", "--env=PYTHONPATH=/src",
         "--env=PYTHONDONTWRITEBYTECODE=1", image, "python", "-m", "scripts.export.merge", *arguments],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NotReadyError(f"the merge in {image} failed:\n{done.stderr.strip()[-2000:]}")


def publish(api: HfApi, written: Written, repo: str, *, public: bool) -> None:
    """Push each folder as one commit; run again after a failure, it pushes what is missing.

    Raises: RecipeError: the licence of the base is unknown, or the Hub refuses. NotReadyError: it does not answer.
    """
    if not written.license_known:
        raise RecipeError("the licence of the base is unknown and a card must say it; give it with --base-license")
    for suffix, (path, files) in written.folders.items():
        target = repo + suffix
        with hub.messages(target, api.endpoint):
            commit = _push(api, target, path, files, not public)
        console.print(f"Pushed to {api.endpoint}/{target} at commit {commit}", soft_wrap=True)


@retry(
    retry=retry_if_exception(lambda error: hub.status(error) == CONFLICT),
    stop=stop_after_attempt(3),
    wait=wait_exponential_jitter(multiplier=0.5, max=10),
    reraise=True,
)
def _push(api: HfApi, repo: str, path: Path, files: tuple[str, ...], private: bool) -> str:
    """On top of the newest commit, or not at all: huggingface_hub repeats a commit that was answered with a 500
    although it landed, and then finds a conflict; the second attempt here finds that nothing is left to push."""
    api.create_repo(repo, private=private, exist_ok=True)
    info: Any = api.upload_folder(
        repo_id=repo, folder_path=path, allow_patterns=list(files), commit_message=f"Export {path.name}",
        parent_commit=api.repo_info(repo).sha,
    )  # fmt: skip
    return str(info.oid)


def _show(facts: Facts, written: Written) -> None:
    for path, files in written.folders.values():
        console.print(f"{facts.checkpoint.path.name} of {facts.run} in {path}", soft_wrap=True, highlight=False)
        shown = Table("file", show_edge=False)
        shown.add_column("bytes", justify="right")
        for file in sorted({file for pattern in files for file in path.glob(pattern)}):
            shown.add_row(file.name, f"{file.stat().st_size:,}")
        console.print(shown)
    if facts.results is None:
        console.print("These weights have no results: `make eval CKPT=...` makes them.")
    if facts.license is None:
        console.print("The licence of the base is unknown: --base-license is needed to push.")


if __name__ == "__main__":
    typer.run(main)
