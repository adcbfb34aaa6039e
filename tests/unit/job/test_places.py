"""Where everything is inside a Job's container."""

import hashlib
import json
from pathlib import Path

import pytest

from services.common.errors import RecipeError
from services.job import places


def test_a_job_s_public_name_comes_from_its_own_id_and_everything_else_is_on_loopback() -> None:
    found = places.variables("train", {"JOB_ID": "6f00"})
    assert found["SPACE_HOST"] == "6f00--8000.hf.jobs"
    assert (found["CAPTURE_HOST"], found["CAPTURE_PORT"]) == ("0.0.0.0", "8000")
    assert (found["POLICY_LISTEN"], found["POLICY_URL"]) == ("127.0.0.1:8001", "http://127.0.0.1:8001")
    assert (found["CONTROL_HOST"], found["ENV_URL"]) == ("127.0.0.1", "http://127.0.0.1:8100")
    assert (found["TRAINER_GPU"], found["POLICY_GPU"], found["EVALUATOR"]) == ("0", "1", "final")


def test_what_is_set_already_stays() -> None:
    assert "TASKS_DIR" not in places.variables("train", {"TASKS_DIR": "/elsewhere"})
    assert "SPACE_HOST" not in places.variables("train", {})


def test_an_evaluation_job_has_one_gpu_and_follows_the_hub() -> None:
    found = places.variables("watch", {"JOB_ID": "6f00"})
    assert (found["POLICY_GPU"], found["EVALUATOR"]) == ("0", "watch --hub")


def test_a_policy_in_a_job_of_its_own_is_found_through_the_network_group() -> None:
    server = places.variables("policy", {"JOB_ID": "6f00"})
    assert (server["POLICY_LISTEN"], server["POLICY_GPU"]) == ("0.0.0.0:8001", "0")
    trainer = places.variables("train", {"POLICY_ALIAS": "policy", "HF_NETWORK_GROUP_PREFIX": "grp-"})
    assert (trainer["POLICY_URL"], trainer["POLICY_GPU"]) == ("http://grp-policy:8001", "0")
    with pytest.raises(RecipeError, match="start the Job with a network group"):
        places.variables("train", {"POLICY_ALIAS": "policy"})


def test_the_submitted_recipe_is_the_one_that_runs(tmp_path: Path) -> None:
    path = places.write_recipe({"RECIPE_TOML": "[run]\n", "RECIPE": "other"}, tmp_path)
    assert path.read_text() == "[run]\n"
    assert places.write_recipe({"RECIPE": "data/recipes/smoke.toml"}, tmp_path) == Path("data/recipes/smoke.toml")
    with pytest.raises(RecipeError, match="neither RECIPE_TOML nor RECIPE is set"):
        places.write_recipe({}, tmp_path)


def test_other_pins_than_were_submitted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    places.check_pins({"PINS": json.dumps({"train.json": digest})}, tmp_path)
    places.check_pins({}, tmp_path)
    with pytest.raises(RecipeError, match=r"pin file test\.json of this image has SHA-256 no file"):
        places.check_pins({"PINS": json.dumps({"test.json": digest})}, tmp_path)
