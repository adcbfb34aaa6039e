"""What this stack relies on in TRL 1.15 and transformers 5.17, by name and signature.

A failure here means that a release moved a part: the message says which, and what of ours depends on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import transformers
import trl
from transformers import Lfm2Config
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.lfm2 import modeling_lfm2
from trl import chat_template_utils
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.openenv_harness import (
    CaptureContractError,
    HarnessRolloutOutcome,
    HarnessRolloutWorker,
    _HarnessRolloutLoop,
)
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils as trl_utils

from services.trainer import packing


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def source(part: Any) -> str:
    return inspect.getsource(part)


def test_the_installed_versions_are_those_that_were_checked():
    packing.require_supported(trl.__version__, Lfm2Config.model_type)
    assert transformers.__version__.startswith("5.17."), (
        f"transformers {transformers.__version__}: services/trainer/packing.py was checked with 5.17 only"
    )


@pytest.mark.parametrize("name", ["rollout_worker", "weight_transfer", "train_dataset", "peft_config", "callbacks"])
def test_the_trainer_takes_our_parts(name):
    assert name in parameters(AsyncGRPOTrainer.__init__), (
        f"AsyncGRPOTrainer no longer takes {name!r}: services/trainer/train.py passes it"
    )


@pytest.mark.parametrize(
    ("method", "expected", "who"),
    [
        ("_sync_weight_merged", ["t0"], "services/trainer/grpo.py overrides it so that no adapter is merged in place"),
        ("_streaming_iter", [], "weight_sync.mode = 'full' streams what it yields"),
        ("_sync_weight", [], "it logs perf/weight_sync_* from the three times that _sync_weight_merged returns"),
        ("_save_checkpoint", ["model", "trial"], "services/trainer/grpo.py adds the position to what it saves"),
        ("training_step", ["model", "inputs", "num_items_in_batch"], "services/trainer/grpo.py calls it for each row"),
        ("_get_output_dir", ["trial"], "services/trainer/grpo.py saves resume points in another folder"),
        ("get_train_dataloader", [], "services/trainer/grpo.py makes the steps itself"),
        (
            "compute_loss", ["model", "inputs", "return_outputs", "num_items_in_batch"],
            "services/trainer/grpo.py has its own",
        ),
    ],
)  # fmt: skip
def test_the_trainers_methods_that_we_override_or_call(method, expected, who):
    found = parameters(getattr(AsyncGRPOTrainer, method))
    assert found == expected, f"AsyncGRPOTrainer.{method} takes {found}, not {expected}: {who}"


def test_an_injected_weight_transfer_is_asked_to_merge_by_one_method_only():
    assert "self._sync_weight_merged(t0)" in source(AsyncGRPOTrainer._sync_weight)
    others = source(AsyncGRPOTrainer).replace(source(AsyncGRPOTrainer._sync_weight_merged), "")
    assert "merge_adapter" not in others, (
        "AsyncGRPOTrainer merges the adapter outside _sync_weight_merged: overriding that no longer keeps the base"
    )


def test_the_weight_transfer_protocol_has_the_methods_that_ours_implements():
    protocol = async_grpo_trainer.WeightTransferProtocol
    found = {name: parameters(getattr(protocol, name)) for name in vars(protocol) if not name.startswith("_")}
    assert found == {
        "init_weight_transfer": [], "pause": [], "send_weights": ["iterator"], "resume": [], "destroy": [],
    }, "WeightTransferProtocol changed: services/weight_sync/client.py implements it"  # fmt: skip


def test_a_checkpoint_holds_the_rollout_position():
    saved = source(AsyncGRPOTrainer._save_checkpoint)
    for text in ("rollout_state.json", '"prompt_index"', '"model_version"'):
        assert text in saved, f"_save_checkpoint no longer mentions {text}: a resume would restart at prompt 0"
    # It is written for this class of worker only.
    assert "isinstance(self.rollout_worker, AsyncRolloutWorker)" in saved
    assert issubclass(HarnessRolloutWorker, AsyncRolloutWorker)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_repeat_iterator", []), ("_score_group", ["group"]),
        ("_generate_one", ["prompt", "tool_dict", "tools", "group_id"]),
    ],
)  # fmt: skip
def test_the_loops_methods_that_we_override_or_call(method, expected):
    found = parameters(getattr(_HarnessRolloutLoop, method))
    assert found == expected, f"the rollout loop's {method} takes {found}: services/trainer/rollout_loop.py has its own"


def test_the_loop_is_a_class_attribute_and_asks_for_groups_and_scores_where_ours_answers():
    assert HarnessRolloutWorker._loop_cls is _HarnessRolloutLoop
    assert "work_iter = self._repeat_iterator()" in source(_AsyncRolloutLoop._generate_loop)
    assert "group_id, row = next(work_iter)" in source(_AsyncRolloutLoop._generate_loop)
    assert "samples = await self._score_group(group)" in source(_AsyncRolloutLoop._score_loop)


def test_a_resumed_trainer_takes_the_version_from_the_checkpoint_before_training_begins():
    begin = source(AsyncGRPOTrainer._inner_training_loop)
    assert begin.index('rollout_state.get("model_version", 0)') < begin.index("super()._inner_training_loop"), (
        "services/trainer/grpo.py sets a higher version in on_train_begin, after this"
    )


def test_the_worker_needs_eos_token_ids_and_allows_8_model_calls_unless_told():
    assert default(_AsyncRolloutLoop.__init__, "eos_token_ids") is inspect.Parameter.empty
    assert default(_AsyncRolloutLoop.__init__, "max_tool_calling_iterations") is None
    assert "self.max_tool_calling_iterations is not None else 8" in source(_HarnessRolloutLoop.__init__), (
        "the loop-owning default of model calls is no longer 8: check rollout.max_tool_calling_iterations"
    )
    passed = {
        "model_name", "dataset", "reward_funcs", "processing_class", "num_generations", "max_inflight_tasks",
        "vllm_server_url", "max_tokens", "temperature", "top_p", "top_k", "dataset_start_index",
    }  # fmt: skip
    assert not passed - set(parameters(_AsyncRolloutLoop.__init__))
    assert {"harness_session_factory", "rollout_reward_fn"} <= set(parameters(_HarnessRolloutLoop.__init__))


def test_a_failed_session_is_unscorable_and_a_bad_capture_is_fatal():
    session = source(_HarnessRolloutLoop._run_session)
    assert "CaptureContractError" in session and issubclass(CaptureContractError, ValueError)
    assert "return self._EMPTY_ROLLOUT, None" in session, (
        "a session that raises is no longer one unscorable rollout: services/trainer/session.py relies on it"
    )
    assert {"env_reward", "tool_call_count", "timed_out"} <= set(inspect.signature(HarnessRolloutOutcome).parameters)


def test_the_worker_s_queue_is_handed_to_the_child_and_takes_what_a_group_was_scored_to():
    assert "self.rollout_buffer," in source(AsyncRolloutWorker.start)
    loop = source(_AsyncRolloutLoop._score_loop)
    assert "sample.enqueued_at = time.time()" in loop and "self.rollout_buffer.put_nowait(sample)" in loop


def test_the_accounts_of_a_step_are_where_ours_are_added():
    accounts = source(AsyncGRPOTrainer._log_step_metrics)
    names = (
        "_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted", "_step_samples", "_step_forward_s",
        "_current_train_step_time", "_rollout_dataset.wait_s", "_trained_groups",
    )  # fmt: skip
    for name in names:
        assert f"self.{name}" in accounts, f"TRL logs a step without {name}: services/trainer/step_metrics.py feeds it"


def test_transformers_takes_a_step_when_the_one_before_has_ended():
    epoch = source(transformers.Trainer._run_epoch)
    assert "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)" in epoch
    assert epoch.index("self.get_batch_samples(") < epoch.index("self.training_step(")
    assert epoch.index("self.callback_handler.on_step_end(") < epoch.index("self._maybe_log_save_evaluate(")


def test_rows_are_packed_by_position_ids_alone():
    loss = source(AsyncGRPOTrainer.compute_loss)
    call = loss[loss.index("outputs = model(") : loss.index("log_probs, entropy = outputs.log_probs")]
    assert "position_ids=position_ids" in call and "fused_lm_head=True" in call
    assert "attention_mask" not in call and "seq_idx" not in call, (
        "TRL's forward pass now passes more than position_ids: services/trainer/packing.py may do its work twice"
    )
    assert 'kwargs["use_cache"] = False' in source(trl_utils.add_fused_lm_head)


@pytest.mark.parametrize("name", ["create_model_from_path", "get_peak_flops_per_device"])
def test_names_that_are_bound_in_trls_trainer_module(name):
    assert getattr(async_grpo_trainer, name) is not None
    assert f"{name}(" in source(AsyncGRPOTrainer.__init__), (
        f"AsyncGRPOTrainer.__init__ no longer calls {name}: services/trainer/{{cpu,attention}}.py replace it"
    )


def test_the_attention_kernel_is_still_hard_coded():
    assert 'attn_implementation="kernels-community/flash-attn3"' in source(AsyncGRPOTrainer.__init__), (
        "AsyncGRPOTrainer chooses the attention in another way: services/trainer/attention.py may be needless now"
    )


def test_the_fused_head_calls_the_kernel_that_the_cpu_stand_in_copies():
    assert "_ChunkedLogProbFunction.apply(" in source(trl_utils.add_fused_lm_head)
    found = [name for name in parameters(ChunkedLogProbFunction.forward) if name != "ctx"]
    assert found == [
        "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
        "outputs",
    ], "ChunkedLogProbFunction.forward changed: services/trainer/cpu.py has its signature"  # fmt: skip


def test_lfm2s_layers_are_where_the_packing_hooks_look():
    layer = modeling_lfm2.Lfm2DecoderLayer
    assert issubclass(layer, GradientCheckpointingLayer)
    assert parameters(layer.forward)[:1] == ["hidden_states"] and "position_ids" in parameters(layer.forward)
    config = Lfm2Config(
        hidden_size=64, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2, vocab_size=8,
        layer_types=["conv", "full_attention"],
    )  # fmt: skip
    conv, attention = layer(config, 0), layer(config, 1)
    assert not conv.is_attention_layer and attention.is_attention_layer
    assert {name for name, _ in conv.conv.named_children()} == {"conv", "in_proj", "out_proj"}
    assert conv.conv.conv_kernel_size == config.conv_L_cache
    assert "position_ids=position_ids" in source(modeling_lfm2.Lfm2Model.forward), (
        "Lfm2Model no longer passes position_ids to its layers: services/trainer/packing.py reads them there"
    )
    assert "position_ids=position_ids" in source(layer.forward), "packed_sdpa gets no position_ids any more"
    assert 'seq_idx=kwargs.get("seq_idx")' in source(layer.forward), (
        "Lfm2DecoderLayer no longer hands seq_idx to its convolution: services/trainer/packing.py marks the samples so"
    )
    assert "seq_idx=seq_idx" in source(type(conv.conv).forward)


def test_masks_come_from_a_registry():
    assert callable(AttentionMaskInterface.register)


def test_lfm25s_response_template_ships_with_trl():
    assert chat_template_utils.lfm2_2_5_template["start_anchor"] == "<|im_start|>assistant\n"


def test_the_push_callback_is_gone():
    """Why checkpoints are pushed by a callback of ours. Should it come back, ours may be needless."""
    assert not hasattr(transformers, "PushToHubCallback")


def test_config_fields_that_we_set():
    known = set(inspect.signature(AsyncGRPOConfig).parameters)
    used = {
        "dtype", "num_generations", "max_completion_length", "temperature", "max_inflight_tasks",
        "max_staleness", "max_tool_calling_iterations", "vllm_server_base_url", "heartbeat_stale_after_s",
        "weight_sync_steps", "weight_sync_timeout", "model_init_kwargs",
    }  # fmt: skip
    assert not used - known, f"AsyncGRPOConfig no longer has {sorted(used - known)}"
    assert AsyncGRPOConfig("x", report_to="none", use_cpu=True, bf16=False).dtype == "float32"
