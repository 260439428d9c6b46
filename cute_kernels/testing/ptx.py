"""PTX texts launched in the emulator: a kernel around a body, and a launch on NumPy arrays.

>>> import numpy as np
>>> from cute_kernels.testing import ptx
>>> data = ptx.aligned(np.zeros(32, np.uint32))
>>> text = ptx.module(ptx.THREAD_OUTPUT + "st.global.u32 [%d1], %r1;", parameters=1)
>>> report = ptx.launch(text, data)
>>> data[:4].tolist()
[0, 1, 2, 3]
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.emulator import GlobalMemory, Report, run
from cute_kernels.emulator.machine.units.copies.tensor_map import Im2colMap, TensorMap, encode

REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %h<80>;
    .reg .b32 %r<200>;
    .reg .b64 %d<120>;
"""
"""Registers that a body may use unless it declares others."""

THREAD_OUTPUT = """
    mov.u32 %r1, %tid.x;
    ld.param.u64 %d0, [p0];
    mul.wide.u32 %d1, %r1, 4;
    add.s64 %d1, %d0, %d1;
"""
"""The beginning of a body: ``%r1`` is ``%tid.x``, ``%d1`` the address of this thread's 4-byte item of array p0."""

Argument = np.ndarray | TensorMap | Im2colMap | int | bytes
"""Arrays are passed by their address, and so are tensor maps, whose 128 bytes lie in global memory; an int is passed as
64 bits, bytes as they are."""

_MAPS = (TensorMap, Im2colMap)


def module(
    body: str,
    *,
    parameters: int = 2,
    head: str = "",
    registers: str = REGISTERS,
    entry: str = "",
    target: str = DEFAULT_ARCH,
) -> str:
    """A PTX module with one entry ``k`` whose parameters p0, p1, ... are 64-bit: what `launch` passes for arrays.

    ``ld.param.u64 %d0, [p0];`` reads the address of the first array. Nothing of the body is checked here: the launch
    raises `UnsupportedPTX` for what is none, with its line in the whole text.

    Args:
        body: instructions of the entry, with semicolons, and declarations beyond its registers (``.shared``, labels).
        parameters: how many of them, as many as `launch` is given arguments.
        head: declarations of the module (``.global``, ``.func``). ``dynamic``, the dynamic shared memory, is there.
        registers: declarations of the entry's registers; of `REGISTERS`, which are there without, ``%p`` are
            predicates, and ``%h``, ``%r`` and ``%d`` have 16, 32 and 64 bits.
        entry: directives of the entry, such as ``.reqntid 128``.
        target: architecture, such as ``sm_90a``.

    Returns:
        The text.
    """
    declared = ",\n".join(f"    .param .u64 p{i}" for i in range(parameters))
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 dynamic[];\n"
        f"{head}\n.visible .entry k(\n{declared}\n) {entry}\n{{\n{registers}\n{body}\n}}\n"
    )


def aligned(values: np.ndarray, alignment: int = 128) -> np.ndarray:
    """A copy, contiguous, whose address is a multiple of ``alignment`` bytes, as device allocations' are."""
    store = np.zeros(values.nbytes + alignment, np.uint8)
    skip = -store.ctypes.data % alignment
    copy = store[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@dataclass(frozen=True, eq=False)
class PtxLaunch:
    """One launch of a PTX text on arrays of the host, made by `prepare`; extents as for `cute_kernels.emulator.run`,
    one byte string for each parameter. ``arrays``: all that the kernel may touch, those behind tensor maps after
    those that are arguments; ``maps``: numbers of the arrays that hold tensor maps, in which there are addresses."""

    text: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    cluster: int | Sequence[int]
    dynamic_smem: int
    params: tuple[bytes, ...]
    arrays: tuple[np.ndarray, ...]
    maps: frozenset[int]

    def run(self, **more: Any) -> Report:
        """Executes it; keywords, results and errors are those of `cute_kernels.emulator.run`."""
        memory = GlobalMemory()
        for i, array in enumerate(self.arrays):
            memory.register_tensor(array, f"array {i}", array.flags.writeable)
        shape = {"grid": self.grid, "block": self.block, "cluster": self.cluster, "dynamic_smem": self.dynamic_smem}
        return run(self.text, **shape, params=self.params, memory=memory, **more)


def prepare(
    text: str,
    *arguments: Argument,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    cluster: int | Sequence[int] = 1,
    dynamic_smem: int = 4096,
    reachable: Sequence[np.ndarray] = (),
) -> PtxLaunch:
    """The launch that `launch` executes, whose arguments and errors these are, too."""
    arrays, params, maps = [], [], set()
    for i, argument in enumerate(arguments):
        if isinstance(argument, bytes):
            params.append(argument)
            continue
        if isinstance(argument, int) and not isinstance(argument, bool):
            if not -(1 << 63) <= argument < 1 << 64:
                raise ValueError(f"argument {i} = {argument}: 64 bits are passed: must be -2**63 to 2**64 - 1")
            params.append(struct.pack("<Q", argument % (1 << 64)))
            continue
        if isinstance(argument, _MAPS):
            maps.add(len(arrays))
            argument = aligned(np.frombuffer(encode(argument), np.uint8))
        arrays.append(_array(f"argument {i}", argument, "a NumPy array, a tensor map, an int or bytes"))
        params.append(struct.pack("<Q", argument.ctypes.data))
    arrays += [_array(f"reachable[{i}]", array, "a NumPy array") for i, array in enumerate(reachable)]
    return PtxLaunch(text, grid, block, cluster, dynamic_smem, tuple(params), tuple(arrays), frozenset(maps))


def launch(
    text: str,
    *arguments: Argument,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    cluster: int | Sequence[int] = 1,
    dynamic_smem: int = 4096,
    reachable: Sequence[np.ndarray] = (),
    **more: Any,
) -> Report:
    """Runs the one kernel of a PTX text in the emulator, on arrays of the host, which it may write.

    Args:
        text: PTX.
        arguments: one for each parameter: `Argument`. An array may have any dtype, shape and strides: a kernel gets the
            address of its first element and may touch what it spans; one that is read-only it may not write.
        grid, block, cluster: CTAs, threads of a CTA and CTAs of a cluster, as for `cute_kernels.emulator.run`.
        dynamic_smem: bytes of dynamic shared memory.
        reachable: arrays that are no arguments, whose addresses are in tensor maps or in other arrays.
        more: ``options``, ``kernel`` and the other keywords of `cute_kernels.emulator.run`.

    Returns:
        What the launch did.

    Raises:
        TypeError: an argument of another type.
        ValueError: an int beyond 64 bits; arguments or a launch shape that do not fit the kernel.
        EmulatorError: the kernel is at fault, or needs what the emulator does not implement.
    """
    shape = {"grid": grid, "block": block, "cluster": cluster, "dynamic_smem": dynamic_smem}
    return prepare(text, *arguments, **shape, reachable=reachable).run(**more)


def _array(name: str, value: object, allowed: str) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} is {type(value).__name__}: must be {allowed}")
    return value
