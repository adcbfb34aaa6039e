"""The GPU kernels of the merge, compiled for an H100 or H200 without one: what the compiler makes of them.

Their results are checked on a GPU (tests/gpu). Here it is what decides their speed, and what a release of Triton may
lose without a wrong result: 16 bytes a load, and one fused operation an element and rank.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from services.weight_sync import grouped  # noqa: E402

TABLES = {"table": "*i64", "matrix_of_tile": "*i32", "u": "*i64", "v": "*i64", "sums": "*i64"}
MERGING = {**TABLES, "kept": "*fp64", "scale": "fp32"}
COMMON = {"FIELDS": 14, "BITS": 16, "ROWS": grouped.ROWS, "COLUMNS": grouped.COLUMNS}
MERGE = {**COMMON, "BFLOAT": True, "EXACT_PRODUCTS": True, "FOUR": True, "RANK": 32, "DITHER": False}


def instructions(kernel: Any, arguments: dict[str, str], constants: dict[str, Any]) -> Counter[str]:
    """PTX instructions of the kernel on sm_90, with the options that ``Group`` launches it with."""
    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": grouped.WARPS, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]+\.[a-z0-9_.:]+)", ptx, re.MULTILINE))


def test_the_merge_reads_and_writes_16_bytes_at_a_time_and_fuses_multiplication_and_addition():
    found = instructions(grouped._merge, MERGING, {**MERGE, "ALIGNED": True, "WRITE": True})
    vectors = grouped.COLUMNS // (32 * grouped.WARPS) // 8
    elements = 8 * vectors * grouped.ROWS  # of a thread
    assert found["ld.global.v4.b32"] >= vectors * (4 + grouped.ROWS), "A or W0 is read element by element"
    assert found["ld.global.b16"] == 0, "B is read element by element"
    assert found["st.global.v4.b32"] >= vectors * grouped.ROWS, "the result is written element by element"
    assert found["fma.rn.f32"] == 4 * elements, "four ranks a turn of the loop"
    # What is left in float32: scale and base, which must round each for itself.
    assert found["mul.rn.f32"] == found["add.rn.f32"] == elements


def test_products_that_float32_cannot_hold_are_not_fused():
    constants = {**MERGE, "BITS": 32, "BFLOAT": False, "EXACT_PRODUCTS": False, "FOUR": False, "WRITE": True}
    constants["ALIGNED"] = True
    assert instructions(grouped._merge, MERGING, constants)["fma.rn.f32"] == 0


def test_stochastic_rounding_keeps_the_loads_wide_and_costs_two_multiplications_an_element():
    constants = {**MERGE, "ALIGNED": True, "WRITE": True, "DITHER": True}
    found = instructions(grouped._merge, MERGING, constants)
    elements = grouped.COLUMNS * grouped.ROWS // (32 * grouped.WARPS)
    assert found["ld.global.b16"] == 0 and found["st.global.v4.b32"] >= elements // 8
    assert found["fma.rn.f32"] == 4 * elements
    assert found["mul.lo.s32"] == 2 * elements


def test_checksums_read_16_bytes_at_a_time():
    found = instructions(grouped._checksum, TABLES, {**COMMON, "ALIGNED": True, "OF": 0})
    assert found["ld.global.v4.b32"] >= grouped.ROWS


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("rank", [1, 7])
def test_matrices_at_odd_addresses_and_of_odd_ranks_are_merged_too(write, rank):
    constants = {**MERGE, "ALIGNED": False, "FOUR": False, "RANK": rank, "WRITE": write}
    assert instructions(grouped._merge, MERGING, constants)


def test_the_kernels_compute_the_bits_and_the_sums_of_the_loops_that_define_them():
    """In Triton's interpreter, without what a compiler adds; in a process of its own, as it replaces the compiler."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr
