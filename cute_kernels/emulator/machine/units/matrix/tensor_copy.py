"""tcgen05.cp and tcgen05.shift: what fills and moves tensor memory in the pipe of the tensor core."""

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.smem import SharedMemory
from cute_kernels.emulator.machine.state.tmem import LANE_GROUP, TensorMemory, split_address
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix import operands
from cute_kernels.emulator.machine.units.matrix.scaled_products import cells_of_codes, codes_of_rows
from cute_kernels.emulator.machine.units.matrix.tensor_core import TensorCore

#: (shape, multicast) of tcgen05.cp -> the quarters of the lanes that each 32 rows go to.
_COPIES = {
    ("128x256b", ""): ((0,), (1,), (2,), (3,)),
    ("128x128b", ""): ((0,), (1,), (2,), (3,)),
    ("64x128b", "warpx2::02_13"): ((0, 2), (1, 3)),
    ("64x128b", "warpx2::01_23"): ((0, 1), (2, 3)),
    ("32x128b", "warpx4"): ((0, 1, 2, 3),),
}
#: Source format of a decompression -> elements as they lie in shared memory; of six bits both types lie alike.
COMPRESSED: dict[str, operands.ElementType] = {"b4x16_p64": operands.E2M1, "b6x16_p32": operands.E3M2}


def copy_to_tensor_memory(
    core: TensorCore, *, shape: str, multicast: str, cta_group: int, rank: int, address: int, matrix: int,
    held: str = "", describe: str = "",
) -> None:  # fmt: skip
    """tcgen05.cp: rows of a K-major matrix in shared memory to lanes of tensor memory, in order with the MMAs.

    ``shape``, ``multicast``: a key of `_COPIES`: rows and bits of each, and which lanes get each 32 rows. With
    ``cta_group`` 2 both CTAs of the pair of CTA ``rank`` copy, each from its own shared memory. ``address``,
    ``matrix``: in tensor memory, in lane 0; a matrix descriptor. ``held``: a key of `COMPRESSED`: every 16 bytes hold
    16 elements of four or six bits, each of which becomes a byte. ``describe``: who issues.

    Raises UnsupportedPTX, IllegalAccess: another shape; outside of the memories or of the allocated columns;
    ProxyFenceMissing: the source was written through the generic proxy and not fenced since."""
    if (shape, multicast) not in _COPIES:
        raise UnsupportedPTX(f"tcgen05.cp.{shape}{'.' if multicast else ''}{multicast}")
    quarters = _COPIES[shape, multicast]
    chunks = 2 if shape.endswith("256b") else 1
    rows = 32 * len(quarters)
    lane, column = split_address(address)
    text = f"tcgen05.cp.{shape}{'.b8x16.' if held else ''}{held} issued {describe or f'by CTA {rank}'}"
    if lane:
        raise UnsupportedPTX(f"{text}: to lane {lane}")
    places = operands.operand_places(operands.decode_matrix(matrix), rows, 1, False)[:, :chunks]
    operand = operands.Places.of(places, 1, False)
    places = operand.places
    watched = core.tracker.tensor.operation(text) if core.tracker is not None else None
    for each in [rank] if cta_group == 1 else [rank, rank ^ 1]:
        cta, memory = core.shared.ctas[each], core.tensor_memories[each]
        operands.check_operand(cta, operand, text)
        if watched is not None:
            core.tracker.async_read(each, operand.starts, CHUNK, watched)
            place = slice(column, column + 4 * chunks), slice(None)
            core.tracker.tensor.access(each, place, watched, write=True)

        def run(cta: SharedMemory = cta, memory: TensorMemory = memory) -> None:
            words = _words(cta, places, COMPRESSED.get(held))
            for block, targets in enumerate(quarters):
                for quarter in targets:
                    memory.check(32 * quarter, 32, column, 4 * chunks, write=True)
                    part = words[32 * block : 32 * block + 32].T
                    memory.cells[column : column + 4 * chunks, 32 * quarter : 32 * quarter + 32] = part

        core.engine.submit(AsyncOp(("tcgen05", rank), run, text))


def _words(cta: SharedMemory, places: np.ndarray, element: operands.ElementType | None) -> np.ndarray:
    """uint32 [rows, columns] of 16-byte chunks at int64 [rows, chunks], decompressed."""
    if element is None:
        cta.check_initialised(places, CHUNK)
    else:  # the last bytes of a chunk hold nothing
        cta.check_initialised(places[..., None] * (CHUNK // 4) + np.arange(element.held // 4), 4)
    data = np.ascontiguousarray(cta.chunks[places]).view(np.uint8)
    if element is not None:
        data = np.ascontiguousarray(cells_of_codes(codes_of_rows(data, element), element))
    return data.view(np.uint32)


# Of the matrix. PTX ISA, "Data Movement Shape": .31x256b, since the last row is not written.
_SHIFT_LANES, _SHIFT_COLUMNS = 32, 8


def shift_rows(core: TensorCore, *, cta_group: int, rank: int, address: int, describe: str = "") -> None:
    """tcgen05.shift.down: in the 32 lanes of one warp, every row but the last becomes the next one, in order with MMAs.

    A row is 32 bytes. The first one is lost, the last one is in the last two lanes afterwards. ``cta_group`` 2 shifts
    in both CTAs of the pair of CTA ``rank``, from a lane on that is a multiple of 32. Raises IllegalAccess: another
    lane; outside of the allocated columns; rows that nobody has written."""
    lane, column = split_address(address)
    text = f"tcgen05.shift issued {describe or f'by CTA {rank}'}"
    if lane % _SHIFT_LANES:
        raise IllegalAccess(f"{text}: lane {lane}, which is no multiple of {_SHIFT_LANES}")
    columns = slice(column, column + _SHIFT_COLUMNS)
    watched = core.tracker.tensor.operation(text) if core.tracker is not None else None
    for each in [rank] if cta_group == 1 else [rank, rank ^ 1]:
        memory = core.tensor_memories[each]
        if watched is not None:
            groups = slice(lane // LANE_GROUP, (lane + _SHIFT_LANES) // LANE_GROUP)
            core.tracker.tensor.access(each, (columns, groups), watched, write=True)

        def run(memory: TensorMemory = memory) -> None:
            memory.check(lane + 1, _SHIFT_LANES - 1, column, _SHIFT_COLUMNS, write=False)
            memory.check(lane, _SHIFT_LANES - 1, column, _SHIFT_COLUMNS, write=True)
            rows = memory.cells[columns, lane : lane + _SHIFT_LANES]
            rows[:, :-1] = rows[:, 1:].copy()

        core.engine.submit(AsyncOp(("tcgen05", rank), run, text))
