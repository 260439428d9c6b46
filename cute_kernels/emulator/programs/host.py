"""Runs the host code that CuTe DSL generated, and records its kernel launches instead of executing them.

CuTe DSL compiles a host function to machine code that encodes tensor maps, computes the grid and calls the CUDA runtime
through about ten entry points named ``_cuda*``. Each compiled function has a JIT engine of its own, and an engine takes
symbols that are registered with it before those of any library. `recording_runtime` therefore gives the engines created
inside it Python stand-ins for these entry points. Nothing else in the process changes: functions compiled outside it,
before or after, keep calling the real runtime, so one process can launch on a GPU and record for the emulator.

    with host.recording_runtime():
        function = cute.compile(host_function, *arguments, options="--keep-ptx")
    launch = host.record(function, *arguments)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cute_kernels.common import interrupts
from cute_kernels.common.chips import MOST_SMEM_BYTES
from cute_kernels.dsl import host_code
from cute_kernels.dsl.allocations import Allocations
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.machine.launch.run import Report, run
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.units.copies import tensor_map
from cute_kernels.emulator.options import Options

_SUCCESS, _FAILURE, _NOT_SUPPORTED = 0, 999, 801  # cudaError: success, unknown, not supported
_MAX_SHARED_MEMORY_OPTIN_ATTRIBUTE = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_MAX_SHARED_MEMORY_OPTIN = MOST_SMEM_BYTES  # a launch refuses what its chip has not
_STATIC_SHARED_BYTES_ATTRIBUTE = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_PARAMETER_BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}


@contextlib.contextmanager
def recording_runtime() -> Iterator[None]:
    """Makes what `cute.compile` compiles inside (by this thread) record its launches; it needs neither GPU nor driver.

    The function must be compiled with ``--keep-ptx`` (the sizes of the kernel's parameters come from the PTX) and
    without TVM-FFI. `cute.compile` is not thread-safe; this does not change that.
    """
    host_code.hook_runtime(_recording, _Recorder)
    outer = _recording()
    _LOCAL.recording = True
    try:
        yield
    finally:
        _LOCAL.recording = outer


def load_object(code: bytes, prefix: str, ptx: str, allocations: Allocations) -> host_code.HostFunction:
    """A host function as `recording_runtime` has it compiled, from an object file: nothing is traced or compiled.

    Args:
        code, prefix: as `host_code.export_object` made them.
        ptx, allocations: of the kernel.

    Raises:
        LinkError: as `host_code.HostFunction`.
    """
    symbols = _Symbols()
    recorder = _Recorder(symbols)
    recorder.ptx, recorder.allocations = ptx, (allocations,)
    return host_code.HostFunction(code, prefix, symbols.addresses, recorder)


class _Symbols:
    """Takes the stand-ins for an object file as CuTe DSL's engines take them.

    Attributes:
        addresses: of each name.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}

    def raw_register_runtime(self, name: str, address: ctypes.c_void_p) -> None:
        """Registers a symbol as CuTe DSL's engines take it."""
        self.addresses[name] = address.value


@contextlib.contextmanager
def capture() -> Iterator[list[CapturedLaunch]]:
    """Yields a list to which every launch is appended that this thread makes inside through recorded functions."""
    launches: list[CapturedLaunch] = []
    with intercept(launches.append):
        yield launches


@contextlib.contextmanager
def intercept(
    take: Callable[[CapturedLaunch], None],
    refuse: Callable[[CapturedLaunch, EmulatorError], None] | None = None,
    operation: Callable[..., Report] | None = None,
) -> Iterator[None]:
    """``take`` is called with every launch that this thread makes inside through recorded functions.

    What it raises comes out of the call of the host function. So does the reason why a launch is illegal or not
    implemented; ``refuse``, if any, is called with both before. The error's ``launch`` and ``ptx`` are set then.
    ``operation`` takes the place of `execute` for launches of this package's operations.
    """
    outer = getattr(_LOCAL, "take", None)
    _LOCAL.take = take, refuse, operation
    try:
        yield
    finally:
        _LOCAL.take = outer


def execute_operation(*launch: Any, **how: Any) -> Report:
    """`execute`, or whatever the innermost `intercept` has in its place."""
    _, _, operation = getattr(_LOCAL, "take", None) or (None, None, None)
    return (operation or execute)(*launch, **how)


def submit(launch: CapturedLaunch) -> None:
    """Makes a launch of what something else than CuTe DSL compiled: inside `intercept` as one of a recorded function.

    A program that `cute-kernels emulate` runs hands over by it what Triton or nvcc compiled for it.

    Raises:
        EmulatorError: outside of `intercept`.
        UnsupportedPTX: the PTX has no such kernel.
    """
    take = getattr(_LOCAL, "take", None)
    if take is None:
        raise EmulatorError("host.submit was called by a program that is not emulated, or outside capture()")
    sizes, given = parameter_sizes(launch.ptx, launch.kernel_name), tuple(map(len, launch.params))
    if given != sizes:
        raise ValueError(f"parameters of {given} bytes; kernel {launch.kernel_name} declares {sizes}")
    take[0](launch)


def record(function: Callable[..., object], *arguments: object) -> CapturedLaunch:
    """Calls a function that was compiled under `recording_runtime` and returns its one launch.

    Args:
        function: result of `cute.compile`.
        arguments: its run-time arguments; addresses in them are only passed on.

    Raises:
        EmulatorError: compiled for the real runtime or without ``--keep-ptx``, or not exactly one launch.
        UnsupportedPTX: a launch attribute that the emulator does not implement.
    """
    if host_code.recorder_of(function) is None:
        raise EmulatorError(f"{function!r} was not compiled under host.recording_runtime()")
    with capture() as launches:
        function(*arguments)
    if len(launches) != 1:
        raise EmulatorError(f"the host function launched {len(launches)} kernels; `record` is for exactly one")
    return launches[0]


def execute(launch: CapturedLaunch, memory: GlobalMemory, options: Options, *, programmatic: bool) -> Report:
    """Runs a recorded launch; ``programmatic``: behind the one before it, which it may overlap. Else as `run`."""
    return run(
        launch.ptx,
        launch.kernel_name,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        dynamic_smem=launch.dynamic_smem,
        params=launch.params,
        memory=memory,
        options=options,
        programmatic=programmatic,
        cooperative=launch.cooperative,
    )


def parameter_sizes(ptx: str, kernel_name: str) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel, from its declaration.

    Raises:
        UnsupportedPTX: no such kernel, or a parameter declaration that is not understood.
    """
    entry = re.search(rf"\.entry\s+{re.escape(kernel_name)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        if re.search(rf"\.entry\s+{re.escape(kernel_name)}\s*[.{{]", ptx):
            return ()
        if not ptx.strip():  # CUDA 12 has another name for sm_110
            raise UnsupportedPTX(f"CuTe DSL made no PTX for {kernel_name}: the extra cu13 knows more chips")
        raise UnsupportedPTX(f"the PTX has no kernel {kernel_name}")
    sizes = []
    for declaration in filter(None, map(str.strip, entry.group(1).split(","))):
        match = re.fullmatch(r"\.param((?:\s+\.\w+(?:\s+\d+)?)+)\s+\w+(?:\[(\d+)\])?", declaration)
        types = [word[1:] for word in match.group(1).split() if word[1:] in _PARAMETER_BYTES] if match else []
        if len(types) != 1:
            raise UnsupportedPTX(f"parameter declaration `{declaration}` of kernel {kernel_name}")
        sizes.append(_PARAMETER_BYTES[types[0]] * int(match.group(2) or 1))
    return tuple(sizes)


_LOCAL = threading.local()  # recording: bool; take: of the innermost `intercept`


def _recording() -> bool:
    return getattr(_LOCAL, "recording", False)


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    ]


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute: an id and a 64-byte value."""

    _fields_ = [("id", ctypes.c_int32), ("_pad", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


# cudaLaunchAttributeID
_IGNORE, _COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALISATION, _PREFERRED_CLUSTER_DIMENSION = 0, 2, 4, 6, 11
_PROGRAMMATIC_EVENT, _LAUNCH_COMPLETION_EVENT = 7, 12
_ATTRIBUTES = {  # cudaLaunchAttributeID and CUlaunchAttributeID, which agree: the name, 32-bit words of the value
    0: ("Ignore", 0), 1: ("AccessPolicyWindow", 8), 2: ("Cooperative", 1), 3: ("SynchronizationPolicy", 1),
    4: ("ClusterDimension", 3), 5: ("ClusterSchedulingPolicyPreference", 1), 6: ("ProgrammaticStreamSerialization", 1),
    7: ("ProgrammaticEvent", 4), 8: ("Priority", 1), 9: ("MemSyncDomainMap", 1), 10: ("MemSyncDomain", 1),
    11: ("PreferredClusterDimension", 3), 12: ("LaunchCompletionEvent", 3), 13: ("DeviceUpdatableKernelNode", 1),
    14: ("PreferredSharedMemoryCarveout", 1), 16: ("NvlinkUtilCentricScheduling", 1),
    17: ("PortableClusterSizeMode", 1), 18: ("SharedMemoryMode", 1),
}  # fmt: skip
# May use larger clusters where there is room: none is one legal choice. Events are complete when a launch returns. The
# others say where and when CTAs run, or what stays in the L2 cache.
_WITHOUT_EFFECT = (
    _IGNORE, _PREFERRED_CLUSTER_DIMENSION, _PROGRAMMATIC_EVENT, _LAUNCH_COMPLETION_EVENT, 1, 3, 5, 8, 14, 16,
)  # fmt: skip

_INT, _UINT, _POINTER, _TEXT = ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p
_INT_OUT, _POINTER_OUT = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)

# CUtensorMapDataType and CUtensorMapSwizzle
_TENSOR_TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz",
    "b4x16", "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_SWIZZLES = ("none", "32B", "64B", "128B", "128B_atom32B")

# Entry points that host code may contain but that no stand-in exists for: they fail with their name. Without this
# they would resolve to the real runtime library, which the process has usually loaded too.
_REFUSED = (
    *("cuda" + name for name in (
        "DeviceSynchronize", "EventCreate", "EventDestroy", "EventElapsedTime", "EventRecord", "Free", "FreeAsync",
        "FreeHost", "GetDeviceProperties", "GraphDestroy", "GraphExecDestroy", "GraphInstantiate", "GraphLaunch",
        "LaunchKernel", "LibraryGetGlobal", "LibraryGetKernelCount", "LibraryGetManaged", "LibraryGetUnifiedFunction",
        "LibraryLoadFromFile", "Malloc", "MallocAsync", "MallocHost", "MallocManaged", "Memcpy", "MemcpyAsync",
        "Memset", "MemsetAsync", "OccupancyMaxActiveBlocksPerMultiprocessor", "StreamAddCallback",
        "StreamBeginCapture", "StreamCreate", "StreamDestroy", "StreamEndCapture", "StreamSynchronize",
        "StreamWaitEvent",
    )),
    *("cu" + name for name in (
        "DeviceGet", "LibraryGetGlobal", "LibraryGetKernel", "LibraryGetKernelCount", "LibraryGetManaged",
        "LibraryGetModule", "LibraryGetUnifiedFunction", "LibraryLoadData", "LibraryLoadFromFile", "LibraryUnload",
    )),
)  # fmt: skip


_FAT_BINARY = struct.Struct("<IHHQ")  # magic number, version, bytes of this header, bytes behind it
_FAT_BINARY_MAGIC = 0xBA55ED50


def _fat_binary_at(address: int) -> bytes:
    """The fat binary that host code hands to the runtime, for tools like cuobjdump; b"" for code in another form."""
    magic, _, header, behind = _FAT_BINARY.unpack(ctypes.string_at(address, _FAT_BINARY.size))
    return ctypes.string_at(address, header + behind) if magic == _FAT_BINARY_MAGIC else b""


def _numbers(kind: type[ctypes._SimpleCData], where: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(where)) if count else ()


def _facts_of_map(function: str, tensor: Sequence[int], steps: int, modes: Sequence[int]) -> dict[str, object]:
    """Fields of both kinds of maps, from arguments in the order of the driver."""
    dtype, rank, address, extents, strides = tensor
    interleave, swizzle, promotion, fill = modes
    if dtype not in range(len(_TENSOR_TYPES)) or interleave or swizzle not in range(len(_SWIZZLES)):
        raise UnsupportedPTX(f"{function}: type {dtype}, interleave {interleave}, swizzle {swizzle}")
    return {
        "address": address or 0,
        "dtype": _TENSOR_TYPES[dtype],
        "extents": _numbers(ctypes.c_uint64, extents, rank),
        "strides": _numbers(ctypes.c_uint64, strides, rank - 1),
        "element_strides": _numbers(_UINT, steps, rank),
        "swizzle": _SWIZZLES[swizzle],
        "nan_fill": bool(fill),
        "l2_promotion": promotion,
    }


def _put_map(out: int, made: tensor_map.TensorMap | tensor_map.Im2colMap) -> None:
    encoded = tensor_map.encode(made)
    ctypes.memmove(out, encoded, len(encoded))


class _Recorder:
    """Stand-ins for the runtime's entry points, registered with one JIT engine.

    Attributes:
        ptx, parameters: text of the compiled module and number of the host function's parameters, once the function has
            loaded its library.
        allocations: what the module's kernels allocate in shared memory.
    """

    def __init__(self, engine: object) -> None:
        self.ptx: str | None = None
        self.parameters: int | None = None
        self.allocations: tuple[Allocations, ...] = ()
        self._errors: dict[int, BaseException] = {}  # of threads: what went wrong in their last stand-in that failed
        self._machine_code = b""
        self._names: list[ctypes.Array] = []
        launch = (_INT, ctypes.POINTER(_LaunchConfig), _TEXT, _POINTER_OUT)
        tensor = (_INT, _POINTER, _INT, _UINT, _POINTER, _POINTER, _POINTER)
        modes = (_POINTER, _INT, _INT, _INT, _INT)  # behind element strides: interleave, swizzle, promotion, fill
        load = (_INT, _POINTER_OUT, _POINTER, _POINTER, _POINTER, _UINT, _POINTER, _POINTER, _UINT)
        entry_points = {
            "_cudaGetDevice": (functools.partial(self._put, 0), (_INT, _INT_OUT)),
            "_cudaSetDevice": (self._succeed, (_INT, _INT)),
            "_cudaGetDeviceCount": (functools.partial(self._put, 1), (_INT, _INT_OUT)),
            "_cudaDeviceGetAttribute": (self._device_attribute, (_INT, _INT_OUT, _INT, _INT)),
            "_cudaLibraryLoadData": (self._load, load),
            "_cudaLibraryUnload": (self._succeed, (_INT, _POINTER)),
            "_cudaLibraryGetKernel": (self._get_kernel, (_INT, _POINTER_OUT, _POINTER, _TEXT)),
            "_cuKernelGetAttribute": (self._kernel_attribute, (_INT, _INT_OUT, _INT, _POINTER, _INT)),
            "_cudaFuncSetAttribute": (self._succeed, (_INT, _POINTER, _INT, _INT)),
            "_cudaKernelSetAttributeForDevice": (self._succeed, (_INT, _POINTER, _INT, _INT, _INT)),
            "_cudaLaunchKernelEx": (self._launch, launch),
        }
        for name, (encode, parameters) in {
            "cuTensorMapEncodeTiled": (self._encode_tiled, (_POINTER, *modes)),
            "cuTensorMapEncodeIm2col": (self._encode_im2col, (_POINTER, _POINTER, _UINT, _UINT, *modes)),
            "cuTensorMapEncodeIm2colWide": (self._encode_im2col, (_INT, _INT, _UINT, _UINT, *modes, _INT)),
        }.items():
            entry_points[f"_{name}"] = functools.partial(encode, name), (*tensor, *parameters)
        for name in _REFUSED:
            entry_points[f"_{name}"] = (functools.partial(self._refuse, name), (_INT,))
        self._callbacks = []  # the engine holds bare addresses, so the callbacks live here
        for name, (function, (result, *parameters)) in entry_points.items():
            callback = ctypes.CFUNCTYPE(result, *parameters)(functools.partial(self._guarded, function))
            self._callbacks.append(callback)
            host_code.register_symbol(engine, name, callback)

    def call(self, function: Callable[..., object], *arguments: object) -> object:
        """Calls something of CuTe DSL that calls stand-ins; it sees their error codes only, the reason is kept here."""
        thread = threading.get_ident()
        with interrupts.deferred():
            self._errors.pop(thread, None)
            try:
                result = function(*arguments)
            except Exception as error:
                raise self._errors.pop(thread, error) from None
            reason = self._errors.pop(thread, None)
            if reason is not None and not isinstance(reason, Exception):
                raise reason  # an interrupt that host code went on after
            return result

    def _guarded(self, function: Callable[..., int | None], *arguments: object) -> int:
        """An exception cannot cross the machine code between here and the caller: keep it, return an error code."""
        try:
            return function(*arguments) or _SUCCESS
        except BaseException as error:  # noqa: BLE001 - `call` raises it
            self._errors[threading.get_ident()] = error
            return _NOT_SUPPORTED if isinstance(error, UnsupportedPTX) else _FAILURE

    @staticmethod
    def _succeed(*_: object) -> None:
        pass

    @staticmethod
    def _put(number: int, out: ctypes._Pointer[ctypes.c_int]) -> None:
        out[0] = number

    @staticmethod
    def _refuse(name: str) -> None:
        raise UnsupportedPTX(f"host code calls {name}, for which the recording runtime has no stand-in")

    @staticmethod
    def _device_attribute(out: ctypes._Pointer[ctypes.c_int], attribute: int, device: int) -> None:
        if attribute != _MAX_SHARED_MEMORY_OPTIN_ATTRIBUTE:
            raise UnsupportedPTX(f"host code asks for device attribute {attribute}")
        out[0] = _MAX_SHARED_MEMORY_OPTIN

    @staticmethod
    def _kernel_attribute(out: ctypes._Pointer[ctypes.c_int], attribute: int, kernel: int, device: int) -> None:
        if attribute != _STATIC_SHARED_BYTES_ATTRIBUTE:
            raise UnsupportedPTX(f"host code asks for kernel attribute {attribute}")
        out[0] = 0  # only lowers the limit that the host code sets for dynamic shared memory

    def _load(self, library: ctypes._Pointer[ctypes.c_void_p], code: int, *_: object) -> None:
        self._machine_code = _fat_binary_at(code)
        library[0] = code

    def _get_kernel(self, kernel: ctypes._Pointer[ctypes.c_void_p], library: int, name: bytes) -> None:
        self._names.append(ctypes.create_string_buffer(name))
        kernel[0] = ctypes.addressof(self._names[-1])

    @staticmethod
    def _encode_tiled(name: str, out: int, *given: int) -> None:
        *tensor, box, steps = given[:7]
        facts = _facts_of_map(name, tensor, steps, given[7:])
        _put_map(out, tensor_map.TensorMap(box=_numbers(_UINT, box, tensor[1]), **facts))

    @staticmethod
    def _encode_im2col(name: str, out: int, *given: int) -> None:
        """Corners begin with W. Along W alone there are numbers of W, and a mode, which a map of the driver has not."""
        *tensor, lower, upper, channels, pixels, steps, interleave = given[:11]
        facts, spatial = _facts_of_map(name, tensor, steps, (interleave, *given[-3:])), tensor[1] - 2
        lower, upper = (
            (corner, *[0] * (spatial - 1)) if "Wide" in name else _numbers(_INT, corner, spatial)
            for corner in (lower, upper)
        )
        made = tensor_map.Im2colMap(lower_corner=lower, upper_corner=upper, channels=channels, pixels=pixels, **facts)
        _put_map(out, made)

    def _launch(
        self, config: ctypes._Pointer[_LaunchConfig], kernel: bytes, arguments: ctypes._Pointer[ctypes.c_void_p]
    ) -> None:
        take = getattr(_LOCAL, "take", None)
        if take is None:
            raise EmulatorError("a function compiled under recording_runtime() was called outside record()/capture()")
        if self.ptx is None:
            raise EmulatorError("the function was compiled without --keep-ptx, which recording needs")
        take, refuse, _ = take
        config = config.contents
        name = kernel.decode()
        attributes = _attributes(config)
        sizes = parameter_sizes(self.ptx, name)
        launch = CapturedLaunch(
            kernel_name=name,
            grid=tuple(config.grid),
            block=tuple(config.block),
            cluster=tuple(attributes.get(_CLUSTER_DIMENSION, (1, 1, 1))[:3]),
            dynamic_smem=config.dynamic_smem,
            params=tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)),
            ptx=self.ptx,
            programmatic=attributes.get(_PROGRAMMATIC_SERIALISATION, (0,))[0] != 0,
            cooperative=attributes.get(_COOPERATIVE, (0,))[0] != 0,
            stream=config.stream or 0,
            machine_code=self._machine_code,
            allocations=self.allocations,
        )
        try:
            _check(launch, attributes)
        except EmulatorError as error:
            error.attach(launch.ptx, launch)
            if refuse is not None:
                refuse(launch, error)
            raise
        take(launch)


def _attributes(config: _LaunchConfig) -> dict[int, tuple[int, ...]]:
    """Values of the launch's attributes by their id."""
    if not config.attribute_count:
        return {}
    attributes = (_LaunchAttribute * config.attribute_count).from_address(config.attributes)
    return {attribute.id: tuple(attribute.value) for attribute in attributes}


def _check(launch: CapturedLaunch, attributes: dict[int, tuple[int, ...]]) -> None:
    """Raises UnsupportedPTX for what the emulator does not implement, EmulatorError for what no GPU launches."""
    for number, value in attributes.items():
        if number not in (_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALISATION, _COOPERATIVE, *_WITHOUT_EFFECT):
            name, words = _ATTRIBUTES.get(number, ("unknown to the emulator", 1))
            raise UnsupportedPTX(f"launch attribute {number} ({name}) with value {', '.join(map(str, value[:words]))}")
    name, grid, block, cluster = launch.kernel_name, launch.grid, launch.block, launch.cluster
    if any(size % step for size, step in zip(grid, cluster, strict=True)):
        raise EmulatorError(f"launch of {name}: grid {grid} is no multiple of the cluster {cluster}")
    threads, nbytes = math.prod(block), launch.dynamic_smem
    limits = {
        f"grid {grid} has no CTA": 0 in grid,
        f"a block {block} of {threads:,} threads: must be 1 to 1,024": not 1 <= threads <= 1024,
        f"{nbytes:,} bytes of dynamic shared memory: must be {_MAX_SHARED_MEMORY_OPTIN:,}": nbytes
        > _MAX_SHARED_MEMORY_OPTIN,
    }
    wrong = [text for text, exceeded in limits.items() if exceeded]
    if wrong:
        raise EmulatorError(f"launch of {name} is illegal: {'; '.join(wrong)}")
