"""The product of one tile, whatever the element type: copies, fragments and ``mma.sync``, all by the same warps.

Stages of both operands are filled by ``cp.async`` while earlier ones are multiplied; there is one barrier per stage.
Fragments are read by ``ldmatrix`` one step of 32 bytes ahead, and copies are spread over the steps of a stage. Rows of
B are read in such an order that a lane's accumulators are neighbouring columns (`Sm80Plan.lane_columns`).
"""

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.sm80.instructions import accumulator_type, computed_here, ldmatrix_x4, mma_sync, round_tf32
from cute_kernels.kernels.sm80.load import (
    Chore,
    Load,
    key_of_column,
    key_of_row,
    shared_base,
    sync_team,
    team_of,
    team_thread,
)
from cute_kernels.plan.sm80 import STEP_BYTES, Sm80Plan


@dataclass(frozen=True)
class Warp:
    """Where a warp and its lanes are in a tile: first row and column of the warp."""

    plan: Sm80Plan
    lane: Int32
    row: Int32
    column: Int32


def this_warp(plan: Sm80Plan) -> Warp:
    """The warp of this thread, computed where it is called."""
    thread = computed_here(team_thread(plan))
    warp = cute.arch.make_warp_uniform(thread // 32)
    c = plan.config
    return Warp(plan, thread % 32, warp // c.warps_n * plan.warp_m, warp % c.warps_n * plan.warp_n)


@dataclass(frozen=True)
class Fragments:
    """Two steps of both operands in registers, and where a lane reads the next ones from.

    Registers of A are (rows 0 to 7, rows 8 to 15) x (lower 16 bytes of K, upper) of every 16 rows, those of B (lower,
    upper) x (8 columns, the next 8): the operands of an MMA lie side by side as ``ldmatrix`` leaves them.

    Attributes:
        a, b: ``[registers, 2]``.
        from_a, from_b: offsets in a stage of the row of which this lane has the address.
        cell_a, cell_b: of its piece of the first step, swizzled; that of step s is the exclusive or with 32 s.
    """

    plan: Sm80Plan
    a: cute.Tensor
    b: cute.Tensor
    from_a: Int32
    from_b: Int32
    cell_a: Int32
    cell_b: Int32

    def load(self, stage: Int32, stage_b: Int32, step: int, buffer: int) -> None:
        """Reads a step of the stages of A and of B at these addresses."""
        plan, row_bytes = self.plan, self.plan.config.row_bytes
        a = stage + self.from_a + (self.cell_a ^ (step * STEP_BYTES))
        b = stage_b + self.from_b + (self.cell_b ^ (step * STEP_BYTES))
        for i in range(plan.warp_m // 16):
            for r, value in enumerate(ldmatrix_x4(a, i * 16 * row_bytes)):
                self.a[4 * i + r, buffer] = value
        for pair in range(plan.warp_n // 16):
            # Of 32 columns lanes own 8 each: two pairs of blocks take every other four of eight.
            row = 32 * (pair // 2) + 4 * (pair % 2) if plan.lane_columns == 8 else 16 * pair
            for r, value in enumerate(ldmatrix_x4(b, row * row_bytes)):
                self.b[4 * pair + r, buffer] = value


def fragments(plan: Sm80Plan, warp: Warp) -> Fragments:
    """Fragments of a warp, not loaded yet."""
    lane, row_bytes = warp.lane, plan.config.row_bytes
    row_a = (lane & 7) + 8 * ((lane >> 3) & 1)
    row_b = plan.lane_columns * ((lane & 7) >> 1) + (lane & 1) + 2 * (lane >> 4)
    key_a = key_of_row(row_a, plan.chunks)
    key_b = key_of_column(row_b, plan.chunks, plan.lane_columns)
    behind_a = 0 if plan.keeps_b else plan.config.tile_m
    registers = (plan.warp_m // 16 * 4, plan.warp_n // 8 * 2)
    a, b = (cute.make_rmem_tensor((count, 2), Int32) for count in registers)
    from_a, from_b = (warp.row + row_a) * row_bytes, (behind_a + warp.column + row_b) * row_bytes
    return Fragments(plan, a, b, from_a, from_b, ((lane >> 4) ^ key_a) * 16, (((lane >> 3) & 1) ^ key_b) * 16)


class Tiles(Protocol):
    """Tiles of a kernel: what they are made of and where they go."""

    def loads(self, tile: Int32) -> tuple[Load, Load]:
        """Loads of A and of B. Of a tile behind the last one nothing is copied, whatever the addresses."""

    def begin(self, tile: Int32) -> None:
        """Copies what `store` reads of shared memory, if anything: no warp reads that of the tile before any more.

        The copies are in the group of the first block's, and complete before the last block is multiplied.
        """

    def store(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Finishes and stores this lane's accumulators: ``[4 numbers, blocks of 8 columns, blocks of 16 rows]``."""


class FeatureTiles(Tiles):
    """Tiles of which those of neighbouring features follow each other; ``n`` features."""

    plan: Sm80Plan
    n: Int32

    @property
    def n_tiles(self) -> Int32:
        return cute.ceil_div(self.n, self.plan.config.tile_n)

    def _place(self, tile: Int32) -> tuple[Int32, Int32]:
        """First row and column of the product."""
        c = self.plan.config
        return tile // self.n_tiles * c.tile_m, tile % self.n_tiles * c.tile_n


@dataclass(frozen=True)
class MainLoop:
    """Multiplies tiles one after the other, and copies the first blocks of the next one under the end of each."""

    plan: Sm80Plan
    tiles: Tiles
    k_blocks: Int32

    @property
    def ahead(self) -> int:
        """Blocks that are copied before they are multiplied."""
        return self.plan.config.stages - 1

    @cute.jit
    def run(self, first: Int32, count: Int32, step: Int32) -> None:
        """Takes the tiles from ``first`` to ``count - 1``, every ``step``-th."""
        plan, ahead = self.plan, self.ahead
        smem = shared_base(plan)
        blocks = (4, plan.warp_n // 8, plan.warp_m // 16)
        sums = cute.make_rmem_tensor(blocks, accumulator_type(plan.multiplied))
        parts = fragments(plan, this_warp(plan))
        last = smem + ahead * plan.stage_bytes
        ring = (smem, last)
        if cutlass.const_expr(plan.keeps_b):
            self._keep(self.tiles.loads(first)[1])
        if cutlass.const_expr(plan.overlaps):
            self._begin(self._of_tile(first), smem)
        if cutlass.const_expr(plan.keeps_b):
            cute.arch.cp_async_wait_group(ahead - 1)
            cute.arch.sync_threads()  # each team has copied a part of B
        read = smem
        for tile in cutlass.range(first, count, step, unroll=1):
            loads = self._of_tile(tile)
            sums.fill(0)
            if cutlass.const_expr(not plan.overlaps):
                sync_team(plan)  # the stages of the tile before have been read
                self._begin(loads, smem)
                read = smem
            cute.arch.cp_async_wait_group(ahead - 1)
            self._emit(self._roundings(loads, read, Int32(1)))
            sync_team(plan)
            self.tiles.begin(tile)
            parts.load(read, self._b(read, Int32(0)), 0, 0)
            inner = self.k_blocks - ahead if cutlass.const_expr(plan.overlaps) else self.k_blocks
            for block in cutlass.range(inner, unroll=1):
                following = self._behind(read, ring)
                exists, more = Int32(1), Int32(1)
                if cutlass.const_expr(not plan.overlaps):
                    exists = Int32(block + ahead < self.k_blocks)
                    more = Int32(block + 1 < self.k_blocks)
                    # Behind the last block nothing may have been copied: its own first step is read again, not used.
                    following = cutlass.select_(more != 0, following, read)
                buffers = self._buffers(read, following, ring, Int32(block))
                self._stage(sums, parts, loads, block + ahead, exists, buffers, more)
                read = following
            if cutlass.const_expr(plan.overlaps):
                coming, exists = self._of_tile(tile + step), Int32(tile + step < count)
                for block in cutlass.range_constexpr(ahead):
                    following = self._behind(read, ring)
                    more = Int32(1) if cutlass.const_expr(block + 1 < ahead) else None
                    buffers = self._buffers(read, following, ring, inner + block)
                    self._stage(sums, parts, coming, Int32(block), exists, buffers, more)
                    read = following
            self.tiles.store(sums, this_warp(plan), tile)

    def _behind(self, stage: Int32, ring: tuple[Int32, Int32]) -> Int32:
        """The stage behind one, of a ring from its first to its last."""
        return cutlass.select_(stage == ring[1], ring[0], stage + self.plan.stage_bytes)

    def _buffers(self, read: Int32, following: Int32, ring: tuple[Int32, Int32], block: Int32) -> tuple[Int32, ...]:
        """Stages that are multiplied, come next and are written, and where B of the first two is."""
        write = cutlass.select_(read == ring[0], ring[1], read - self.plan.stage_bytes)
        return read, following, write, self._b(read, block), self._b(following, block + 1)

    def _of_tile(self, tile: Int32) -> tuple[Load, ...]:
        """Loads of a tile: of A, and of B where it is not kept."""
        loads = self.tiles.loads(tile)
        return loads[:1] if self.plan.keeps_b else loads

    def _b(self, stage: Int32, block: Int32) -> Int32:
        """B of a block: in the stage, or kept."""
        if not self.plan.keeps_b:
            return stage
        return cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint() + block * self.plan.kept_block_bytes

    @cute.jit
    def _keep(self, load: Load) -> None:
        """Copies all of B, in the group of the first block of A; teams take blocks in turn."""
        team = team_of(self.plan)
        for i in cutlass.range(-(-self.plan.k_blocks // self.plan.teams), unroll=1):
            block = i * self.plan.teams + team
            self._emit(load.copies(self._b(Int32(0), block), block, Int32(block < self.plan.k_blocks)))

    def _begin(self, loads: tuple[Load, Load], smem: Int32) -> None:
        """Copies the first blocks of a tile."""
        for stage in range(self.ahead):
            exists = Int32(Int32(stage) < self.k_blocks)
            self._emit(self._copies(loads, smem + stage * self.plan.stage_bytes, Int32(stage), exists))
            cute.arch.cp_async_commit_group()

    def _copies(self, loads: tuple[Load, Load], stage: Int32, block: Int32, exists: Int32) -> list[Chore]:
        return [chore for load in loads for chore in load.copies(stage, block, exists)]

    def _roundings(self, loads: tuple[Load, Load], stage: Int32, exists: Int32) -> list[Chore]:
        """Pieces of work that round a stage in shared memory, none if it is not rounded there."""
        if self.plan.rounds_fragments:
            return []
        pairs = zip(loads, self.plan.rounds[: len(loads)], strict=True)
        return [chore for load, rounds in pairs if rounds for chore in load.roundings(stage, exists)]

    def _emit(self, chores: list[Chore]) -> None:
        for chore in chores:
            chore()

    def _stage(
        self, sums: cute.Tensor, parts: Fragments, loads: tuple[Load, Load], block: Int32, exists: Int32,
        buffers: tuple[Int32, ...], more: Int32 | None
    ) -> None:
        """Multiplies a block, copies another if it ``exists``, and makes the next ready; ``more`` None: nobody waits.
        """
        read, following, write, b, following_b = buffers
        steps = self.plan.config.row_bytes // STEP_BYTES
        chores = self._copies(loads, write, block, exists)
        chores.append(cute.arch.cp_async_commit_group)
        roundings = [] if more is None else self._roundings(loads, following, more)
        if roundings:
            chores += [lambda: cute.arch.cp_async_wait_group(self.ahead - 1), *roundings]
        for step in range(steps):
            if step < steps - 1:
                parts.load(read, b, step + 1, (step + 1) % 2)
                self._emit(chores[len(chores) * step // (steps - 1) : len(chores) * (step + 1) // (steps - 1)])
            elif more is not None:
                if not roundings:
                    cute.arch.cp_async_wait_group(self.ahead - 1)
                sync_team(self.plan)
                parts.load(following, following_b, 0, (step + 1) % 2)
            self._multiply(sums, parts, step % 2)

    def _multiply(self, sums: cute.Tensor, parts: Fragments, buffer: int) -> None:
        """One step, in a serpentine over the tile: a fragment of one operand is used again at once."""
        plan = self.plan
        rows, columns = plan.warp_m // 16, plan.warp_n // 8
        if plan.rounds_fragments:
            for fragment, rounds in zip((parts.a, parts.b), plan.rounds, strict=True):
                for i in range(fragment.shape[0] if rounds else 0):
                    fragment[i, buffer] = round_tf32(fragment[i, buffer])
        for j in range(columns):
            b = [parts.b[2 * j + r, buffer] for r in range(2)]
            for i in reversed(range(rows)) if j % 2 else range(rows):
                a = [parts.a[4 * i + r, buffer] for r in range(4)]
                for e, value in enumerate(mma_sync(plan.multiplied, [sums[e, j, i] for e in range(4)], a, b)):
                    sums[e, j, i] = value
