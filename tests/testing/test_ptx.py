"""`cute_kernels.testing.ptx`: what a kernel gets of each kind of argument, and what is refused."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing import ptx

COPY = """
    ld.param.u64 %d2, [p1];
    st.global.u64 [%d0], %d2;
"""
"""One thread stores the value of p1 in the first item of p0."""

ONE = "setp.ne.u32 %p0, %r1, 0; @%p0 ret;"


def parameter(value: ptx.Argument) -> int:
    """What a kernel finds in a parameter of 64 bits."""
    out = np.zeros(1, np.uint64)
    ptx.launch(ptx.module(ptx.THREAD_OUTPUT + ONE + COPY), out, value)
    return int(out[0])


def test_the_example_of_the_page():
    assert doctest.testmod(ptx).attempted >= 4 and not doctest.testmod(ptx).failed


@pytest.mark.parametrize("value", [0, 7, (1 << 64) - 1, -1, -(1 << 63)])
def test_an_int_is_64_bits(value: int):
    assert parameter(value) == value % 2**64


def test_bytes_are_passed_as_they_are_and_arrays_by_their_address():
    assert parameter(b"\1\2\3\4\5\6\7\x08") == 0x0807060504030201
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert parameter(array) == array.ctypes.data
    assert parameter(array[1:, 1:]) == array.ctypes.data + 20


def test_a_tensor_map_is_passed_by_the_address_of_its_bytes_and_what_is_reachable_is_memory():
    source, out = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    source = ptx.aligned(source, 16)
    box = TensorMap(source.ctypes.data, "u32", (64,), (), (32,), (1,))
    text = ptx.module(
        ptx.THREAD_OUTPUT + """
        ld.param.u64 %d2, [p1];
        setp.eq.u32 %p1, %r1, 0;
        @%p1 mbarrier.init.shared.b64 [dynamic+128], 1;
        @%p1 fence.mbarrier_init.release.cluster;
        bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic+128], 128;
        mov.u32 %r3, 8;
        @%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes
            [dynamic], [%d2, {%r3}], [dynamic+128];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic+128], 0;
        @!%p2 bra WAIT;
        mul.lo.u32 %r4, %r1, 4;
        mov.u32 %r5, dynamic;
        add.u32 %r4, %r4, %r5;
        ld.shared.u32 %r6, [%r4];
        st.global.u32 [%d1], %r6;
        """
    )
    ptx.launch(text, out, box, reachable=[source])
    assert out.tolist() == list(range(8, 40))
    with pytest.raises(IllegalAccess):
        ptx.launch(text, out, box)


def test_an_array_that_is_read_only_is_not_written_and_no_other_memory_is():
    text = ptx.module(ptx.THREAD_OUTPUT + "st.global.u32 [%d1], %r1;", parameters=1)
    out = np.zeros(32, np.uint32)
    ptx.launch(text, out)
    assert out.tolist() == list(range(32))
    out.flags.writeable = False
    with pytest.raises(IllegalAccess):
        ptx.launch(text, out)
    with pytest.raises(IllegalAccess):
        ptx.launch(text, np.zeros(31, np.uint32))


def test_shape_and_keywords_are_those_of_run():
    body = """mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r2, %r2, %r3, %r1;
        mul.wide.u32 %d1, %r2, 4; add.s64 %d1, %d0, %d1; mov.u32 %r4, %dynamic_smem_size; st.global.u32 [%d1], %r4;"""
    out = np.zeros(6 * 64, np.uint32)
    text = ptx.module(ptx.THREAD_OUTPUT + body, parameters=1, target="sm_90a", entry=".reqntid 64")
    launch = ptx.prepare(text, out, grid=6, block=(64, 1), cluster=2, dynamic_smem=512)
    report = launch.run(options=Options(clusters=[1]), kernel="k")
    assert out.tolist() == [0] * 128 + [512] * 128 + [0] * 128 and report.warp_instructions > 0


def test_a_module_declares_what_it_is_told_to():
    text = ptx.module(
        "add.u32 %x, %x, 1;", parameters=3, head=".global .u32 counter;", registers=".reg .u32 %x;", target="sm_80"
    )
    assert ".target sm_80\n" in text and ".global .u32 counter;\n.visible .entry k(" in text
    assert [f".param .u64 p{i}" in text for i in range(4)] == [True, True, True, False] and "%r<" not in text


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_aligned_copies(alignment: int):
    values = np.arange(30, dtype=np.int16).reshape(5, 6)[:, ::2]
    copy = ptx.aligned(values, alignment)
    assert copy.ctypes.data % alignment == 0 and copy.flags.c_contiguous and copy.dtype == values.dtype
    assert np.array_equal(copy, values) and not np.shares_memory(copy, values)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([[1, 2]], TypeError, "argument 1 is list: must be a NumPy array, a tensor map, an int or bytes"),
        ([True], TypeError, "argument 1 is bool"),
        ([1.5], TypeError, "argument 1 is float"),
        ([None], TypeError, "argument 1 is NoneType"),
        ([1 << 64], ValueError, r"argument 1 = 18446744073709551616: 64 bits are passed: must be -2\*\*63 to"),
        ([-(1 << 63) - 1], ValueError, "argument 1 = -9223372036854775809"),
        ([b"1234"], ValueError, "parameter 1 has 4 bytes, the kernel declares 8"),
        ([], ValueError, "1 parameters, the kernel takes 2"),
        ([1, 2], ValueError, "3 parameters, the kernel takes 2"),
    ],
)
def test_what_is_refused(arguments: list, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        ptx.launch(ptx.module("ret;"), np.zeros(1), *arguments)


def test_what_is_reachable_is_an_array():
    with pytest.raises(TypeError, match=r"reachable\[0\] is int: must be a NumPy array"):
        ptx.launch(ptx.module("ret;", parameters=0), reachable=[12])
    with pytest.raises(ValueError, match="grid"):
        ptx.launch(ptx.module("ret;", parameters=0), grid=(0, 1, 1))
