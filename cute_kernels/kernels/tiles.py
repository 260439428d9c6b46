"""Orders in which persistent clusters walk the output tiles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.plan.tiles import TransposedRows


@dataclass(frozen=True)
class PositionOrder:
    """Row blocks by position: ``tile -> (row block, position)``, dealt round-robin to the clusters of a feature group.

    A position stands for a block of neighbouring ones where a tile has several. Positions run fastest: the clusters
    that work at the same time read neighbouring rows of the same images. Flat order is the case of one position.
    ``first`` is this cluster's index in its feature group, ``step`` the clusters in that group.
    """

    row_tiles: Int32
    positions: Int32
    first: Int32
    step: Int32

    @property
    def tiles(self) -> Int32:
        return self.row_tiles * self.positions

    @cute.jit
    def start(self) -> tuple[Int32, Int32]:
        """(row block, position) of this cluster's first tile."""
        row_block = self.first // self.positions
        return row_block, self.first - row_block * self.positions

    @cute.jit
    def stride(self) -> tuple[Int32, Int32]:
        """Addend of one step to (row block, position) before a carry; a division per tile costs 40 instructions."""
        row_blocks = self.step // self.positions
        return row_blocks, self.step - row_blocks * self.positions

    @cute.jit
    def advance(self, row_block: Int32, position: Int32, stride: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
        """(row block, position) one step further."""
        row_block += stride[0]
        position += stride[1]
        if position >= self.positions:
            position -= self.positions
            row_block += 1
        return row_block, position


@dataclass(frozen=True)
class ImageOrder(PositionOrder):
    """Order like `PositionOrder` with row blocks fastest: what belongs to a position is fetched for many tiles."""

    @property
    def _swapped(self) -> PositionOrder:
        return PositionOrder(self.positions, self.row_tiles, self.first, self.step)

    def start(self) -> tuple[Int32, Int32]:
        """(row block, position) of this cluster's first tile."""
        position, row_block = self._swapped.start()
        return row_block, position

    def stride(self) -> tuple[Int32, Int32]:
        """Addend of one step to (position, row block) before a carry."""
        return self._swapped.stride()

    def advance(self, row_block: Int32, position: Int32, stride: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
        """(row block, position) one step further."""
        position, row_block = self._swapped.advance(position, row_block, stride)
        return row_block, position


@dataclass(frozen=True)
class SnakeOrder:
    """Row-major tile order whose odd rows run backwards with ``snake``, dealt round-robin to the clusters.

    The column tiles of one row block run next to each other, so ``x`` comes from DRAM once and from L2 afterwards;
    turning round at the end of a row lets its last N tile of the weight be reused at once.
    """

    m_tiles: Int32
    n_tiles: Int32
    first: Int32
    step: Int32
    snake: bool = True

    @property
    def tiles(self) -> Int32:
        return self.m_tiles * self.n_tiles

    @cute.jit
    def coordinates(self, tile: Int32) -> tuple[Int32, Int32]:
        """``tile -> (m_tile, n_tile)``."""
        m_tile = tile // self.n_tiles
        n_tile = tile - m_tile * self.n_tiles
        if cutlass.const_expr(self.snake):
            if m_tile % 2 == 1:
                n_tile = self.n_tiles - 1 - n_tile
        return m_tile, n_tile


@dataclass(frozen=True)
class GroupedOrder:
    """Two-dimensional order: down a group of ``group_m`` row blocks, then to the next column, batch after batch.

    Clusters that work at the same time then cover a compact rectangle of the output, whose rows of ``a`` and ``b`` fit
    L2 together. The last group of a batch may have fewer row blocks.
    """

    m_tiles: Int32
    n_tiles: Int32
    batches: Int32
    group_m: int
    first: Int32
    step: Int32

    @property
    def tiles(self) -> Int32:
        return self.m_tiles * self.n_tiles * self.batches

    @cute.jit
    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """``tile -> (m_tile, n_tile, batch)``."""
        batch = tile // (self.m_tiles * self.n_tiles)
        tile -= batch * (self.m_tiles * self.n_tiles)
        group = tile // (self.group_m * self.n_tiles)
        tile -= group * (self.group_m * self.n_tiles)
        rows = min(self.m_tiles - group * self.group_m, self.group_m)
        column = tile // rows
        return group * self.group_m + tile - column * rows, column, batch


@dataclass(frozen=True)
class DividedOrder(GroupedOrder):
    """`GroupedOrder` by `tile_divisors`, reciprocals of the host: divisions took 700 clocks of a tile, and of a launch.
    """

    divisors: tuple[cute.FastDivmodDivisorV2, ...] = ()

    @cute.jit
    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """``tile -> (m_tile, n_tile, batch)``."""
        batch, tile = divmod(tile, self.divisors[0])
        group, tile = divmod(tile, self.divisors[1])
        column, last_column = tile // self.group_m, tile // self.divisors[2]
        rows = self.m_tiles - group * self.group_m
        if rows < self.group_m:
            column = last_column
        return group * self.group_m + tile - column * min(rows, self.group_m), column, batch


def tile_divisors(m_tiles: Int32, n_tiles: Int32, group_m: int) -> tuple[cute.FastDivmodDivisorV2, ...]:
    """Tiles of a batch, of a group of row blocks, and of a column of the last group."""
    last = m_tiles - (m_tiles - 1) // group_m * group_m
    return tuple(map(cute.fast_divmod_create_divisor_v2, (m_tiles * n_tiles, group_m * n_tiles, last)))


@dataclass(frozen=True)
class PatchOrder:
    """Tiles of patches and features: those of the features run fastest, so that patches come from DRAM once.

    Tiles of images, along a column and along a row of the patch grid, and of features, the last ones possibly partial;
    with ``images_first`` images run faster than positions.
    """

    image_tiles: Int32
    column_tiles: Int32
    row_tiles: Int32
    n_tiles: Int32
    images_first: bool
    first: Int32
    step: Int32

    @property
    def tiles(self) -> Int32:
        return self.image_tiles * self.column_tiles * self.row_tiles * self.n_tiles

    @cute.jit
    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """``tile -> (tile of a grid row, of a grid column, of images, of features)``."""
        rest = tile // self.n_tiles
        n_tile = tile - rest * self.n_tiles
        if cutlass.const_expr(self.images_first):
            position = rest // self.image_tiles
            image_tile = rest - position * self.image_tiles
        else:
            image_tile = rest // (self.column_tiles * self.row_tiles)
            position = rest - image_tile * self.column_tiles * self.row_tiles
        column_tile = position // self.row_tiles
        return position - column_tile * self.row_tiles, column_tile, image_tile, n_tile


# --- which row of the bias + position table belongs to a row of the output -------------------------------------------

@dataclass(frozen=True)
class TableRows:
    """Row of ``x`` -> row of the table: ``row % positions``, or what an index in memory says.

    Attributes:
        positions: rows of the table that a row of ``x`` may ask for.
        index: ``[rows]`` Int32, or None. The table then has one more row, of NaN, which stands for every number that is
            no position: a wrong index gives a row of NaN, never an access outside the table and never a plausible one.
        rows: rows of ``x``.
    """

    positions: Int32
    index: cute.Tensor | None
    rows: Int32

    @cute.jit
    def of(self, row: Int32) -> Int32:
        """The table row of one output row. Rows beyond the output get a valid one too; TMA clips their stores."""
        if cutlass.const_expr(self.index is None):
            return row % self.positions
        table_row = Int32(0)
        if row < self.rows:
            table_row = self.index[row]
        if table_row < 0 or table_row >= self.positions:
            table_row = self.positions
        return table_row


@dataclass(frozen=True)
class TileTableRows(TableRows):
    """`TableRows` of the rows of a tile, which are images at neighbouring positions, or consecutive rows."""

    plan: TransposedRows

    @cute.jit
    def position(self, block: Int32, i: cutlass.Constexpr[int]) -> Int32:
        """Position ``i`` of a tile. Beyond the last one, whose rows TMA clips, the last: the table ends there."""
        if cutlass.const_expr(self.plan.config.tile_positions == 1):
            return block
        return min(block * self.plan.config.tile_positions + i, self.positions - 1)

    @cute.jit
    def first(self, row_block: Int32) -> Int32:
        """Flat order: table row of a tile's first row, where those of the others follow without a division."""
        if cutlass.const_expr(not self.plan.table_wraps_once):
            return Int32(0)
        return self.of(row_block * self.plan.tile_rows)

    @cute.jit
    def following(self, first: Int32, row: Int32, offset: Int32) -> Int32:
        """Flat order: table row of a row, ``offset`` rows behind the tile's first one, whose table row is ``first``."""
        if cutlass.const_expr(not self.plan.table_wraps_once):
            return self.of(row)
        table_row = first + offset
        if table_row >= self.positions:
            table_row -= self.positions
        return table_row

    @cute.jit
    def row_of(self, image: Int32, position: Int32) -> Int32:
        """Position order: row of ``x``; of images beyond the last one, which nobody stores, that of the last."""
        return min(image, self.rows // self.positions - 1) * self.positions + position


def index_view(pointer: cute.Pointer | None, rows: Int32) -> cute.Tensor | None:
    """``[rows]`` over the index in memory."""
    return None if pointer is None else cute.make_tensor(pointer, rows)
