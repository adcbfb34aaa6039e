"""The twelve pitfalls: each check is ok on the shipped set-up, and fails once the thing that it guards is broken."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import Check
from scripts.doctor import pitfalls
from scripts.doctor.setup import Setup

Broken = Callable[..., Setup]
Facts = dict[str, Any]


def change(facts: Facts, *path: str, to: Any) -> Facts:
    """The facts with one value changed; ``to=None`` takes it away."""
    found = copy.deepcopy(facts)
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return found


def fails(check: Check, exit_code: int, *words: str) -> None:
    assert check.state == "fail", check
    assert check.error.exit_code == exit_code
    text = f"{check.found} {check.mend}"
    assert all(word in text for word in words), text


class FakeEngine:
    """FAKE of docker.DockerClient: every image is there."""

    images = type("Images", (), {"get": staticmethod(lambda _name: object())})


@pytest.mark.parametrize("check", pitfalls.ALL, ids=lambda check: check.__name__)
def test_every_check_is_ok_on_the_shipped_set_up(
    check: Callable[[Setup, Facts], Check], setup: Setup, facts: Facts
) -> None:
    found = check(setup, facts)
    assert found.state == "ok", found
    assert found.name == check.__name__.replace("_", "-")


def test_an_image_of_another_version_is_told_as_that(setup: Setup, facts: Facts) -> None:
    old = change(facts, "worker", to={"error": "RecipeError: rollout.new_key: unknown key"})
    for check in (pitfalls.training_prompts, pitfalls.eos_token, pitfalls.agent_budget):
        fails(check(setup, old), 3, "does not fit this recipe", "new_key", "make images")


def test_there_are_twelve() -> None:
    assert len(pitfalls.ALL) == 12


def test_without_a_trainer_image_what_only_it_can_say_is_skipped_and_not_ok(setup: Setup) -> None:
    facts = {"skipped": "image local/opencode-rl-trainer:cpu is not there"}
    states = {check.__name__: check(setup, facts).state for check in pitfalls.ALL}
    assert {name for name, state in states.items() if state == "skipped"} == {
        "trl_release", "eos_token", "agent_budget", "chat_template",
    }  # fmt: skip
    assert set(states.values()) == {"ok", "skipped"}


# --- 1: trl 1.16 --------------------------------------------------------------------------------------------------


def locks_with(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """The trainer's lock with one pin changed."""
    lock = tmp_path / "trainer.txt"
    text = setup.lock_of["trainer"].read_text()
    assert f"\n{old} " in text
    lock.write_text(text.replace(f"\n{old} ", f"\n{new} "))
    monkeypatch.setattr(Setup, "lock_of", property(lambda _self: {"trainer": lock}))


def test_1_another_trl_in_the_lock_fails(
    setup: Setup, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks_with(setup, tmp_path, monkeypatch, "trl==1.15.0", "trl==1.16.0")
    fails(pitfalls.trl_release(setup, facts), 3, "1.16.0", "make lock")


def test_1_another_trl_in_the_image_fails(setup: Setup, facts: Facts) -> None:
    fails(pitfalls.trl_release(setup, change(facts, "versions", "trl", to="1.16.0")), 3, "1.16.0", "make images")


def test_1_a_model_that_this_trl_cannot_pack_fails(setup: Setup, facts: Facts) -> None:
    refused = change(facts, "supported", to={"error": "RecipeError: a model of type 'mamba'"})
    fails(pitfalls.trl_release(setup, refused), 2, "mamba")


# --- 2: kernels ---------------------------------------------------------------------------------------------------


def test_2_another_kernels_package_fails(
    setup: Setup, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks_with(setup, tmp_path, monkeypatch, "kernels==0.16.0", "kernels==0.9.0")
    fails(pitfalls.attention_kernel(setup, facts), 3, "0.9.0", "kernels==0.16.0")


def test_2_an_image_without_the_package_fails(setup: Setup, facts: Facts) -> None:
    gone = change(facts, "versions", to={"error": "PackageNotFoundError: kernels"})
    fails(pitfalls.attention_kernel(setup, gone), 3, "kernels", "make images")


def test_2_a_kernel_that_is_nowhere_fails_and_one_in_the_cache_is_ok(broken: Broken, facts: Facts) -> None:
    setup = broken(trainer__attn_implementation="kernels-community/flash-attn3")
    fails(pitfalls.attention_kernel(setup, facts), 3, "kernels-community/flash-attn3", "hf download")
    (setup.hf_cache / "hub/kernels--kernels-community--flash-attn3/snapshots/0a1b/build").mkdir(parents=True)
    assert pitfalls.attention_kernel(setup, facts).state == "ok"


# --- 3: the training data set -------------------------------------------------------------------------------------


@pytest.fixture
def own_tasks(broken: Broken, tmp_path: Path, setup: Setup) -> Setup:
    shutil.copytree(setup.tasks_dir, tmp_path / "tasks")
    return broken(tasks_dir=tmp_path / "tasks")


def test_3_two_tasks_with_one_prompt_fail(own_tasks: Setup, facts: Facts) -> None:
    first, second = sorted(path for path in (own_tasks.tasks_dir / "smoke/train").iterdir() if path.is_dir())[:2]
    shutil.copy(first / "instruction.md", second / "instruction.md")
    fails(pitfalls.training_prompts(own_tasks, facts), 2, second.name)


def test_3_a_suite_that_is_gone_fails(own_tasks: Setup, facts: Facts) -> None:
    shutil.rmtree(own_tasks.tasks_dir / "smoke/train")
    fails(pitfalls.training_prompts(own_tasks, facts), 2, "smoke/train")


def test_3_a_trainer_that_gives_trl_no_data_set_fails(setup: Setup, facts: Facts) -> None:
    fails(pitfalls.training_prompts(setup, change(facts, "worker", "given", "dataset", to=None)), 3, "no data set")


# --- 4: eos_token_ids ---------------------------------------------------------------------------------------------


def test_4_a_tokenizer_without_an_end_token_fails(setup: Setup, facts: Facts) -> None:
    gone = change(facts, "eos_token_id", to={"error": "no eos_token"})
    fails(pitfalls.eos_token(setup, gone), 2, "no end token")


def test_4_an_end_token_that_is_not_the_models_fails(setup: Setup, facts: Facts) -> None:
    fails(pitfalls.eos_token(setup, change(facts, "config", "eos_token_id", to=2)), 2, "end token is 7", "model's 2")


def test_4_a_worker_without_it_fails(setup: Setup, facts: Facts) -> None:
    fails(pitfalls.eos_token(setup, change(facts, "worker", "given", "eos_token_ids", to=None)), 3, "eos_token_ids")


# --- 5: 8 model calls ---------------------------------------------------------------------------------------------


def test_5_a_worker_that_is_given_no_number_fails(setup: Setup, facts: Facts) -> None:
    without = change(facts, "worker", "given", "max_tool_calling_iterations", to=None)
    fails(pitfalls.agent_budget(setup, without), 3, "8 hold", "the recipe says 6")


def test_5_a_recipe_that_does_not_say_it_is_a_warning(
    broken: Broken, setup: Setup, facts: Facts, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    lines = setup.recipe_path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("max_tool_calling_iterations")))
    assert pitfalls.agent_budget(broken(recipe_path=path), facts).state == "warn"


# --- 6: the chat template -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [[], [{"name": "bash", "arguments": {"command": "ls"}}], {"error": "ValueError: x"}])
def test_6_a_call_that_does_not_come_back_as_it_was_fails(setup: Setup, facts: Facts, read: Any) -> None:
    fails(
        pitfalls.chat_template(setup, change(facts, "round_trip", to=read)), 2, "reads back as", "chat_template.jinja"
    )


# --- 7: tool_choice="auto" ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--enable-auto-tool-choice", "--tool-call-parser"])
def test_7_a_policy_command_without_a_parser_fails(setup: Setup, facts: Facts, flag: str) -> None:
    command = [part for part in pitfalls.argv.argv(setup.cfg, "train", "cpu") if part != flag]
    fails(pitfalls.tool_choice(setup, facts, command), 3, flag)


# --- 8: x-api-key -------------------------------------------------------------------------------------------------


def test_8_a_configuration_that_sends_only_authorization_fails(setup: Setup, facts: Facts) -> None:
    def as_opencode_does_by_default(*arguments: Any) -> Any:
        config = pitfalls.opencode.config(*arguments)
        del config["provider"][pitfalls.opencode.PROVIDER]["options"]["headers"]
        return config

    fails(pitfalls.session_key_header(setup, facts, as_opencode_does_by_default), 3, "headers none")


# --- 9: no PushToHubCallback --------------------------------------------------------------------------------------


def test_9_a_repository_without_a_token_fails(broken: Broken, facts: Facts) -> None:
    setup = broken(environment={"ADAPTER_REPO": "you/adapter"})
    fails(pitfalls.checkpoint_push(setup, facts), 2, "you/adapter", "HF_TOKEN")


def test_9_a_repository_that_is_no_name_fails(broken: Broken, facts: Facts) -> None:
    setup = broken(environment={"ADAPTER_REPO": "adapter", "HF_TOKEN": "t"})
    fails(pitfalls.checkpoint_push(setup, facts), 2, "owner/name")


def test_9_a_transformers_that_pushes_by_itself_is_a_warning(broken: Broken, facts: Facts) -> None:
    setup = broken(environment={"ADAPTER_REPO": "you/adapter", "HF_TOKEN": "t"})
    assert pitfalls.checkpoint_push(setup, facts).state == "ok"
    assert pitfalls.checkpoint_push(setup, change(facts, "push_callback", to=True)).state == "warn"


# --- 10: the tunnel and the stall ---------------------------------------------------------------------------------


def test_10_a_tunnel_fails(broken: Broken, facts: Facts) -> None:
    setup = broken(environment={"CAPTURE_URL": "https://0a1b.gradio.live/capture"})
    fails(pitfalls.stall_watchdog(setup, facts), 2, "0a1b.gradio.live", "Jobs proxy")
    setup = broken(environment={"CAPTURE_URL": "https://job--8000.hf.jobs/capture"})
    assert pitfalls.stall_watchdog(setup, facts).state == "ok"


def test_10_a_watchdog_that_would_take_one_slow_rollout_for_a_stall_fails(broken: Broken, facts: Facts) -> None:
    fails(pitfalls.stall_watchdog(broken(watchdog__stall_s=300), facts), 2, "stall_s is 300", "outer_timeout_s = 420")


# --- 11: one variable a flag --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["you/adapter MAX_STEPS=20", "you/adapter,MAX_STEPS=20", "you/adapter;MAX_STEPS=20"])
def test_11_two_variables_in_one_flag_fail(broken: Broken, facts: Facts, value: str) -> None:
    fails(pitfalls.one_variable_per_flag(broken(environment={"ADAPTER_REPO": value}), facts), 2, "MAX_STEPS")


# --- 12: purpose="eval" -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken_part", [{"purpose": "train"}, {"purpose": None}, {"eval_sampling": {"temperature": 0.0}}]
)
def test_12_an_evaluation_with_another_purpose_or_sampling_fails(
    setup: Setup, facts: Facts, broken_part: dict[str, Any]
) -> None:
    request = pitfalls.evaluation_request(setup) | broken_part
    fails(pitfalls.eval_purpose(setup, facts, request), 3, "purpose")


# --- The probe's answer -------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_not_tried(broken: Broken) -> None:
    setup = broken(model__id="no-such-model")
    vars(setup)["engine"] = FakeEngine()
    assert "no-such-model" in pitfalls.trainer_facts(setup)["skipped"]


def test_a_probe_that_dies_is_skipped_with_its_last_words(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(setup)["engine"] = FakeEngine()
    monkeypatch.setattr(pitfalls, "output_of", lambda *_, **__: (137, "Killed"))
    assert "137: Killed" in pitfalls.trainer_facts(setup)["skipped"]
    monkeypatch.setattr(pitfalls, "output_of", lambda *_, **__: (0, "noise\n" + json.dumps({"versions": {}})))
    assert pitfalls.trainer_facts(setup) == {"versions": {}}
