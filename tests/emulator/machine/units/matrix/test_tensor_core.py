"""tcgen05.mma: descriptors, operand layouts, accumulator layouts, arithmetic, completion."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import (
    BarrierMisuse,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    TensorMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine
from cute_kernels.emulator.machine.state.memory_tables import STATES
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory, shared_address
from cute_kernels.emulator.machine.state.tmem import rectangle, tensor_address
from cute_kernels.emulator.machine.units.matrix.operands import (
    decode_instruction,
    decode_matrix,
)
from cute_kernels.emulator.machine.units.matrix.tensor_core import ASKED, TensorCore
from cute_kernels.emulator.machine.units.matrix.tensor_mma import KIND_NAMES
from cute_kernels.emulator.races.happens_before import FULL
from cute_kernels.emulator.races.sync_point import Order
from tests.emulator.barriers import Barriers
from tests.emulator.crew import Crew, fence_proxy, wait_for
from tests.emulator.tensor_registers import TensorRegisters

TensorMma = STRUCTURES["TensorMma"]
SIZE, BARRIER, A, B = 200 * 1024, 1024, 4 * 1024, 100 * 1024
#: name -> (kind, type code, NumPy type, bytes)
TYPES = {
    "e4m3": ("f8f6f4", 0, ml_dtypes.float8_e4m3fn, 1),
    "e5m2": ("f8f6f4", 1, ml_dtypes.float8_e5m2, 1),
    "f16": ("f16", 0, np.float16, 2),
    "bf16": ("f16", 1, ml_dtypes.bfloat16, 2),
    "tf32": ("tf32", 2, np.float32, 4),
}
MODES = {"none": 0, "128B_atom32B": 1, "128B": 2, "64B": 4, "32B": 6}
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_atom32B": 128}


class Machine:
    def __init__(self, ctas: int = 2, policy: str = "eager", detectors: bool = True) -> None:
        self.crew = Crew([SIZE] * ctas, [0, 0]) if detectors else None
        tracker = self.crew.tracker if detectors else None
        self.shared = ClusterMemory([SharedMemory(SIZE, rank, detect=detectors) for rank in range(ctas)])
        self.barriers = Barriers(self.shared)
        self.engine = AsyncEngine(policy, random.Random(0), tables=self.barriers.address)
        self.barriers.tables.work, self.engine.reraise = self.engine.address, self.barriers.reraise
        self.barriers.ask = self._ask
        self.barriers.tables.flags = STATES if detectors else 0
        self.tmem = [TensorRegisters(detect=detectors) for _ in range(ctas)]
        for memory in self.tmem:
            memory.alloc(512)
        self.core = TensorCore(self.shared, self.tmem, self.barriers, self.engine, tracker)
        self.core.threads_of(1)
        self.warp: Any = self.crew[0] if detectors else SimpleNamespace()
        self.warp.label = "warp 0"
        self.barriers.labels.append(self.warp.label)
        if detectors:
            self._context = tracker.context(self.crew[0].agent)

    def _ask(self, what: int) -> bool:
        if what == CONSTANTS["RACE_RAISED"]:
            self.crew.tracker.unit.reraise()
        if what not in ASKED:
            raise self.barriers.fault(what)
        self.core.answer(what, self.barriers.tables.fault, self.warp)
        return True

    def mma(
        self, *, kind: str, cta_group: int, d: int, a: int, b: int, instruction: int, accumulate: bool, rank: int = 0,
        a_in_tmem: bool = False, scales: tuple[int, int, int] = (0, 0, 0), disabled: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """tcgen05.mma by the first lane of the warp.

        Args:
            kind, cta_group, d, a, b, instruction, accumulate: as in PTX.
            rank: of the issuing CTA.
            a_in_tmem: A is in tensor memory.
            scales: addresses of those of A and B, and how many each row has.
            disabled: mask of lanes of D.
        """
        record = TensorMma(
            kind=KIND_NAMES.index(kind), group=cta_group, a_in_tensor=a_in_tmem, scales=scales[2], rank=rank, d=d, a=a,
            b=b, instruction=instruction, accumulate=accumulate, scale_a=scales[0], scale_b=scales[1],
        )  # fmt: skip
        record.disabled[: len(disabled)] = disabled
        self._enter()
        if library().tensor_mma(self.barriers.address, ctypes.addressof(record)):
            self.barriers.reraise()

    def _enter(self) -> None:
        if self.crew is not None:
            self.barriers.tables.context = ctypes.addressof(self._context)

    def commit(self, barrier: int, multicast: int = -1) -> None:
        """tcgen05.commit by the first lane of the warp, which is in CTA 0."""
        self._enter()
        if library().tensor_commit(self.barriers.address, 0, 0, 0, barrier, multicast):
            self.barriers.reraise()

    def write(self, rank: int, offset: int, data: np.ndarray) -> None:
        self.shared.view(shared_address(rank, offset), len(data), write=True)[...] = data


@dataclass
class Layout:
    """An operand of [rows, k] elements in shared memory: where element (row, k) lies, by the canonical layouts."""

    swizzle: str
    mn_major: bool
    nbytes: int
    rows: int

    @property
    def leading_stride(self) -> tuple[int, int]:
        """Byte offsets for the descriptor: tiles of 8 rows (K-major) or one span (MN-major), 64 bytes of gap."""
        span = SPANS[self.swizzle]
        if self.mn_major:
            group = span * (4 if self.swizzle == "128B_atom32B" else 8)
            return (4096, group) if self.swizzle != "none" else (256, 2048)
        return (1024 * 20, span * 8) if self.swizzle == "none" else (16, span * 8)

    def offset(self, row: int, k: int) -> int:
        """Byte offset of an element from the start of a pattern that is aligned to its period."""
        leading, stride = self.leading_stride
        span = SPANS[self.swizzle]
        fast, slow = (row, k) if self.mn_major else (k, row)
        byte = fast * self.nbytes
        if self.swizzle == "none":
            if self.mn_major:
                return byte // 16 * stride + byte % 16 + slow // 8 * leading + slow % 8 * 16
            return byte // 16 * leading + byte % 16 + slow // 8 * stride + slow % 8 * 16
        if self.swizzle == "128B_atom32B":
            line, atom = slow % 4, byte % 128 // 32
            return byte // 128 * leading + slow // 4 * stride + line * 128 + (atom ^ line) * 32 + byte % 32
        line, chunk = slow % 8, byte % span // 16
        # Rows of the pattern, counted in units of 128 bytes, are XORed into the chunk number.
        flip = line * span // 128
        outer = byte // span * leading if self.mn_major else 0
        if not self.mn_major and byte >= span:
            raise AssertionError("an operand row longer than its span")
        return outer + slow // 8 * stride + line * span + (chunk ^ flip) * 16 + byte % 16

    def place(self, values: np.ndarray) -> np.ndarray:
        """Bytes of shared memory that hold ``values`` [rows, k]."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, self.nbytes)
        spots = [[self.offset(row, k) for k in range(values.shape[1])] for row in range(values.shape[0])]
        image = np.zeros(max(map(max, spots)) + self.nbytes, np.uint8)
        for row, k in np.ndindex(values.shape):
            image[spots[row][k] : spots[row][k] + self.nbytes] = raw[row, k]
        return image

    def descriptor(self, base: int, k_bytes: int = 0) -> int:
        leading, stride = self.leading_stride
        start = base + k_bytes
        return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | MODES[self.swizzle] << 61


def idesc(a: str, b: str, m: int, n: int, a_mn: bool = False, b_mn: bool = False, negate: int = 0) -> int:
    types = 1 << 4 | TYPES[a][1] << 7 | TYPES[b][1] << 10
    return types | negate << 13 | a_mn << 15 | b_mn << 16 | n // 8 << 17 | m // 16 << 24


def accumulator(machine: Machine, cta_group: int, m: int, n: int, column: int = 0, lane: int = 0) -> np.ndarray:
    """float32 [m, n] from tensor memory, element by element of the documented layouts."""
    result = np.empty((m, n), np.float32)
    rows = m // cta_group
    for i, j in np.ndindex(m, n):
        cta, row = divmod(i, rows)
        if cta_group == 1 and m == 64:
            where, col = lane + row % 16 + 32 * (row // 16), j
        elif cta_group == 2 and m == 128:
            where, col = row + (64 if j >= n // 2 else 0), j % (n // 2)
        else:
            where, col = row, j
        result[i, j] = machine.tmem[cta].floats[column + col, where]
    return result


def small_integers(rng: np.random.Generator, shape: tuple[int, int], name: str) -> np.ndarray:
    """Values that every type represents exactly, whose dot products FP32 represents exactly."""
    return rng.integers(-8, 9, shape).astype(TYPES[name][2])


SHAPES = [
    *((1, 64, 8), (1, 64, 248), (1, 128, 8), (1, 128, 24), (1, 128, 248), (1, 128, 256)),
    *((2, 128, 16), (2, 128, 256), (2, 256, 16), (2, 256, 48), (2, 256, 256)),
]
K_MAJOR = ["none", "32B", "64B", "128B"]
OPERANDS = [
    *((name, swizzle, False) for name in TYPES for swizzle in K_MAJOR),
    *((name, swizzle, True) for name in ("e4m3", "f16") for swizzle in K_MAJOR),
    ("tf32", "128B_atom32B", True),
    ("f16", "128B_atom32B", True),
]


def run_once(
    machine: Machine, cta_group: int, m: int, n: int, x: np.ndarray, w: np.ndarray, layouts: tuple[Layout, Layout],
    names: tuple[str, str], changes: dict | None = None,
) -> None:  # fmt: skip
    """Places the operands in the CTAs of the group and issues one MMA, with some of its arguments changed."""
    rows, columns = m // cta_group, n // cta_group
    for rank in range(cta_group):
        machine.write(rank, A, layouts[0].place(x[rank * rows : (rank + 1) * rows]))
        machine.write(rank, B, layouts[1].place(w[rank * columns : (rank + 1) * columns]))
    arguments = {
        "kind": TYPES[names[0]][0], "cta_group": cta_group, "rank": 0, "d": 0, "accumulate": False,
        "a": layouts[0].descriptor(A), "b": layouts[1].descriptor(B),
        "instruction": idesc(*names, m, n, layouts[0].mn_major, layouts[1].mn_major),
    }  # fmt: skip
    machine.mma(**(arguments | (changes or {})))


@pytest.mark.parametrize("name, swizzle, mn_major", OPERANDS)
def test_operand_layouts(name: str, swizzle: str, mn_major: bool):
    """A in the layout under test, B in the common one, and the other way round."""
    rng = np.random.default_rng(0)
    nbytes, k = TYPES[name][3], 32 // TYPES[name][3]
    m, n = 128, 64
    for swap in (False, True):
        machine = Machine(1)
        tested = Layout(swizzle, mn_major, nbytes, n if swap else m)
        common = Layout("128B", False, nbytes, m if swap else n)
        layouts = (common, tested) if swap else (tested, common)
        a, b = small_integers(rng, (m, k), name), small_integers(rng, (n, k), name)
        run_once(machine, 1, m, n, a, b, layouts, (name, name))
        np.testing.assert_array_equal(accumulator(machine, 1, m, n), a.astype(int) @ b.astype(int).T)


@pytest.mark.parametrize("shift", [128, 384, 896])
def test_an_operand_may_start_in_the_middle_of_the_swizzle_pattern(shift: int):
    """TMA permutes by absolute address bits: a buffer aligned to 128 bytes only starts in another row of the pattern.

    The tutorial kernels of CuTe DSL do that, and wgmma on an H200 reads it so.
    """
    rng = np.random.default_rng(shift)
    a, b = small_integers(rng, (128, 16), "f16"), small_integers(rng, (64, 16), "f16")
    image = np.zeros(shift + 128 * 128, np.uint8)
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(128, 2, 16)
    for row, chunk in np.ndindex(128, 2):
        address = shift + row * 128 + chunk * 16
        address ^= (address >> 7 & 7) << 4
        image[address : address + 16] = raw[row, chunk]
    machine, layout = Machine(1), Layout("128B", False, 2, 0)
    machine.write(0, A, image)
    machine.write(0, B, layout.place(b))
    machine.mma(
        kind="f16", cta_group=1, rank=0, d=0, accumulate=False, a=layout.descriptor(A, shift),
        b=layout.descriptor(B), instruction=idesc("f16", "f16", 128, 64),
    )  # fmt: skip
    np.testing.assert_array_equal(accumulator(machine, 1, 128, 64), a.astype(int) @ b.astype(int).T)


@pytest.mark.parametrize("cta_group, m, n", SHAPES)
def test_accumulator_layouts(cta_group: int, m: int, n: int):
    rng = np.random.default_rng(m + n)
    machine = Machine()
    layout = Layout("128B", False, 1, 0)
    a, b = small_integers(rng, (m, 32), "e4m3"), small_integers(rng, (n, 32), "e5m2")
    run_once(machine, cta_group, m, n, a, b, (layout, layout), ("e4m3", "e5m2"), {"d": 128})
    expected = a.astype(int) @ b.astype(int).T
    np.testing.assert_array_equal(accumulator(machine, cta_group, m, n, 128), expected)
    machine.mma(
        kind="f8f6f4", cta_group=cta_group, rank=0, d=tensor_address(0, 128), accumulate=True,
        a=layout.descriptor(A), b=layout.descriptor(B), instruction=idesc("e4m3", "e5m2", m, n, negate=1),
    )  # fmt: skip
    assert not accumulator(machine, cta_group, m, n, 128).any(), "D - A B"
    untouched = machine.tmem[0].cells[:128].any() or machine.tmem[0].cells[128 + n :].any()
    assert not untouched and (cta_group == 2 or not machine.tmem[1].cells.any())


def test_m64_may_use_the_upper_half_of_each_quarter():
    rng = np.random.default_rng(0)
    machine = Machine(1)
    layout = Layout("64B", False, 2, 0)
    a, b = small_integers(rng, (64, 16), "bf16"), small_integers(rng, (16, 16), "bf16")
    run_once(machine, 1, 64, 16, a, b, (layout, layout), ("bf16", "bf16"), {"d": tensor_address(16, 0)})
    np.testing.assert_array_equal(accumulator(machine, 1, 64, 16, lane=16), a.astype(int) @ b.astype(int).T)
    assert not machine.tmem[0].cells[:, :16].any()
    for m, n, lane in ((64, 16, 8), (128, 16, 16)):
        with pytest.raises(IllegalAccess, match=f"accumulator at lane {lane}"):
            run_once(machine, 1, m, n, np.repeat(a, m // 64, 0), b, (layout, layout), ("bf16",) * 2, {"d": lane << 16})


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16"])
def test_a_whole_k_loop_bit_for_bit(policy: str, name: str):
    """Random normal operands, four K steps inside one 128-byte swizzle span, two buffers: torch float64 is exact."""
    rng = np.random.default_rng(1)
    machine = Machine(policy=policy)
    machine.barriers.init(BARRIER, 1)
    nbytes, k = TYPES[name][3], 128 // TYPES[name][3]
    layout, kind, m, n = Layout("128B", False, nbytes, 0), TYPES[name][0], 256, 96
    a, b = ((rng.standard_normal((rows, 2 * k)) * 3).astype(TYPES[name][2]) for rows in (m, n))
    for rank in range(2):
        for stage in range(2):
            part = slice(stage * k, (stage + 1) * k)
            machine.write(rank, A + 16384 * stage, layout.place(a[rank * 128 :][:128, part]))
            machine.write(rank, B + 16384 * stage, layout.place(b[rank * 48 :][:48, part]))
    for step in range(8):
        base, offset = 16384 * (step // 4), 32 * (step % 4)
        machine.mma(
            kind=kind, cta_group=2, rank=0, d=0, accumulate=step > 0, a=layout.descriptor(A + base, offset),
            b=layout.descriptor(B + base, offset), instruction=idesc(name, name, m, n),
        )  # fmt: skip
    machine.commit(BARRIER)
    machine.engine.drain()
    x, w = (torch.from_numpy(v.astype(np.float64)) for v in (a, b))
    expected = torch.zeros(m, n)
    for start in range(0, 2 * k, 32 // nbytes):
        part = slice(start, start + 32 // nbytes)
        expected = (expected.double() + x[:, part] @ w[:, part].T).float()
    np.testing.assert_array_equal(accumulator(machine, 2, m, n), expected.numpy())
    assert machine.core.barriers.tables.mmas == 8


def halfway_operands(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 operands whose every dot product is 64 + 2^-18, halfway between two FP32 numbers."""
    a, b = np.zeros((rows, 32), ml_dtypes.float8_e4m3fn), np.zeros((16, 32), ml_dtypes.float8_e4m3fn)
    a[:, 0] = b[:, 0] = 8
    a[:, 1] = b[:, 1] = 2.0**-9
    return a, b


def store_everywhere(machine: Machine, value: float) -> None:
    for warp in range(4):
        values = np.full((32, 16), value, np.float32).view(np.uint32)
        machine.tmem[0].store(warp, tensor_address(32 * warp, 0), "32x32b", 16, values)


@pytest.mark.parametrize("value, expected", [(2.0**-60, 64 + 2.0**-17), (-(2.0**-60), 64), (0, 64)])
def test_accumulating_onto_arbitrary_values(value: float, expected: float):
    """tcgen05.st may write what lies on no grid with E4M3 products; float64 would lose it and round to even."""
    machine = Machine(1)
    layout = Layout("128B", False, 1, 0)
    store_everywhere(machine, value)
    run_once(machine, 1, 128, 16, *halfway_operands(128), (layout, layout), ("e4m3", "e4m3"), {"accumulate": True})
    np.testing.assert_array_equal(accumulator(machine, 1, 128, 16), np.float32(expected))


def test_accumulators_that_share_columns_do_not_share_their_history():
    """M = 64 twice in the same columns: in the lower half lanes an E4M3 sum, in the upper ones an arbitrary value."""
    machine = Machine(1)
    layout = Layout("128B", False, 1, 0)
    store_everywhere(machine, 2.0**-60)
    run_once(machine, 1, 64, 16, *halfway_operands(64), (layout, layout), ("e4m3", "e4m3"))
    upper = {"d": tensor_address(16, 0), "accumulate": True}
    run_once(machine, 1, 64, 16, *halfway_operands(64), (layout, layout), ("e4m3", "e4m3"), upper)
    np.testing.assert_array_equal(accumulator(machine, 1, 64, 16), np.float32(64))
    np.testing.assert_array_equal(accumulator(machine, 1, 64, 16, lane=16), np.float32(64 + 2.0**-17))


def test_nan_and_tf32_operands():
    machine = Machine(1)
    layout = Layout("128B", False, 1, 0)
    a, b = np.zeros((128, 32), ml_dtypes.float8_e4m3fn), np.ones((16, 32), ml_dtypes.float8_e4m3fn)
    a[5, 3] = np.nan
    run_once(machine, 1, 128, 16, a, b, (layout, layout), ("e4m3", "e4m3"))
    bits = accumulator(machine, 1, 128, 16).view(np.uint32)
    assert (bits[5] == 0x7FFFFFFF).all() and not np.delete(bits, 5, 0).any()
    layout = Layout("128B", False, 4, 0)
    a, b = np.zeros((128, 8), np.float32), np.zeros((16, 8), np.float32)
    a[:, 0], b[:, 0] = np.array([0x3F801FFF], np.uint32).view(np.float32), 1
    run_once(machine, 1, 128, 16, a, b, (layout, layout), ("tf32", "tf32"))
    assert (accumulator(machine, 1, 128, 16) == 1).all(), "the 13 low bits are not read"


@pytest.mark.parametrize("name", ["e4m3", "bf16", "tf32"])
def test_a_from_tensor_memory(name: str):
    rng = np.random.default_rng(0)
    nbytes, k = TYPES[name][3], 32 // TYPES[name][3]
    a, b = small_integers(rng, (256, k), name), small_integers(rng, (32, k), name)
    machine = Machine()
    layout = Layout("128B", False, nbytes, 0)
    for rank in range(2):
        machine.write(rank, B, layout.place(b[16 * rank :][:16]))
        for warp in range(4):
            rows = np.ascontiguousarray(a[128 * rank + 32 * warp :][:32]).view(np.uint32)
            machine.tmem[rank].store(warp, tensor_address(32 * warp, 64), "32x32b", 8, rows)

    def issue(m: int) -> None:
        machine.mma(
            kind=TYPES[name][0], cta_group=2, rank=0, d=0, a=64, b=layout.descriptor(B), a_in_tmem=True,
            instruction=idesc(name, name, m, 32), accumulate=False,
        )  # fmt: skip

    issue(256)
    np.testing.assert_array_equal(accumulator(machine, 2, 256, 32), a.astype(int) @ b.astype(int).T)
    with pytest.raises(UnsupportedPTX, match="A in tensor memory"):
        issue(128)


def test_instruction_descriptors_that_are_refused():
    good = idesc("e4m3", "e5m2", 256, 256)
    fields = decode_instruction("f8f6f4", 2, good | 1 << 14 | 1 << 15)
    assert (fields.m, fields.n, fields.a_type.name, fields.b_type.name) == (256, 256, "e4m3", "e5m2")
    assert (fields.negate_a, fields.negate_b, fields.a_mn_major, fields.b_mn_major) == (False, True, True, False)
    for bits, text in ((1 << 2, "sparsity"), (1 << 3, "saturation"), (1 << 30, "reserved"), (2 << 4, "D type 3")):
        with pytest.raises(UnsupportedPTX, match=text):
            decode_instruction("f8f6f4", 2, good | bits)
    with pytest.raises(UnsupportedPTX, match=r"D type 3; implemented is 0 \(f16\), 1 \(f32\)"):
        decode_instruction("f16", 2, idesc("f16", "f16", 256, 256) | 3 << 4)
    with pytest.raises(UnsupportedPTX, match="A type 2; implemented are 0 .e4m3., 1 .e5m2., 3 .e2m3., 4 .e3m2., 5 .e2"):
        decode_instruction("f8f6f4", 2, good | 2 << 7)
    with pytest.raises(UnsupportedPTX, match="A of e3m2 MN-major; elements of less than eight bits are K-major"):
        decode_instruction("f8f6f4", 2, good | 4 << 7 | 1 << 15)
    with pytest.raises(UnsupportedPTX, match="kind::i8"):
        decode_instruction("i8", 1, good)


#: PTX ISA 9.2, "Matrix Shape", dense MMAs without .ws: kind, cta_group -> legal M, legal N as written there.
LEGAL_SHAPES = {
    ("f16", 1): ((64, 128), "8 16 24 ... 256"),
    ("f16", 2): ((128, 256), "16 32 ... 256"),
    ("tf32", 1): ((64, 128), "8 16 24 ... 256"),
    ("tf32", 2): ((128, 256), "16 32 ... 256"),
    ("f8f6f4", 1): ((64, 128), "8 16 ... 256"),
    ("f8f6f4", 2): ((128, 256), "16 32 ... 256"),
    ("i8", 1): ((64, 128), "8 16 24 32 48 ... 256"),
    ("i8", 2): ((128, 256), "32 64 ... 256"),
}


@pytest.mark.parametrize(("kind", "group"), LEGAL_SHAPES)
def test_shapes_are_those_of_the_table(kind: str, group: int) -> None:
    """Every shape that the descriptor can say is accepted or refused as the table says."""
    rows, text = LEGAL_SHAPES[kind, group]
    listed, last = (part.split() for part in text.split("..."))
    first, second = int(listed[-2]), int(listed[-1])
    legal = {int(n) for n in listed} | set(range(second, int(last[0]) + 1, second - first))
    word = {"f16": 1 << 4, "tf32": 1 << 4 | 2 << 7 | 2 << 10, "f8f6f4": 1 << 4, "i8": 2 << 4}[kind]
    for m, n in product(range(0, 512, 16), range(0, 512, 8)):
        descriptor = word | n // 8 << 17 | m // 16 << 24
        if m in rows and n in legal:
            fields = decode_instruction(kind, group, descriptor)
            assert (fields.m, fields.n) == (m, n)
        else:
            with pytest.raises(IllegalAccess, match=f"shape {m}x{n} with cta_group::{group}; legal are {rows[0]}xN"):
                decode_instruction(kind, group, descriptor)


def test_matrix_descriptors_that_are_refused():
    good = Layout("128B", False, 1, 0).descriptor(A)
    assert decode_matrix(good).address == A and decode_matrix(good).stride == 1024
    assert decode_matrix(good + (96 >> 4)).address == A + 96, "a K step inside the span"
    for bits, text in ((1 << 49, "base offset"), (1 << 52, "absolute"), (1 << 47, "bits 46-48"), (1 << 61, "mode 3")):
        with pytest.raises(UnsupportedPTX, match=text):
            decode_matrix(good | bits)
    plain = Layout("none", False, 1, 0).descriptor(A)
    assert decode_matrix(plain | 4 << 49) == decode_matrix(plain), "without a swizzle there is no pattern to be offset"
    with pytest.raises(UnsupportedPTX, match=f"offset {A + 128}, in the middle of the pattern of swizzle 128B_atom32B"):
        decode_matrix(Layout("128B_atom32B", True, 2, 0).descriptor(A) + (128 >> 4))
    for swizzle, mn_major, name in (("128B_atom32B", False, "f16"), ("128B", True, "tf32")):
        nbytes = TYPES[name][3]
        layout = Layout(swizzle, mn_major, nbytes, 0)
        with pytest.raises(UnsupportedPTX, match=f"swizzle {swizzle}"):
            Machine(1).mma(
                kind=TYPES[name][0], cta_group=1, rank=0, d=0, a=layout.descriptor(A), b=layout.descriptor(B),
                instruction=idesc(name, name, 128, 16, mn_major, mn_major), accumulate=False,
            )  # fmt: skip


def one_mma(machine: Machine, **changes) -> None:
    layout = Layout("128B", False, 1, 0)
    ones = np.ones((16, 32), ml_dtypes.float8_e4m3fn)
    run_once(machine, 1, 128, 16, np.repeat(ones, 8, 0), ones, (layout, layout), ("e4m3", "e4m3"), changes)


def test_illegal_operands_and_accumulators():
    layout = Layout("128B", False, 1, 0)
    for changes, text in (
        ({"a": layout.descriptor(SIZE - 1024)}, f"which has {SIZE} bytes"),
        ({"a": layout.descriptor(A + 16384)}, "uninitialised shared memory"),
        ({"d": 500}, "leaves the 128 x 512 cells"),
        ({"accumulate": True}, "uninitialised TMEM"),
        ({"cta_group": 2, "instruction": idesc("e4m3", "e4m3", 256, 32)}, "the cluster has no CTA 1"),
    ):
        with pytest.raises(IllegalAccess, match=text):
            one_mma(Machine(1), **changes)
    machine = Machine(1)
    machine.tmem[0].dealloc(0, 512)
    machine.tmem[0].alloc(32)
    with pytest.raises(IllegalAccess, match="column 32 is not allocated"):
        one_mma(machine, d=24)
    with pytest.raises(UnsupportedPTX, match="odd one of its pair"):
        one_mma(Machine(2), cta_group=2, rank=1)


@pytest.mark.parametrize("detectors", [False, True])
def test_an_mma_that_is_repeated_is_checked_again(detectors: bool) -> None:
    """What is known of an MMA from before says nothing of the columns that are allocated and written now."""
    machine = Machine(1, detectors=detectors)
    one_mma(machine)
    one_mma(machine, accumulate=True)
    one_mma(machine, accumulate=True)
    assert (machine.tmem[0].floats[:16] == 96).all()
    machine.tmem[0].dealloc(0, 512)
    with pytest.raises(IllegalAccess, match="column 0 is not allocated"):
        one_mma(machine, accumulate=True)
    machine.tmem[0].alloc(32)
    if detectors:
        with pytest.raises(IllegalAccess, match="uninitialised TMEM"):
            one_mma(machine, accumulate=True)
    one_mma(machine)
    machine.write(0, A, np.full(32, 0x40, np.uint8))  # 2 in the first row
    layout = Layout("128B", False, 1, 0)
    machine.mma(
        kind="f8f6f4", cta_group=1, rank=0, d=0, a=layout.descriptor(A), b=layout.descriptor(B),
        instruction=idesc("e4m3", "e4m3", 128, 16), accumulate=True,
    )  # fmt: skip
    assert (machine.tmem[0].floats[:16] == np.where(np.arange(128) == 0, 96, 64)).all()


def test_unfenced_operand_is_reported():
    machine = Machine(1)
    machine.barriers.init(BARRIER, 1)
    machine.barriers.watch(BARRIER, machine.crew.tracker.initialise(machine.crew[0].agent, BARRIER))
    one_mma(machine)
    machine.commit(BARRIER)
    wait_for(machine.crew.tracker, machine.crew[0], BARRIER, Order.SYNC, 0)
    machine.crew.store(0, machine.shared, np.array([B + 1024 + 16]), np.ones((1, 16), np.uint8))
    with pytest.raises(ProxyFenceMissing, match=f"offset {B + 1040} of CTA 0, which the store of warp 0 wrote"):
        layout = Layout("128B", False, 1, 0)
        machine.mma(
            kind="f8f6f4", cta_group=1, rank=0, d=0, a=layout.descriptor(A), b=layout.descriptor(B),
            instruction=idesc("e4m3", "e4m3", 128, 16), accumulate=False,
        )  # fmt: skip
    fence_proxy(machine.crew[0].agent, FULL)
    one_mma(machine)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_mma_guards_its_operands_and_its_accumulator_until_the_commit_was_waited_for(policy: str):
    machine = Machine(1, policy=policy)
    machine.barriers.init(BARRIER, 1)
    crew, place = machine.crew, rectangle(tensor_address(0, 128), "32x32b", 1)
    machine.barriers.watch(BARRIER, crew.tracker.initialise(crew[0].agent, BARRIER))
    one_mma(machine, d=128)
    with pytest.raises(SharedMemoryRace, match="a store of warp 0 .* which the tcgen05.mma.*read"):
        crew.touch(0, np.array([A + 128]), 16, write=True)
    crew.touch(0, np.array([A + 48]), 16, write=True)
    with pytest.raises(TensorMemoryRace, match="tcgen05.ld of warp 0 reads TMEM column 128.*tcgen05.mma.*warp 0 wrote"):
        crew.tracker.tensor.load(crew[0].agent, place, 0)
    machine.commit(BARRIER)
    machine.engine.drain()
    with pytest.raises(TensorMemoryRace, match="tcgen05.commit"):
        crew.tracker.tensor.load(crew[0].agent, place, 0)
    wait_for(crew.tracker, crew[0], BARRIER, Order.SYNC, 0)
    crew.tracker.tensor.load(crew[0].agent, place, 0)
    crew.touch(0, np.array([A + 128]), 16, write=True)
    assert (machine.tmem[0].load(0, tensor_address(0, 128), "32x32b", 1).view(np.float32) == 32).all()


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_commit_arrives_after_the_mmas_before_it(policy: str):
    machine = Machine(2, policy=policy)
    for rank in range(2):
        machine.barriers.init(shared_address(rank, BARRIER), 1)
    one_mma(machine)
    machine.commit(BARRIER, multicast=0b11)
    one_mma(machine, accumulate=True)
    seen = []
    while True:
        if machine.barriers.phase(BARRIER) and not seen:
            seen.append(machine.core.barriers.tables.mmas)
        if not machine.engine.step():
            break
    assert [barrier.phase for barrier in machine.barriers] == [1, 1]
    assert seen == [2 if policy == "eager" else 1] and machine.core.barriers.tables.mmas == 2
    assert "tcgen05.commit issued by warp 0" in machine.barriers.describe(BARRIER)


def test_commit_targets():
    machine = Machine(2)
    machine.barriers.init(shared_address(1, BARRIER), 1)
    machine.commit(shared_address(1, BARRIER))
    assert machine.barriers.phase(shared_address(1, BARRIER)) == 1
    for mask in (0, 0b100):
        with pytest.raises(IllegalAccess, match="multicast mask"):
            machine.commit(BARRIER, multicast=mask)
    with pytest.raises(BarrierMisuse, match="not initialised"):
        machine.commit(BARRIER)
