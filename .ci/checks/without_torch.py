"""Run where the package is installed without torch and CuTe DSL: PTX text in every core that this processor has."""

from __future__ import annotations

import platform
import sys

import numpy as np

from cute_kernels.commands.cli import main
from cute_kernels.emulator import run
from cute_kernels.emulator.core import library

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 data) {
  .reg .u64 %a; .reg .u32 %i; .reg .f32 %v;
  ld.param.u64 %a, [data];
  cvta.to.global.u64 %a, %a;
  mov.u32 %i, %tid.x;
  mad.wide.u32 %a, %i, 4, %a;
  cvt.rn.f32.u32 %v, %i;
  ex2.approx.f32 %v, %v;
  st.global.f32 [%a], %v;
  ret;
}
"""

data = np.zeros(32, dtype=np.float32)
run(PTX, grid=1, block=32, args=[data])
assert np.array_equal(data, np.exp2(np.arange(32))), data
assert main(["plan", "gemm", "--arch", "sm_90a", "--m", "512", "--n", "512", "--k", "512"]) == 0
assert not {"torch", "cutlass"} & set(sys.modules)
print(f"PTX on {platform.machine()}, core {library.variant()} of {', '.join(library.usable())}")
