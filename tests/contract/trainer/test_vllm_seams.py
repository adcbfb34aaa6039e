"""What this stack relies on in vLLM 0.31 and no running server here would show, by name and signature.

A failure here means that a release moved a part: the message says what of ours depends on it. What a running server
does with our engine, worker, endpoint and parsers is in test_weight_sync_vllm.py, test_parser_in_api.py and
test_policy_argv.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor import custom_op
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.lfm2 import Lfm2ForCausalLM
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.v1.engine.async_llm import AsyncLLM

from services.policy.lfm2_reasoning_parser import Lfm2ReasoningParser
from services.policy.lfm2_tool_parser import Lfm2ToolParser
from services.weight_sync import plugin, short_conv
from services.weight_sync.endpoint import WeightSyncEndpoint
from services.weight_sync.engine import LoraFactorsEngine


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_installed_version_is_the_one_that_was_checked() -> None:
    assert vllm.__version__.startswith("0.31."), f"vLLM {vllm.__version__}: docs/upstream.md was checked with 0.31 only"


def test_the_weight_transfer_engine_asks_for_the_methods_that_ours_has() -> None:
    asked = {name: parameters(getattr(WeightTransferEngine, name)) for name in WeightTransferEngine.__abstractmethods__}
    assert asked == {
        "init_transfer_engine": ["init_info"], "start_weight_update": [], "receive_weights": ["update_info"],
        "finish_weight_update": [], "shutdown": [],
    }, "WeightTransferEngine changed: services/weight_sync/engine.py implements it"  # fmt: skip
    assert not LoraFactorsEngine.__abstractmethods__
    assert parameters(WeightTransferEngineFactory.register_engine)[:2] == ["name", "module_path_or_cls"]


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        ("sleep", {"level", "mode"}),
        ("wake_up", {"tags"}),
        ("reset_prefix_cache", {"reset_running_requests", "reset_connector"}),
        ("collective_rpc", {"method", "args"}),
        ("update_weight_version", set()),
    ],
)
def test_the_engine_takes_what_our_endpoint_calls(method: str, needed: set[str]) -> None:
    found = set(parameters(getattr(AsyncLLM, method)))
    assert needed <= found, f"AsyncLLM.{method} lost {needed - found}: services/weight_sync/endpoint.py passes it"


def test_our_endpoint_is_a_plugin_as_vllm_declares_it() -> None:
    for name in ("attach_router", "init_state"):
        assert parameters(getattr(WeightSyncEndpoint, name)) == parameters(getattr(EndpointPlugin, name)), name
    asked = {name for name in EndpointPlugin.__annotations__ if not name.startswith("_")}
    assert asked == {"name", "required_tasks"} and WeightSyncEndpoint.required_tasks == ("generate",)


def test_a_short_convolution_that_the_packed_kernel_cannot_take_is_kept_as_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen on processors with AVX-512 BF16 alone; here: vLLM builds ours, and its packing skips what ours marks."""
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    short_conv.register()
    short_conv.register()
    assert custom_op.op_registry_oot == {"ShortConv": short_conv.UnpackedShortConv}
    initialise = inspect.getsource(ShortConv.__init__)
    assert "self.L_cache =" in initialise and "self.conv = " in initialise
    assert "_cpu_skip_gemm_dispatch" in inspect.getsource(UnquantizedLinearMethod.process_weights_after_loading), (
        "vLLM no longer skips layers with _cpu_skip_gemm_dispatch: services/weight_sync/short_conv.py sets it"
    )


def test_lfm2_says_where_a_checkpoints_weights_are() -> None:
    """``services/weight_sync/served.py`` finds a LoRA target so: the name maps, and the shard hangs on the tensor."""
    checkpoint = [(f"model.layers.2.self_attn.{name}_proj.weight", torch.empty(0)) for name in "qk"]
    mapped = list(Lfm2ForCausalLM.hf_to_vllm_mapper.apply(checkpoint))
    assert [(name, marker.shard_id) for name, marker in mapped] == [
        ("model.layers.2.self_attn.qkv_proj.weight", "q"), ("model.layers.2.self_attn.qkv_proj.weight", "k"),
    ]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), [(ToolParser, Lfm2ToolParser), (ReasoningParser, Lfm2ReasoningParser)])
def test_overridden_methods_of_the_parsers_are_declared_as_vllm_declares_them(theirs: type, ours: type) -> None:
    shared = {n for n, value in vars(ours).items() if inspect.isfunction(value) and hasattr(theirs, n)} - {"__init__"}
    assert shared
    for name in shared:
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name


def test_the_plugin_registers_our_engine_with_vllms_factory() -> None:
    plugin.register()
    assert WeightTransferEngineFactory._registry[plugin.ENGINE]() is LoraFactorsEngine
