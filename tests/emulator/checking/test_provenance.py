"""Tiles of shared and tensor memory, watchpoints, steps back, and where bytes of results come from."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels.emulator import EmulatorError, Options
from cute_kernels.emulator.checking import inspection
from cute_kernels.emulator.checking.debugger import Debugger
from cute_kernels.emulator.checking.provenance import Trail
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Replay
from cute_kernels.emulator.reports.diagnosis import diagnose
from tests.emulator.checking.test_debugger import COUNT, GEMM, recorded
from tests.emulator.checking.test_reduction import write

ROWS = K = 64  # of a tile of the example
B_UNSWIZZLED = ("load_tma(b, stages_layout(COLUMNS)", "load_tma(b, cute.make_layout((COLUMNS, K), stride=(K, 1))")
OUT_UNSWIZZLED = ("store_tma(out, staging_layout(*box)", "store_tma(out, cute.make_layout(box, stride=(COLUMNS, 1))")
WAITED = next(n for n, text in enumerate(GEMM.read_text().splitlines(), 1) if "warpgroup.wait_group(0)" in text)


def changed(folder: Path, old: str, new: str) -> Path:
    """The example with a fault."""
    source = GEMM.read_text()
    assert source.count(old) == 1
    path = folder / "program.py"
    path.write_text(source.replace(old, new))
    return path


@pytest.fixture(scope="module")
def launch() -> RecordedLaunch:
    return recorded(GEMM)[0]


def bfloats(launch: RecordedLaunch, name: str, columns: int) -> np.ndarray:
    """An argument of the launch as float32 [rows, columns]."""
    (content,) = (image.content for image in launch.memory if image.name == name)
    return torch.from_numpy(content.copy()).view(torch.bfloat16).float().numpy().reshape(-1, columns)


def test_tiles_are_the_slices_of_the_operands(launch: RecordedLaunch) -> None:
    """Both stages of both operands, where the first warp has waited for its WGMMAs: what TMA has brought."""
    a, b = bfloats(launch, "a", 160), bfloats(launch, "b", 160)
    with Debugger(launch) as debugger:
        debugger.break_at(f"relu_gemm.py:{WAITED}", "0.0.0")
        for stage in range(2):
            assert debugger.go().reason == "breakpoint 1"
            for name, operand in (("a_stages", a), ("b_stages", b)):
                tile = debugger.tile(f"{name}[stage {stage}]")
                assert tile.shape == (ROWS, K)
                assert np.array_equal(tile.astype(np.float32), operand[:ROWS, stage * K : stage * K + K])
        some = debugger.tile("b_stages", (slice(3, 5), 7, 0))
        assert np.array_equal(some.astype(np.float32), b[3:5, 7])
        for text, words in {
            "c": "must be the variable of a tensor; the kernel has a_stages, b_stages, staged",
            "a_stages[64]": r"index must be within \[64, 64, 2\]",
            "a_stages[x]": "must be numbers, ranges like 0:8, or stage N",
            "staged@99": "must be within the CTA's memory",
        }.items():
            with pytest.raises(ValueError, match=words):
                debugger.tile(text)


def test_ptx_alone_has_no_tiles(tmp_path: Path) -> None:
    with Debugger(recorded(*write(tmp_path, COUNT, 1, 32))[0]) as debugger:
        debugger.step("0")
        with pytest.raises(ValueError, match="none is known, and PTX does not say the layouts of tensors"):
            debugger.tile("cell")


def test_reports_have_coordinates(tmp_path: Path) -> None:
    """A lane that does not store results of row 5: what TMA reads is from [0, 0] on, and ends with row 15.

    Its last 16 bytes are chunk 7 of a row of 128 bytes, which by the swizzle has the results of chunk 7 ^ 15 % 8.
    """
    store = "                cute.autovec_copy(pair,"
    skipped = f"                if lane != (22 if group == 2 and half == 0 else 99):\n    {store}"
    path = changed(tmp_path, store, skipped)
    errors: list[EmulatorError] = []
    with capture("sm_90a", Options()) as session:
        run_program(str(path), [], session, lambda error, *_: errors.append(error))
    assert errors[0].kind == "uninitialised-read"
    found = re.search(r": staged@(\d)\[0, 0, stage 0\] to staged@(\d)\[(.*)\]$", diagnose(errors[0]).memory)
    assert found[1] == found[2] and found[3] == f"15, {8 * (7 ^ 15 % 8) + 7}, stage 0"


def test_conditions_watchpoints_and_steps_back(tmp_path: Path) -> None:
    """Of a loop that counts to three in shared memory: each stop, and the value there, are those of the text."""
    with Debugger(recorded(*write(tmp_path, COUNT, 1, 32))[0]) as debugger:
        made = debugger.break_at(15, condition="%r2 == 2")
        assert debugger.go().reason == "breakpoint 1" and (debugger.registers("", "%r2")["%r2"] == 2).all()
        stop = debugger.back(count=4)
        assert (stop.reason, stop.instruction.line) == ("back", 15)
        assert (debugger.registers("", "%r2")["%r2"] == 1).all() and (debugger.shared("cell").view("u4") == 1).all()
        debugger.delete(made.number)
        watched = debugger.watch("shared cell 4")
        for value in (2, 3):
            stop = debugger.go()
            assert stop.reason == (
                f"watchpoint {watched.number}: shared cell 4[0] {value - 1} -> {value}, "
                "by warp 0.0.0 at PTX line 16 `st.shared.u32 [%r3], %r2`"
            )
            assert (debugger.shared("cell").view("u4") == value).all()
        assert debugger.go().reason == "end"
        for text in ("%r2 = 2", "%none == 2", "%r2 == x"):
            with pytest.raises(ValueError, match="condition = "):
                debugger.break_at(15, condition=text)
        with pytest.raises(ValueError, match="watchpoint = 'cell': must be register NAME, "):
            debugger.watch("cell")


def test_watchpoints_of_tiles_and_barriers(launch: RecordedLaunch) -> None:
    """A tile changes by the copy into it, the phase of its barrier by the copy's bytes; registers by an instruction."""
    with Debugger(launch) as debugger:
        debugger.step("0.0.0")
        debugger.watch("tile b_stages[0, 0, stage 0]")
        reason = debugger.go().reason
        b = bfloats(launch, "b", 160)
        assert f" -> {b[0, 0]}, by " in reason and "TMA load of 8192 bytes" in reason
        debugger.delete(2)
        debugger.watch("barrier barriers[0]")  # behind the last bytes of its first phase
        assert debugger.phase("barriers[0]") == 1
        reason = debugger.go().reason
        assert re.match(r"watchpoint 3: barrier barriers\[0\] 1 -> 2, by .*TMA load of 8192 bytes", reason)


def test_a_watchpoint_looks_its_name_up_once(launch: RecordedLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of thousands of instructions are watched in seconds: finding a name anew takes many milliseconds."""
    asked: Counter[str] = Counter()
    for name in ("tiles", "Barriers"):
        function = getattr(inspection, name)
        counted = lambda *given, name=name, function=function: asked.update([name]) or function(*given)  # noqa: E731
        monkeypatch.setattr(inspection, name, counted)
    with Debugger(launch) as debugger:
        debugger.watch("tile b_stages[0, 0, stage 0]")
        debugger.go()
        debugger.watch("barrier barriers[0]")
        while debugger.go().reason != "end":
            pass
    assert asked == {"tiles": 1, "Barriers": 1}


def products(lines: list[str]) -> list[tuple[str, str]]:
    """Of each product the text of A and of B."""
    return [match.groups() for line in lines if (match := re.search(r"\+= (.*) \* (.*?)(?:;|$)", line))]


@pytest.mark.parametrize(("row", "column"), [(0, 1), (77, 130), (199, 64)])
def test_the_origin_of_a_right_result(row: int, column: int, launch: RecordedLaunch) -> None:
    """Every K once, of its row of a and its row of b, whichever tile, warp and stage; and no complaint."""
    with Debugger(launch) as debugger:
        lines = debugger.origin("out", 2 * (row * 136 + column))
    assert f" to out[{row}, {column}], with swizzle 128B" in lines[1] and "copies staged@" in lines[1]
    made = [(f"a[{row}, {k}:{k + 16}]", f"b[{column}, {k}:{k + 16}]") for k in range(0, 160, 16)]
    assert products(lines)[:10] == made and all("zeros" in each for pair in products(lines)[10:] for each in pair)
    assert not any("differ" in line or "is copied" in line for line in lines)
    with pytest.raises(ValueError, match="must be a byte of an array of the device; .*out of 54400 bytes"):
        debugger.origin("out", 54400)


def test_of_registers_those_that_say_where_data_go_are_kept(tmp_path: Path) -> None:
    """Of COUNT the operands of its stores, and the guard of one; nothing of what computes, for each is a copy."""
    trail = Trail()
    Replay(recorded(*write(tmp_path, COUNT, 1, 32))[0]).run(Options(debugger=trail))
    kept = {" ".join(each.instruction.parts[:3]): set(each.values) for each in trail.events}
    assert kept.pop("st shared u32") == {"%r2", "%r3"} and kept.pop("st global u32") == {"%rd1", "%r2", "%p1"}
    assert {"add u32", "mul f32"} < set(kept) and not any(kept.values())


def test_an_operand_without_the_swizzle_is_found(tmp_path: Path) -> None:
    """TMA writes b as it is, WGMMA reads it by the pattern of 128 bytes: chunk c of row r is chunk c ^ r % 8."""
    one = recorded(changed(tmp_path, *B_UNSWIZZLED))[0]
    with Debugger(one) as debugger:
        lines = debugger.origin("out", 2 * 3)
        debugger.break_at(f"program.py:{WAITED}", "0.0.0")
        debugger.go()
        tile = debugger.tile("b_stages[stage 0]").astype(np.float32)
    chunks = np.arange(8) ^ (np.arange(64) % 8)[:, None]
    b = bfloats(one, "b", 160)[:64, :64].reshape(64, 8, 8)
    assert np.array_equal(tile.reshape(64, 8, 8), np.take_along_axis(b, chunks[..., None], axis=1))
    starts = [8 * (chunk ^ 3) for chunk in range(8)]
    wanted = [f"b[3, {x}:{x + 8}] b[3, {y}:{y + 8}]" for x, y in zip(starts[::2], starts[1::2])]
    assert [b for _, b in products(lines)][:4] == wanted
    assert "B is copied with swizzle none and read with 128B" in lines[3] and "A is copied" not in lines[3]


def test_an_epilogue_without_the_swizzle_is_found(tmp_path: Path) -> None:
    """TMA stores what lies in row 1 as it is: out[1, 1] is what warp 0 has made for column 9."""
    with Debugger(recorded(changed(tmp_path, *OUT_UNSWIZZLED))[0]) as debugger:
        lines = debugger.origin("out", 2 * (136 + 1))
    assert "copies staged@0[1, 9, stage 0] of CTA 0 (swizzle 128B) to out[1, 1], with swizzle none" in lines[1]
    assert products(lines)[0] == ("a[1, 0:16]", "b[9, 0:16]")


STORED = Path(__file__).parent / "stored_operands.py"


def test_operands_that_threads_store_with_another_swizzle_are_found(tmp_path: Path) -> None:
    """Rows of 64 elements: half of those that wgmma takes for b's row 0 are of row 1."""
    path = tmp_path / "program.py"
    path.write_text(STORED.read_text().replace("WRITTEN = KIND.K_SW64", "WRITTEN = KIND.K_SW32"))
    for program, rows in ((STORED, (0, 0, 0, 0)), (path, (0, 1, 0, 1))):
        with Debugger(recorded(program)[0]) as debugger:
            lines = debugger.origin("c", 0)
            assert [a for a, _ in products(lines)] == [f"a[0, {k}:{k + 16}]" for k in range(0, 64, 16)]
            parts = [f"b[{row}, {16 * (k - row)}:{16 * (k - row) + 16}]" for k, row in enumerate(rows)]
            assert [b for _, b in products(lines)] == parts
            assert ["differ in their coordinate along K" in line for line in lines[2:]] == [bool(row) for row in rows]


def test_a_tile_has_the_name_of_its_tensor_and_of_its_array() -> None:
    """Of b there are two views with variables of their own, and one array."""
    line = next(n for n, text in enumerate(STORED.read_text().splitlines(), 1) if "sync_threads" in text)
    with Debugger(recorded(STORED)[0]) as debugger:
        debugger.break_at(f"stored_operands.py:{line}", "0.0.3")
        debugger.go()
        for array, views in {"ma": ("sa",), "mb": ("sb", "tb")}.items():
            assert debugger.tile(array).any()
            assert all((debugger.tile(view) == debugger.tile(array)).all() for view in views)
        with pytest.raises(ValueError, match="the kernel has ma, sa, mb, sb, tb"):
            debugger.tile("other")


# --- cp.async, ldmatrix and mma.sync ----------------------------------------------------------------------------------

AMPERE = Path(__file__).parents[1] / "reports" / "programs" / "gemm_sm80.py"
# The rows of A are read by another swizzle than the one that cp.async has written them by.
UNSWIZZLED = (
    "read_b.get_slice(tid)\n",
    "read_b.get_slice(tid)\n    sa = cute.make_tensor(pa, cute.make_layout((M, K, STAGES), stride=(K, 1, M * K)))\n",
)


@pytest.fixture(scope="module")
def ampere() -> RecordedLaunch:
    torch.manual_seed(0)
    return recorded(AMPERE, arch="sm_80")[0]


def test_the_origin_of_a_result_of_mma_sync(ampere: RecordedLaunch) -> None:
    """Every K once, sixteen at a time, through both loads of fragments; a sum of a row has all products of its half."""
    with Debugger(ampere) as debugger:
        lines = debugger.origin("c", 4 * (17 * 128 + 70))
        assert products(lines) == [(f"a[17, {k}:{k + 16}]", f"b[70, {k}:{k + 16}]") for k in range(0, 192, 16)]
        assert "load of" in lines[2] and "tile_memory[17, 6]" in lines[2] and "differ" not in "".join(lines)


def test_two_launches_are_compared(ampere: RecordedLaunch, tmp_path: Path) -> None:
    """Rows of A that are read without their swizzle: chunk c of row r of 64 bytes is chunk c ^ r / 2 % 4."""
    path = tmp_path / "program.py"
    path.write_text(AMPERE.read_text().replace(*UNSWIZZLED))
    torch.manual_seed(0)
    with Debugger(recorded(path, arch="sm_80")[0]) as debugger:
        head, *lines = debugger.origin("c", ampere)
    assert head.endswith(" bytes of c differ; here -, there +")
    row = int(re.search(r"D\[.*?\+= a\[(\d+), ", "".join(line for line in lines if line[0] == "+"))[1])
    chunk = [8 * (c ^ row // 2 % 4) for c in range(4)]
    here = "".join(line for line in lines if line[0] == "-")
    assert row and f"+= a[{row}, {chunk[0]}:{chunk[0] + 8}] a[{row}, {chunk[1]}:{chunk[1] + 8}] * b[0, 0:16]" in here
    assert "differ in their coordinate along K" in here


def test_launches_that_cannot_be_compared(tmp_path: Path) -> None:
    one = recorded(*write(tmp_path, COUNT, 1, 32))[0]
    with Debugger(one) as debugger, pytest.raises(ValueError, match="must be in both launches, .* no and no bytes"):
        debugger.origin("d", one)
