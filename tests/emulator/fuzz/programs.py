"""Programs that work, to be damaged: small kernels of other tests, and frozen launches of our kernels."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterator

import numpy as np

from cute_kernels.emulator.machine.units.copies.tensor_map import encode
from tests.emulator import record_tma_on_gpu as tma
from tests.emulator.fuzz.asynchronous import clusters, synchronisation, tensor_cores
from tests.emulator.fuzz.program import Program, addresses, on_arrays
from tests.emulator.instruction_cases import kernel_text
from tests.emulator.isa.instructions.test_conversions import CONVERSION
from tests.emulator.isa.instructions.test_instructions import FLOAT, INTEGER
from tests.emulator.machine.units.copies.test_tma import CASES, tensor_map_of
from tests.emulator.machine.units.test_units import text_of
from tests.emulator.matrix_cases import matrix_cases, wgmma_cases
from tests.emulator.oracle.launches import ARCHIVE, FrozenLaunch, read_archive
from tests.emulator.record_matrix_on_gpu import result_array
from tests.emulator.sm90_all_cases import cases

_FROZEN = ("gather-sm100", "gather-sm90", "gemm-sm90-split", "sm100-one-cta", "sm100", "sm90-one-cta")
_MAP_ADDRESS = 1 << 32  # that tensor maps are encoded with; the address of a buffer takes its place


def _arithmetic() -> Iterator[Program]:
    for number, case in enumerate([*INTEGER.values(), *FLOAT.values(), *CONVERSION.values()]):
        data = np.arange(102 * (len(case.sources) + 1), dtype=np.uint64) * 0x0123456789ABCDEF
        yield on_arrays(f"arithmetic {number}", kernel_text(case), data)


def _instructions() -> Iterator[Program]:
    for case in cases():
        out = np.zeros(case.expected.nbytes, np.uint8)
        yield on_arrays(
            case.name, case.text, *case.inputs, out, block=(case.block, 1, 1), grid=(case.grid, 1, 1),
            cluster=(case.cluster, 1, 1), shared=case.shared,
        )  # fmt: skip


def _matrices() -> Iterator[Program]:
    for case in wgmma_cases():
        image, _ = case.image()
        operands = image, case.registers(), result_array(case)
        yield on_arrays(f"wgmma {case}", case.ptx(), *operands, block=(128, 1, 1), shared=len(image))
    for case in matrix_cases():
        operands = case.image(), case.registers(), result_array(case)
        yield on_arrays(repr(case), case.ptx(), *operands, block=(128, 1, 1))


def _tensor_copies() -> Iterator[Program]:
    for number, case in enumerate(CASES):
        if case["kind"] not in ("load", "store") or "fault" in case or not case["map"]:
            continue
        tensor, image = tma.noise(0, tma.GLOBAL_BYTES), tma.noise(number, tma.SHARED_BYTES)
        coords = np.array([*case["coords"], *[0] * (32 - len(case["coords"]))], np.int32)
        buffers = tensor, coords, image, np.zeros(4, np.uint32)
        where = addresses(len(buffers))
        steps = [1, *case["element_strides"][1:]]
        elements = math.prod(-(-b // s) for b, s in zip(case["box"], steps))
        words = case["offset"], elements * tma.element_bytes(case["dtype"])
        tensor_map = where[0] + encode(tensor_map_of(case, _MAP_ADDRESS))[8:]
        params = tensor_map, where[1], *(struct.pack("<I", word) for word in words), *where[2:]
        # One thread copies all of shared memory word by word: most boxes lie in a part of it.
        text = text_of(case["kind"], len(case["box"])).replace(f", {tma.SHARED_BYTES};", ", 1024;")
        yield Program(
            f"tensor copy {number}", text, params,
            tuple(array.tobytes() for array in buffers), block=(1, 1, 1), shared=tma.SHARED_BYTES + 1024,
        )  # fmt: skip


def _frozen() -> Iterator[Program]:
    for name in _FROZEN:
        head = read_archive(ARCHIVE)[f"{name}.jsonl"].partition(b"\n")[0]
        launch = FrozenLaunch.from_json(json.loads(head)["launch"])
        yield Program(
            name, launch.ptx, tuple(map(bytes.fromhex, launch.params)),
            tuple(content.tobytes() for content in launch.contents), launch.grid, launch.block, launch.cluster,
            launch.dynamic_smem, {"clusters": (0,)},
        )  # fmt: skip


@functools.cache
def programs() -> dict[str, tuple[Program, ...]]:
    """All of them, by kind."""
    kinds = {
        "arithmetic": _arithmetic, "instructions": _instructions, "wgmma": _matrices, "tensor copies": _tensor_copies,
        "tcgen05": tensor_cores, "clusters": clusters, "synchronisation": synchronisation, "kernels": _frozen,
    }  # fmt: skip
    return {name: tuple(kind()) for name, kind in kinds.items()}


@functools.cache
def _by_name() -> dict[str, tuple[str, Program]]:
    found = {}
    for kind, members in programs().items():
        for program in members:
            if program.name in found:
                raise ValueError(f"two programs are called {program.name!r}")
            found[program.name] = kind, program
    return found


def kind_of(name: str) -> str:
    """The kind of a program, by its name."""
    return _by_name()[name][0]


def program_of(name: str) -> Program:
    """A program before it is damaged."""
    return _by_name()[name][1]
