"""Parameters are read by addresses, too, which may have gone through registers of 32 bits, as Triton writes it."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options, TensorMap
from cute_kernels.emulator.machine.units.copies.tensor_map import encode
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

ADDRESSES = {
    "ld.param, 64 bits": "mov.b64 %d1, p1; ld.param.b32 %r1, [%d1];",
    "ld.param, 32 bits": "mov.b32 %r2, p1; ld.param.b32 %r1, [%r2];",
    "generic, 64 bits": "mov.b64 %d1, p1; cvta.param.u64 %d2, %d1; ld.b32 %r1, [%d2];",
    "generic, 32 bits": "mov.b32 %r2, p1; cvt.u64.u32 %d1, %r2; cvta.param.u64 %d2, %d1; ld.b32 %r1, [%d2];",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_loads(address: str):
    result = np.zeros(1, np.uint32)
    body = f"{ADDRESSES[address]} ld.param.b64 %d0, [p0]; st.global.b32 [%d0], %r1; ret;"
    launch(module(body, parameters=2), result, 0x1234567, block=(1, 1, 1), options=Options())
    assert result[0] == 0x1234567


def test_the_tensor_map_of_a_copy():
    """A tensor map in a parameter, whose address has 32 bits on the way."""
    source, result = aligned(np.arange(64, dtype=np.uint32)), np.zeros(1, np.uint32)
    tensor_map = TensorMap(source.ctypes.data, "u32", (64,), (), (64,), (1,))
    body = """mbarrier.init.shared.b64 [dynamic+1024], 1; fence.proxy.async;
        mov.b32 %r2, p1; cvt.u64.u32 %d1, %r2; cvta.param.u64 %d2, %d1; mov.u32 %r3, 0;
        mbarrier.arrive.expect_tx.shared.b64 _, [dynamic+1024], 256;
        cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [dynamic], [%d2, {%r3}], [dynamic+1024];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p0, [dynamic+1024], 0; @!%p0 bra WAIT;
        ld.param.b64 %d0, [p0]; ld.shared.b32 %r1, [dynamic+252]; st.global.b32 [%d0], %r1; ret;"""
    text = module(body, parameters=2).replace(".param .u64 p1", ".param .align 64 .b8 p1[128]")
    options = Options()
    launch(text, result, encode(tensor_map), block=(1, 1, 1), options=options, reachable=[source])
    assert result[0] == 63
