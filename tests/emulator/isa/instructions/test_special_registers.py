"""Special registers whose values follow from the launch."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

BODY = """
.shared .b8 used[5000];
mov.u32 %r1, %total_smem_size; mov.u32 %r2, %aggr_smem_size; mov.u32 %r3, %dynamic_smem_size;
mov.u32 %r4, %reserved_smem_offset_cap; mov.pred %p1, %is_explicit_cluster; selp.u32 %r5, 1, 0, %p1;
mov.u64 %d2, %current_graph_exec; cvt.u32.u64 %r6, %d2; mov.u32 %r9, used;
mov.u32 %r7, %ctaid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r7, 32, %d0;
st.global.v4.u32 [%d0], {%r1, %r2, %r3, %r4}; st.global.v2.u32 [%d0+16], {%r5, %r6}; ret;
"""


@pytest.mark.parametrize("cluster", [1, 2])
def test_shared_memory_and_cluster(cluster: int) -> None:
    """Sizes are multiples of 128 bytes; 1,024 bytes are the system's; no launch here is of a device graph."""
    out = aligned(np.zeros((2, 8), np.uint32))
    launch(module(BODY, parameters=1), out, grid=2, cluster=cluster, dynamic_smem=100,
           hardware="sizes of shared memory are rounded differently")  # fmt: skip
    used = -(-(5 * 1024 + 100) // 128) * 128  # dynamic memory begins at a multiple of 1,024 bytes
    assert out[:, :6].tolist() == [[used, used + 1024, 100, 1024, int(cluster > 1), 0]] * 2
