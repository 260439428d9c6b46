"""Products of tcgen05.mma that the core does not compute: of elements of less than eight bits, or with scales in tensor
memory (PTX ISA, "Block Scaling").
"""

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory
from cute_kernels.emulator.machine.state.tmem import TensorMemory, split_address
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.operands import K_BYTES, decode_scaled
from cute_kernels.emulator.machine.units.matrix.scaled_products import (
    Numbers,
    Side,
    codes_of_cells,
    codes_of_rows,
    dot_products,
)
from cute_kernels.emulator.machine.units.matrix.tensor_mma import A_COLUMNS, QUARTER, A, B, TensorMma


def multiply(mma: TensorMma, shared: ClusterMemory, memories: list[TensorMemory], arithmetic: Arithmetic) -> None:
    """Computes the product and writes it to tensor memory. Raises UnsupportedPTX: how such products are added is not
    known; IllegalAccess: what it touches is not allocated or not initialised; scales differ between quarters of the
    lanes."""
    fields, scaled = mma.fields, mma.record.scales
    sums = arithmetic.scaled_sums(mma.kind) if scaled else arithmetic.sums("tcgen05", fields.a_type.name, fields.d_type)
    mma.check(shared, memories)
    b_codes = np.concatenate([_codes_in_shared(mma, shared.ctas[rank], B) for rank in mma.ranks])
    b = Numbers.of(b_codes, fields.b_type.name, fields.negate_b)
    for rank in mma.ranks:
        memory = memories[rank]
        codes = _codes_in_tensor(mma, memory) if mma.record.a_in_tensor else _codes_in_shared(mma, shared.ctas[rank], A)
        a = Numbers.of(codes, fields.a_type.name, fields.negate_a)
        scales = _scales(mma, memory) if scaled else (None, None)
        place = _cells(mma)
        old = memory.cells[place] if mma.record.accumulate else None
        memory.cells[place] = dot_products(Side(a, scales[0]), Side(b, scales[1]), old, fields.d_type, sums)


def _codes_in_tensor(mma: TensorMma, memory: TensorMemory) -> np.ndarray:
    column = split_address(mma.record.a)[1]
    cells = np.ascontiguousarray(memory.cells[column : column + A_COLUMNS, : mma.rows].T)
    return codes_of_cells(cells.view(np.uint8), mma.fields.a_type)


def _codes_in_shared(mma: TensorMma, cta: SharedMemory, which: int) -> np.ndarray:
    places, (element, _) = mma.operand(which).places, mma.element(which)
    chunks = places.shape[1] == K_BYTES // CHUNK
    rows = np.ascontiguousarray(cta.chunks[places]).view(np.uint8) if chunks else cta.data[places]
    return codes_of_rows(rows.reshape(len(places), K_BYTES), element)


def _cells(mma: TensorMma) -> tuple[np.ndarray, np.ndarray]:
    """Columns and lanes of D in each CTA, both [rows, n]."""
    lane, column = split_address(mma.record.d)
    row, j = np.arange(mma.rows)[:, None], np.arange(mma.fields.n)[None]
    if mma.folded:
        return column + j % mma.width, row + 64 * (j // mma.width)
    if mma.rows == 64:
        return column + j, lane + row // 16 * QUARTER + row % 16
    return column + j, row + 0 * j


def _scales(mma: TensorMma, memory: TensorMemory) -> tuple[Numbers, Numbers]:
    """Scales of A and B. Row i lies in lane i % 32 of column i // 32, and so in all quarters of the lanes.

    Where a CTA of a pair has 64 rows, lanes from 64 on have the scales of the upper half of B's rows, beside the
    columns of D that they compute: so NVIDIA's example 2cta_mma_blockscale_m128.py copies them (CUTLASS,
    examples/python/CuTeDSL/experimental/primitives/tcgen05).
    """
    record = mma.record
    name = decode_scaled(mma.kind, record.scales, record.group, record.instruction)[1]
    a = _quarters(mma, memory, A, mma.rows, name.a_id)
    b = _quarters(mma, memory, B, mma.width, name.b_id)
    _check_equal(mma, a, "A")
    halves = [b[:2], b[2:]] if mma.folded else [b]
    for quarters in halves:
        _check_equal(mma, quarters, "B")
    chosen = np.concatenate([quarters[0] for quarters in halves])
    assert a.shape[-1] == chosen.shape[-1] == record.scales
    return Numbers.of(a[0], name.name), Numbers.of(chosen, name.name)


def _quarters(mma: TensorMma, memory: TensorMemory, which: int, rows: int, first: int) -> np.ndarray:
    """uint8 [4 quarters, rows, scales of a row]; ``first``: byte of a cell."""
    column, columns = mma.scale_columns(which)
    cells = memory.cells[column : column + columns].reshape(columns, -1, QUARTER).transpose(1, 0, 2)
    shifts = 8 * (first + np.arange(mma.record.scales, dtype=np.uint32))
    words = cells.reshape(len(cells), -1)[:, :rows, None]
    return (words >> shifts.astype(np.uint32) & np.uint32(255)).astype(np.uint8)


def _check_equal(mma: TensorMma, quarters: np.ndarray, operand: str) -> None:
    """Raises IllegalAccess where the quarters differ: by the PTX ISA scales are in all of them."""
    wrong = np.argwhere(quarters != quarters[0])
    if len(wrong):
        quarter, row, which = (int(x) for x in wrong[0])
        raise IllegalAccess(
            f"{mma.text}: scale {which} of row {row} of {operand} is {quarters[quarter, row, which]:#04x} in one "
            f"quarter of the lanes and {quarters[0, row, which]:#04x} in another; scales are in all of them"
        )
