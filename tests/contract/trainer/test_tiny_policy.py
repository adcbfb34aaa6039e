"""The shipped tiny policy is what its record says, fits OpenCode's real prompt, and is made the same way again."""

from __future__ import annotations

import json
import random
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl.chat_template_utils import (
    add_response_schema,
    is_chat_template_prefix_preserving,
    lfm2_2_5_template,
    lfm2_2_5_v2_chat_template,
    parse_response,
    supports_tool_calling,
)
from typer.testing import CliRunner

from scripts import make_suites, make_tiny_policy
from scripts.tiny_policy import prompts, warmup
from scripts.tiny_policy import tokenizer as text
from services.common import recipe
from services.common.errors import RecipeError
from services.common.recipe import Env
from services.env import opencode
from services.policy import argv
from tests.contract.conftest import serving

ROOT = Path(__file__).parents[3]
SHIPPED, TASKS = ROOT / "data/models/tiny-lfm2", ROOT / "data/tasks"
SUITES = [f"{suite}/{split}" for suite in ("smoke", "learn") for split in ("train", "heldout")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(SHIPPED).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM with the shipped policy, started as the policy service starts it."""
    smoke = recipe.load(ROOT / "data/recipes/smoke.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS_DIR", str(SHIPPED.parent))
        command = argv.argv(smoke, "train", "cpu", sys.executable)
        variables = {"MODELS_DIR": str(SHIPPED.parent), **argv.environment(smoke, "train", "cpu")}
    url = f"http://127.0.0.1:{argv.PORT}"
    with serving(command, variables, url, tmp_path_factory.mktemp("vllm") / "vllm.log"):
        yield url


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def read_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def test_shipped_files_are_the_recorded_ones_and_at_most_8_mib() -> None:
    make_tiny_policy.verify(SHIPPED)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 8 * 2**20


def test_verify_refuses_a_changed_a_missing_and_an_extra_file(tmp_path: Path) -> None:
    folder = shutil.copytree(SHIPPED, tmp_path / "model", copy_function=shutil.copyfile)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    (folder / "chat_template.jinja").unlink()
    (folder / "adapter.bin").touch()
    with pytest.raises(RecipeError, match=r"adapter\.bin, chat_template\.jinja, model\.safetensors differ"):
        make_tiny_policy.verify(folder)


def test_recorded_requests_are_of_the_opencode_that_the_sandboxes_run() -> None:
    assert prompts.recorded()["opencode_version"] == Env().opencode_version
    offered = {tool["function"]["name"] for tool in prompts.recorded()["agent"]["tools"]}
    assert offered & set(opencode.DENIED_TOOLS) == prompts.DENIED_TOOLS
    assert prompts.SHELL_TOOL in offered - prompts.DENIED_TOOLS


def test_special_tokens_have_the_ids_of_lfm2_5(tokenizer: PreTrainedTokenizerFast) -> None:
    named = ("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
    assert tokenizer.convert_tokens_to_ids(list(named)) == [0, 1, 6, 7, 10, 11]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 7)


def test_prompt_is_short_and_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    for denied in (prompts.DENIED_TOOLS, frozenset()):
        rendered = text.render(tokenizer, *prompts.agent_request("Count ä ö ü 日本 in a.csv\n", denied=denied))
        ids = text.encode(tokenizer, rendered)
        assert tokenizer.decode(ids) == rendered
        assert len(ids) < 512 < len(rendered) / 45


def test_chat_template_is_lfm2_5s_and_trl_parses_its_calls() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer.chat_template == lfm2_2_5_v2_chat_template
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    assert add_response_schema(tokenizer).response_template == lfm2_2_5_template
    prompt = text.encode(tokenizer, text.render(tokenizer, *prompts.agent_request("Count the lines of a.csv.\n")))
    sampled = text.encode(tokenizer, text.call_text("wc -l < a.csv > answer.txt"))
    answer = parse_response(tokenizer, sampled, prefix=prompt)
    assert answer["tool_calls"] == [
        {"type": "function", "function": {"name": "bash", "arguments": {"command": "wc -l < a.csv > answer.txt"}}}
    ]


@pytest.mark.parametrize("suite", SUITES)
def test_second_prompt_continues_the_first_prompt_and_the_sampled_call(
    tokenizer: PreTrainedTokenizerFast, suite: str
) -> None:
    for task in prompts.read_suite(TASKS, suite):
        messages, tools = prompts.agent_request(task.instruction)
        sampled = text.encode(tokenizer, text.render(tokenizer, messages, tools))
        sampled += text.encode(tokenizer, text.call_text(task.command))
        result = [prompts.tool_call_turn(task.command), {"role": "tool", "content": "(no output)"}]
        second = text.encode(tokenizer, text.render(tokenizer, messages + result, tools))
        assert second == sampled + text.encode(tokenizer, text.tool_turn("(no output)"))


def test_shipped_model_is_sometimes_right_on_smoke_tasks_and_always_stops(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    train, heldout = make_tiny_policy.read_suites(TASKS, "smoke")
    found = make_tiny_policy.measure(model, tokenizer, train, heldout)
    assert 0.3 <= found["accuracy"]["train"]["sampled"] <= 0.6
    assert all(0.1 <= chance <= 0.8 for part in found["accuracy"].values() for chance in part["tasks"].values())
    assert all(part["final_text"] > 0.95 for part in found["accuracy"].values())
    recorded = read_record(SHIPPED)
    assert found["prompt_tokens"] == recorded["prompt_tokens"]
    for name, part in found["accuracy"].items():
        assert part["sampled"] == pytest.approx(recorded["accuracy"][name]["sampled"], abs=0.01)


def test_config_has_what_vllm_reads_and_generation_samples_the_full_vocabulary() -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["conv_dim"] == config["block_dim"] == config["hidden_size"]
    assert config["hidden_size"] // config["num_attention_heads"] == 64
    assert {"conv", "full_attention"} == set(config["layer_types"])
    generation = json.loads((SHIPPED / "generation_config.json").read_text())
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "min_p": 0.0}
    assert all(generation.get(key, value) == value for key, value in neutral.items())


def test_heldout_instructions_never_train_and_wrong_commands_are_wrong() -> None:
    train, heldout = make_tiny_policy.read_suites(TASKS, "smoke")
    reference = {task.instruction: task.command for task in train}
    examples = prompts.Examples(train, heldout, random.Random(0))
    examples.right_share = 0.4
    drawn = [examples.draw() for _ in range(1000)]
    assert not {group[0].instruction for group in drawn} & {task.instruction for task in heldout}
    assert all(sum(example.weight for example in group) == pytest.approx(1) for group in drawn)
    known = [group for group in drawn if group[0].instruction in reference]
    assert known
    for right, *wrong in known:
        assert right.command == reference[right.instruction]
        assert wrong and all(example.command != right.command for example in wrong)


def test_slips_are_the_tasks_own_command_with_its_answer_elsewhere() -> None:
    train, heldout = make_tiny_policy.read_suites(TASKS, "learn")
    reference = {task.instruction: task.command for task in train}
    examples = prompts.Examples(train, heldout, random.Random(0), "answer-file")
    examples.right_share = 0.3
    drawn = [group for group in (examples.draw() for _ in range(500)) if group[0].instruction in reference]
    slips = {example.command.partition(" > ")[2] for group in drawn for example in group[1:]}
    assert slips == {"", "output.txt", "result.txt"}
    for right, *wrong in drawn:
        assert {example.command.partition(" > ")[0] for example in wrong} == {
            right.command.removesuffix(" > answer.txt")
        }


def test_warm_up_questions_are_none_of_the_suites_and_about_none_of_its_columns() -> None:
    train, heldout = make_tiny_policy.read_suites(TASKS, "learn")
    warmup_tasks = [prompts.Task(*task) for task in make_suites.learn_warmup()]
    assert len(warmup_tasks) == 5 * 3 * len(make_suites.WARMUP_COLUMNS)
    assert not {task.instruction for task in warmup_tasks} & {task.instruction for task in train + heldout}
    assert not {task.command for task in warmup_tasks} & {task.command for task in train + heldout}


def test_schedule_starts_right_and_ends_at_the_target() -> None:
    schedule = warmup.Schedule(target_accuracy=0.45, steps=100)
    shares = [schedule.right_share(step) for step in range(100)]
    assert shares[0] == 1 and shares[-1] == pytest.approx(0.45)
    assert shares == sorted(shares, reverse=True)
    assert not any(schedule.is_full(step) for step in range(40)) and any(schedule.is_full(step) for step in range(100))
    assert 0 < schedule.rate(99) < schedule.rate(0) < schedule.rate(35) == schedule.learning_rate


def test_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path: Path) -> None:
    def made(name: str, seed: int) -> dict[str, str]:
        arguments = ["make", "--out", str(tmp_path / name), "--seed", str(seed), "--warmup-steps", "10"]
        result = CliRunner().invoke(make_tiny_policy.app, [*arguments, "--batch-size", "4", "--threads", "1"])
        assert result.exit_code == 0, result.output
        return read_record(tmp_path / name)["sha256"]

    first = made("first", 1)
    assert made("again", 1) == first
    other = made("other", 2)
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}


def test_suite_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="suite nowhere/train is not in"):
        make_tiny_policy.make(suite="nowhere", tasks_dir=TASKS, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_served_log_probabilities_are_those_of_the_trainers_forward(
    server: str, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    task = prompts.read_suite(TASKS, "smoke/heldout")[0]
    ids = text.encode(tokenizer, text.render(tokenizer, *prompts.agent_request(task.instruction)))
    ids += text.encode(tokenizer, text.call_text(task.command))
    body = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    served = post(f"{server}/v1/completions", body)["choices"][0]["prompt_logprobs"][1:]
    with torch.inference_mode():
        forward, _ = warmup.log_probs(model, torch.tensor([ids]), torch.ones(1, len(ids)) > 0)
    assert [next(iter(each.values()))["logprob"] for each in served] == pytest.approx(forward.tolist(), abs=1e-3)


def test_served_policy_calls_bash_both_right_and_wrong_and_then_ends(server: str) -> None:
    task = prompts.read_suite(TASKS, "smoke/train")[0]
    messages, tools = prompts.agent_request(task.instruction)
    body = {"model": "policy", "tools": tools, "tool_choice": "auto", "n": 32, "max_tokens": 96, "temperature": 1.0}
    choices = post(f"{server}/v1/chat/completions", {**body, "messages": messages})["choices"]
    calls = [choice["message"]["tool_calls"] for choice in choices if choice["message"].get("tool_calls")]
    assert len(calls) >= 30
    commands = [json.loads(call[0]["function"]["arguments"])["command"] for call in calls]
    assert task.command in commands and len(set(commands)) > 1

    result = {"role": "tool", "tool_call_id": calls[0][0]["id"], "content": "(no output)"}
    answered = [*messages, {"role": "assistant", "content": "", "tool_calls": calls[0]}, result]
    choices = post(f"{server}/v1/chat/completions", {**body, "messages": answered})["choices"]
    assert sum(choice["message"]["content"] == prompts.FINAL_TEXT for choice in choices) >= 30
    assert sum(choice["finish_reason"] == "stop" for choice in choices) >= 30
