"""The fused merge on a GPU gives the bits of the loop that defines them. Needs a CUDA device and Triton."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from services.weight_sync.merge import merged, reference  # noqa: E402


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(2048, 2048, 32), (10752, 2048, 32), (130, 257, 7), (1, 1, 1)])
def test_the_fused_merge_has_the_bits_of_the_loop_on_gpu_and_cpu(dtype, rows, columns, rank):
    w0 = random(rows, columns, dtype=dtype, seed=0)
    a, b = random(rank, columns, dtype=dtype, seed=1), random(rows, rank, dtype=dtype, seed=2)
    found = bits(merged(w0, a, b, 1.7))
    assert torch.equal(found, bits(reference(w0, a, b, 1.7)))
    assert torch.equal(found, bits(reference(w0.cpu(), a.cpu(), b.cpu(), 1.7)))


def test_a_slice_of_a_fused_weight_is_written_in_place_and_nothing_beside_it():
    w0, served = (random(96, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 3))
    before = served.clone()
    a, b = random(8, 64, dtype=torch.bfloat16, seed=1), random(32, 8, dtype=torch.bfloat16, seed=2)
    merged(w0[32:64], a, b, 2.0, out=served[32:64])
    assert torch.equal(bits(served[32:64]), bits(reference(w0[32:64], a, b, 2.0)))
    assert torch.equal(bits(served[:32]), bits(before[:32])) and torch.equal(bits(served[64:]), bits(before[64:]))


def test_zero_b_gives_back_the_base_with_its_negative_zeros():
    w0 = random(64, 64, dtype=torch.bfloat16, seed=0)
    w0[0] = -0.0
    a, b = random(4, 64, dtype=torch.bfloat16, seed=1), torch.zeros(64, 4, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(bits(merged(w0, a, b, 2.0)), bits(w0))
