"""Hand-written PTX for tests: a kernel around a body, and a launch on NumPy arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

from cute_kernels.emulator import GlobalMemory, Options, Report, run
from cute_kernels.emulator.units.copies.tensor_map import Im2colMap, TensorMap, encode
from tests.emulator import hardware as real

REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %h<80>;
    .reg .b32 %r<200>;
    .reg .b64 %d<120>;
"""


def module(body: str, *, parameters: int = 2, head: str = "", registers: str = REGISTERS, entry: str = "") -> str:
    """A module with one entry ``k`` whose parameters p0, p1, ... are 64-bit."""
    declared = ",\n".join(f"    .param .u64 p{i}" for i in range(parameters))
    return (
        ".version 8.8\n.target sm_100a\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 dynamic[];\n"
        f"{head}\n.visible .entry k(\n{declared}\n) {entry}\n{{\n{registers}\n{body}\n}}\n"
    )


_MAPS = (TensorMap, Im2colMap)


def launch(
    text: str,
    *arguments: np.ndarray | TensorMap | Im2colMap | int | bytes,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    dynamic_smem: int = 4096,
    options: Options | None = None,
    hardware: str | None = None,
    reachable: Sequence[np.ndarray] = (),
    **more: object,
) -> Report:
    """Runs the one kernel of ``text``; arrays are passed by address (and may be written), ints and bytes by value.

    A tensor map is passed by the address of its 128 bytes, which lie in global memory. ``hardware``: why a GPU may
    leave other bytes in the arrays than the emulator (see `tests.emulator.hardware`), or None if it must not.
    ``reachable``: arrays that are no arguments, whose addresses are in tensor maps.
    """
    memory = GlobalMemory()
    for i, array in enumerate(reachable):
        memory.register_tensor(array, f"reachable array {i}")
    params = []
    arrays = [aligned(np.frombuffer(encode(x), np.uint8)) if isinstance(x, _MAPS) else x for x in arguments]
    for i, array in enumerate(arrays):
        if isinstance(array, int):
            params.append(struct.pack("<Q", array % (1 << 64)))
        elif isinstance(array, bytes):
            params.append(array)
        else:
            memory.register_tensor(array, f"array {i}")
            params.append(struct.pack("<Q", array.ctypes.data))
    touched = [array for array in (*arrays, *reachable) if isinstance(array, np.ndarray)]
    maps = {id(array) for array, given in zip(arrays, arguments) if isinstance(given, _MAPS)}
    buffers = [real.Buffer(x.ctypes.data, x.tobytes(), id(x) in maps) for x in touched] if real.MODE else []
    same = real.Launch(text, grid, block, cluster, dynamic_smem, tuple(params), tuple(buffers))
    with real.compared(same, touched, leave_out=hardware or _not_comparable(text, options)):
        return run(
            text,
            grid=grid,
            block=block,
            cluster=cluster,
            dynamic_smem=dynamic_smem,
            params=params,
            memory=memory,
            options=options,
            **more,
        )


def _not_comparable(text: str, options: Options | None) -> str | None:
    if options is not None and options.clusters is not None:
        return "a part of a grid"
    if options is not None and not options.detectors:
        return "without detectors the program may be faulty"
    return "a function whose last bits PTX leaves open" if re.search(r"\.approx|\.full", text) else None


#: ``%d1`` = address of this thread's 4-byte item of array p0 (one warp), ``%r1`` = %tid.x.
THREAD_OUTPUT = """
    mov.u32 %r1, %tid.x;
    ld.param.u64 %d0, [p0];
    mul.wide.u32 %d1, %r1, 4;
    add.s64 %d1, %d0, %d1;
"""


def aligned(values: np.ndarray, alignment: int = 128) -> np.ndarray:
    """A copy whose first element is aligned, as device allocations are."""
    store = np.zeros(values.nbytes + alignment, np.uint8)
    skip = -store.ctypes.data % alignment
    copy = store[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
