"""Layouts of a kernel's own tensors: banks by arithmetic, and accesses by tensor that add up to the launch's counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.config import GemmProblem
from cute_kernels.emulator.reports.arrays import Array
from cute_kernels.explore import own_layouts
from cute_kernels.explore.own_layouts import OwnMemory, costs
from cute_kernels.explore.page import page
from cute_kernels.explore.sweep_program import sweep_program
from cute_kernels.explore.sweep_table import Row, sweep
from cute_kernels.plan import choose
from tests.commands.test_explore import Seen

PROGRAM = str(Path(__file__).parents[2] / "docs" / "examples" / "sweep_bias_add.py")
FILLS, LOADS, STORES, TMA_STORES = (
    f"shared: {name}, wavefronts" for name in ("TMA fill", "loads", "stores", "TMA stores")
)


def wavefronts(memory: OwnMemory) -> dict[str, dict[str, int]]:
    """By tensor and kind of access."""
    return {
        name: {kind: each.wavefronts for each in accesses for kind in each.kinds}
        for name, accesses in memory.by_tensor().items()
    }


def test_tensors_and_accesses_of_a_program() -> None:
    """A ring of tiles of 16 x 32 in FP32, rows one behind the other: each row has all banks once."""
    (row,) = sweep_program(PROGRAM, [{"stages": 2}], arch="sm_90a")
    memory, counts = row.memory, row.counts
    titles = [tensor.title for tensor in memory.tensors]
    assert [title.partition(", from")[0] for title in titles] == [
        "sx: f32 (16,32,2):(32,1,512), swizzle none", "sy: f32 (16,32):(32,1), swizzle none",
    ]  # fmt: skip
    for tensor in memory.tensors:
        first = int(tensor.title.split()[-2].replace(",", ""))
        assert tensor.whole and [*map(list, tensor.banks)] == [[(first // 4 + n) % 32 for n in range(0, 32, 4)]] * 16
    assert wavefronts(memory) == {
        "sx": {"tma.load": counts[FILLS], "ld.shared.4B": counts[LOADS]},
        "sy": {"st.shared.4B": counts[STORES], "tma.store": counts[TMA_STORES]},
    }
    adding = [each for each in memory.accesses if each.kinds == ("st.shared.4B",)]
    assert [each.text[:37] for each in adding] == ["sy[row, column] = sx[row, column, sta"]
    assert costs(memory.accesses) == (sum(counts[name] for name in (FILLS, LOADS, STORES, TMA_STORES)), 0)
    assert OwnMemory.read(json.loads(json.dumps(dataclasses.asdict(memory)))) == memory


def test_conflicts_are_those_of_the_tensor_that_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of a tile of 32 x 32 are read: 32 lanes in one bank; a row more apart than 32 has none."""
    program = Path(__file__).with_name("transposing_program.py")
    (row,) = sweep_program(program, [{"pitch": 32}], arch="sm_90a")
    conflicts = {name: costs(accesses)[1] for name, accesses in row.memory.by_tensor().items()}
    assert conflicts == {"tile": 32 * 31, "kept": 0} and row.counts["shared: bank conflicts"] == 32 * 31
    first = row.memory.accesses[0]
    assert (first.tensor, first.kinds, first.text) == ("tile", ("ld.shared.4B",), "kept[i, thread] = tile[thread, i]")
    assert main(["layout", str(program), "--arch", "sm_90a", "--arguments=--pitch=33"]) == 0
    text = capsys.readouterr().out
    assert "tile: f32 (32,32):(33,1), swizzle none, from byte " in text and "first rows and columns; banks by" in text
    assert "\ntile: 64 wavefronts, 0 bank conflicts\n" in text
    for words, message in (
        ([str(program), "--dtype", "f32"], "--dtype is for a layout"),
        (["(8,8):(8,1)", "--arch", "sm_90a"], "--arch is for a program, SCRIPT.py"),
        ([str(program), "--arch", "sm_90a", "--arguments=--pitch=no"], "program.py: exit status 2: "),
        ([str(tmp_path / "no.py")], "no file "),
    ):
        assert main(["layout", *words]) == 2 and message in capsys.readouterr().err
    assert main(["layout", str(program), "--arch", "sm_90a", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["tensor"] == "tile" and found[0]["kinds"] == "ld.shared.4B" and found[0]["bank_conflicts"] == 992


def test_tensors_of_a_kernel_of_this_package() -> None:
    """Operands in SWIZZLE_128B: of 16 bytes in a row of 128, the address bits from 7 on change those from 4 on."""
    problem = GemmProblem(256, 256, 256)
    (row,) = sweep(problem, choose(problem, "sm_90a"), [None], arch="sm_90a", counted=True, compiled=False)
    operands = [tensor for tensor in row.memory.tensors if tensor.title.startswith(("a: ", "b: "))]
    assert len(operands) == 2 and not any(tensor.whole for tensor in operands)
    for tensor in operands:
        # 128 bytes a row are 32 banks, 16 bytes are 4: the place in a row of eight changes with the row.
        assert [*map(list, tensor.banks)] == [[4 * (piece ^ row % 8) for piece in range(8)] for row in range(16)]
    found = wavefronts(row.memory)
    assert found["a"]["tma.load"] + found["b"]["tma.load"] == row.counts[FILLS]
    assert costs(row.memory.accesses)[0] == sum(row.counts[name] for name in (FILLS, LOADS, STORES, TMA_STORES))
    assert costs(row.memory.accesses)[1] == row.counts["shared: bank conflicts"]
    conflicts = [each.bank_conflicts for each in row.memory.accesses]
    assert conflicts == sorted(conflicts, reverse=True)


def test_a_page_has_each_layout_once_and_the_accesses_of_every_row() -> None:
    """Rows that were not counted have none."""
    rows = sweep_program(PROGRAM, [{"stages": n} for n in (1, 2, 3)] + [{"rows": 24}], arch="sm_90a")
    seen = Seen(page([*rows, Row({"stages": 4})]))
    tables = [(place["data-rows"], place["class"]) for place in seen.found("figure") if "class" in place]
    assert tables == [("1", "banks"), ("1 2 3", "banks"), ("2", "banks"), ("3", "banks")]
    assert seen.text.count("Accesses to shared memory, by tensor") == 3
    assert seen.text.count("rows 1-3: sy: f32 (16,32):(32,1), swizzle none") == 1 and "row 2: sx: f32" in seen.text
    assert "Where no time stands it is unknown" in seen.text
    assert "Layouts in shared memory" not in page(rows[3:])


def test_an_access_is_to_the_smallest_array_that_has_all_of_its_bytes() -> None:
    known = [Array("storage", 0, 256), Array("a", 0, 64), Array("b", 64, 64)]
    spans = {(0, 64): "a", (8, 16): "a", (64, 128): "b", (128, 136): "storage", (60, 68): "storage"}
    assert {span: own_layouts._name(known, *span) for span in spans} == spans
    assert own_layouts._name(known[1:], 60, 68) == "a and b"
    assert own_layouts._name(known, 256, 260) == "shared memory without a name"


def test_an_access_without_a_source_line_has_that_of_the_ptx() -> None:
    ptx = ".version 8.0\n  st.shared.u32 [%r1], %r2;\n"
    assert own_layouts._place(ptx, 2) == ("PTX line 2", "st.shared.u32 [%r1], %r2;")
