"""Run by ``test_grouped_kernels`` with ``TRITON_INTERPRET=1``: the real kernels on a CPU, operation by operation.

Compares their bits and sums with the functions that define them, for matrices of several shapes at several places.
Exit 1 with the difference where there is one. What a compiler makes of the kernels is tested on a GPU (tests/gpu).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1"

from services.weight_sync.checksum import checksum  # noqa: E402
from services.weight_sync.dither import Dither  # noqa: E402
from services.weight_sync.grouped import Group, Matrix  # noqa: E402
from services.weight_sync.merge import change, kept_sums, reference  # noqa: E402

SHAPES = [(16, 2048), (13, 257), (1, 1), (9, 96)]
SCALE = 1.7


_access_memory = interpreter._interpreter


class AccessMemory:
    """Triton 3.9's interpreter gives a broadcast scalar in a mask the type int8, and then refuses the mask."""

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        return _access_memory.load(pointers, mask.astype(bool), *rest)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        return _access_memory.store(pointers, value, mask.astype(bool))

    def __getattr__(self, name: str) -> Any:
        return getattr(_access_memory, name)


interpreter._interpreter = AccessMemory()


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(dtype: torch.dtype, rank: int, size: float, dithered: bool) -> None:
    matrices, expected, kept = [], [], []
    for seed, (rows, columns) in enumerate(SHAPES):
        w0 = random(rows, columns, dtype=dtype, seed=seed)
        a = random(rank, columns, dtype=dtype, seed=seed + 10)
        w0[0, 0] = -0.0
        if rows > 1:
            w0[1, :2] = torch.tensor([torch.nan, torch.inf])
        b = random(rows, rank, dtype=dtype, seed=seed + 20) * size
        dither = Dither(f"target {seed}", first_row=5 * seed, first_column=3 * seed) if dithered else None
        matrices.append(Matrix.of(w0, a, b, torch.full_like(w0, 7), dither))
        expected.append(reference(w0, a, b, SCALE, dither))
        kept.append(kept_sums(w0, expected[-1], change(a, b, SCALE)))
    group = Group(matrices)
    sums, kept_found = group.merged_sums(SCALE)
    group.merge(SCALE)
    wanted = [checksum(e, m.first_row, m.first_column) for e, m in zip(expected, matrices, strict=True)]
    assert [value % 2**64 for value in sums.tolist()] == wanted
    assert [value % 2**64 for value in group.checksums().tolist()] == wanted
    torch.testing.assert_close(kept_found, torch.stack(kept), rtol=1e-4, atol=0, equal_nan=True)
    for matrix, value in zip(matrices, expected, strict=True):
        assert torch.equal(matrix.out.view(torch.uint8), value.view(torch.uint8))


# The interpreter cuts float32 to bfloat16 where a GPU rounds: the nearest bfloat16 is compared on a GPU only.
for dtype, dithered in ((torch.float32, False), (torch.float32, True), (torch.float16, False), (torch.bfloat16, True)):
    for rank in (4, 3):
        for size in (1.0, 1e-3, 0.0):
            compare(dtype, rank, size, dithered)
print("equal")
