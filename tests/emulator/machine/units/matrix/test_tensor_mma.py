"""tcgen05.mma of the core against its definition, what it refuses, and MMAs in kernels."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.state.tmem import tensor_address
from tests.emulator.definitions.tensor_mma import Multiply, TensorCores, Wrong
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.machine.units.matrix.test_scaled_mma import Case, operands, run_program, values_of
from tests.emulator.machine.units.matrix.test_tensor_core import (
    A,
    B,
    Layout,
    Machine,
    accumulator,
    idesc,
    small_integers,
)

COMMON = Layout("128B", False, 1, 0)
ALLOCATED, A_COLUMNS = 256, (64, 448)  # columns; the second place of A is not allocated
EMPTY = 2  # number of the buffer that nobody has written
STRIDE = 256 * 128  # bytes of a buffer


@functools.cache
def buffers() -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    """Small integers of A and of B: [CTAs, rows, K] in two buffers, none in the third."""
    rng = np.random.default_rng(7)
    return tuple([rng.integers(-8, 9, (2, rows, 32)), rng.integers(-8, 9, (2, rows, 32)), None] for rows in (128, 256))


@functools.cache
def image(which: int, number: int, rank: int) -> np.ndarray:
    return COMMON.place(buffers()[which][number][rank].astype(ml_dtypes.float8_e4m3fn))


def prepared(ctas: int, policy: str) -> tuple[Machine, TensorCores]:
    """Operands are in shared memory, and A in tensor memory too; D is allocated in part."""
    machine, model = Machine(ctas, policy), TensorCores(ctas, buffers())
    model.allocated[:ALLOCATED] = True
    model.a_rows = dict.fromkeys(A_COLUMNS, buffers()[0][0])
    model.written[:, :, A_COLUMNS[0] : A_COLUMNS[0] + 8] = True
    for rank, memory in enumerate(machine.tmem):
        memory.dealloc(0, 512)
        assert memory.alloc(ALLOCATED) == 0
        for number in range(2):
            machine.write(rank, A + 16384 * number, image(0, number, rank))
            machine.write(rank, B + STRIDE * number, image(1, number, rank))
        words = buffers()[0][0][rank].astype(ml_dtypes.float8_e4m3fn).view(np.uint32)
        for warp in range(4):
            part = np.ascontiguousarray(words[32 * warp :][:32])
            memory.store(warp, tensor_address(32 * warp, A_COLUMNS[0]), "32x32b", 8, part)
        model.cells[rank, :, A_COLUMNS[0] : A_COLUMNS[0] + 8] = words
    return machine, model


def issue(machine: Machine, mma: Multiply) -> None:
    in_tensor = mma.a_column is not None
    machine.mma(
        kind="f8f6f4", cta_group=mma.group, rank=mma.rank, d=tensor_address(*mma.d), accumulate=mma.accumulate,
        a=mma.a_column if in_tensor else COMMON.descriptor(A + 16384 * mma.buffers[0]), a_in_tmem=in_tensor,
        b=COMMON.descriptor(B + STRIDE * mma.buffers[1]), disabled=(0, 1 << 9) if mma.disabled else (),
        instruction=idesc("e4m3", "e4m3", mma.m, mma.n, negate=mma.negate),
    )  # fmt: skip


def of_one(group: int) -> st.SearchStrategy[Multiply]:
    """MMAs, most of them legal."""
    seldom = st.integers(0, 15).map(lambda number: number == 0)
    return st.builds(
        Multiply, st.just(group), st.sampled_from((64 * group, 128 * group)),
        st.integers(1, 256 // (8 * group)).map(lambda count: 8 * group * count),
        st.tuples(st.sampled_from((0, 0, 0, 0, 16, 8)), st.sampled_from((0, 72, 72, 96, 128, 200, 400))),
        st.booleans(), st.booleans(), st.sampled_from((None, None, None, *A_COLUMNS)),
        st.tuples(*[st.sampled_from((0, 0, 1, 1, EMPTY))] * 2), seldom.map(int), seldom,
    )  # fmt: skip


def outcome(run: object) -> str:
    """What is wrong, or nothing."""
    try:
        run()
    except (Wrong, EmulatorError) as error:
        return str(error)
    return ""


@given(st.lists(st.sampled_from((1, 2)).flatmap(of_one), min_size=1, max_size=5), st.sampled_from((1, 2)),
       st.sampled_from(("eager", "lazy", "random")))  # fmt: skip
def test_mmas_are_as_defined(mmas: list[Multiply], ctas: int, policy: str) -> None:
    """D, which cells are written, and the first thing that is wrong; MMAs of one CTA take effect in their order."""
    machine, model = prepared(ctas, policy)
    mmas = [mma for mma in mmas if mma.rank == mmas[0].rank]  # of one queue
    waiting: list[Multiply] = []

    def step(mma: Multiply) -> None:
        model.issue(mma)
        if policy != "eager":
            waiting.append(mma)
            return
        model.take_effect(mma)

    for mma in mmas:
        wrong, text = outcome(lambda mma=mma: step(mma)), outcome(lambda mma=mma: issue(machine, mma))
        assert bool(wrong) == bool(text) and wrong in text, (mma, wrong, text)
    while len(machine.engine):
        mma = waiting.pop(0)
        wrong, text = outcome(lambda mma=mma: model.take_effect(mma)), outcome(machine.engine.step)
        assert bool(wrong) == bool(text) and wrong in text, (mma, wrong, text)
    for rank, memory in enumerate(machine.tmem):
        kept = model.written[rank].T & ~np.isin(np.arange(512), range(64, 72))[:, None]
        np.testing.assert_array_equal(memory.floats[kept], model.cells[rank].T[kept])
        np.testing.assert_array_equal(memory._written[:ALLOCATED], model.written[rank].T[:ALLOCATED])


def memory_of(machine: Machine) -> list[np.ndarray]:
    """All that an MMA may change."""
    kept = []
    for cta, memory in zip(machine.shared.ctas, machine.tmem):
        kept += [cta.data, cta.states, memory.cells, memory._full, memory._written]
    return [array.copy() for array in kept]


GOOD = idesc("e4m3", "e4m3", 256, 256)
#: Changes of a legal MMA of a pair, and a word of what is said then.
REFUSED = {
    "lanes left out": ({"disabled": (1 << 7,)}, "disable-output-lane mask ['0x80', '0x0', '0x0', '0x0', '0x0'"),
    "sparsity": ({"instruction": GOOD | 1 << 2}, "sparsity"),
    "saturation of floats": ({"instruction": GOOD | 1 << 3}, "saturation of floats"),
    "a reserved bit": ({"instruction": GOOD | 1 << 23}, "reserved bit"),
    ".ws": ({"instruction": GOOD | 1 << 30}, "reserved bit"),
    "type of D": ({"instruction": GOOD | 2 << 4}, "D type 3"),
    "type of A": ({"instruction": GOOD | 2 << 7}, "A type 2"),
    "no such shape": ({"instruction": GOOD + (4 << 24)}, "shape 320x256"),
    "BF16 to FP16": ({"kind": "f16", "instruction": (GOOD | 1 << 7) & ~(3 << 4)}, "BF16 operands with an FP16"),
    "swizzle mode": ({"a": COMMON.descriptor(A) | 1 << 61}, "swizzle mode 3"),
    "no constant 1": ({"b": COMMON.descriptor(B) & ~(1 << 46)}, "not the constant 1"),
    "32-byte atoms, K-major": ({"a": Layout("128B_atom32B", False, 1, 0).descriptor(A)}, "K-major operand with"),
    "TF32, MN-major, 16-byte atoms": (
        {"kind": "tf32", "instruction": idesc("tf32", "tf32", 256, 256, a_mn=True)}, "MN-major tf32 operand with"
    ),
    "beyond shared memory": ({"a": COMMON.descriptor(199 * 1024)}, "operand at shared offsets 203776 to 220160 of"),
    "beyond all memory": ({"b": COMMON.descriptor(262128)}, "operand at shared offsets 262016 to"),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str, policy: str) -> None:
    """It is said when the MMA is issued, whenever it would take effect."""
    machine, _ = prepared(2, policy)
    before, (changes, text) = memory_of(machine), REFUSED[name]
    arguments = {
        "kind": "f8f6f4", "cta_group": 2, "d": 0, "a": COMMON.descriptor(A), "b": COMMON.descriptor(B),
        "instruction": GOOD, "accumulate": False,
    }  # fmt: skip
    with pytest.raises(EmulatorError) as caught:
        machine.mma(**(arguments | changes))
    assert text in str(caught.value)
    assert all(np.array_equal(x, y) for x, y in zip(before, memory_of(machine), strict=True))
    assert not len(machine.engine)
    machine.mma(**arguments)
    assert len(machine.engine) == (policy == "lazy")


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_execution_goes_on_after_a_report(policy: str) -> None:
    """With what memory holds, once; D counts as written then."""
    machine, model = prepared(1, policy)
    reports: list[EmulatorError] = []
    machine.tmem[0].report = machine.shared.ctas[0].report = reports.append
    mma = Multiply(1, 128, 64, (0, 128), True, False, None, (0, 0), 0, False)
    for _ in range(2):
        issue(machine, mma)
    machine.engine.drain()
    assert ["read of uninitialised TMEM: lane 0, column 128" in str(report) for report in reports] == [True]
    product = model.operands[0][0][0] @ model.operands[1][0][0, :64].T
    np.testing.assert_array_equal(accumulator(machine, 1, 128, 64, 128), 2 * product)


def test_the_other_cta_of_the_pair_has_exited() -> None:
    """Whether the MMA was executed before or not."""
    machine, _ = prepared(2, "eager")
    mma = Multiply(2, 256, 64, (0, 128), False, False, None, (0, 0), 0, False)
    issue(machine, mma)
    machine.shared.ctas[1].close()
    machine.barriers.cta(1).exited = True
    with pytest.raises(EmulatorError, match="shared memory of CTA 1, which has exited"):
        issue(machine, mma)


def test_many_operands() -> None:
    """More than are kept, and MN-major ones, which take most room."""
    rng = np.random.default_rng(9)
    machine = Machine(1, detectors=False)
    layouts = Layout("128B", True, 1, 256), Layout("none", True, 1, 128)
    a, b = small_integers(rng, (128, 32), "e4m3"), small_integers(rng, (256, 32), "e4m3")
    images = layouts[1].place(a), layouts[0].place(b)
    for step in range(300):
        base = A + 1024 * (step % 40)
        machine.write(0, base, images[0])
        machine.write(0, B + 16 * 1024, images[1])
        machine.mma(
            kind="f8f6f4", cta_group=1, d=0, accumulate=False, a=layouts[1].descriptor(base),
            b=layouts[0].descriptor(B + 16 * 1024), instruction=idesc("e4m3", "e4m3", 128, 256, True, True),
        )  # fmt: skip
        if step % 37 == 0:
            np.testing.assert_array_equal(accumulator(machine, 1, 128, 256), a.astype(int) @ b.astype(int).T)
    assert machine.core.barriers.tables.mmas == 300


# --- in kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "nan", "large"])
@pytest.mark.parametrize("completion", ["eager", "random"])
@pytest.mark.parametrize("detectors", [False, True])
def test_kernel_of_mmas(fault: str, completion: str, detectors: bool) -> None:
    case = make_case(batch=4, positions=256, n=256, k=512, sm_count=2, seed=4, config=Sm100PatchEmbedConfig())
    if fault:
        case.tensors.x[600, 40] = float("nan") if fault == "nan" else 448.0
    options = Options(detectors=detectors, completion=completion, seed=3)
    report = emulate(case.plan, case.tensors, options)
    assert report.mma_instructions == 4 * 16
    wrong = case.mismatches()
    if fault:  # sums with large numbers need not be rounded as the reference rounds them
        assert case.tensors.out[600].isnan().all() == (fault == "nan")
        wrong[600] = False
    assert not wrong.any()


WORD = 1 << 4 | 16 // 8 << 17 | 128 // 16 << 24  # E4M3 to FP32, 128 x 16


@pytest.mark.parametrize("completion", ["eager", "lazy"])
def test_each_lane_has_its_own_predicates(completion: str) -> None:
    """Two lanes issue one MMA: the first one writes D, the second one adds to it. A third MMA is guarded, for none."""
    case = Case("mxf8f6f4", ("e4m3", "e4m3"), n=16)
    mma = f"tcgen05.mma.cta_group::1.kind::f8f6f4 [%r8], %d8, %d9, {WORD}, %p4;"
    text = f"setp.ne.u32 %p4, %r0, 0; {mma} setp.gt.u32 %p6, %r0, 99; @%p6 {mma}"
    elements, _ = operands(case)
    product = values_of(elements[0], "e4m3") @ values_of(elements[1], "e4m3").T
    got, _ = run_program(text, case, Options(completion=completion, detectors=False), issuers=2)
    np.testing.assert_array_equal(got, 2 * product)


def test_descriptors_that_vary_between_lanes() -> None:
    """Each lane has its own descriptor of A: the second one begins eight rows further, and its D in another column."""
    case = Case("mxf8f6f4", ("e4m3", "e4m3"), n=16)
    word = 1 << 4 | 8 // 8 << 17 | 64 // 16 << 24
    text = (
        "mul.wide.u32 %d20, %r0, 16; add.u64 %d20, %d8, %d20; mul.lo.u32 %r60, %r0, 8; add.u32 %r60, %r60, %r8; "
        f"tcgen05.mma.cta_group::1.kind::f8f6f4 [%r60], %d20, %d9, {word}, %p4;"
    )
    elements, _ = operands(case)
    a, b = values_of(elements[0], "e4m3"), values_of(elements[1], "e4m3")
    got, _ = run_program(text, case, Options(detectors=False), issuers=2)
    lanes = (np.arange(64) // 16 * 32 + np.arange(64) % 16)[:, None]
    np.testing.assert_array_equal(got[lanes, np.arange(8)], a[:64] @ b[:8].T)
    np.testing.assert_array_equal(got[lanes, np.arange(8, 16)], a[8:72] @ b[:8].T)
