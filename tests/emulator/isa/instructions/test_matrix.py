"""ldmatrix and stmatrix: every element against the layout's formula and a GPU's results, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.matrix_cases import MatrixMove, matrix_cases
from tests.emulator.ptx_launch import launch
from tests.emulator.record_matrix_on_gpu import digest, result_array

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "matrix_h200.json").read_text())


def generic(text: str) -> str:
    """The same matrices at generic addresses."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if "matrix." in line)
    move = lines[at].replace(".shared", "").replace("[%i]", "[%x]")
    return "\n".join([*lines[:at], "cvt.u64.u32 %x, %i; cvta.shared.u64 %x, %x;", move, *lines[at + 1 :]])


def run(case: MatrixMove, text: str | None = None, block: int = 128) -> np.ndarray:
    out = result_array(case)
    launch(
        text or case.ptx(), aligned(case.image()), aligned(case.registers()), out,
        block=(block, 1, 1), dynamic_smem=4096,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", list(matrix_cases()), ids=repr)
def test_every_element(case: MatrixMove) -> None:
    out = run(case)
    assert np.array_equal(out, case.expected())
    assert digest(out) == RECORDED[repr(case)]


@pytest.mark.parametrize("case", list(matrix_cases()), ids=repr)
def test_generic_addresses(case: MatrixMove) -> None:
    assert np.array_equal(run(case, generic(case.ptx())), case.expected())


@pytest.mark.parametrize("store", [False, True])
def test_generic_addresses_of_other_memory_are_reported(store: bool) -> None:
    case = MatrixMove(store, 1, False)
    text = generic(case.ptx())
    assert "cvta.shared.u64 %x, %x;" in text

    def words(given: str) -> str:
        with pytest.raises(IllegalAccess) as caught:
            run(case, given)
        return str(caught.value)

    for given, expected in (
        (text.replace("cvta.shared.u64 %x, %x;", ""), "not one of shared memory"),  # the window is missing
        (text.replace("cvta.shared.u64 %x, %x;", "mov.u64 %x, %image;"), "not one of shared memory"),
        (text.replace("[%x]", "[%x+8]"), "misaligned"),
        (text.replace("[%x]", "[%x+1048576]"), "leaves its"),
    ):
        assert expected in words(given)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [(".m8n8", ".m16n16"), (".b16", ".b8"), (".x2", ".x4"), (".x2", ""), (".shared.b16", ".global.b16")],
)
def test_other_forms_are_refused(store: bool, old: str, new: str) -> None:
    case = MatrixMove(store, 2, False)
    line = next(line for line in case.ptx().splitlines() if "matrix." in line)
    with pytest.raises(UnsupportedPTX, match="PTX line"):
        run(case, case.ptx().replace(line, line.replace(old, new)))


@pytest.mark.parametrize("store", [False, True])
def test_rows_are_16_byte_aligned_and_in_bounds(store: bool) -> None:
    text = MatrixMove(store, 1, False).ptx()
    for shift, message in ((8, "misaligned"), (1 << 20, "leaves its|names CTA")):
        with pytest.raises(IllegalAccess, match=message):
            run(MatrixMove(store, 1, False), text.replace("add.u32 %i, %i, %shared;", f"add.u32 %i, %shared, {shift};"))


@pytest.mark.parametrize("store", [False, True])
def test_all_lanes_take_part(store: bool) -> None:
    case = MatrixMove(store, 1, False)
    lines = [
        f"setp.lt.u32 %p, %thread, 7;\n@%p {line}" if "matrix." in line else line for line in case.ptx().splitlines()
    ]
    with pytest.raises(BarrierMisuse, match="executed by lanes"):
        run(case, "\n".join(lines))


def test_unused_addresses_are_ignored() -> None:
    """x1 takes its rows from lanes 0 to 7; the others may hold anything."""
    for store in (False, True):
        case = MatrixMove(store, 1, True)
        registers = case.registers()
        registers[0, np.arange(128) % 32 >= 8] = 0x00FFFFFF
        out = result_array(case)
        launch(case.ptx(), aligned(case.image()), aligned(registers), out, block=(128, 1, 1), dynamic_smem=4096)
        assert np.array_equal(out, case.expected())


def test_loads_of_unwritten_memory_are_reported() -> None:
    case = MatrixMove(False, 4, False)
    text = "\n".join(line for line in case.ptx().splitlines() if not line.startswith("st.shared"))
    with pytest.raises(EmulatorError, match="uninitialised"):
        run(case, text)


@pytest.mark.parametrize("case", list(matrix_cases()), ids=repr)
def test_what_is_counted(case: MatrixMove) -> None:
    """Of four warps: eight rows are a wavefront, and more where they conflict."""
    report = launch(
        case.ptx(), aligned(case.image()), aligned(case.registers()), result_array(case), block=(128, 1, 1),
        dynamic_smem=4096, options=Options(counters=True, detectors=False),
    )  # fmt: skip
    kind = f"{'stmatrix' if case.store else 'ldmatrix'}.shared.16B"
    requests, nbytes, wavefronts, conflicts = (
        report.units.total(metric, kind) for metric in ("requests", "bytes", "wavefronts", "bank_conflicts")
    )
    assert (requests, nbytes, wavefronts - conflicts) == (4, 512 * case.count, 4 * case.count)


#: Each lane writes its row of 16 bytes of p0 to shared memory, moves matrices, and writes registers and its row to p1.
OCTETS = f"""{THREAD_OUTPUT} mul.wide.u32 %d2, %r1, 16; add.s64 %d2, %d0, %d2;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d2]; mov.u32 %r6, dynamic; mad.lo.u32 %r6, %r1, 16, %r6;
    st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}}; bar.warp.sync -1;
    MOVE bar.warp.sync -1; ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6]; ld.param.u64 %d0, [p1];
    mul.wide.u32 %d2, %r1, 32; add.s64 %d2, %d0, %d2;
    st.global.v4.b32 [%d2], {{%r10, %r11, %r12, %r13}}; st.global.v4.b32 [%d2+16], {{%r2, %r3, %r4, %r5}}; ret;"""


def octets(move: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows of 16 bytes before, those after, four registers of each lane as bytes)."""
    before = aligned(np.random.default_rng(1).integers(0, 256, (32, 16)).astype(np.uint8))
    out = aligned(np.zeros((32, 32), np.uint8))
    start = "mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0; "
    launch(module(OCTETS.replace("MOVE", start + move)), before, out, options=Options())
    return before, out[:, 16:], out[:, :16].reshape(32, 4, 4)


@pytest.mark.parametrize("count", [1, 2])
def test_loads_of_8_bit_elements(count: int) -> None:
    names = ", ".join(f"%r{10 + n}" for n in range(2 * count))
    before, after, registers = octets(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{names}}}, [%r6];")
    assert np.array_equal(before, after)
    for lane, matrix, register, row in np.ndindex(32, count, 2, 4):
        element = before[16 * matrix + 4 * (lane % 4) + row, lane // 4 + 8 * register]
        assert registers[lane, 2 * matrix + register, row] == element


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stores_of_8_bit_elements(count: int) -> None:
    """Each lane stores the first bytes of its own row."""
    names = ", ".join(f"%r{2 + n}" for n in range(count))
    before, after, _ = octets(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r6], {{{names}}};")
    expected = before.copy()
    for lane, matrix, row, half in np.ndindex(32, count, 2, 2):
        element = before[lane, 4 * matrix + row + 2 * half]
        expected[8 * matrix + 2 * (lane % 4) + row, lane // 4 + 8 * half] = element
    assert np.array_equal(after, expected)


@pytest.mark.parametrize(
    "move",
    ["ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r10, %r11}, [%r6];",
     "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%r10, %r11, %r12, %r13}, [%r6];",
     "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r6], {%r2};",
     "stmatrix.sync.aligned.m8n8.x1.trans.shared.b8 [%r6], {%r2};"],
)  # fmt: skip
def test_other_forms_of_8_bit_elements_are_refused(move: str) -> None:
    with pytest.raises(UnsupportedPTX, match="matrix.sync.aligned.* it takes .sync.aligned"):
        octets(move)


TRANSPOSE = f"{THREAD_OUTPUT} ld.global.b32 %r2, [%d1]; MOVE st.global.b32 [%d1], %r3; ret;"


def test_a_matrix_in_registers_is_transposed() -> None:
    """Lane l holds the elements 2 (l % 4) and the next one of row l / 4."""
    before = np.random.default_rng(2).integers(0, 1 << 16, (8, 8), np.uint16)
    registers = aligned(before.copy())
    text = TRANSPOSE.replace("MOVE", "movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;")
    launch(module(text, parameters=1), registers)
    assert all(registers[i, j] == before[j, i] for i, j in np.ndindex(8, 8))


@pytest.mark.parametrize(("move", "kind", "words"), [
    ("movmatrix.sync.aligned.m8n8.b16 %r3, %r2;", UnsupportedPTX, "one of .trans; it takes"),
    ("movmatrix.sync.aligned.m8n8.trans.b16 %r3, %d1;", UnsupportedPTX, "operand a"),
    ("setp.lt.u32 %p1, %r1, 9; mov.b32 %r3, 0; @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;", BarrierMisuse,
     "executed by lanes"),
])  # fmt: skip
def test_other_transpositions_are_refused(move: str, kind: type[EmulatorError], words: str) -> None:
    with pytest.raises(kind, match=words):
        launch(module(TRANSPOSE.replace("MOVE", move), parameters=1), aligned(np.zeros((8, 8), np.uint16)))
