"""Launches of our kernels as data: PTX, shape, parameters and buffers, without CuTe DSL, plans or host code.

A frozen launch gives the emulator the same bytes on every machine and after every change of the kernels: buffers are
filled from a seed by integer arithmetic, and lie at addresses that stand for themselves in the file (`address_of`).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cute_kernels.emulator import DYNAMIC_SHARED_BASE, EmulatorError, GlobalMemory, Options, run
from cute_kernels.emulator.programs import host
from cute_kernels.emulator.programs.recorded import Relocation
from cute_kernels.kernels.graph import graph_of
from cute_kernels.operations.compile import host_arguments
from cute_kernels.testing.ptx import aligned
from tests.emulator.checking.mutation.targets import KernelTarget
from tests.emulator.oracle.outcomes import Outcome, executed, reported

ARCHIVE = Path(__file__).parent / "data.tar.xz"
"""Two files for each frozen launch: ``NAME.ptx`` and ``NAME.jsonl``."""
_UNWRITTEN = 0xFF  # what written buffers hold before the launch: NaNs that no rounding produces
_ALIGNMENT = 1024
_FLOATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}


@functools.cache
def read_archive(archive: Path) -> dict[str, bytes]:
    """The files of an archive, by name."""
    if not archive.exists():
        return {}
    with tarfile.open(archive, "r:xz") as files:
        return {member.name: files.extractfile(member).read() for member in files.getmembers()}


def write_archive(archive: Path, files: dict[str, bytes]) -> None:
    """Adds files to an archive, or replaces those of the same names; of several processes only one may write."""
    found = read_archive(archive) | files
    with tarfile.open(archive, "w:xz", preset=9) as target:
        for name in sorted(found):
            member = tarfile.TarInfo(name)
            member.size = len(found[name])
            target.addfile(member, io.BytesIO(found[name]))
    read_archive.cache_clear()


def address_of(number: int) -> int:
    """Where a buffer lies in a file. In a process it lies elsewhere; no pair of small integers looks like this."""
    return (0x5EED << 48) + (number << 32)


@dataclass(frozen=True)
class Buffer:
    """Global memory of a launch: ``elements`` of a torch ``dtype``, by name."""

    name: str
    dtype: str
    elements: int
    written: bool

    def fill(self, seed: int) -> np.ndarray:
        """Its bytes before a launch: random numbers of moderate size, or poison where the kernel writes."""
        kind = _FLOATS.get(self.dtype) or np.dtype(self.dtype)
        if self.written:
            return np.full(self.elements * np.dtype(kind).itemsize, _UNWRITTEN, np.uint8)
        # Of NumPy's generators this is the one whose stream stays the same in all versions.
        random = np.random.RandomState(seed)  # noqa: NPY002
        if self.dtype not in _FLOATS:
            limits = np.iinfo(kind)
            return random.randint(limits.min, limits.max + 1, self.elements, kind).view(np.uint8)
        # Exact in FP32, of several magnitudes and both signs, and none of it depends on a mathematical library.
        values = random.randint(-128, 129, self.elements) * 2.0 ** random.randint(-10, -4, self.elements)
        return values.astype(kind).view(np.uint8)


@dataclass(frozen=True)
class FrozenLaunch:
    """One launch. ``limit``: most warp instructions that a mutant may execute; ``params``: hexadecimal digits."""

    name: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    programmatic: bool
    params: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    roles: tuple[str, ...]
    barriers: tuple[tuple[int, str], ...]
    limit: int = 0

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> FrozenLaunch:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        values["buffers"] = tuple(Buffer(**each) for each in entry["buffers"])
        values["barriers"] = tuple((offset, name) for offset, name in entry["barriers"])
        return cls(**values)

    @functools.cached_property
    def ptx(self) -> str:
        return read_archive(ARCHIVE)[f"{self.name}.ptx"].decode()

    @functools.cached_property
    def contents(self) -> tuple[np.ndarray, ...]:
        """Of the buffers before the launch."""
        return tuple(buffer.fill(seed) for seed, buffer in enumerate(self.buffers))

    def execute(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        """Runs a text with the launch's shape and parameters on fresh memory, ``repeat`` times in a row."""
        arrays = [aligned(bytes_, _ALIGNMENT) for bytes_ in self.contents]
        moved = Relocation(tuple(
            (address_of(number), array.ctypes.data, array.nbytes) for number, array in enumerate(arrays)
        ))  # fmt: skip
        memory = GlobalMemory()
        for buffer, array in zip(self.buffers, arrays):
            memory.register_tensor(array, buffer.name, writable=buffer.written)
        options = dataclasses.replace(options, arithmetic="exact", roles=self.roles, barriers=self.barriers)
        try:
            for _ in range(repeat):
                report = run(
                    ptx, self.kernel, grid=self.grid, block=self.block, cluster=self.cluster, memory=memory,
                    dynamic_smem=self.dynamic_smem, params=[moved.words(bytes.fromhex(each)) for each in self.params],
                    options=options, programmatic=self.programmatic,
                )  # fmt: skip
        except EmulatorError as error:
            return reported(error, moved)
        written = b"".join(array.tobytes() for buffer, array in zip(self.buffers, arrays) if buffer.written)
        return executed(report, written)


def freeze(name: str, target: KernelTarget) -> tuple[FrozenLaunch, str]:
    """The last launch of a mutation target, compiled anew, and its PTX with the paths of sources cut short."""
    case = target.case()
    plan = case.plan.launches[-1]
    operands, artifact = case.tensors.of(plan), target.artifact
    captured = host.record(artifact.function, *host_arguments(plan, **operands.addresses(), stream=0))
    written, tensors = operands.written(plan), operands.tensors()
    moved = Relocation(tuple(
        (tensor.data_ptr(), address_of(number), tensor.numel() * tensor.element_size())
        for number, tensor in enumerate(tensors.values())
    ))  # fmt: skip
    first = DYNAMIC_SHARED_BASE + plan.smem[0].offset
    launch = FrozenLaunch(
        name, artifact.kernel_name, captured.grid, captured.block, captured.cluster, captured.dynamic_smem,
        captured.programmatic, tuple(moved.words(value).hex() for value in _read_by(artifact.ptx, captured.params)),
        tuple(
            Buffer(each, str(tensor.dtype).removeprefix("torch."), tensor.numel(), each in written)
            for each, tensor in tensors.items()
        ),
        plan.roles,
        tuple((first + 8 * slot, each) for slot, each in enumerate(graph_of(plan).barrier_names())),
    )  # fmt: skip
    return launch, re.sub(r'(\.file\s+\d+\s+")[^"]*/(cute_kernels|site-packages)/', r"\1/\2/", artifact.ptx)


def _read_by(ptx: str, params: tuple[bytes, ...]) -> list[bytes]:
    """Parameters without what the kernel cannot read: padding, which the host leaves as it finds it."""
    names = re.findall(r"^\s*\.param[^;\n]*?\b(\w+_param_\d+)", ptx, re.MULTILINE)
    result = []
    for name, value in zip(names, params, strict=True):
        kept = bytearray(len(value))
        loads = re.findall(rf"ld\.param(?:\.v(\d))?\.[a-z](\d+)[^;]*\[{name}(?:\+(\d+))?\]", ptx)
        places = [(int(offset or 0), int(count or 1) * int(bits) // 8) for count, bits, offset in loads]
        if re.search(rf"mov\.b64\s+[%\w]+, {name};", ptx):  # a tensor map; its second half is not initialised
            places.append((0, 64))
        for offset, nbytes in places:
            kept[offset : offset + nbytes] = value[offset : offset + nbytes]
        result.append(bytes(kept))
    return result
