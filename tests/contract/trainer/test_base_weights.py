"""The base weights before and after training: what changed them is named, and stops the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common import run_dir
from services.common.errors import StoppedError
from services.common.run_dir import RunDir
from services.trainer import base_weights
from services.weight_sync import names
from tests.contract.trainer.tiny_models import SHIPPED, tiny_lfm2

TARGET = "model.layers.0.feed_forward.w1"


def recorded(run: RunDir) -> dict:
    return run_dir.read_json(run.path / base_weights.FILE)


def test_a_base_that_stays_is_recorded_twice_alike(tmp_path: Path) -> None:
    model, run = tiny_lfm2(), RunDir(tmp_path)
    with base_weights.unchanged(model, run):
        assert recorded(run)["at_end"] is None  # a run that is killed leaves this
        with torch.no_grad():
            for _, factor in names.lora_factors(model):
                factor.add_(1.0)  # the adapter may change
    found = recorded(run)
    assert found["at_start"] == found["at_end"]
    assert len(found["at_start"]) == sum(".lora_" not in name for name, _ in model.named_parameters())
    assert found["changed"] == []


def test_a_weight_that_changed_stops_the_run_and_is_named(tmp_path: Path) -> None:
    model, run = tiny_lfm2(), RunDir(tmp_path)
    with (
        pytest.raises(StoppedError, match=rf"1 of \d+ base weights changed while training, {TARGET}\.weight: "),
        base_weights.unchanged(model, run),
        torch.no_grad(),
    ):
        names.base_weight(model, TARGET)[3, 4] += 1e-7
    found = recorded(run)
    assert found["changed"] == [f"{TARGET}.weight"]
    assert found["at_start"][f"{TARGET}.weight"] != found["at_end"][f"{TARGET}.weight"]


def test_a_merge_in_place_that_is_undone_changes_a_bfloat16_base(tmp_path: Path) -> None:
    """What TRL does at every sync, and the reason why ours does not."""
    model, run = tiny_lfm2(dtype=torch.bfloat16), RunDir(tmp_path)
    with torch.no_grad():
        for name, factor in names.lora_factors(model):
            if ".lora_B." in name:
                factor.normal_()
    with pytest.raises(StoppedError, match="base weights changed while training"), base_weights.unchanged(model, run):
        model.merge_adapter()
        model.unmerge_adapter()


def test_a_drift_that_the_recipe_allows_is_recorded_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """weight_sync.mode = "full"."""
    model, run = tiny_lfm2(), RunDir(tmp_path)
    with base_weights.unchanged(model, run, may_drift=True), torch.no_grad():
        names.base_weight(model, TARGET)[0, 0] += 1.0
    assert recorded(run)["changed"] == [f"{TARGET}.weight"]
    assert "base weights changed" in caplog.text


def test_a_weight_file_that_is_written_over_while_it_is_mapped_is_noticed(tmp_path: Path) -> None:
    """Seen for real: transformers maps the file, and making the model anew changed the base of a running trainer."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    file = folder / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, tmp_path / "other.safetensors")
    run = RunDir(tmp_path / "run")
    with pytest.raises(StoppedError, match="written over"), base_weights.unchanged(model, run), file.open("r+b") as old:
        old.write((tmp_path / "other.safetensors").read_bytes())


def test_a_failure_of_training_is_not_hidden_by_a_changed_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, run = tiny_lfm2(), RunDir(tmp_path)
    with pytest.raises(KeyError, match="the bug"), base_weights.unchanged(model, run), torch.no_grad():
        names.base_weight(model, TARGET)[0, 0] += 1.0
        raise KeyError("the bug")
    assert recorded(run)["changed"] == [f"{TARGET}.weight"]
    assert "1 of" in caplog.text and TARGET in caplog.text
