"""Launches and tensor maps out of CuTe DSL's own host code, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import linecache
import math
import struct
import sys
import threading
from types import FrameType

import cuda.bindings.driver as cuda
import cuda.bindings.runtime as runtime
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap, decode
from cute_kernels.emulator.programs import host
from tests.emulator import host_kernels as kernels


def pointer(address: int, dtype: type = Float32) -> object:
    return make_ptr(dtype, address, AddressSpace.gmem, assumed_align=16)


def fill_arguments(address: int, count: int, value: float) -> tuple:
    return pointer(address), Int32(count), Float32(value), cuda.CUstream(0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compile(host function, arguments, recorded=True, options="")"""
    directory = tmp_path_factory.mktemp("dump")

    def compile_function(function, arguments, recorded=True, options="--keep-ptx"):
        options = f"--gpu-arch=sm_100a --dump-dir={directory} {options}"
        if not recorded:
            return cute.compile(function, *arguments, options=options)
        with host.recording_runtime():
            return cute.compile(function, *arguments, options=options)

    return compile_function


@pytest.fixture(scope="module")
def fill(compiled):
    return compiled(kernels.launch_fill, fill_arguments(16, 1, 0.0))


def test_launch_shape_and_parameter_bytes(fill):
    launch = host.record(fill, *fill_arguments(0x7F0012345670, 6, 2.5))
    assert launch.kernel_name in fill.__ptx__
    assert (launch.grid, launch.block, launch.cluster) == ((12, 3, 5), (64, 2, 1), (2, 1, 1))
    assert launch.dynamic_smem == 4096
    assert launch.params == (struct.pack("<Q", 0x7F0012345670), struct.pack("<i", 6), struct.pack("<f", 2.5))


def test_arguments_are_not_frozen_by_the_first_call(fill):
    launches = [host.record(fill, *fill_arguments(4096 * n, n, n / 4)) for n in (1, 2, 3)]
    assert [launch.grid[0] for launch in launches] == [2, 4, 6]
    assert [struct.unpack("<f", launch.params[2])[0] for launch in launches] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_architectures_other_than_the_present_gpu(arch, tmp_path):
    with host.recording_runtime():
        options = f"--gpu-arch={arch} --dump-dir={tmp_path} --keep-ptx"
        function = cute.compile(kernels.launch_plain, *fill_arguments(16, 1, 0.0), options=options)
    assert f".target {arch}" in function.__ptx__
    assert host.record(function, *fill_arguments(16, 7, 1.0)).grid == (7, 1, 1)


def test_defaults(compiled):
    launch = host.record(compiled(kernels.launch_plain, fill_arguments(16, 1, 0)), *fill_arguments(16, 7, 1))
    assert (launch.grid, launch.block, launch.cluster, launch.dynamic_smem) == ((7, 1, 1), (32, 1, 1), (1, 1, 1), 0)


def test_capture_collects_every_launch(compiled):
    function = compiled(kernels.launch_twice, fill_arguments(16, 1, 0))
    with host.capture() as launches:
        function(*fill_arguments(16, 7, 1))
        with host.capture() as inner:
            function(*fill_arguments(32, 8, 1))
    assert [launch.grid[0] for launch in launches] == [1, 2]
    assert [struct.unpack("<i", launch.params[1])[0] for launch in launches + inner] == [7, 8, 8, 9]
    with pytest.raises(EmulatorError, match="launched 2 kernels"):
        host.record(function, *fill_arguments(16, 7, 1))


@pytest.mark.parametrize("recorded_first", [True, False])
def test_real_and_recorded_functions_live_in_one_process(compiled, recorded_first: bool):
    """The real one fails only because this machine has no driver, or launches on its GPU: it is not recorded."""
    arguments = fill_arguments(16, 1, 0)
    order = (True, False, True) if recorded_first else (False, True, False)
    functions = [(kind, compiled(kernels.launch_plain, arguments, recorded=kind)) for kind in order]
    for kind, function in functions:
        if kind:
            assert host.record(function, *arguments).grid == (1, 1, 1)
        else:
            with pytest.raises(EmulatorError, match="not compiled under host.recording_runtime"):
                host.record(function, *arguments)
            if not _has_driver():
                with pytest.raises(Exception, match="cudaErrorInsufficientDriver"):
                    function(*arguments)


def _has_driver() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_only_the_recording_thread_is_affected(compiled):
    """A function that another thread compiles meanwhile keeps the real runtime."""
    arguments, functions = fill_arguments(16, 1, 0), []

    def other() -> None:
        functions.append(compiled(kernels.launch_plain, arguments, recorded=False))

    with host.recording_runtime():
        worker = threading.Thread(target=other)
        worker.start()
        worker.join()
    with pytest.raises(EmulatorError, match="not compiled under"):
        host.record(functions[0], *arguments)


@pytest.mark.parametrize("fails", [True, False])
def test_a_launch_that_fails_is_of_its_thread_alone(fill, fails: bool) -> None:
    """Another thread's call of the function ends between the machine code of this one's and the look at its status."""
    arguments, between = fill_arguments(4096, 1, 1.0), []

    def launched(failing: bool) -> type | None:
        def take(_) -> None:
            if failing:
                raise ArithmeticError

        try:
            with host.intercept(take):
                fill(*arguments)
        except Exception as error:  # noqa: BLE001 - CuTe DSL's own, for one
            return type(error)
        return None

    def step(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code.co_name != "run_compiled_program" or "cutlass" not in frame.f_code.co_filename:
            return None if event == "call" else step
        if event == "line" and "cuda_result.value" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            other = threading.Thread(target=lambda: between.append(launched(not fails)))
            other.start()
            other.join()
        return step

    outer = sys.gettrace()
    sys.settrace(step)
    try:
        result = launched(fails)
    finally:
        sys.settrace(outer)
    expected = {True: ArithmeticError, False: None}
    assert result is expected[fails] and between == [expected[not fails]]


def test_illegal_launches_are_named(fill, compiled):
    with pytest.raises(EmulatorError, match=r"grid \(0, 3, 5\) has no CTA"):
        host.record(fill, *fill_arguments(16, 0, 0))
    function = compiled(kernels.launch_cooperative, fill_arguments(16, 1, 0))
    assert host.record(function, *fill_arguments(16, 1, 0)).cooperative
    with pytest.raises(Exception, match="outside record"):
        fill(*fill_arguments(16, 1, 0))
    without = compiled(kernels.launch_plain, fill_arguments(16, 1, 0), options="--keep-cubin")
    with pytest.raises(EmulatorError, match="without --keep-ptx"):
        host.record(without, *fill_arguments(16, 1, 0))
    assert host.record(fill, *fill_arguments(16, 1, 0)).grid == (2, 3, 5), "usable after a failure"


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (10, 3, r"launch attribute 10 \(MemSyncDomain\) with value 3$"),
        (17, 2, r"launch attribute 17 \(PortableClusterSizeMode\) with value 2$"),
        (99, 7, r"launch attribute 99 \(unknown to the emulator\) with value 7$"),
        (1, 5, None), (2, 0, None), (2, 1, None), (3, 1, None), (5, 2, None), (8, -1, None), (14, 50, None),
    ],
)  # fmt: skip
def test_launch_attributes_are_named(fill, number: int, value: int, message: str | None) -> None:
    """Hints to a scheduler or a cache are taken; of another one's 64 bytes those that the value has are shown."""
    launch = host.record(fill, *fill_arguments(16, 1, 0))
    attributes = {number: (value, *range(32671, 32686))}
    if message is None:
        host._check(launch, attributes)
        return
    with pytest.raises(UnsupportedPTX, match=message):
        host._check(launch, attributes)


def test_all_launch_attributes_of_cuda_python_have_names() -> None:
    prefix = "cudaLaunchAttribute"
    known = {number: f"{prefix}{name}" for number, (name, _) in host._ATTRIBUTES.items()}
    assert {each.value: each.name for each in runtime.cudaLaunchAttributeID}.items() <= known.items()


def test_dynamic_shared_memory_ends_at_227_kib(compiled):
    """The opt-in limit of a CTA on compute capabilities 9.0 and 10.0: 227 KiB."""
    function = compiled(kernels.launch_smem, fill_arguments(16, 1, 0))
    assert host.record(function, *fill_arguments(16, 227 * 1024, 0)).dynamic_smem == 232_448
    with pytest.raises(EmulatorError, match="232,449 bytes of dynamic shared memory: must be 232,448"):
        host.record(function, *fill_arguments(16, 227 * 1024 + 1, 0))


MAPS = [
    (cutlass.Float8E4M3FN, "u8", (128, 128), "128B", (768, 928256), (768,)),
    (cutlass.Float8E5M2, "u8", (32, 8), "32B", (592, 300), (592,)),
    (cutlass.Int8, "u8", (64, 8), "64B", (500, 300), (512,)),
    (cutlass.Uint16, "u16", (16, 8), "none", (500, 300), (512,)),
    (cutlass.Int32, "u32", (32, 8), "none", (500, 300), (512,)),
    (cutlass.Uint64, "u64", (16, 8), "128B", (500, 300), (512,)),
    (cutlass.Float16, "f16", (64, 8), "128B", (500, 300), (512,)),
    (cutlass.BFloat16, "bf16", (64, 32), "128B", (1152, 600), (1152,)),
    (cutlass.Float32, "f32", (16, 8), "64B", (500, 300), (512,)),
    (cutlass.Float64, "f64", (16, 8), "128B", (500, 300), (512,)),
    (cutlass.TFloat32, "tf32", (32, 8), "128B_atom32B", (500, 300), (512,)),
    (cutlass.TFloat32, "tf32", (8, 8), "32B", (500, 300), (512,)),
    (cutlass.BFloat16, "bf16", (64, 8, 2), "128B", (500, 300, 7), (512, 153600)),
    (cutlass.BFloat16, "bf16", (16, 8, 2, 3), "none", (500, 300, 9, 11), (512, 51200, 5120000)),
    (cutlass.Float16, "f16", (16, 8, 2, 3, 4), "32B", (500, 300, 9, 11, 5), (512, 51200, 5120000, 1 << 36)),
]


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dtype, name, box, swizzle, shape, strides", MAPS)
def test_tensor_maps_of_the_host_code(compiled, dtype, name, box, swizzle, shape, strides, store: bool):
    address = 0x7F0012345670
    arguments = kernels.tensor_map_arguments(pointer(address, dtype), shape, strides)
    launch = host.record(compiled(kernels.TensorMapHost(box, swizzle, store), arguments), *arguments)
    (descriptor,) = (param for param in launch.params if len(param) == 128)
    nbytes = dtype.width // 8
    expected = TensorMap(
        address, name, shape, tuple(nbytes * s for s in strides), box, (1,) * len(box), swizzle, l2_promotion=2
    )
    assert decode(descriptor) == expected


@pytest.mark.parametrize(("suffix", "dtype"), [
    ("16U4_ALIGN8B", "b4x16"), ("16U4_ALIGN16B", "b4x16_p64"), ("16U6_ALIGN16B", "b6x16_p32"),
])  # fmt: skip
def test_packed_types_of_the_driver(suffix: str, dtype: str) -> None:
    """By the numbers of cuda.bindings: what host code asks cuTensorMapEncodeTiled for."""
    code = int(getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{suffix}"))
    row = {"b4x16": 128, "b4x16_p64": 128, "b6x16_p32": 192}[dtype]
    lists = [(ctypes.c_uint64 * 2)(256, 8), (ctypes.c_uint64 * 1)(row), (ctypes.c_uint32 * 2)(128, 8),
             (ctypes.c_uint32 * 2)(1, 1)]  # fmt: skip
    out = (ctypes.c_uint8 * 128)()
    addresses = [ctypes.addressof(each) for each in (out, *lists)]
    host._Recorder._encode_tiled("", addresses[0], code, 2, 4096, *addresses[1:], 0, 3, 0, 0)
    found = decode(bytes(out))
    assert (found.dtype, found.extents, found.box, found.swizzle) == (dtype, (256, 8), (128, 8), "128B")


#: Rank, steps, corners, channels, pixels, the driver's numbers of type, swizzle, promotion and fill -> what its encoder
#: of CUDA 13.0 made on an H200; where a corner is one number, cuTensorMapEncodeIm2colWide.
PIXELS = {
    (3, (1, 3, 1), (-300,), (299,), 16, 64, 9, 1, 0, 0): "2521 8 f0 0 0 0 3f 1d 4 0 0 f000010 12bfed4 3f",
    (4, (1, 1, 2, 1), (-1, -2), (-3, 4), 32, 96, 6, 2, 2, 1): "4c331 10 a0 3c0 0 0 7f 9 5 3 0 1f000040 4fdfeff 5f",
    (5, (1, 2, 1, 4, 1), (-1, -2, -3), (4, -5, 6), 16, 32, 7, 3, 1, 0):
        "263c1 10 90 480 1f80 0 3f 8 7 6 2 f000608 1b6477df 1f",
    (5, (1, 2, 1, 4, 1), (-1, -2, -3), (4, -5, 6), 16, 32, 11, 0, 3, 0):
        "703c1 10 90 480 1f80 0 3f 8 7 6 2 f000608 1b6477df 1f",
    (4, (1, 2, 1, 1), -1, -3, 32, 96, 9, 3, 2, 1): "4e531 10 a0 3c0 0 0 7f 9 5 3 0 1f000008 fd00ff 5f",
    (5, (1, 2, 1, 4, 1), -1, 4, 16, 32, 7, 2, 1, 0): "243c1 10 90 480 1f80 0 3f 8 7 6 2 f000608 4001f 1f",
}  # fmt: skip


@pytest.mark.parametrize("given", PIXELS, ids=str)
@pytest.mark.parametrize("mode", [0, 1])
def test_maps_of_pixels_are_the_driver_s(given: tuple, mode: int) -> None:
    rank, steps, *corners, channels, pixels, dtype, swizzle, promotion, fill = given
    extents = {3: (64, 30, 5), 4: (128, 10, 6, 4), 5: (64, 9, 8, 7, 3)}[rank]
    element = 4 if dtype in (7, 11) else 2
    strides = [element * math.prod(extents[: d + 1]) for d in range(rank - 1)]
    lists = [(ctypes.c_uint64 * rank)(*extents), (ctypes.c_uint64 * (rank - 1))(*strides),
             (ctypes.c_uint32 * rank)(*steps)]  # fmt: skip
    wide = isinstance(corners[0], int)
    kept = [] if wide else [(ctypes.c_int * (rank - 2))(*corner) for corner in corners]
    out = (ctypes.c_uint8 * 128)()
    *tensor, stepped = map(ctypes.addressof, lists)
    number, place = ctypes.c_int, ctypes.c_void_p
    corner = number if wide else place
    kinds = [place, number, number, place, place, place, corner, corner, number, number, place, *[number] * (4 + wide)]
    symbols = host._Symbols()
    recorder = host._Recorder(symbols)
    entry = ctypes.CFUNCTYPE(number, *kinds)(symbols.addresses[f"_cuTensorMapEncodeIm2col{'Wide' * wide}"])
    assert not recorder.call(
        entry, ctypes.addressof(out), dtype, rank, 0x7F0012345680, *tensor,
        *(map(ctypes.addressof, kept) if kept else corners), channels, pixels, stepped, 0, *[mode] * wide, swizzle,
        promotion, fill,
    )  # fmt: skip
    words = ["12345680", "7f00", *PIXELS[given].split()]
    assert bytes(out)[:64] == struct.pack("<16I", *(int(word, 16) for word in words))


def test_functions_that_take_tensors(compiled):
    """Fake tensors to compile with; at run time any object with a host address serves."""
    tensor = make_fake_compact_tensor(cutlass.Float32, (64,), assumed_align=16)
    function = compiled(kernels.launch_tensor, (tensor, cuda.CUstream(0)))
    data = torch.zeros(64)
    launch = host.record(function, cutlass.cute.runtime.from_dlpack(data, assumed_align=16), cuda.CUstream(0))
    assert struct.unpack("<Q", launch.params[0][:8])[0] == data.data_ptr()


PTX = """
.visible .entry empty() { ret; }
.visible .entry bare
{ ret; }
.visible .entry many(
	.param .align 32 .b8 many_param_0[64],
	.param .u64 .ptr .global .align 16 many_param_1,
	.param .f32 many_param_2,
	.param .b64 many_param_3[3],
	.param .u8 many_param_4
)
.reqntid 128, 1, 1
{ ret; }
.visible .entry odd(.param .texref t) { ret; }
"""


def test_parameter_sizes_from_ptx():
    assert host.parameter_sizes(PTX, "many") == (64, 8, 4, 24, 1)
    assert host.parameter_sizes(PTX, "empty") == () and host.parameter_sizes(PTX, "bare") == ()
    with pytest.raises(UnsupportedPTX, match="no kernel man"):
        host.parameter_sizes(PTX, "man")
    with pytest.raises(UnsupportedPTX, match="texref"):
        host.parameter_sizes(PTX, "odd")
