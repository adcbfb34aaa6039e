"""The CPU stand-ins give the numbers of the parts that they stand for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from trl.experimental.async_grpo import async_grpo_trainer
from trl.trainer import utils as trl_utils

from services.common.errors import NotReadyError
from services.trainer import cpu
from tests.contract.trainer.tiny_models import use_stand_ins

TOKENS, HIDDEN, VOCAB = 11, 16, 96


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    tensors = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *tensors, torch.randint(0, VOCAB, (TOKENS,))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probs_entropy_and_gradients_equal_the_dense_formula(monkeypatch, softcap):
    monkeypatch.setattr(cpu, "TILE_BYTES", 4 * VOCAB * 3)  # three tokens a tile: four tiles
    temperature, scale = 0.7, 1.3
    hidden, weight, bias, targets = problem()
    found = cpu.ChunkedLogProb.apply(hidden, weight, bias, targets, temperature, 64, softcap, scale)

    hidden64, weight64, bias64, _ = problem(torch.float64)
    logits = (hidden64 @ weight64.T + bias64) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    expected = (
        log_p[torch.arange(TOKENS), targets],
        -(p * log_p).sum(-1),
        p.square().sum(-1).log(),
        logits.mean(-1),
        logits.argmax(-1) == targets,
    )
    for ours, dense in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), dense.double(), atol=1e-5, rtol=1e-5)

    weights = torch.randn(2, TOKENS)
    gradients = torch.autograd.grad((found[0] * weights[0] + found[1] * weights[1]).sum(), [hidden, weight, bias])
    dense = torch.autograd.grad(
        (expected[0] * weights[0] + expected[1] * weights[1]).sum(), [hidden64, weight64, bias64]
    )
    for ours, theirs in zip(gradients, dense, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)


def test_outputs_that_are_not_asked_for_are_none():
    hidden, weight, _, targets = problem()
    found = cpu.ChunkedLogProb.apply(hidden, weight, None, targets, 1.0, 64, None, 1.0, ("entropy",))
    assert [part is not None for part in found] == [True, True, False, False, False]


def test_no_tokens_give_empty_outputs():
    hidden, weight, _, targets = problem()
    log_probs, entropy, *_ = cpu.ChunkedLogProb.apply(hidden[:0], weight, None, targets[:0], 1.0, 64)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()


def test_the_logits_matrix_is_never_kept(monkeypatch):
    monkeypatch.setattr(cpu, "TILE_BYTES", 4 * VOCAB)
    hidden, weight, _, targets = problem()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, *_ = cpu.ChunkedLogProb.apply(hidden, weight, None, targets, 1.0, 64)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    inputs = hidden.nbytes + weight.nbytes + targets.nbytes
    assert log_probs.requires_grad
    assert kept
    assert sum(storages.values()) < inputs + 4 * TOKENS * VOCAB / 2


KERNEL_ON_CPU = """
import sys, torch
from trl.kernels import ChunkedLogProbFunction
hidden, weight, bias, targets, grads = torch.load(sys.argv[1])
for x in (hidden, weight, bias): x.requires_grad_()
out = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 0.7, 40, 3.0, 1.3)
(out[0] * grads[0] + out[1] * grads[1]).sum().backward()
torch.save([x.detach() for x in out] + [hidden.grad, weight.grad, bias.grad], sys.argv[2])
"""


def test_the_stand_in_equals_trls_own_kernel_in_tritons_interpreter(tmp_path):
    hidden, weight, bias, targets = problem()
    grads = torch.randn(2, TOKENS)
    torch.save([hidden.detach(), weight.detach(), bias.detach(), targets, grads], tmp_path / "in.pt")
    subprocess.run(
        [sys.executable, "-c", KERNEL_ON_CPU, tmp_path / "in.pt", tmp_path / "out.pt"],
        check=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    kernel = torch.load(tmp_path / "out.pt")
    found = cpu.ChunkedLogProb.apply(hidden, weight, bias, targets, 0.7, 40, 3.0, 1.3)
    (found[0] * grads[0] + found[1] * grads[1]).sum().backward()
    for ours, theirs in zip([*found, hidden.grad, weight.grad, bias.grad], kernel, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here: the stand-ins are not used")
def test_install_binds_the_names_that_trl_looks_up():
    use_stand_ins()
    assert trl_utils._ChunkedLogProbFunction is cpu.ChunkedLogProb
    assert async_grpo_trainer.get_peak_flops_per_device(None, "float32") is None


def test_install_refuses_a_machine_with_cuda(monkeypatch):
    before = trl_utils._ChunkedLogProbFunction
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(NotReadyError, match="NVIDIA H200"):
        cpu.install()
    assert trl_utils._ChunkedLogProbFunction is before
