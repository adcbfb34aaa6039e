"""The grouped kernels on a GPU give the bits and the sums of the loops that define them. Needs CUDA and Triton."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from services.weight_sync.checksum import checksum  # noqa: E402
from services.weight_sync.dither import Dither  # noqa: E402
from services.weight_sync.grouped import Group, Matrix  # noqa: E402
from services.weight_sync.merge import change, kept_sums, merged, reference, sendable  # noqa: E402

SHAPES = [(2048, 2048, 32), (10752, 2048, 32), (2048, 10752, 32), (130, 257, 7), (1, 1, 1)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_the_fused_merge_has_the_bits_of_the_loop_on_gpu_and_cpu(dtype, rows, columns, rank):
    w0 = random(rows, columns, dtype=dtype, seed=0)
    a, b = random(rank, columns, dtype=dtype, seed=1), random(rows, rank, dtype=dtype, seed=2)
    found = bits(merged(w0, a, b, 1.7))
    assert torch.equal(found, bits(reference(w0, a, b, 1.7)))
    assert torch.equal(found, bits(reference(w0.cpu(), a.cpu(), b.cpu(), 1.7)))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_stochastic_rounding_has_the_same_bits_on_gpu_and_cpu(rows, columns, rank, size):
    w0 = random(rows, columns, dtype=torch.bfloat16, seed=0)
    a, b = random(rank, columns, dtype=torch.bfloat16, seed=1), random(rows, rank, dtype=torch.bfloat16, seed=2) * size
    dither = Dither("model.layers.3.feed_forward.w2", first_row=11, first_column=5)
    found = bits(merged(w0, a, b, 1.7, dither=dither))
    assert torch.equal(found, bits(reference(w0, a, b, 1.7, dither)))
    assert torch.equal(found, bits(reference(w0.cpu(), a.cpu(), b.cpu(), 1.7, dither)))
    assert size or torch.equal(found, bits(w0))


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e-10, 1e4])
def test_numbers_of_any_size_are_merged_alike(size):
    w0 = random(64, 256, dtype=torch.bfloat16, seed=0) * size
    a, b = (random(*shape, dtype=torch.bfloat16, seed=1) * size for shape in ((8, 256), (64, 8)))
    expected = reference(w0.cpu(), sendable(a.cpu()), sendable(b.cpu()), 0.3)
    assert torch.equal(bits(merged(w0, a, b, 0.3)), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_of_several_shapes_is_merged_and_summed_like_each_alone(dtype):
    matrices, expected = [], []
    for seed, (rows, columns) in enumerate([(96, 2048), (130, 257), (8, 16), (2048, 512)]):
        w0 = random(rows, columns, dtype=dtype, seed=seed)
        a, b = random(8, columns, dtype=dtype, seed=seed + 10), random(rows, 8, dtype=dtype, seed=seed + 20)
        matrices.append(Matrix(w0, a, b, torch.empty_like(w0), first_row=seed, first_column=3 * seed))
        expected.append(reference(w0.cpu(), a.cpu(), b.cpu(), 0.7))
    group = Group(matrices)
    before, kept = group.merged_sums(0.7)
    before = before.tolist()
    group.merge(0.7)
    sums = [checksum(e, m.first_row, m.first_column) for e, m in zip(expected, matrices, strict=True)]
    assert [value % 2**64 for value in before] == sums
    assert [value % 2**64 for value in group.checksums().tolist()] == sums
    parts = zip(matrices, expected, strict=True)
    sums = [kept_sums(m.w0.cpu(), e, change(m.a.cpu(), m.b.cpu(), 0.7)) for m, e in parts]
    assert torch.allclose(kept.cpu(), torch.stack(sums), rtol=1e-5)
    bases = [checksum(m.w0.cpu(), m.first_row, m.first_column) for m in matrices]
    assert [value % 2**64 for value in group.checksums(of_base=True).tolist()] == bases
    for matrix, value in zip(matrices, expected, strict=True):
        assert torch.equal(bits(matrix.out), bits(value))


def test_slices_of_a_fused_weight_are_written_in_place_and_nothing_beside_them():
    w0, served = (random(96, 64, dtype=torch.bfloat16, seed=seed) for seed in (0, 3))
    before = served.clone()
    a, b = random(8, 64, dtype=torch.bfloat16, seed=1), random(32, 8, dtype=torch.bfloat16, seed=2)
    Group([Matrix(w0[32:64, 16:48], a[:, 16:48], b, served[32:64, 16:48])]).merge(2.0)
    expected = before.clone()
    expected[32:64, 16:48] = reference(w0[32:64, 16:48], a[:, 16:48], b, 2.0)
    assert torch.equal(bits(served), bits(expected))


@pytest.mark.parametrize("length", [5, 4096, 100_000])
def test_the_checksum_on_a_gpu_is_the_one_on_a_cpu(length):
    vector = random(length, dtype=torch.bfloat16, seed=0)
    assert checksum(vector) == checksum(vector.cpu())


def test_zero_b_gives_back_the_base_with_its_negative_zeros():
    w0 = random(64, 64, dtype=torch.bfloat16, seed=0)
    w0[0] = -0.0
    a, b = random(4, 64, dtype=torch.bfloat16, seed=1), torch.zeros(64, 4, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(bits(merged(w0, a, b, 2.0)), bits(w0))


def test_matrices_of_two_types_ranks_or_roundings_are_no_group():
    a, b = random(8, 16, dtype=torch.bfloat16, seed=1), random(4, 8, dtype=torch.bfloat16, seed=2)
    one = Matrix(random(4, 16, dtype=torch.bfloat16, seed=0), a, b)
    with pytest.raises(ValueError, match="one device, of one type"):
        Group([one, Matrix(one.w0.float(), a, b)])
    with pytest.raises(ValueError, match=r"one rank; found \[4, 8\]"):
        Group([one, Matrix(one.w0, a[:4], b[:, :4])])
    with pytest.raises(ValueError, match="all rounded to the nearest, or all stochastically"):
        Group([one, Matrix.of(one.w0, a, b, None, Dither("m"))])
