"""Machine code that is written here by hand, word by word: what is read of it, its loops, and what costs in them."""

from __future__ import annotations

import pytest

from cute_kernels.explore.sass.findings import findings
from cute_kernels.explore.sass.flow import Flow
from cute_kernels.explore.sass.listing import Instruction, kernels
from cute_kernels.explore.sass.report import MachineCode, machine_code

NONE = 7  # no scoreboard


def code(*lines: str) -> str:
    """A listing of a kernel k, as `nvdisasm -c -hex -gp` prints it.

    A line is a label, ``"LABEL:"``; a line of PTX, ``"#5"``; or an instruction behind its stall count, the scoreboards
    that it holds until results are written and until operands are read, and those that it awaits:
    ``"2 1 - 03 LDS R1, [R2]"``. Bits of the upper word: 41 stall, 45 yield, 46 written, 49 read, 52 awaited.
    """
    text, address = ["//--- .text.k ---", ".text.k:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        elif line.startswith("#"):
            text.append(f'\t//## File ".nv_debug_ptx_txt", line {line[1:]}')
        else:
            stall, written, read, awaits, instruction = line.split(None, 4)
            fields = [int(field) if field != "-" else NONE for field in (written, read)]
            mask = sum(1 << int(number) for number in awaits if number != "-")
            upper = (int(stall) | 1 << 4 | fields[0] << 5 | fields[1] << 8 | mask << 11) << 41
            text.append(f"        /*{address:04x}*/    {instruction} ;    /* 0x0123456789abcdef */")
            text.append(f"                                          /* {upper | 0x1FF:#018x} */")
            address += 16
    return "\n".join([*text, "//--- .nv.info ---", "other:"])


def flow_of(*lines: str) -> Flow:
    return Flow(kernels(code(*lines))["k"])


def test_control_words_predicates_labels_and_lines_are_read() -> None:
    (found,) = kernels(
        code("#3", "5 2 0 - @!P0 LDG.E.64 R4, desc[UR4][R2.64+0x8]", ".L_x_0:", "#9", "15 - - 025 BRA `(.L_x_0)")
    ).values()
    assert found == (
        Instruction(0, "!P0", "LDG.E.64", "R4, desc[UR4][R2.64+0x8]", 3, 5, 2, 0, ()),
        Instruction(16, "", "BRA", "`(.L_x_0)", 9, 15, None, None, (0, 2, 5), (16,)),
    )
    assert [each.name for each in found] == ["LDG", "BRA"]
    assert found[0].text == "@!P0 LDG.E.64 R4, desc[UR4][R2.64+0x8]"


def test_a_listing_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="nvdisasm -hex"):
        kernels(".text.k:\n        /*0000*/   EXIT ;\n")


NESTED = (
    "1 - - - MOV R0, RZ",
    ".L_x_0:",
    "2 - - - IADD3 R1, R1, 0x1, RZ",
    ".L_x_1:",
    "1 - - - SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R5], R3",
    "5 - - 0 @!P0 BRA `(.L_x_1)",
    "3 - - - ISETP.NE.AND P1, PT, R1, RZ, PT",
    "5 - - - @P1 BRA `(.L_x_3)",
    ".L_x_2:",
    "4 - - - HMMA.16816.F32 R8, R4, R6, R8",
    "5 - - - @P2 BRA `(.L_x_2)",
    ".L_x_3:",
    "0 - - - STG.E desc[UR4][R2.64], R1",
    "5 - - - BRA.U UP0, `(.L_x_0)",
    "5 - - - EXIT",
    ".L_x_4:",
    "0 - - - BRA `(.L_x_4)",
)


def test_loops_and_the_clocks_of_a_pass() -> None:
    """By hand: a loop of 2 + 1 + 5 + 3 + 5 clocks, of an inner one of 4 + 5 that may be passed by, and of 1 + 5.

    The loop that only tries a barrier is none, and neither is what stands behind the end.
    """
    flow = flow_of(*NESTED)
    outer, inner = flow.loops
    assert [(loop.depth, loop.shortest, loop.longest) for loop in flow.loops] == [(1, 22, 31), (2, 9, 9)]
    assert [each.address // 16 for each in flow.inside(inner)] == [6, 7]
    assert [each.address // 16 for each in flow.inside(outer)] == list(range(1, 10))
    assert [number for number in range(len(flow.code)) if flow.repeated(number)] == list(range(1, 10))
    assert flow.innermost[6] is inner and flow.innermost[5] is outer


def test_code_behind_a_call_returns_and_its_loops_are_found() -> None:
    flow = flow_of(
        "5 - - - CALL.REL.NOINC `($k$inner)",
        "5 - - - EXIT",
        "$k$inner:",
        "2 - - - LDG.E R0, desc[UR4][R2.64]",
        "5 - - - @P0 BRA `($k$inner)",
        "5 - - - RET.REL.NODEC R2 `(k)",
    )
    (only,) = flow.loops
    assert [each.address // 16 for each in flow.inside(only)] == [2, 3] and only.longest == 7


def test_indirect_branches_with_targets_and_without() -> None:
    table = '5 - - - BRX R4 -0x20 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    known = flow_of(".L_x_0:", "2 - - - LDG.E R0, desc[UR4][R2.64]", table, ".L_x_1:", "5 - - - EXIT")
    assert known.complete and [loop.longest for loop in known.loops] == [7]
    unknown = code("2 - - - LDG.E R0, desc[UR4][R2.64]", "5 - - - BRX R4 -0x20", "5 - - - EXIT")
    (kernel,) = machine_code(unknown, PTX)
    assert not kernel.flow.complete and "an indirect branch does not say where it leads" in kernel.text()
    assert kernel.document()["all_branches_known"] is False


def costs(*lines: str) -> list[tuple[str, int, int]]:
    """Kind, number of the instruction, and clocks."""
    return [(each.kind, each.instruction.address // 16, each.clocks) for each in findings(flow_of(*lines))]


def loop(*lines: str) -> tuple[str, ...]:
    return (".L_x_0:", *lines, "5 - - - @P0 BRA `(.L_x_0)", "5 - - - EXIT")


def test_barriers_of_memory_count_in_loops_only() -> None:
    inside = loop("6 - - - MEMBAR.ALL.CTA", "6 - - - CCTL.IVALL", "1 - - - CCTL.PF2", "2 - - - @P1 BRA.U.ANY `(.L_x_0)")
    assert costs("6 - - - MEMBAR.ALL.GPU", "6 - - - CCTL.IVALL", *inside) == [
        ("membar", 2, 0), ("cache", 3, 0), ("lanes", 5, 0),
    ]  # fmt: skip
    assert costs("6 - - - MEMBAR.ALL.GPU", "6 - - - CCTL.IVALL") == [("membar", 0, 0), ("cache", 1, 0)]  # one pass


def test_spills_count_everywhere() -> None:
    assert costs("2 - - - STL [R1], R4", *loop("2 - - - LDL.LU R4, [R1]")) == [("spill", 0, 0), ("spill", 1, 0)]


MOVES = (
    "1 - - - MOV R4, R5", "1 - - - MOV R4, 0x10", "1 - - - IMAD.MOV.U32 R4, RZ, RZ, R7", "1 - - - UMOV UR4, UR5",
    "1 - - - IMAD R4, RZ, RZ, R7", "1 - - - IMAD.MOV.U32 R4, RZ, RZ, 0x1", "1 - - - R2UR UR4, R7",
    "1 - - - UMOV UR4, 0x1",
)  # fmt: skip


@pytest.mark.parametrize("mma", ["HMMA.16816.F32 R8, R4, R6, R8", "QGMMA.64x64x32.F32 R8, R4, gdesc[UR4]",
                                 "UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8]", "IMMA R8, R4, R6, R8"])  # fmt: skip
def test_copies_of_registers_count_beside_mmas(mma: str) -> None:
    assert costs(*loop(*MOVES, f"2 - - - {mma}")) == [("move", number, 0) for number in (0, 2, 3, 6)]
    assert costs(*loop(*MOVES)) == costs(*MOVES) == []


def test_waits_for_loads() -> None:
    """A load of shared memory takes 29 clocks, one of global memory 260; a scoreboard may have several."""
    assert costs(*loop("2 0 - - LDS R4, [R2]", "3 - - - IADD3 R3, R3, R3, RZ", "1 - - 0 FADD R5, R4, R4")) == [
        ("wait", 2, 29 - 5)
    ]
    assert costs(*loop("2 1 - - LDG.E R6, desc[UR4][R2.64]", "2 1 - - LDS R4, [R2]", "1 - - 1 FADD R5, R4, R6")) == [
        ("wait", 2, 260 - 4)
    ]
    two = "2 0 - - LDS R4, [R2]", "2 1 - - LDS R6, [R2]", "1 - - 0 FADD R5, R4, R4", "1 - - 1 FADD R5, R6, R6"
    # The first wait covers what the second load would have needed, but for what it was issued later.
    assert costs(*loop(*two)) == [("wait", 2, 29 - 4), ("wait", 3, 29 - (2 + 25 + 1))]


def test_waits_around_a_loop_and_not_from_before_it() -> None:
    before, at_the_end = "2 0 - - LDS R4, [R2]", "2 0 - - LDS R4, [R2+0x80]"
    use = "1 - - 0 FADD R5, R4, R4"
    assert costs(before, *loop(use, "9 - - - NOP", at_the_end)) == [("wait", 1, 29 - (2 + 5))]
    assert costs(before, *loop(use, "9 - - - NOP")) == []


@pytest.mark.parametrize(
    "between", ["6 - - - BAR.SYNC.DEFER_BLOCKING 0x0", "15 - - - NOP", "2 - - 0 IADD3 R2, R2, R2, RZ"]
)
def test_waits_that_something_covers(between: str) -> None:
    found = costs(*loop("14 0 - - LDS R4, [R2]", between, "1 - - - NOP", "1 - - 0 FADD R5, R4, R4"))
    assert not any(number == 3 for _, number, _ in found)


def test_results_of_other_units_are_no_loads() -> None:
    assert costs(*loop("2 0 - - MUFU.RCP R4, R2", "1 - - 0 FADD R5, R4, R4")) == []


def test_operands_that_are_read_are_no_wait_for_a_load() -> None:
    assert costs(*loop("2 - 0 - LDS R4, [R2]", "1 - - 0 IADD3 R2, R2, 0x8, RZ")) == []


PTX = """.version 8.8
.target sm_90a
.file 1 "/a/kernel.py"
.visible .entry k(
)
{
.loc 1 20 3
mov.u32 %r1, 0;
.loc 1 21 3
ld.shared.b32 %r2, [%r1];
.loc 1 22 7
fence.proxy.async.shared::cta;
}
"""


def test_lines_of_source_have_what_was_made_of_them() -> None:
    listing = code("#8", "1 - - - MOV R0, RZ", *loop("#10", "2 0 - - LDS R4, [R0]", "2 - - 0 FADD R5, R4, R4",
                                                     "#12", "6 - - - MEMBAR.ALL.CTA"))  # fmt: skip
    (kernel,) = machine_code(listing, PTX)
    found = {place.line: dict(+counts) for place, counts in kernel.lines.items()}
    assert found == {
        20: {"instructions": 1},
        21: {"instructions": 2, "looped": 2, "clocks": 4, "exposed": 27},
        22: {"instructions": 3, "looped": 2, "clocks": 11, "membar": 1},
    }
    facts = kernel.document()
    assert [(each["kind"], each["ptx_line"], each["line"], each["loop"]) for each in facts["findings"]] == [
        ("wait", 10, 21, 1), ("membar", 12, 22, 1),
    ]  # fmt: skip
    assert facts["findings"][1]["ptx"] == "fence.proxy.async.shared::cta;"
    (only,) = facts["loops"]
    assert (only["clocks_shortest"], only["clocks_longest"], only["ptx_lines"], only["line"]) == (15, 15, [10, 12], 21)
    text = kernel.text()
    assert "1 x  loop 1  MEMBAR.ALL.CTA  PTX 12: fence.proxy.async.shared::cta;  kernel.py:22" in text
    assert "1 x  loop 1  LDS, 2 clocks before, takes 27 more  PTX 10: ld.shared.b32 %r2, [%r1];" in text
    assert "    10  ld.shared.b32 %r2, [%r1];\n        0x0010  2 clocks, awaits -  LDS R4, [R0]" in kernel.annotated()


def test_a_kernel_of_another_text_is_left_out() -> None:
    assert machine_code(code("5 - - - EXIT"), PTX.replace("entry k(", "entry other(")) == []
    assert isinstance(machine_code(code("5 - - - EXIT"), PTX)[0], MachineCode)
