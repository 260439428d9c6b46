"""wgmma: layouts and fragments against formulas and a GPU's results; rounding, groups, and rules that must be kept."""

from __future__ import annotations

import ctypes
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.config import Sm90PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import (
    BarrierMisuse,
    Hang,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.emulator.machine.launch.run import Report
from cute_kernels.testing.ptx import aligned
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.machine.units.matrix.test_exact import nearest_float32, rational_dot
from tests.emulator.matrix_cases import IntegerWgmma, Wgmma, integer_wgmma_cases, wgmma_cases
from tests.emulator.ptx_launch import launch
from tests.emulator.record_matrix_on_gpu import digest, result_array
from tests.emulator.wgmma_registers import rows_of_accumulators

RECORDED = json.loads((Path(__file__).parents[3] / "data" / "matrix_h200.json").read_text())
POLICIES = ("eager", "lazy", "random")
WAIT = "wgmma.wait_group.sync.aligned 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
FENCE = "wgmma.fence.sync.aligned;"

REPEATED = "ptxas drops a wgmma that is repeated word for word"
"""Why a GPU leaves other bytes: machine code of four in a row has one QGMMA (H100, driver 580), of four with a
``wgmma.fence`` between them four."""


def run(
    case: Wgmma, text: str | None = None, options: Options | None = None, threads: int = 128,
    hardware: str | None = None
) -> np.ndarray:  # fmt: skip
    return run_with_report(case, text, options, threads, hardware)[0]


def run_with_report(
    case: Wgmma, text: str | None, options: Options | None, threads: int = 128, hardware: str | None = None
) -> tuple[np.ndarray, Report]:
    out = result_array(case)
    image, _ = case.image()
    report = launch(
        text or case.ptx(), aligned(image), aligned(case.registers()), out,
        block=(threads, 1, 1), dynamic_smem=len(image), options=options, hardware=hardware,
    )  # fmt: skip
    return out, report


def changed(case: Wgmma, *edits: tuple[str, str]) -> str:
    text = case.ptx()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(wgmma_cases()), ids=repr)
def test_result_equals_the_formula_and_the_gpu(case: Wgmma) -> None:
    """Small integers: every sum is exact, so silicon, emulator and integer arithmetic agree in every bit."""
    out = run(case)
    assert np.array_equal(out, case.fragments(case.expected()))
    assert digest(out) == RECORDED[repr(case)]


@pytest.mark.parametrize("case", list(integer_wgmma_cases()), ids=repr)
def test_integers_equal_integer_arithmetic(case: IntegerWgmma) -> None:
    """All values of the types; sums leave int32, at its lower end only with a sign, and wrap or saturate there."""
    a, b, d = case.values()
    sums = d + a @ b.T
    assert not case.accumulate or sums.max() >= 2**31
    assert not case.accumulate or sums.min() < -(2**31) or case.a_type == case.b_type == "u8"
    out = run(case, options=Options())
    assert np.array_equal(out, case.fragments(case.expected()))


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("in_registers", [False, True])
def test_result_does_not_depend_on_the_schedule(completion: str, in_registers: bool) -> None:
    case = Wgmma(a_in_registers=in_registers, steps=4)
    for seed in range(4):
        out = run(case, options=Options(seed=seed, completion=completion, interleave="random"))
        assert np.array_equal(out, case.fragments(case.expected()))


@pytest.mark.parametrize("scale", [1.0, 2.0**20, 3e7, 1e-9])
def test_one_rounding_per_instruction(scale: float) -> None:
    """E4M3 products and an accumulator of any magnitude, on the grid of the products or not, against rationals."""
    rng, case = np.random.default_rng(5), Wgmma(n=8, a_in_registers=True)
    a, b = (rng.normal(0, 20, (rows, 32)).astype(ml_dtypes.float8_e4m3fn) for rows in (64, 8))
    old = (rng.normal(0, 1, (64, 8)) * scale).astype(np.float32)
    image, _ = case.image()
    image[case.layout("b").offsets(8, 32)] = b.view(np.uint8)
    warps = a.view(np.uint32).reshape(4, 2, 8, 2, 4)
    fragments = warps.transpose(3, 1, 0, 2, 4).reshape(4, 128)
    registers, out = np.concatenate([fragments, case.fragments(old)]), result_array(case)
    launch(
        case.ptx(), aligned(image), aligned(registers), out,
        block=(128, 1, 1), dynamic_smem=len(image), options=Options(arithmetic="exact"),
        hardware="sums that are not exact, which PTX lets a tensor core round as it does",
    )  # fmt: skip
    by_warp = np.split(out, 4, axis=1)
    got = np.concatenate([rows_of_accumulators(each.copy()).view(np.float32) for each in by_warp])
    for i, j in np.ndindex(64, 8):
        products = rational_dot(a[i].astype(float), b[j].astype(float))
        assert got[i, j] == nearest_float32(products + Fraction(float(old[i, j])))


def test_nan_stays_in_its_row_and_column() -> None:
    case = Wgmma(n=16, a_in_registers=True)
    registers = case.registers()
    registers[0, 5] = registers[0, 5] & ~np.uint32(0xFF) | np.uint32(0x7F)  # an E4M3 NaN in row 5 / 4 = 1
    out = result_array(case)
    image, _ = case.image()
    launch(case.ptx(), aligned(image), aligned(registers), out, block=(128, 1, 1), dynamic_smem=len(image))
    nan = np.zeros((64, 16), np.float32)
    nan[1] = 1
    wrong = case.fragments(nan).view(np.float32) == 1
    assert np.isnan(out.view(np.float32)[wrong]).all()
    assert np.array_equal(out[~wrong], case.fragments(case.expected())[~wrong])


ASKED = {"detectors": Options(), "none": Options(detectors=False), "counters": Options(counters=True)}
SOME_CASES = [case for case in wgmma_cases() if case.n <= 64]


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("case", [*SOME_CASES[::4], *list(integer_wgmma_cases())[::40]], ids=repr)
def test_what_is_counted(case: Wgmma, options: Options, completion: str) -> None:
    """Whatever looks at the operations changes no result; of operands in shared memory every byte is read once."""
    out, report = run_with_report(case, None, replace(options, completion=completion))
    assert np.array_equal(out, case.fragments(case.expected()))
    assert report.mma_instructions == case.steps
    if options.counters:
        rows = case.n + (0 if case.a_in_registers else 64)
        counts = {metric: count for _, kind, metric, count in report.units.rows() if kind == "mma"}
        assert counts == {"instructions": case.steps, "operand_wavefronts": case.steps * rows * 32 // 128}


@pytest.mark.parametrize("order", [(2, 1, 0, 3), (3, 2, 1, 0), (0, 2, 1, 3)])
def test_accumulators_in_any_order(order: tuple[int, ...]) -> None:
    """Registers lie in memory by their names, which need not be the order of the operands."""
    case = Wgmma(n=8, steps=2)
    text = re.sub(r"%d([0-3])\b", lambda match: f"%d{order[int(match[1])]}", case.ptx())
    assert text != case.ptx()
    assert np.array_equal(run(case, text), case.fragments(case.expected()))


def test_computed_accumulators_reach_the_operation() -> None:
    """The old D is not what memory holds when the block begins, but computed in it."""
    case = Wgmma(n=8)
    a, b, d = case.values()
    old = case.fragments(d.astype(np.float32)).view(np.float32)
    expected = case.fragments((a @ b.T).astype(np.float32)).view(np.float32) + old[[0, 1, 0, 3]]
    expected[[0, 2]] += 1
    out = run(case, changed(case, (FENCE, f"add.f32 %d0, %d0, 0f3F800000; mov.b32 %d2, %d0; {FENCE}")))
    assert np.array_equal(out.view(np.float32), expected)


def test_accumulators_that_a_move_has_packed() -> None:
    """Two halves that change places, by moves and by a permutation of bytes."""
    case = Wgmma(n=8)
    moves = ".reg .b16 %half<2>; mov.b32 {%half0, %half1}, %d0; mov.b32 %d1, {%half1, %half0};"
    packed, permuted = (
        run(case, changed(case, (FENCE, f"{{ {swap} }} {FENCE}")))
        for swap in (moves, "prmt.b32 %d1, %d0, 0, 0x1032;")
    )
    assert np.array_equal(packed, permuted)
    assert not np.array_equal(packed, run(case))


def test_two_warpgroups_read_one_operand() -> None:
    """Neither is ordered before the other: the race detector keeps a reader of each."""
    case = make_case(positions=128, n=136, k=272, sm_count=2, config=Sm90PatchEmbedConfig(tile_rows=64))
    report = emulate(case.plan, case.tensors, Options())
    assert report.mma_instructions and not case.mismatches().any()


# --- waiting and groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", POLICIES)
def test_wait_group_leaves_the_newest_groups_running(completion: str) -> None:
    """Two groups into different registers: after wait_group 1 the first is complete, which the program may read."""
    case = Wgmma(n=8, a_in_registers=True)
    text = case.ptx()
    mma = next(line for line in text.splitlines() if line.startswith("wgmma.mma_async"))
    second = mma.replace("%d", "%e").replace("%p", "%q").replace("%edesc", "%bdesc")
    body = f"{mma}\n{COMMIT}\nsetp.ne.b32 %q, 0, 0;\n{second}\n{COMMIT}\nwgmma.wait_group.sync.aligned 1;"
    text = text.replace(f"{mma}\n{COMMIT}\n{WAIT}", body).replace("ret;", f"{WAIT}\nret;")
    text = text.replace(".reg .pred %p;", ".reg .pred %p, %q; .reg .b32 %e<4>;")
    assert text.count("wgmma.mma_async") == 2
    out = run(case, text, Options(completion=completion))
    assert np.array_equal(out, case.fragments(case.expected()))


def test_a_pending_operation_reads_shared_memory_when_it_completes() -> None:
    """Detectors off, so that only the schedule shows the fault: B is overwritten between issue and wait."""
    case = Wgmma(n=8, a_in_registers=True)
    spoil = f"{COMMIT}\nbar.sync 0;\nst.shared.b32 [%mine], 0;\nst.shared.b32 [%mine+512], 0;\nbar.sync 0;\n{WAIT}"
    text = changed(case, (f"{COMMIT}\n{WAIT}", spoil))
    good = case.fragments(case.expected())
    assert np.array_equal(run(case, text, Options(completion="eager", detectors=False)), good)
    late = run(case, text, Options(completion="lazy", detectors=False))
    a, b, d = case.values()
    assert np.array_equal(late, case.fragments(d.astype(np.float32)))
    for completion in POLICIES:
        with pytest.raises(SharedMemoryRace, match=r"wgmma\.mma_async"):
            run(case, text, Options(completion=completion))


def test_operands_may_be_overwritten_after_the_wait() -> None:
    case = Wgmma(n=8, a_in_registers=True)
    text = changed(case, (WAIT, f"{WAIT}\nst.shared.b32 [%mine], 0;"))
    for completion in POLICIES:
        # Threads of other warps may still wait, but the operation that they wait for is complete.
        out = run(case, text, Options(completion=completion))
        assert np.array_equal(out, case.fragments(case.expected()))


def test_missing_proxy_fence() -> None:
    case = Wgmma()
    for completion in POLICIES:
        with pytest.raises(ProxyFenceMissing, match="PTX line"):
            run(case, changed(case, ("fence.proxy.async;\n", "")), Options(completion=completion))


def test_a_warp_that_does_not_take_part_is_named() -> None:
    """Three warps wait for the fourth, which takes another way."""
    case = Wgmma(n=8)
    text = changed(case, ("bar.sync 0;\n", "bar.sync 0;\nsetp.ge.u32 %p, %thread, 96;\n@%p bra SKIP;\n"))
    text = text.replace("ret;", "SKIP: ret;")
    with pytest.raises(Hang) as error:
        run(case, text)
    assert "not issued by warps 3 of the warpgroup" in error.value.report
    text = text.replace("%thread, 96", "%thread, 32").replace(WAIT, "ret;")
    text = text.replace("ret;\nst.global", "bra SKIP;\nst.global")
    with pytest.raises(BarrierMisuse, match="the kernel ends with .* not issued by warps 1, 2, 3") as misuse:
        run(case, text)
    assert (misuse.value.ptx_line, misuse.value.warp) == (line_of_mma(text), "CTA 0 warp 0")


def test_an_operation_that_nobody_waits_for_is_reported_where_it_was_issued() -> None:
    case = Wgmma(n=8)
    text = changed(case, (WAIT, ""))
    text = text[: text.index(COMMIT) + len(COMMIT)] + "\nret;\n}\n"
    with pytest.raises(IllegalAccess, match="never waited for wgmma.mma_async") as error:
        run(case, text, Options())
    warp = f"CTA 0 warp {error.value.message.split()[1]}"  # it is of no importance which of the four is named
    assert (error.value.ptx_line, error.value.warp) == (line_of_mma(text), warp)


def line_of_mma(text: str) -> int:
    """PTX line of the first wgmma.mma_async."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if "wgmma.mma_async" in line)


def test_warps_must_issue_the_same_operation() -> None:
    case = Wgmma(n=8, a_in_registers=True)
    mma = next(line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async"))
    # Warp 3 gets another scale-d.
    text = changed(case, (mma, f"setp.lt.u32 %p, %thread, 96;\n{mma}"))
    with pytest.raises(BarrierMisuse, match=r"scale-d \d where the other warps of its warpgroup issued .* scale-d \d"):
        run(case, text)
    # Warp 3 gets another matrix B.
    text = changed(case, (mma, f"setp.lt.u32 %p, %thread, 96;\n@!%p add.u64 %bdesc, %bdesc, 2;\n{mma}"))
    with pytest.raises(BarrierMisuse, match=r"B 0x\w+, scale-d 1 where the other warps .* issued"):
        run(case, text)


def test_operands_are_the_same_in_all_lanes() -> None:
    case = Wgmma(n=8, a_in_registers=True)
    mma = next(line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async"))
    text = changed(case, (mma, f"cvt.u64.u32 %x, %thread;\nadd.u64 %bdesc, %bdesc, %x;\n{mma}"))
    with pytest.raises(BarrierMisuse, match="descriptor .* differs between the lanes"):
        run(case, text)
    text = changed(case, (mma, f"setp.lt.u32 %p, %thread, 16;\n{mma}"))
    with pytest.raises(BarrierMisuse, match="scale-d .* differs between the lanes"):
        run(case, text)


def test_exit_without_waiting() -> None:
    case = Wgmma(n=8)
    stores = "\n".join(line for line in case.ptx().splitlines() if line.startswith("st.global"))
    with pytest.raises(IllegalAccess, match="never waited"):
        run(case, changed(case, (WAIT, ""), (stores, "")))


# --- registers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ((FENCE, ""), r"without any wgmma\.fence"),
        ((FENCE, f"{FENCE}\nadd.u32 %d0, %d0, 0;"), r"register %d0 is accessed at PTX line \d+ `add.u32 %d0.*no wgmma"),
        ((FENCE, f"{FENCE}\nadd.u32 %a1, %a1, 0;"), r"register %a1 is accessed"),
        ((FENCE, f"{FENCE}\nst.global.b32 [%out], %d3;"), r"register %d3 is accessed"),
        ((WAIT, ""), r"register %d0 is an accumulator of the wgmma at PTX line"),
        ((WAIT, "wgmma.wait_group.sync.aligned 1;"), r"register %d0 is an accumulator"),
        ((f"{COMMIT}\n{WAIT}", WAIT), r"register %d0 is an accumulator"),
        ((f"{COMMIT}\n{WAIT}", f"{WAIT}\n{COMMIT}"), r"register %d0 is an accumulator"),
        ((WAIT, f"mov.b32 %d1, 5;\n{WAIT}"), r"register %d1 is an accumulator"),
        ((WAIT, f"add.u32 %i, %d2, 5;\n{WAIT}"), r"register %d2 is an accumulator"),
        ((WAIT, f"mov.b32 %a2, 5;\n{WAIT}"), r"register %a2 is an A fragment"),
        ((WAIT, f"@%p {WAIT}"), "guard"),
    ],
)  # fmt: skip
def test_registers_are_fenced_and_waited_for(edit: tuple[str, str], message: str) -> None:
    """Found before the kernel runs, whatever its schedule."""
    case = Wgmma(n=8, a_in_registers=True)
    run(case)
    with pytest.raises((IllegalAccess, UnsupportedPTX), match=message) as error:
        run(case, changed(case, edit))
    assert error.value.ptx_line


def test_a_chain_of_one_shape_needs_one_fence_and_another_shape_a_wait() -> None:
    case = Wgmma(n=16, a_in_registers=True, steps=2)
    run(case)
    first, second = (line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async"))
    narrow = second.replace("n16", "n8").replace(", %d4, %d5, %d6, %d7", "")
    assert narrow != second
    with pytest.raises(IllegalAccess, match=r"another shape"):
        run(case, changed(case, (second, narrow)))
    out = run(case, changed(case, (second, f"{COMMIT}\n{WAIT}\n{narrow}")))
    half = replace(case, n=8)
    a, b, d = case.values()
    assert np.array_equal(out[:4], half.fragments((a @ b.T + d)[:, :8].astype(np.float32)))
    assert np.array_equal(out[4:], case.fragments((a[:, :32] @ b[:, :32].T + d).astype(np.float32))[4:])


def test_a_loop_carries_what_is_in_flight() -> None:
    """The hazard appears only along the back edge: the fence stands before the loop, the access at its end."""
    case = Wgmma(n=8, a_in_registers=True)
    mma = next(line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async"))
    loop = f"mov.u32 %i, 0;\n{FENCE}\nLOOP: {mma}\n{COMMIT}\n{WAIT}\nadd.u32 %i, %i, 1;\nsetp.lt.u32 %p, %i, 3;\n"
    clean = changed(case, (FENCE, ""), (f"{mma}\n{COMMIT}\n{WAIT}", f"{loop}@%p bra LOOP;"))
    a, b, d = case.values()
    # scale-d is the loop condition from the second turn on: the first turn's is 1 as well.
    assert np.array_equal(run(case, clean), case.fragments((3 * (a @ b.T) + d).astype(np.float32)))
    broken = clean.replace("@%p bra LOOP;", "add.u32 %d0, %d0, 0;\n@%p bra LOOP;")
    with pytest.raises(IllegalAccess, match="register %d0 is accessed"):
        run(case, broken)


def test_moves_of_accumulators_in_flight_are_followed() -> None:
    """PTX's registers are virtual: a copy holds the result once the wgmma is complete, and is not to be read before."""
    case = Wgmma(n=8, a_in_registers=True)
    store = "st.global.b32 [%out+0], %d0;"
    edits = [(WAIT, f"mov.b32 %i, %d0;\n{WAIT}"), (store, store.replace("%d0", "%i"))]
    for completion in POLICIES:
        out = run(case, changed(case, *edits), Options(completion=completion))
        assert np.array_equal(out, case.fragments(case.expected()))
    with pytest.raises(IllegalAccess, match="register %i is an accumulator"):
        run(case, changed(case, (WAIT, f"mov.b32 %i, %d0;\nadd.u32 %i, %i, 1;\n{WAIT}")))


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".f32.e4m3.e4m3", ".f16.e4m3.e4m3", "must be a list of 2 registers"),
        (".f32.e4m3.e4m3", ".s32.e4m3.e4m3", "qualifier .s32 does not exist here"),
        (".f32.e4m3.e4m3", ".f32.e4m3.f16", "qualifier .f16 does not go with the others"),
        ("m64n8k32", "m64n8k16", "does not exist"),
        ("m64n8k32", "m64n12k32", "does not exist"),
        ("m64n8k32", "m64n16k32", "must be a list of 8 registers"),
        ("%p, 1, 1;", "%p, 2, 1;", "imm-scale"),
        ("%p, 1, 1;", "%p, 1, 1, 0;", "takes 6 operands .*; 7 are given"),
        ("mma_async.sync", "mma_async.sp.sync", "qualifier .sp does not exist here"),
    ],
)
def test_unknown_forms_are_refused(old: str, new: str, message: str) -> None:
    case = Wgmma(n=8)
    with pytest.raises(UnsupportedPTX, match=message):
        run(case, changed(case, (old, new)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".s32.s8.u8", ".f32.s8.u8", "qualifier .f32 does not exist here"),
        (".s32.s8.u8", ".s32.s8.e4m3", "qualifier .e4m3 does not exist here"),
        (".s32.s8.u8", ".s32.e4m3.e4m3", "qualifier .s32 does not exist here"),
        (".s32.s8.u8", ".s32.s8.s4", "qualifier .s4 does not exist here"),
        ("m64n8k32", "m64n40k32", "does not exist"),
        ("m64n8k32", "m64n8k64", "does not exist"),
        ("%bdesc, %p;", "%bdesc, %p, 1, 1;", "takes 4 operands .*; 6 are given"),
        (".s32.s8.u8", ".s32.s8.u8.relu", "qualifier .relu does not exist here"),
    ],
)
def test_unknown_forms_of_integers_are_refused(old: str, new: str, message: str) -> None:
    case = IntegerWgmma(n=8)
    with pytest.raises(UnsupportedPTX, match=message):
        run(case, changed(case, (old, new)))


@pytest.mark.parametrize(("old", "new"), [("k32.s32", "k32.satfinite.s32"), (".s8.u8", ".s8.u8.satfinite")])
def test_places_of_satfinite(old: str, new: str) -> None:
    case = IntegerWgmma(n=8)
    out = run(case, changed(case, (old, new)))
    assert np.array_equal(out, case.fragments(replace(case, saturate=True).expected()))
    assert not np.array_equal(out, case.fragments(case.expected()))


def test_floats_do_not_saturate() -> None:
    case = Wgmma(n=8)
    with pytest.raises(UnsupportedPTX, match="qualifier .satfinite does not exist here"):
        run(case, changed(case, (".f32.e4m3.e4m3", ".f32.e4m3.e4m3.satfinite")))


#: What takes the second warpgroup of 256 threads around everything: warp-uniform, known as such or not.
AROUND = {
    "a broadcast of the warp index": "shr.u32 %i, %thread, 5; shfl.sync.idx.b32 %wide|%p, %i, 0, 31, -1;"
    "setp.ge.u32 %p, %wide, 4;",
    "arithmetic on the thread index": "mul.lo.u32 %i, %thread, 3; setp.ge.u32 %p, %i, 384;",
}
THREAD = "mov.u32 %thread, %tid.x;"


@pytest.mark.parametrize("name", AROUND)
def test_branches_around_wgmma(name: str) -> None:
    """In the second case lanes may diverge, as far as the text says; they do not."""
    case = Wgmma(n=8, steps=2, a_in_registers=True)
    text = changed(case, (THREAD, f"{THREAD} {AROUND[name]} @%p bra SKIP;"), ("bar.sync 0;", "bar.sync 1, 128;"))
    text = text.replace("ret;", "SKIP: ret;")
    for completion in POLICIES:
        out = run(case, text, Options(completion=completion), threads=256)
        assert np.array_equal(out, case.fragments(case.expected()))


@pytest.mark.parametrize("edited", [FENCE, COMMIT, WAIT])
def test_a_part_of_a_warp_is_reported(edited: str) -> None:
    case = Wgmma(n=8)
    skipped = f"setp.lt.u32 %p, %thread, 16; @%p bra SKIP; {edited}"
    text = changed(case, (edited, skipped), ("ret;", "SKIP: bar.warp.sync -1; ret;"))
    with pytest.raises(BarrierMisuse, match="wgmma.* is executed by lanes 0xffff0000 of a warp with live lanes"):
        run(case, text, Options())


def decoded(descriptor: int) -> tuple[int, ...] | None:
    """Address, leading and stride offset, and number of the swizzle; None: it is refused."""
    matrix = STRUCTURES["Matrix"]()
    if library().wgmma_matrix(ctypes.c_int64(descriptor).value, ctypes.addressof(matrix)):
        return None
    return matrix.address, matrix.leading, matrix.stride, matrix.swizzle


def test_descriptor_fields() -> None:
    modes = [CONSTANTS[f"SWIZZLE_{name}"] for name in ("NONE", "128B", "64B", "32B")]
    assert decoded(0x123 | 0x45 << 16 | 0x678 << 32 | 3 << 62) == (0x1230, 0x450, 0x6780, modes[3])
    assert [decoded(mode << 62)[3] for mode in range(4)] == modes
    for bit in (14, 15, 30, 31, *range(46, 62)):
        assert decoded(1 << bit | 1 << 62) is None
    assert decoded(4 << 49) == decoded(0), "without a swizzle there is no pattern to be offset"


@pytest.mark.parametrize(("bit", "words"), [(50, "base offset 2"), (47, "a bit outside of the fields of a wgmma")])
def test_descriptors_that_are_refused(bit: int, words: str) -> None:
    case = Wgmma(n=8, a_in_registers=True)
    (mma,) = [line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async")]
    with pytest.raises(UnsupportedPTX, match=f"matrix descriptor 0x[0-9a-f]{{16}}: {words}") as caught:
        run(case, changed(case, (mma, f"add.u64 %bdesc, %bdesc, {1 << bit};\n{mma}")))
    assert caught.value.instruction.startswith("wgmma.mma_async")


def test_operands_beyond_shared_memory() -> None:
    case = Wgmma(n=8, a_in_registers=True)
    edit = ("add.u64 %bdesc, %base, ", "add.u64 %bdesc, %base, 0x3000;\nadd.u64 %bdesc, %bdesc, ")
    with pytest.raises(IllegalAccess, match="operand at shared offsets") as caught:
        run(case, changed(case, edit))
    assert caught.value.kind == "out-of-bounds"


def test_operands_that_were_never_written() -> None:
    case = Wgmma(n=8, a_in_registers=True)
    text = "\n".join(line for line in case.ptx().splitlines() if not line.startswith("st.shared"))
    with pytest.raises(IllegalAccess, match="uninitialised"):
        run(case, text)
