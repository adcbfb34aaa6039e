"""Every command line that we build is accepted by vLLM's own parser, and says there what we meant."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from vllm.config.lora import MaxLoRARanks
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from services.common import recipe
from services.policy import argv as built
from services.policy.reasoning import REASONING_PARSER_PLUGIN

RECIPES = Path(__file__).parents[3] / "data/recipes"
FULL_RUN = {"model.revision": "0" * 40}
REVISION = {"lfm2.5-2.6b.toml": FULL_RUN, "lfm2.5-2.6b-one-gpu.toml": FULL_RUN}


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.toml")))
@pytest.mark.parametrize("role", typing.get_args(built.Role))
@pytest.mark.parametrize("device", typing.get_args(built.Device))
def test_vllm_accepts_the_command_line(name, role, device):
    cfg = recipe.load(RECIPES / name, REVISION.get(name))
    reasoning = ["--reasoning-parser-plugin", str(REASONING_PARSER_PLUGIN), "--reasoning-parser", "lfm2_5"]
    command = built.argv(cfg, role, device, reasoning=reasoning)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("serve") + 1 :])
    validate_parsed_serve_args(parsed)
    assert parsed.model_tag == cfg.model_location()
    assert parsed.served_model_name == [cfg.policy.served_model_name]
    assert parsed.max_model_len == cfg.model.max_model_len
    assert parsed.generation_config == "vllm"
    assert bool(parsed.enable_lora) is (role == "eval")
    assert (parsed.weight_transfer_config is not None) is (role == "train")
    if role == "eval":
        assert parsed.max_lora_rank >= cfg.lora.r


def test_vllm_takes_the_parallel_sizes():
    sizes = {"policy.tensor_parallel_size": 2, "policy.data_parallel_size": 2}
    cfg = recipe.load(RECIPES / "lfm2.5-2.6b.toml", FULL_RUN | sizes)
    command = built.argv(cfg, "train", "cuda")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("serve") + 1 :])
    validate_parsed_serve_args(parsed)
    assert (parsed.tensor_parallel_size, parsed.data_parallel_size) == (2, 2)


def test_the_lora_ranks_are_vllms():
    assert typing.get_args(MaxLoRARanks) == built.LORA_RANKS


def test_the_tool_parser_plugin_registers_the_name_that_is_asked_for():
    ToolParserManager.import_tool_parser(str(built.TOOL_PARSER_PLUGIN))
    assert ToolParserManager.get_tool_parser(built.TOOL_PARSER).__name__ == "Lfm2ToolParser"


def test_the_operation_that_is_switched_off_on_the_cpu_has_that_name():
    assert issubclass(RotaryEmbedding, CustomOp)
    assert RotaryEmbedding.name == "rotary_embedding"
