"""tcgen05.mma in the core: which are executed, with which results, and in a kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.core.layout import word_count
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.state.memory_tables import STATES, MemoryTables
from cute_kernels.emulator.units.core_units import Units
from cute_kernels.emulator.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.units.matrix.operands import KINDS
from cute_kernels.emulator.units.matrix.tensor_core import TensorCore
from cute_kernels.emulator.units.sm import Cluster
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.units.matrix.test_tensor_core import (
    OPERANDS,
    SHAPES,
    TYPES,
    A,
    B,
    Layout,
    Machine,
    accumulator,
    idesc,
    run_once,
    small_integers,
)

TEXT = "tcgen05.mma issued by warp 3"
LANE, WARP = 5, 3
COMMON = Layout("128B", False, 1, 0)


class CoreMachine(Machine):
    """`Machine` without a race detector, whose MMAs the core executes."""

    def __init__(self, ctas: int = 2, completion: str = "eager", known: bool = True) -> None:
        super().__init__(ctas, detectors=False)
        for memory, cta in zip(self.tmem, self.shared.ctas):
            memory.detect = cta.detect = True
            memory._written[:] = memory._full[:] = False
        self.cluster = SimpleNamespace(
            ctas=[SimpleNamespace(shared=cta, tmem=memory) for cta, memory in zip(self.shared.ctas, self.tmem)],
            gmem=GlobalMemory(), params=b"", options=Options(completion=completion), barriers=self.barriers,
            tma=SimpleNamespace(bytes_loaded=0, bytes_stored=0), progress=0, meter=None, trace=None,
            tensor_core=self.core, tracker=None, wgmma=SimpleNamespace(instructions=0), arithmetic=Arithmetic(),
        )  # fmt: skip
        self.tables = MemoryTables(self.cluster.barriers, self.cluster.gmem, self.cluster.params, STATES)
        self.units = Units(self.cluster, self.tables)
        self.known, self.done = known, False
        self.core.mma = self.mma

    def mma(
        self, *, kind: str, cta_group: int, rank: int, d: int, a: int, b: int, instruction: int, accumulate: bool,
        disabled: int = 0,
    ) -> None:  # fmt: skip
        """As `TensorCore.mma`; ``done`` says whether it was executed."""
        who = rank | LANE << 8 | WARP << 16
        if self.known:
            self.units.learn_mma(kind, cta_group, who, TEXT)
        numbers = cta_group, who, tuple(KINDS).index(kind), d, a, b, instruction, int(accumulate), disabled
        words = np.array([number & (1 << 64) - 1 for number in numbers], np.uint64)
        assert len(words) == word_count("MmaArguments")
        self.done = bool(library().tensor_mma(self.tables.address, words.ctypes.data, 0))
        Cluster.count(self.cluster)

    def state(self) -> list[np.ndarray]:
        """All that an MMA may change."""
        kept = [np.frombuffer(self.tables.header, np.uint8)]
        for cta, memory in zip(self.shared.ctas, self.tmem):
            kept += [cta.words[1], cta.states[1], memory.cells, memory._full, memory._written]
        return [array.copy() for array in kept]


@pytest.mark.parametrize("name, swizzle, mn_major", OPERANDS)
def test_operand_layouts(name: str, swizzle: str, mn_major: bool):
    """A in the layout under test, B in the common one, and the other way round."""
    rng = np.random.default_rng(1)
    nbytes, k = TYPES[name][3], 32 // TYPES[name][3]
    m, n = 128, 64
    for swap in (False, True):
        machine = CoreMachine(1)
        tested = Layout(swizzle, mn_major, nbytes, n if swap else m)
        common = Layout("128B", False, nbytes, m if swap else n)
        layouts = (common, tested) if swap else (tested, common)
        a, b = small_integers(rng, (m, k), name), small_integers(rng, (n, k), name)
        run_once(machine, 1, m, n, a, b, layouts, (name, name))
        assert machine.done and machine.core.instructions == 1
        np.testing.assert_array_equal(accumulator(machine, 1, m, n), a.astype(int) @ b.astype(int).T)


@pytest.mark.parametrize("cta_group, m, n", [shape for shape in SHAPES if shape[:2] != (1, 64)])
def test_accumulators(cta_group: int, m: int, n: int):
    """The first MMA writes D, the second one subtracts the same; no other cell changes."""
    rng = np.random.default_rng(m + n)
    machine = CoreMachine()
    a, b = small_integers(rng, (m, 32), "e4m3"), small_integers(rng, (n, 32), "e5m2")
    run_once(machine, cta_group, m, n, a, b, (COMMON, COMMON), ("e4m3", "e5m2"), {"d": 128})
    assert machine.done
    width = n // 2 if (cta_group, m) == (2, 128) else n
    np.testing.assert_array_equal(accumulator(machine, cta_group, m, n, 128), a.astype(int) @ b.astype(int).T)
    for rank, memory in enumerate(machine.tmem):
        inside = np.zeros(512, bool)
        inside[128 : 128 + width] = rank < cta_group
        np.testing.assert_array_equal(memory._full, inside)
        np.testing.assert_array_equal(memory._written, np.repeat(inside[:, None], 128, axis=1))
        assert not memory.cells[~inside].any()
    machine.core.mma(
        kind="f8f6f4", cta_group=cta_group, rank=0, d=128, accumulate=True, a=COMMON.descriptor(A),
        b=COMMON.descriptor(B), instruction=idesc("e4m3", "e5m2", m, n, negate=1),
    )  # fmt: skip
    assert machine.done and not accumulator(machine, cta_group, m, n, 128).any(), "D - A B"


def test_integers():
    rng = np.random.default_rng(3)
    machine = CoreMachine(1)
    a, b = rng.integers(-128, 128, (128, 32)).astype(np.int8), rng.integers(0, 256, (24, 32)).astype(np.uint8)
    for base, values in ((A, a), (B, b)):
        machine.write(0, base, COMMON.place(values))
    word = 2 << 4 | 1 << 7 | 0 << 10 | 24 // 8 << 17 | 128 // 16 << 24
    descriptors = {"a": COMMON.descriptor(A), "b": COMMON.descriptor(B)}
    machine.mma(kind="i8", cta_group=1, rank=0, d=0, instruction=word, accumulate=False, **descriptors)
    assert machine.done
    np.testing.assert_array_equal(machine.tmem[0].cells[:24].T.view(np.int32), a.astype(int) @ b.astype(int).T)


GOOD = idesc("e4m3", "e4m3", 256, 256)
#: What Python has to look at, and why: changes of a legal MMA of a pair, which is executed.
LEFT = {
    "lanes left out": {"disabled": 1 << 7},
    "sparsity": {"instruction": GOOD | 1 << 2},
    "saturation of floats": {"instruction": GOOD | 1 << 3},
    "a reserved bit": {"instruction": GOOD | 1 << 23},
    ".ws": {"instruction": GOOD | 1 << 30},
    "type of D": {"instruction": GOOD | 2 << 4},
    "type of A": {"instruction": GOOD | 2 << 7},
    "elements of six bits": {"instruction": GOOD | 3 << 10},
    "no such shape": {"instruction": GOOD + (4 << 24)},
    "BF16 to FP16": {"kind": "f16", "instruction": (GOOD | 1 << 7) & ~(3 << 4)},
    "swizzle mode": {"a": COMMON.descriptor(A) | 1 << 61},
    "no constant 1": {"b": COMMON.descriptor(B) & ~(1 << 46)},
    "base offset": {"a": COMMON.descriptor(A) | 1 << 49},
    "absolute leading dimension": {"a": COMMON.descriptor(A) | 1 << 52},
    "32-byte atoms, K-major": {"a": Layout("128B_atom32B", False, 1, 0).descriptor(A)},
    "TF32, MN-major, 16-byte atoms": {
        "kind": "tf32", "instruction": idesc("tf32", "tf32", 256, 256, a_mn=True),
    },
    "beyond shared memory": {"a": COMMON.descriptor(199 * 1024)},
    "uninitialised operand": {"a": COMMON.descriptor(40 * 1024)},
    "a lane of D": {"d": 16 << 16},
    "beyond tensor memory": {"d": 300},
    "D not allocated": {"d": 256},
    "D not written": {"accumulate": True},
    "the odd CTA of a pair": {"rank": 1},
}  # fmt: skip


@pytest.mark.parametrize("change", ["", *LEFT])
def test_what_is_left_to_python_changes_nothing(change: str):
    rng = np.random.default_rng(5)
    machine = CoreMachine()
    for memory in machine.tmem:
        memory.dealloc(0, 512)
        assert memory.alloc(256) == 0
    a, b = (small_integers(rng, (256, 32), "e4m3") for _ in range(2))
    before: list[np.ndarray] = []
    write = machine.write
    machine.write = lambda *place: (write(*place), before.__setitem__(slice(None), machine.state()))
    run_once(machine, 2, 256, 256, a, b, (COMMON, COMMON), ("e4m3", "e4m3"), LEFT.get(change, {}))
    assert machine.done == (not change)
    same = all(np.array_equal(x, y) for x, y in zip(before, machine.state()))
    assert same == bool(change)


@pytest.mark.parametrize("changes", [{"completion": "random"}, {"known": False}])
def test_mmas_of_others_are_left_to_python(changes: dict):
    """Where completion is not at once, and of threads of which Python has not told."""
    machine = CoreMachine(1, **changes)
    a = small_integers(np.random.default_rng(0), (128, 32), "e4m3")
    run_once(machine, 1, 128, 128, a, a, (COMMON, COMMON), ("e4m3", "e4m3"))
    assert not machine.done and not machine.tmem[0].cells.any()


def test_one_thread_of_which_python_has_told_is_not_another():
    machine = CoreMachine(1)
    a = small_integers(np.random.default_rng(0), (128, 32), "e4m3")
    run_once(machine, 1, 128, 128, a, a, (COMMON, COMMON), ("e4m3", "e4m3"))
    assert machine.done
    machine.known = False
    threads = ("f8f6f4", 1, 0), ("f16", 1, 0), ("f8f6f4", 2, 0), ("f8f6f4", 1, 1)
    for number, (kind, group, other) in enumerate(threads):
        words = [group, LANE << 8 | (WARP + other) << 16, tuple(KINDS).index(kind), 0, COMMON.descriptor(A)]
        words += [COMMON.descriptor(B), idesc("e4m3", "e4m3", 128, 128), 0, 0]
        done = library().tensor_mma(machine.tables.address, np.array(words, np.int64).ctypes.data, 0)
        assert done == (number == 0)


def test_many_operands():
    """More than are kept, and MN-major ones, which take most room."""
    rng = np.random.default_rng(9)
    machine = CoreMachine(1)
    layouts = Layout("128B", True, 1, 256), Layout("none", True, 1, 128)
    a, b = small_integers(rng, (128, 32), "e4m3"), small_integers(rng, (256, 32), "e4m3")
    images = layouts[1].place(a), layouts[0].place(b)
    for step in range(300):
        base = A + 1024 * (step % 40)
        machine.write(0, base, images[0])
        machine.write(0, B + 16 * 1024, images[1])
        machine.mma(
            kind="f8f6f4", cta_group=1, rank=0, d=0, accumulate=False, a=layouts[1].descriptor(base),
            b=layouts[0].descriptor(B + 16 * 1024), instruction=idesc("e4m3", "e4m3", 128, 256, True, True),
        )  # fmt: skip
        assert machine.done
        if step % 37 == 0:
            np.testing.assert_array_equal(accumulator(machine, 1, 128, 256), a.astype(int) @ b.astype(int).T)


@pytest.mark.parametrize("fault", ["", "nan", "large"])
@pytest.mark.parametrize("completion", ["eager", "random"])
@pytest.mark.parametrize("detectors", [False, True])
def test_kernel_of_mmas(fault: str, completion: str, detectors: bool, monkeypatch: pytest.MonkeyPatch):
    """Python executes none of them, but each where their completion is random."""
    case = make_case(batch=4, positions=256, n=256, k=512, sm_count=2, seed=4, config=Sm100PatchEmbedConfig())
    if fault:
        case.tensors.x[600, 40] = float("nan") if fault == "nan" else 448.0
    calls = itertools.count()
    mma = TensorCore.mma
    monkeypatch.setattr(TensorCore, "mma", lambda *args, **keywords: (next(calls), mma(*args, **keywords))[1])
    options = Options(detectors=detectors, completion=completion, seed=3)
    report = emulate(case.plan, case.tensors, options)
    python = next(calls)
    assert report.mma_instructions == 4 * 16
    assert python == (report.mma_instructions if completion == "random" else 0)
    wrong = case.mismatches()
    if fault:  # sums with large numbers need not be rounded as the reference rounds them
        assert case.tensors.out[600].isnan().all() == (fault == "nan")
        wrong[600] = False
    assert not wrong.any()
