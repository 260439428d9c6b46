"""Plan -> compiled kernel.

Kernels take sizes as launch arguments, so one compiled kernel serves every problem whose `Plan.kernel_key` is equal: a
new batch, resolution or model width costs no compilation.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import pkgutil
import re
import struct
import subprocess
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cute_kernels.common import extras, forks
from cute_kernels.dsl import compiling, host_code, linking
from cute_kernels.dsl import kernel_cache as cache
from cute_kernels.dsl.allocations import Allocation
from cute_kernels.plan import Plan
from cute_kernels.plan.base import Operand

_COMPILE_LOCK = forks.awaited_lock()
"""`cute.compile` keeps global state and is not thread-safe."""


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel, by the assembler: per thread registers, stack and local bytes; static shared bytes.

    Spilled registers live on the stack, so a kernel without stack and local memory has no spills.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel: its PTX and cubin, and the host function that builds TMA descriptors and launches it.

    ``loader`` gives the host function; it is called when `function` is first asked for, since PTX and resources are of
    use without it.
    """

    kernel_name: str
    ptx: str
    cubin: bytes
    loader: Callable[[], host_code.HostFunction]

    @functools.cached_property
    def function(self) -> host_code.HostFunction:
        return self.loader()

    @functools.cached_property
    def resources(self) -> Resources:
        return resource_usage(self.cubin, self.kernel_name)


def compile_plan(plan: Plan, *, emulated: bool = False) -> Artifact:
    """Compiles the kernel of a plan, or takes it from memory or from disk. Needs no GPU and no driver. ``emulated``:
    binds the host function to the emulator's launch recorder instead of the CUDA runtime; on disk both are the same."""
    if plan.launches != (plan,):
        kernels = " and ".join(part.operation for part in plan.launches)
        raise ValueError(f"the plan of {plan.operation} chains kernels, of {kernels}, which are compiled one by one")
    key = (plan.kernel_key, emulated)
    return _CACHE.get(key) or _CACHE.setdefault(key, _from_disk(plan, emulated))


_CACHE: dict[tuple, Artifact] = {}
_BUILT: dict[tuple, cache.CompiledKernel] = {}
"""Kernels that this process has compiled: of two threads that ask for the same one, the second need not."""


def _from_disk(plan: Plan, emulated: bool) -> Artifact:
    kernel = cache.load_or_build(plan.kernel_key, functools.partial(_built, plan))

    def load() -> host_code.HostFunction:
        try:
            return _host_function(kernel, emulated)
        except linking.LinkError as reason:
            _BUILT.pop(plan.kernel_key, None)
            make = functools.partial(_built, plan)
            rebuilt = cache.load_or_build(plan.kernel_key, make, f"it cannot be linked: {reason}")
            return _host_function(rebuilt, emulated)

    return Artifact(kernel.kernel_name, kernel.ptx, kernel.cubin, load)


def _built(plan: Plan) -> cache.CompiledKernel:
    """Compiled in one thread at a time. A fork waits for the lock, so nobody waits for another process with it."""
    with _COMPILE_LOCK:
        if plan.kernel_key not in _BUILT:
            _BUILT[plan.kernel_key] = build(plan)
        return _BUILT[plan.kernel_key]


def compile_uncached(plan: Plan, *, emulated: bool = False) -> Artifact:
    """Compiles like `compile_plan`, always anew and without a lock: for kernels changed on purpose."""
    kernel = build(plan)
    load = functools.partial(_host_function, kernel, emulated)
    return Artifact(kernel.kernel_name, kernel.ptx, kernel.cubin, load)


def build(plan: Plan) -> cache.CompiledKernel:
    """Compiles the kernel of a plan. Raises RuntimeError: this version of CuTe DSL passes arguments in another way than
    `Frames` does."""
    function = dsl_function(plan, engine=False)
    check_layout(plan, function)
    ptx = compiling.ptx(function)
    name = re.search(r"\.entry\s+(\w+)", ptx).group(1)
    prefix = f"{name}_host"
    code = compiling.cubin(function), host_code.export_object(function, prefix)
    (held,) = (each for each in compiling.allocations_of(function) if each.kernel == name)
    # The kernel divides its memory by itself, as the plan says.
    regions = tuple((each.name.partition(":")[0], each.offset, each.nbytes) for each in plan.smem if each.nbytes)
    arrays = (Allocation(0, plan.smem_bytes, (), regions),) if regions else ()
    return cache.CompiledKernel(name, ptx, *code, prefix, dataclasses.replace(held, dynamic=arrays))


def dsl_function(plan: Plan, *, engine: bool = True) -> Callable[..., Any]:
    """The host function as CuTe DSL compiles it, which takes `dsl_arguments`; without an engine it cannot be called."""
    compiling.require()  # before the kernel's module, which another version may not even import
    kernel = pkgutil.resolve_name(plan.kernel)(plan)
    example = {operand.name: 16 for operand in plan.operands if operand.given}
    arguments = dsl_arguments(plan, stream=0, **example)
    return compiling.compile_function(kernel, arguments, plan.arch.name, engine=engine)


def _host_function(kernel: cache.CompiledKernel, emulated: bool) -> host_code.HostFunction:
    """From the bytes that were verified, and not from the cache's file."""
    if not emulated:
        return host_code.HostFunction(kernel.host_object, kernel.host_prefix)
    # Launches on a GPU need neither the emulator nor its dependencies.
    import cute_kernels.emulator.programs.host as host

    return host.load_object(kernel.host_object, kernel.host_prefix, kernel.ptx, kernel.allocations)


# --- how a host function is called -----------------------------------------------------------------------------------
# CuTe DSL's own call converts and checks its Python objects one by one, which takes longer than the launch. The machine
# code underneath takes an array of pointers, one to each argument, and a last one to the status it returns.

_SLOT = 8
"""Bytes between arguments in memory."""

_FORMATS = {"pointer": "=Q", "float32": "=f", "int32": "=i"}
"""How `struct` writes an argument."""


class Frames(threading.local):
    """Argument values of one thread, and the array of pointers to them: the call releases the interpreter lock.
    ``current``: memory of the values, the address of the array, and the status that the machine code writes; together,
    since attributes of a thread are found slowly."""

    def __init__(self, plan: Plan, parameters: Sequence[str] = (), **constants: float | int) -> None:
        """Lays out the values: first the ``parameters`` that `launcher` writes, then sizes and ``constants``."""
        present = [operand for operand in plan.operands if operand.present]
        formats = {o.name: _FORMATS["pointer" if o.kind == "pointer" else o.dtype] for o in present}
        self._formats = formats | {"stream": _FORMATS["pointer"]}
        names = [*parameters, *(name for name in self._formats if name not in parameters)]
        self._places = {name: _SLOT * slot for slot, name in enumerate(names)}
        memory, status = (ctypes.c_char * (_SLOT * len(names)))(), ctypes.c_int32()
        base = ctypes.addressof(memory)
        addresses = [*(base + self._places[name] for name in self._formats), ctypes.addressof(status)]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.current = memory, ctypes.addressof(self._pointers), status
        self.write(**{operand.name: operand.size for operand in present if operand.kind == "size"}, **constants)

    def write(self, **values: float | int) -> None:
        """Writes values by their names."""
        for name, value in values.items():
            struct.pack_into(self._formats[name], self.current[0], self._places[name], value)

    def arguments(self) -> dict[str, bytes]:
        """Every argument in the order of `Plan.operands`, the stream last."""
        memory = bytes(self.current[0])
        return {name: memory[self._places[name] :][: struct.calcsize(form)] for name, form in self._formats.items()}

    def launcher(
        self, parameters: Sequence[str], call: Callable[[int], None], fail: Callable[[int], NoReturn]
    ) -> Callable[..., None]:
        """A function that writes its arguments, those of the frames' parameters, into this thread's frame and calls.

        ``call`` takes the address of the array, ``fail`` a status that is not 0.
        """
        padded = [f"{form[1:]}{_SLOT - struct.calcsize(form)}x" for form in map(self._formats.get, parameters)]
        write = struct.Struct("=" + "".join(padded)).pack_into

        def launch(values: Sequence[float | int]) -> None:
            memory, address, status = self.current
            write(memory, 0, *values)
            call(address)
            if status.value:
                fail(status.value)

        return launch


def host_arguments(plan: Plan, *, stream: int, **given: float | int | None) -> tuple[Frames]:
    """Arguments of the compiled host function. ``stream``: CUstream handle; ``given``: by the names of `Plan.operands`
    device addresses, aligned as said there, and the number of a value; anything, or nothing, for one that the plan
    does without. Raises TypeError: as `check_names`."""
    check_names(plan, given)
    needed = {operand.name: given[operand.name] for operand in plan.operands if operand.given}
    return (Frames(plan, **needed, stream=stream),)


def check_names(plan: Plan, given: Mapping[str, object]) -> None:
    """Whether there is something for every operand that a launch has to give, and for nothing else. Raises TypeError:
    naming the operands."""
    names = [operand.name for operand in plan.operands if operand.kind != "size"]
    needed = [operand.name for operand in plan.operands if operand.given]
    missing = [name for name in needed if given.get(name) is None]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        wrong = [f"{', '.join(missing)} missing"] * bool(missing) + [f"{', '.join(unknown)} unknown"] * bool(unknown)
        raise TypeError(f"operands of {plan.operation}: {', '.join(needed)}; {'; '.join(wrong)}")


def dsl_arguments(plan: Plan, *, stream: int, **given: float | int | None) -> tuple:
    """Arguments of `host_arguments` as CuTe DSL takes them, the operands as one named tuple, and a stream.

    They give types for tracing; their values do not reach the code.
    """
    import cuda.bindings.driver as driver

    check_names(plan, given)
    values = {operand.name: _dsl_argument(operand, given.get(operand.name)) for operand in plan.operands}
    return namedtuple("Operands", values)(**values), driver.CUstream(stream)


def _dsl_argument(operand: Operand, given: float | int | None) -> Any:
    import cutlass.cute.runtime as cute_runtime
    import cutlass.cute.typing as cute_typing

    import cute_kernels.kernels.host as elements

    if not operand.present:
        return None
    element = elements.ELEMENT_TYPES[operand.dtype]
    if operand.kind == "size":
        return element(operand.size)
    if operand.kind == "value":
        return element(given)
    return cute_runtime.make_ptr(element, int(given), cute_typing.AddressSpace.gmem, assumed_align=operand.alignment)


def check_layout(plan: Plan, function: Any) -> None:
    """Compares a frame with what CuTe DSL itself makes of the same arguments, argument by argument. Raises
    RuntimeError: this version of CuTe DSL passes arguments in another way."""
    given = [operand for operand in plan.operands if operand.given]
    sample = {o.name: 0.75 if o.kind == "value" else 0x1110 * (i + 1) for i, o in enumerate(given)}
    stream = 0x1110 * (len(given) + 1)
    own = Frames(plan, **sample, stream=stream).arguments()
    expected, _keep_alive = host_code.argument_pointers(function, dsl_arguments(plan, **sample, stream=stream))
    if len(expected) != len(own) or any(
        ctypes.string_at(address, len(value)) != value for address, value in zip(expected, own.values(), strict=True)
    ):
        raise RuntimeError(f"this version of CuTe DSL does not pass {', '.join(own)} as the tested ones do")


def resource_usage(cubin: bytes, kernel_name: str) -> Resources:
    """Reads a cubin's resource usage with NVIDIA's `cuobjdump` (package ``nvidia-cuda-cuobjdump``). Raises
    MissingExtra: the tool is missing; RuntimeError: its report does not name the kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    pattern = rf"Function {re.escape(kernel_name)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    match = re.search(pattern, report)
    if match is None:
        raise RuntimeError(f"cuobjdump reports nothing for kernel {kernel_name}:\n{report}")
    registers, stack, shared, local = map(int, match.groups())
    return Resources(registers, stack, local, shared)


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text, by NVIDIA's `nvdisasm`. Raises MissingExtra: the tool is missing."""
    program = _tool("nvdisasm", "the machine code of a kernel needs")
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def cuobjdump() -> str:
    """Path of NVIDIA's tool. Raises MissingExtra: it is not installed (extra ``emulator``)."""
    return _tool("cuobjdump", "the resources of a kernel need")


def _tool(name: str, who_needs: str) -> str:
    package = importlib.util.find_spec("nvidia")  # a namespace that NVIDIA's wheels share
    for root in package.submodule_search_locations if package is not None else ():
        for candidate in sorted(Path(root).glob(f"*/bin/{name}")):
            return str(candidate)
    raise extras.MissingExtra(f"{who_needs} nvidia-cuda-{name}: {extras.how_to_install('emulator')}")
