"""TMA producer warp: global memory -> operand stages."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import GroupedOrder, PositionOrder, SnakeOrder
from cute_kernels.kernels.tma import fetch, sides
from cute_kernels.plan.base import VECTOR_BYTES


@dataclass(frozen=True)
class Operand:
    """One operand as this CTA loads it.

    Attributes:
        atom: TMA load.
        source: TMA view ``[box, box row, k_block]``, with a last mode of batches if the order has them.
        stages: buffers ``[box, stage * boxes + i]``.
        boxes: row boxes of one stage.
        step, first: the first box row of tile t is ``t * step + first``.
        multicast: CTAs of the cluster that receive what this CTA loads, as a bit mask; None without multicast.
    """

    atom: cute.CopyAtom
    source: cute.Tensor
    stages: cute.Tensor
    boxes: int = 1
    step: int = 1
    first: int | Int32 = 0
    multicast: Int16 | None = None

    def place(self, tile: Int32, batch: tuple) -> tuple[Int32, ...]:
        """Where a tile begins: coordinates of its first box, without the K block."""
        return (tile * self.step + self.first, *batch)

    @cute.jit
    def fetch(self, place: tuple[Int32, ...], k_block: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Starts the loads of one stage; their bytes complete on ``barrier``."""
        for i in cutlass.range_constexpr(self.boxes):
            source = self.source[(None, place[0] + i, k_block, *place[1:])]
            fetch(self.atom, source, self.stages[None, stage * self.boxes + i], barrier, self.multicast)


def tma_operand(
    atom: cute.CopyAtom, source: cute.Tensor, stages: cute.Tensor, box_modes: int, boxes: int = 1,
    tile: tuple[int, int | Int32] = (1, 0), share: tuple[int, int | Int32] = (1, 0), mask: Int32 | None = None
) -> Operand:
    """One operand of this CTA, from its parts of the TMA view and of shared memory: ``boxes`` row boxes of a stage, of
    ``box_modes`` modes. ``tile``: tiles of a cluster along this operand, and which one this CTA multiplies;
    ``share``: CTAs that share that tile, those of ``mask``, and which of its parts this CTA loads."""
    stages, source = sides(atom, stages, source, box_modes, share)
    multicast = Int16(mask) if share[0] > 1 else None
    step, first = boxes * tile[0], boxes * tile[1]
    return Operand(atom, source, stages, boxes, step=step, first=first, multicast=multicast)


@cute.jit
def clear_unloaded(
    stages: cute.Pointer, count: cutlass.Constexpr[int], stage_bytes: cutlass.Constexpr[int],
    loaded_bytes: cutlass.Constexpr[int], threads: cutlass.Constexpr[int]
) -> None:
    """Zeros what no load writes: of ``count`` stages all but the first ``loaded_bytes``, by all threads of the CTA.

    The caller synchronises the CTA before a tensor-core instruction reads a stage.
    """
    vectors = (stage_bytes - loaded_bytes) // VECTOR_BYTES
    zeros = cute.make_rmem_tensor((VECTOR_BYTES // 4,), Int32)
    zeros.fill(0)
    for i in cutlass.range(cute.arch.thread_idx()[0], count * vectors, threads, unroll=1):
        offset = i // vectors * stage_bytes + loaded_bytes + i % vectors * VECTOR_BYTES
        target = cute.recast_ptr(stages + cute.assume(offset, divby=VECTOR_BYTES), dtype=Int32)
        cute.autovec_copy(zeros, cute.make_tensor(target, VECTOR_BYTES // 4))
    # Tensor cores read shared memory through the async proxy.
    cute.arch.fence_view_async_shared()


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA waits for its own stage to be free, which takes the consumers of every CTA that shares it, and loads its
    part of both operands.

    Attributes:
        rows, columns: operands along the rows and the columns of a tile.
        first_block: first K block, where CTAs share a tile along K.
        announces: whether this CTA announces the bytes of a stage. A pair of SM100 CTAs has one full barrier, the
            leader's, on which the bytes of both complete; elsewhere every CTA waits for its own stage.
    """

    rows: Operand
    columns: Operand
    operands: Pipe
    order: SnakeOrder | GroupedOrder
    k_blocks: Int32
    announces: bool | Boolean = True
    first_block: int | Int32 = 0

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            coordinates = self.order.coordinates(tile)
            batch = coordinates[2:]
            rows, columns = self.rows.place(coordinates[0], batch), self.columns.place(coordinates[1], batch)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                barrier = self.operands.acquire(state, self.announces)
                block = k_block + self.first_block
                self.rows.fetch(rows, block, state.index, barrier)
                self.columns.fetch(columns, block, state.index, barrier)
                state.advance()
        self.operands.drain(state)


@dataclass(frozen=True)
class WeightLoad:
    """Fetches what of a weight stays in shared memory, once: operand and K block of each buffer, ``blocks``."""

    blocks: tuple[tuple[Operand, int], ...]
    pipe: Pipe
    n_tile: Int32
    announces: bool | Boolean = True

    @cute.jit
    def run(self) -> None:
        state = self.pipe.producer_state()
        if self.announces:
            with cute.arch.elect_one():
                self.pipe.announce_bytes(state)
        for i in cutlass.range_constexpr(len(self.blocks)):
            operand, k_block = self.blocks[i]
            operand.fetch(operand.place(self.n_tile, ()), k_block, i, self.pipe.full_barrier(state))


# --- TMA producer warp of the transposed product: rows of ``x`` -> operand stages ------------------------------------

@dataclass(frozen=True)
class RowsLoad:
    """Fills operand stages for every tile of this cluster.

    With multicast, each CTA of a cluster loads its share of the rows of ``x`` for all of them, so a stage may be filled
    only when the consumers of every CTA have released it; each CTA's full barrier expects the whole stage. In a pair of
    SM100 CTAs each loads rows of its own, and the bytes of both complete on the leader's barrier.

    Attributes:
        x: view ``[box, row block, k_block, position block]``; ``stage_blocks`` consecutive K blocks are a stage.
        weight, n_tile: a streamed weight, and which features of it this CTA multiplies; None if it is resident.
        announces: whether this CTA announces the bytes of a stage.
    """

    x: Operand
    operands: Pipe
    order: PositionOrder
    tile_stages: Int32 | int
    stage_blocks: int
    weight: Operand | None = None
    n_tile: Int32 | int = 0
    announces: Boolean | bool = True

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        row_block, position = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            rows = self.x.place(row_block, (position,))
            for stage in cutlass.range(self.tile_stages, unroll=1):
                barrier = self.operands.acquire(state, self.announces)
                # A block beyond the end of K is loaded as zeros: the byte count of a stage is always the same.
                for i in cutlass.range_constexpr(self.stage_blocks):
                    k_block, block = stage * self.stage_blocks + i, state.index * self.stage_blocks + i
                    self.x.fetch(rows, k_block, block, barrier)
                    if cutlass.const_expr(self.weight is not None):
                        self.weight.fetch((self.n_tile,), k_block, block, barrier)
                state.advance()
            row_block, position = self.order.advance(row_block, position, stride)
        self.operands.drain(state)


# --- rows in memory as TMA and the stores see them: plain, or as images at positions ---------------------------------

def rows_layout(rows: Int32, columns: Int32, divisor: int) -> cute.Layout:
    """Row-major ``[rows, columns]`` whose rows are a multiple of ``divisor`` elements, 16 bytes for TMA."""
    columns = cute.assume(columns, divby=divisor)
    return cute.make_layout((rows, columns), stride=(columns, 1))


def positions_layout(images: Int32, columns: Int32, positions: Int32, divisor: int) -> cute.Layout:
    """Row-major ``[images, positions, columns]`` seen as ``[images, columns, positions]``; likewise."""
    columns = cute.assume(columns, divby=divisor)
    image_stride = cute.assume(columns * positions, divby=divisor)
    return cute.make_layout((images, columns, positions), stride=(image_stride, 1, columns))
