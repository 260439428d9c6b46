"""Layouts of a kernel's own tensors: banks by arithmetic, and accesses that add up to the launch's counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cute_kernels.config import GemmProblem
from cute_kernels.explore import explorer
from cute_kernels.explore.page import page
from cute_kernels.explore.sweep_program import sweep_program
from cute_kernels.explore.sweep_table import sweep
from cute_kernels.plan import choose

PROGRAM = str(Path(__file__).parents[2] / "docs" / "examples" / "sweep_bias_add.py")


def test_tensors_and_accesses_of_a_program() -> None:
    """A ring of tiles of 16 x 32 in FP32, rows one behind the other: each row has all banks once."""
    found = explorer.timeline_of_program(PROGRAM, {"stages": 2}, arch="sm_90a")
    memory = found["memory"]
    layouts = [(each.name, each.layout) for each in memory.tensors]
    assert layouts == [("sx", "(16,32,2):(32,1,512)"), ("sy", "(16,32):(32,1)")]
    for tensor in memory.tensors:
        first = tensor.byte[0, 0]
        assert (tensor.byte == first + 4 * np.arange(16 * 32).reshape(16, 32)).all()
        assert tensor.banks().tolist() == [[(first // 4 + column) % 32 for column in range(0, 32, 4)]] * 16
    (row,) = sweep_program(PROGRAM, [{"stages": 2}], arch="sm_90a")
    counted = [row.counts[name] for name in ("shared: loads, wavefronts", "shared: stores, wavefronts")]
    assert sum(each.wavefronts for each in memory.accesses) == sum(counted) > 0
    assert sum(each.bank_conflicts for each in memory.accesses) == row.counts["shared: bank conflicts"] == 0
    (access,) = memory.accesses
    assert access.text.startswith("sy[row, column] = sx[row, column, stage]") and "st.shared" in " ".join(access.kinds)
    shown = page([row], None, found)
    assert "sx: f32 (16,32,2):(32,1,512)" in shown and access.text in shown


def test_tensors_of_a_kernel_of_this_package() -> None:
    """Operands in SWIZZLE_128B: of 16 bytes in a row of 128, the address bits from 7 on change those from 4 on."""
    problem = GemmProblem(256, 256, 256)
    (row,) = sweep(problem, choose(problem, "sm_90a"), [None], arch="sm_90a", counted=True, compiled=False)
    memory = explorer.timeline(row)["memory"]
    operands = {each.name: each for each in memory.tensors if each.name in ("a", "b")}
    assert [each.byte.shape[0] for each in operands.values()] == [row.config.tile_m, row.config.tile_n]
    for tensor in operands.values():
        rows, columns = np.indices(tensor.byte.shape)
        plain = tensor.byte.min() + 128 * rows + 2 * columns
        assert tensor.byte.min() % 1024 == 0 and (tensor.byte == (plain ^ (plain >> 7 & 7) << 4)).all()
        assert tensor.banks()[:8, 0].tolist() == [4 * row for row in range(8)]
    total = row.counts["shared: loads, wavefronts"] + row.counts["shared: stores, wavefronts"]
    assert 0 < sum(each.wavefronts for each in memory.accesses) <= total
    conflicts = [each.bank_conflicts for each in memory.accesses]
    assert conflicts == sorted(conflicts, reverse=True)
