"""Merge and checksum of all targets in one launch each: the bits of ``merge.reference`` and ``checksum.checksum``.

Triton ships with PyTorch's CUDA builds. One launch instead of one a target, because 150 launches from Python take
longer than the work; a table on the GPU says where each matrix lies. The sums of a merge stay in registers, so W0 is
read once and the result written once; what is left is one float32 operation an element and rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.weight_sync.checksum import COLUMN_SEED, ROW_SEED, position_weights
from services.weight_sync.dither import FACTORS, Dither
from services.weight_sync.merge import require_ditherable

ROWS = 8
"""Rows a program merges: each number of A that it reads serves all of them. Unrolled in ``_merge``."""
COLUMNS = 1024
WARPS = 4
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_FIELDS = 14
"""Numbers a matrix has in the table: see ``Group``."""


@dataclass(frozen=True)
class Matrix:
    """One target, or the slice of one that a rank holds. All on one GPU and of one type; a row's elements are
    neighbours.

    Args:
        w0: (out, in), the base. out: (out, in), what is served; None where nothing is to be written.
        a: (r, in). b: (out, r). Both None for a matrix of which only checksums are asked.
        first_row, first_column: where it begins in the whole matrix.
        key: of the target's ``Dither``, to round stochastically; None: to the nearest.
    """

    w0: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    out: torch.Tensor | None = None
    first_row: int = 0
    first_column: int = 0
    key: int | None = None

    @classmethod
    def of(
        cls, w0: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, dither: Dither | None
    ) -> Matrix:
        """One that is merged with this rounding; what ``dither`` says of its place holds."""
        if dither is None:
            return cls(w0, a, b, out)
        return cls(w0, a, b, out, dither.first_row, dither.first_column, dither.key)


class Group:
    """Matrices that are always merged together. Keeps addresses: their memory must stay where it is.

    Raises: ValueError: different ranks, types or roundings, or a matrix whose rows are not contiguous.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        first = matrices[0].w0
        self._device, self._dtype = first.device, first.dtype
        self._matrices = tuple(matrices)  # keeps the memory
        ranks = {0 if matrix.a is None else matrix.a.shape[0] for matrix in matrices}
        for matrix in matrices:
            tensors = [t for t in (matrix.w0, matrix.a, matrix.b, matrix.out) if t is not None]
            if any((t.device, t.dtype) != (self._device, self._dtype) or t.stride(1) != 1 for t in tensors):
                raise ValueError("matrices of a group are on one device, of one type, and have contiguous rows")
        if len(ranks) != 1:
            raise ValueError(f"matrices of a group have one rank; found {sorted(ranks)}")
        self._rank = ranks.pop()
        roundings = {matrix.key is not None for matrix in matrices}
        if len(roundings) != 1:
            raise ValueError("matrices of a group are all rounded to the nearest, or all stochastically")
        self._dither = roundings.pop() and self._dtype != torch.float32
        if self._dither:
            require_ditherable(self._dtype)
        rows = [_fields(matrix) for matrix in matrices]
        # Four addresses in bytes; columns and strides in elements, of which 16 are a multiple of 16 bytes too.
        self._aligned = all(value % 16 == 0 for row in rows for value in (*row[:4], *row[5:9]))
        self._four = (
            self._dtype == torch.bfloat16
            and self._rank % 4 == 0
            and all(row[3] % 8 == 0 and row[9] % 4 == 0 for row in rows)  # address and stride of B
        )
        tiles = [triton.cdiv(m.w0.shape[0], ROWS) * triton.cdiv(m.w0.shape[1], COLUMNS) for m in matrices]
        first_tile = 0
        for row, count in zip(rows, tiles, strict=True):
            row.append(first_tile)
            first_tile += count
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._device)
        counts = torch.tensor(tiles)
        self._matrix_of_tile = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(counts).to(self._device)
        span = max(max(m.first_row + m.w0.shape[0], m.first_column + m.w0.shape[1]) for m in matrices)
        self._u = position_weights(0, span, ROW_SEED, self._device)
        self._v = position_weights(0, span, COLUMN_SEED, self._device)

    def merge(self, scale: float) -> None:
        """Write ``W0 + scale * B @ A`` to every ``out``, on the current stream."""
        self._launch_merge(scale, self._u, self._u, write=True)

    def merged_sums(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what ``merge`` would write, for each matrix; nothing is written.

        Returns: checksums, int64 of shape (matrices,), and ``merge.kept_sums``, float64 of shape (matrices, 2).
        """
        sums = torch.zeros(len(self._matrices), dtype=torch.int64, device=self._device)
        kept = torch.zeros((len(self._matrices), 2), dtype=torch.float64, device=self._device)
        self._launch_merge(scale, sums, kept, write=False)
        return sums, kept

    def checksums(self, of_base: bool = False) -> torch.Tensor:
        """int64 of shape (matrices,): checksum of every ``out`` (or W0) as it lies in memory."""
        sums = torch.zeros(len(self._matrices), dtype=torch.int64, device=self._device)
        with self._on_device():
            _checksum[(len(self._matrix_of_tile),)](
                self._table, self._matrix_of_tile, self._u, self._v, sums,
                FIELDS=_FIELDS, ALIGNED=self._aligned, OF=1 if of_base else 0, BITS=8 * self._dtype.itemsize,
                ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
        return sums

    def _launch_merge(self, scale: float, sums: torch.Tensor, kept: torch.Tensor, write: bool) -> None:
        with self._on_device():
            _merge[(len(self._matrix_of_tile),)](
                self._table, self._matrix_of_tile, self._u, self._v, sums, kept, float(scale),
                FIELDS=_FIELDS, ALIGNED=self._aligned, BITS=8 * self._dtype.itemsize,
                BFLOAT=self._dtype == torch.bfloat16,
                # A product of two numbers of 11 bits at most is exact in float32 (``merge.sendable`` keeps it from
                # underflowing), so a fused multiply-add rounds as the reference's two operations do.
                EXACT_PRODUCTS=self._dtype in (torch.bfloat16, torch.float16),
                FOUR=self._four, RANK=self._rank, ROWS=ROWS, COLUMNS=COLUMNS, WRITE=write, DITHER=self._dither,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """The kernels' device as the current one; nothing for a CPU, on which Triton's interpreter runs them."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def checksum_of(matrix: torch.Tensor, first_row: int, first_column: int) -> int:
    """``checksum.checksum`` of one matrix on a GPU with contiguous rows."""
    found = Group([Matrix(matrix, first_row=first_row, first_column=first_column)]).checksums(of_base=True)
    return int(found[0]) % (1 << 64)


def _fields(matrix: Matrix) -> list[int]:
    """A row of the table, in the order that the kernels read; ``first tile`` follows."""
    out, a, b = matrix.out, matrix.a, matrix.b
    return [
        0 if out is None else out.data_ptr(), matrix.w0.data_ptr(),
        0 if a is None else a.data_ptr(), 0 if b is None else b.data_ptr(),
        matrix.w0.shape[0], matrix.w0.shape[1],
        0 if out is None else out.stride(0), matrix.w0.stride(0),
        0 if a is None else a.stride(0), 0 if b is None else b.stride(0),
        matrix.first_row, matrix.first_column, matrix.key or 0,
    ]  # fmt: skip


@triton.jit
def _elements(address, BITS: tl.constexpr, BFLOAT: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer to the matrices' type. Aligned, 16 bytes are one load; else each element is one."""
    if BFLOAT:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif BITS == 16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _accumulate(total, left, right, EXACT_PRODUCTS: tl.constexpr):
    if EXACT_PRODUCTS:
        return tl.fma(left, right, total)
    else:
        return total + left * right  # two roundings: the launch forbids contraction


@triton.jit
def _b(pointer, inside):
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _bfloat(packed, POSITION: tl.constexpr):
    """One of the four bf16 numbers in 64 bits: a bf16 is the upper half of a float32."""
    return ((packed >> (16 * POSITION)).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _four(total, pointer, inside, right0, right1, right2, right3):
    """Four ranks, in their order, of bf16 numbers that lie side by side in B."""
    packed = tl.load(pointer.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
    total = tl.fma(_bfloat(packed, 0), right0, total)
    total = tl.fma(_bfloat(packed, 1), right1, total)
    total = tl.fma(_bfloat(packed, 2), right2, total)
    return tl.fma(_bfloat(packed, 3), right3, total)


@triton.jit
def _merge(
    table, matrix_of_tile, u, v, sums, kept, scale,
    FIELDS: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, BFLOAT: tl.constexpr, EXACT_PRODUCTS: tl.constexpr,
    FOUR: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WRITE: tl.constexpr,
    DITHER: tl.constexpr,
):  # fmt: skip
    """Merge ``ROWS`` rows by ``COLUMNS`` columns of one matrix; write them, or add up their checksum in ``sums`` and
    how much of the change they keep in ``kept``.

    The sums are 1-D on purpose: each thread then holds neighbours of a row and reads A as one vector. For a 2-D tile
    the compiler chose layouts, and others in each release, that took two to four times as long.
    """
    matrix = tl.load(matrix_of_tile + tl.program_id(0)).to(tl.int64)
    entry = table + matrix * FIELDS
    out = _elements(tl.load(entry), BITS, BFLOAT, ALIGNED)
    w0 = _elements(tl.load(entry + 1), BITS, BFLOAT, ALIGNED)
    a = _elements(tl.load(entry + 2), BITS, BFLOAT, ALIGNED)
    b = _elements(tl.load(entry + 3), BITS, BFLOAT, ALIGNED)
    rows = tl.load(entry + 4)
    columns = tl.load(entry + 5)
    out_stride = tl.load(entry + 6)
    w0_stride = tl.load(entry + 7)
    a_stride = tl.load(entry + 8)
    b_stride = tl.load(entry + 9)
    if ALIGNED:
        out_stride, w0_stride = tl.multiple_of(out_stride, 16), tl.multiple_of(w0_stride, 16)
        a_stride, columns = tl.multiple_of(a_stride, 16), tl.multiple_of(columns, 16)
    tile = tl.program_id(0) - tl.load(entry + 13)
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across) * ROWS
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    left = b + row * b_stride
    s0 = tl.zeros((COLUMNS,), dtype=tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    s4 = s0
    s5 = s0
    s6 = s0
    s7 = s0
    # Four numbers of B as one load where that is possible: B, a number for each row and rank, else takes as many
    # loads as there are sums.
    for k in range(0, RANK if FOUR else 0, 4):
        right0 = tl.load(a + k * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        right1 = tl.load(a + (k + 1) * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        right2 = tl.load(a + (k + 2) * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        right3 = tl.load(a + (k + 3) * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        s0 = _four(s0, left + k, row < rows, right0, right1, right2, right3)
        s1 = _four(s1, left + b_stride + k, row + 1 < rows, right0, right1, right2, right3)
        s2 = _four(s2, left + 2 * b_stride + k, row + 2 < rows, right0, right1, right2, right3)
        s3 = _four(s3, left + 3 * b_stride + k, row + 3 < rows, right0, right1, right2, right3)
        s4 = _four(s4, left + 4 * b_stride + k, row + 4 < rows, right0, right1, right2, right3)
        s5 = _four(s5, left + 5 * b_stride + k, row + 5 < rows, right0, right1, right2, right3)
        s6 = _four(s6, left + 6 * b_stride + k, row + 6 < rows, right0, right1, right2, right3)
        s7 = _four(s7, left + 7 * b_stride + k, row + 7 < rows, right0, right1, right2, right3)
    for k in range(0 if FOUR else RANK):
        right = tl.load(a + k * a_stride + column, mask=inside, other=0.0).to(tl.float32)
        s0 = _accumulate(s0, _b(left + k, row < rows), right, EXACT_PRODUCTS)
        s1 = _accumulate(s1, _b(left + b_stride + k, row + 1 < rows), right, EXACT_PRODUCTS)
        s2 = _accumulate(s2, _b(left + 2 * b_stride + k, row + 2 < rows), right, EXACT_PRODUCTS)
        s3 = _accumulate(s3, _b(left + 3 * b_stride + k, row + 3 < rows), right, EXACT_PRODUCTS)
        s4 = _accumulate(s4, _b(left + 4 * b_stride + k, row + 4 < rows), right, EXACT_PRODUCTS)
        s5 = _accumulate(s5, _b(left + 5 * b_stride + k, row + 5 < rows), right, EXACT_PRODUCTS)
        s6 = _accumulate(s6, _b(left + 6 * b_stride + k, row + 6 < rows), right, EXACT_PRODUCTS)
        s7 = _accumulate(s7, _b(left + 7 * b_stride + k, row + 7 < rows), right, EXACT_PRODUCTS)
    totals = (s0, s1, s2, s3, s4, s5, s6, s7)
    first_row = tl.load(entry + 10)
    first_column = tl.load(entry + 11)
    if DITHER:
        key = tl.load(entry + 12)
        column_hash = (tl.load(v + first_column + column, mask=inside, other=0) >> 32).to(tl.uint32)
    weighted = tl.zeros((COLUMNS,), dtype=tl.int64)
    along = tl.zeros((COLUMNS,), dtype=tl.float32)
    whole = along
    for i in tl.static_range(ROWS):
        total = totals[i] * scale  # 0 outside the matrix, where A or B is
        here = inside & (row + i < rows)
        base = tl.load(w0 + (row + i) * w0_stride + column, mask=here, other=0.0).to(tl.float32)
        exact = tl.where(total == 0, base, base + total)
        if DITHER:
            row_hash = (tl.load(u + first_row + row + i, mask=row + i < rows, other=0) >> 32) ^ key
            exact = _dithered(exact, row_hash.to(tl.uint32) ^ column_hash)
        result = exact.to(w0.dtype.element_ty)
        if WRITE:
            tl.store(out + (row + i) * out_stride + column, result, mask=here)
        else:
            bits = _bits(result, BITS)
            row_weight = tl.load(u + first_row + row + i, mask=row + i < rows, other=0)
            weighted += tl.where(here, bits, 0) * row_weight
            along += (result.to(tl.float32) - base) * total
            whole += total * total
    if not WRITE:
        tl.atomic_add(kept + 2 * matrix, tl.sum(along).to(tl.float64), sem="relaxed")
        tl.atomic_add(kept + 2 * matrix + 1, tl.sum(whole).to(tl.float64), sem="relaxed")
        column_weight = tl.load(v + first_column + column, mask=inside, other=0)
        tl.atomic_add(sums + matrix, tl.sum(weighted * column_weight), sem="relaxed")


@triton.jit
def _dithered(exact, hashed):
    """``dither.to_bfloat16`` of float32 numbers, as float32. Args: hashed: uint32, of target, row and column."""
    hashed ^= hashed >> 16
    hashed *= FIRST_FACTOR
    hashed ^= hashed >> 15
    hashed *= SECOND_FACTOR
    bits = exact.to(tl.int32, bitcast=True) + (hashed >> 16).to(tl.int32)
    return tl.where(exact == exact, ((bits >> 16) << 16).to(tl.float32, bitcast=True), exact)


@triton.jit
def _bits(value, BITS: tl.constexpr):
    if BITS == 16:
        return value.to(tl.int16, bitcast=True).to(tl.int64)
    else:
        return value.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _checksum(
    table, matrix_of_tile, u, v, sums,
    FIELDS: tl.constexpr, ALIGNED: tl.constexpr, OF: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the checksum of ``ROWS`` rows by ``COLUMNS`` columns to ``sums``: sum of bits * u(row) * v(column)."""
    matrix = tl.load(matrix_of_tile + tl.program_id(0)).to(tl.int64)
    entry = table + matrix * FIELDS
    address = tl.load(entry + OF)
    weight = address.to(tl.pointer_type(tl.int16 if BITS == 16 else tl.int32))
    rows = tl.load(entry + 4)
    columns = tl.load(entry + 5)
    stride = tl.load(entry + 6 + OF)
    if ALIGNED:
        weight, stride, columns = tl.multiple_of(weight, 16), tl.multiple_of(stride, 16), tl.multiple_of(columns, 16)
    tile = tl.program_id(0) - tl.load(entry + 13)
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across) * ROWS
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    weighted = tl.zeros((COLUMNS,), dtype=tl.int64)
    for i in tl.static_range(ROWS):
        bits = tl.load(weight + (row + i) * stride + column, mask=inside & (row + i < rows), other=0).to(tl.int64)
        weighted += bits * tl.load(u + tl.load(entry + 10) + row + i, mask=row + i < rows, other=0)
    column_weight = tl.load(v + tl.load(entry + 11) + column, mask=inside, other=0)
    tl.atomic_add(sums + matrix, tl.sum(weighted * column_weight), sem="relaxed")
