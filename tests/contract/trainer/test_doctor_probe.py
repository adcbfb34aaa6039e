"""The doctor's probe in the trainer's own image: right on the shipped model, and telling on broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.doctor import probe_trainer
from tests.contract.trainer.tiny_models import SHIPPED

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ROOT / "data/recipes/smoke.toml"
RECORDED = ROOT / "tests/unit/doctor/trainer_facts.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def probe(model: Path) -> dict[str, Any]:
    return probe_trainer.main(str(model), "", str(SMOKE))


def test_what_the_unit_tests_have_recorded_is_what_the_image_says() -> None:
    assert probe(Path(SHIPPED)) == json.loads(RECORDED.read_text())


def test_another_trl_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.__version__", "1.16.0")
    assert "1.16.0" in probe(model)["supported"]["error"]


def test_another_architecture_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    assert "'llama'" in probe(model)["supported"]["error"]


def test_a_tokenizer_without_an_end_token_is_told(model: Path) -> None:
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("eos_token", None)
    path.write_text(json.dumps(config))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    assert probe(model)["eos_token_id"] is None


def test_a_chat_template_that_loses_tool_calls_is_told(model: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (model / "chat_template.jinja").write_text(
        plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert probe(model)["round_trip"] == []


def test_a_model_that_is_not_there_is_an_error_in_each_fact_and_no_traceback(tmp_path: Path) -> None:
    found = probe(tmp_path / "none")
    assert "error" in found["config"] and "error" in found["round_trip"] and "error" in found["worker"]
