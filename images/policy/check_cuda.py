"""What a first kernel needs on a GPU host, tried without a GPU: Triton's compiler, ptxas, gcc, Python's headers.

A missing part would end vLLM, or the first weight sync, on a rented GPU. Only the driver's library is not needed here.
"""

import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.runtime import build

H200 = GPUTarget("cuda", 90, 32)


@triton.jit
def scale(values, factor, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + index, tl.load(values + index, index < count) * factor, index < count)


source = ASTSource(
    scale, signature={"values": "*bf16", "factor": "fp32", "count": "i32", "BLOCK": "constexpr"}, constexprs={(3,): 256}
)
cubin = triton.compile(source, target=H200).asm["cubin"]

launcher = Path(driver.__file__).with_name("driver.c")
with tempfile.TemporaryDirectory() as folder:
    build._build("launcher", str(launcher), folder, [], driver.include_dirs, [], [])
print(f"Triton {triton.__version__}: a kernel for sm_90 ({len(cubin)} bytes) and its launcher compile")
