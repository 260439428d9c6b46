"""Consumer warpgroups of the dense GEMM on Hopper: operand stages to rounded rows of the output.

What they add comes from the other CTAs of a split of K, from the bias, and from a residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import as_floats
from cute_kernels.kernels.gemm import Addends, biases, finish, multipliers
from cute_kernels.kernels.host import ELEMENT_TYPES
from cute_kernels.kernels.pipes import Pipe, PipelineState, Sm90Pipe
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.kernels.tma import MMA_STEPS, WarpStaging, fetch
from cute_kernels.plan.gemm_sm90 import Sm90GemmPlan
from cute_kernels.plan.shared_operands import WARP_ROWS, WgmmaPair

# --- adding up the slices of a tile that the CTAs of a cluster share along K, through distributed shared memory ------

def sums_type(plan: WgmmaPair) -> type:
    """Element type of the accumulators."""
    return Int32 if plan.sums_integers else Float32


GROUP = 4
"""32-bit values of a 16-byte store: two rows and two columns of an accumulator."""


@dataclass(frozen=True)
class PartialSums:
    """The sums of one warp's rows over every slice of K, which one of the CTAs adds up and finishes.

    CTA ``i`` of a split finishes the rows of its warps ``i * finished_warps`` to ``(i + 1) * finished_warps - 1``; the
    same warps of the other CTAs send it their sums. Nothing is shared between the warps of a CTA.

    Attributes:
        sums: stage ``w`` is full when warp ``w`` of this CTA has received every other slice's sums, and empty when what
            warp ``w`` of this CTA sent has been read.
        buffers: where warp ``w % finished_warps`` receives, `Sm90GemmPlan.received_bytes` each.
        slice: this CTA's slice of K.
        first: this CTA's place among those that share operands; slice ``i`` has CTA ``first + i * sharing_ctas`` there.
        warp: index of this warp among the consumers.
    """

    plan: Sm90GemmPlan
    sums: Pipe
    buffers: cute.Pointer
    slice: Int32
    first: Int32
    warp: Int32

    @property
    def finisher(self) -> Int32:
        """The slice whose CTA finishes this warp's rows."""
        return self.warp // self.plan.finished_warps

    def _cta(self, slice_: Int32) -> Int32:
        return self.first + slice_ * self.plan.sharing_ctas

    def _group(self, distance: Int32, index: int) -> cute.Pointer:
        """Where 16 bytes of this lane arrive from slice ``slice ^ distance``: 512 bytes of a warp are contiguous."""
        offset = (self.warp % self.plan.finished_warps) * self.plan.received_bytes
        offset += (distance - 1) * self.plan.partial_bytes
        offset += index * 512 + cute.arch.lane_idx() * 16
        return cute.recast_ptr(self.buffers + cute.assume(offset, divby=16), dtype=Float32)

    @cute.jit
    def send(self, accumulator: cute.Tensor, phase: Int32) -> None:
        """Sends this warp's sums to the CTA that finishes its rows; ``phase``: parity of the cluster's count of tiles.
        """
        groups = cute.size(accumulator) // GROUP
        bits = cute.make_tensor(cute.recast_ptr(accumulator.iterator, dtype=Int32), (GROUP, groups))
        target = self._cta(self.finisher)
        self.sums.wait_empty_phase(self.sums.empty + self.warp, phase ^ 1)
        for index in cutlass.range_constexpr(groups):
            place, values = self._group(self.slice ^ self.finisher, index), tuple(bits[i, index] for i in range(GROUP))
            cute.arch.store_async_dsmem(place, values, self.sums.full + self.warp, target)

    @cute.jit
    def receive(self, phase: Int32) -> None:
        """Waits for the sums of the other slices, likewise."""
        full = self.sums.full + self.warp
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.plan.received_bytes)
        self.sums.wait_full_phase(full, phase)

    def add(self, values: cute.Tensor, first: int) -> None:
        """Adds the sums of the other slices to accumulators of groups of four, of which ``first`` is the number of the
        first, as they are needed: all of them at once would not fit the registers.

        The additions form a balanced binary tree over the slices. Each one commutes, so that the result does not depend
        on which slice is this CTA's.
        """
        for group in range(cute.size(values) // GROUP):
            size = 1
            while size < self.plan.config.split_k:
                subtree = self._sum(size, 2 * size, first + group)
                for i in range(GROUP):
                    values[group * GROUP + i] = values[group * GROUP + i] + subtree[i]
                size *= 2

    def _sum(self, begin: int, end: int, index: int) -> list[Float32 | Int32]:
        """The sum over the slices at distances ``begin`` to ``end - 1``, a power of two of them, as a tree."""
        if end - begin == 1:
            dtype = sums_type(self.plan)
            group = cute.recast_ptr(self._group(Int32(begin), index), dtype=dtype)
            source = cute.make_tensor(group, GROUP)
            loaded = cute.make_rmem_tensor(GROUP, dtype)
            cute.autovec_copy(source, loaded)
            return [loaded[i] for i in range(GROUP)]
        middle = (begin + end) // 2
        left, right = self._sum(begin, middle, index), self._sum(middle, end, index)
        return [a + b for a, b in zip(left, right, strict=True)]

    @cute.jit
    def release(self) -> None:
        """After the last `add` of a tile: the senders may write the sums of their next one."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.plan.config.split_k - 1:
            cute.arch.mbarrier_arrive(self.sums.empty + self.warp, self._cta(self.slice ^ (lane + 1)))

    @cute.jit
    def drain(self, phase: Int32) -> None:
        """At the end, with the phase of a next tile: a CTA must outlive the signals that its sums have been read."""
        if self.slice != self.finisher:
            ptx.mbarrier_try_wait_relaxed_cluster(self.sums.empty + self.warp, phase ^ 1)


# --- the residual of a warp's rows, by TMA into the store buffers that its results will take --------------------------

@dataclass(frozen=True)
class Residual:
    """The store buffers of a warp before they are filled: TMA loads what is added, element by element.

    The warp that stores asks for it itself. A buffer is asked for when the store that used it has been read, and an
    element is read by the lane that writes the result in its place, or by its warp at once. ``full`` is the barrier of
    the first buffer; blocks ``[box, row block, column block, batch]`` are loaded to ``[box, buffer]``.
    """

    full: cute.Pointer
    nbytes: int
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    dtype: type

    @cute.jit
    def fetch(self, buffer: cutlass.Constexpr[int], *block: Int32) -> None:
        """Starts the load of a block."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + buffer, self.nbytes)
        fetch(self.atom, self.source[(None, *block)], self.target[None, buffer], self.full + buffer)


# --- numbers of a tile's columns in shared memory --------------------------------------------------------------------

@dataclass(frozen=True)
class Numbers:
    """Factors and values of the bias for rows of an MMA tile, or for columns of a column group; None: of nothing."""

    factors: Sequence[Float32 | None] | cute.Tensor | None = None
    biases: Sequence[Float32] | cute.Tensor | None = None


@dataclass(frozen=True)
class KeptNumbers:
    """FP32 numbers of the columns of a tile's WGMMAs, kind after kind: every warp needs all of them.

    Loads from global memory stood before every store buffer, and their addresses took as long as the products.

    Attributes:
        kinds: "scale" and "bias", in this order, each of ``count`` columns.
        thread, threads, barrier: index of this thread among those that share the numbers, how many, and their barrier.
    """

    base: cute.Pointer
    kinds: tuple[str, ...]
    count: int
    thread: Int32
    threads: int
    barrier: Int32

    @property
    def columns(self) -> list[Int32]:
        """Columns whose numbers this thread loads."""
        return [self.thread + first for first in range(0, self.count, self.threads)]

    def _place(self, kind: str, column: Int32) -> cute.Pointer:
        return cute.recast_ptr(self.base, dtype=Float32) + self.kinds.index(kind) * self.count + column

    def write(self, numbers: list[list[Float32]], waits: bool) -> None:
        """Writes what this thread has loaded, by kind and column; afterwards all may read.

        ``waits``: until nobody reads those of the tile before. Otherwise all have come here since by another barrier.
        """
        if waits:
            self._synchronise()
        for kind, values in zip(self.kinds, numbers, strict=True):
            for column, value in zip(self.columns, values, strict=True):
                self._write(self._place(kind, column), value, column < self.count)
        self._synchronise()

    @cute.jit
    def _write(self, target: cute.Pointer, value: Float32, exists: Boolean) -> None:
        if exists:
            cute.make_tensor(target, 1)[0] = value

    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)

    @cute.jit
    def read(self, kind: cutlass.Constexpr[str], column: Int32) -> cute.Tensor:
        """Numbers of two columns from an even one on, and of the two that are eight columns on."""
        values = cute.make_rmem_tensor((2, 2), Float32)
        for half in cutlass.range_constexpr(2):
            source = self._place(kind, cute.assume(column + half * 8, divby=2))
            cute.autovec_copy(cute.make_tensor(source, 2), values[None, half])
        return cute.make_tensor(values.iterator, 4)


# --- consumer warpgroup: operand stages -> WGMMA accumulators -> bias, rounding, store buffers, TMA ------------------

LINE_BYTES = 128
"""Bytes of a cache line."""

LOADED_GROUPS = 4
"""Column groups whose residual is in registers at a time: 64 columns, half of a store buffer of 8 bits."""

COLUMN_GROUP = 16
"""Columns of which a thread has eight values: rows ``lane / 4`` and ``lane / 4 + 8``, columns ``lane % 4 * 2`` and the
next one, and the same eight columns on (PTX ISA, wgmma accumulator layout)."""


@dataclass(frozen=True)
class GemmMma:
    """Computes and stores this warpgroup's rows of the tiles of its cluster.

    Attributes:
        tiled_mma: 64 x tile_n x 32 bytes instruction of one warpgroup.
        a_fragments, b_fragments: shared-memory descriptors ``[.., mma_tile, k step, stage]`` of this warpgroup's rows,
            and ``[.., k step, stage]``.
        staging: store buffers of this warp, 16 rows x 128 bytes each.
        bias: values by column, or None.
        warpgroup, thread: index of the warpgroup, and of the thread in it.
        rank_m, rank_n: this CTA among those of its cluster that share operands.
        first_cta: the first of them.
        partials: what this warp and those of other CTAs do with slices of K; None without a split.
        order_barrier: first of the named barriers by which warpgroups hand the tensor cores to each other.
        addends: what the epilogue multiplies and adds besides the bias.
        residual: where TMA brings it, what it brings.
    """

    plan: Sm90GemmPlan
    tiled_mma: cute.TiledMma
    a_fragments: cute.Tensor
    b_fragments: cute.Tensor
    operands: Sm90Pipe
    staging: WarpStaging
    bias: cute.Tensor | None
    order: GroupedOrder
    k_blocks: Int32
    warpgroup: Int32
    thread: Int32
    rank_m: Int32
    rank_n: Int32
    first_cta: Int32 | int
    partials: PartialSums | None
    order_barrier: int
    addends: Addends = Addends()
    residual: Residual | None = None

    kept: KeptNumbers | None = None

    TRANSPOSES: ClassVar[bool] = False

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        shape = self.tiled_mma.partition_shape_C((plan.warpgroup_rows, plan.config.tile_n))
        accumulator = cute.make_rmem_tensor(shape, sums_type(plan))
        state = self.operands.consumer_state()
        first, step = self.order.first, self.order.step
        if cutlass.const_expr(plan.config.pingpong):
            # Tiles go to the warpgroups in turn, and the stages of the other one's tile are not ours.
            if self.warpgroup > 0:
                state.advance(self.k_blocks)
            first += self.warpgroup * step
            step *= 2
        phase = Int32(0)
        for tile in cutlass.range(first, self.order.tiles, step, unroll=1):
            self._prefetch_residual(tile)
            self._await_order(tile)
            released = state.clone()
            self._stage(accumulator, False, state)
            state.advance()
            numbers = self._fetch_numbers(tile)
            self._fetch_residual(tile)
            for _ in cutlass.range(1, self.k_blocks, unroll=1):
                self._stage(accumulator, True, state)
                state.advance()
                # At most the newest group outstanding: the one that read the stage before is complete.
                warpgroup.wait_group(1)
                self.operands.arrive_empty(released, self.thread, plan.sharing_ctas, self.first_cta)
                released.advance()
            self._hand_over(tile)
            if cutlass.const_expr(plan.config.pingpong):
                state.advance(self.k_blocks)
            self._keep_numbers(numbers)
            # Coordinates, numbers of rows and the first of a table are there when the last WGMMAs are.
            place = self._place(tile)
            rows = [self._row_numbers(place, mma_tile) for mma_tile in range(plan.mma_tiles)]
            ahead = self._ahead(place, 0)
            warpgroup.wait_group(0)
            self.operands.arrive_empty(released, self.thread, plan.sharing_ctas, self.first_cta)
            if cutlass.const_expr(self.partials is None):
                self._store(accumulator, place, rows, ahead, phase)
            else:
                if self.partials.slice == self.partials.finisher:
                    self.partials.receive(phase)
                    self._store(accumulator, place, rows, ahead, phase)
                    self.partials.release()
                else:
                    self.partials.send(accumulator, phase)
            if cutlass.const_expr(self.partials is not None or self.residual is not None):
                phase ^= 1
        self.staging.finish()
        if cutlass.const_expr(self.partials is not None):
            self.partials.drain(phase)

    @cute.jit
    def _stage(self, accumulator: cute.Tensor, accumulate: cutlass.Constexpr[bool], state: PipelineState) -> None:
        """Issues the WGMMAs of one stage as one group."""
        self.operands.wait_full(state)
        warpgroup.fence()
        for step in cutlass.range_constexpr(MMA_STEPS):
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate or step > 0)
            a = self.a_fragments[None, None, step, state.index]
            b = self.b_fragments[None, None, step, state.index]
            cute.gemm(self.tiled_mma, accumulator, a, b, accumulator)
        warpgroup.commit_group()

    @cute.jit
    def _await_order(self, tile: Int32) -> None:
        """The first tile of a cluster needs no permission."""
        if cutlass.const_expr(self.plan.config.pingpong):
            if tile != self.order.first:
                cute.arch.barrier(barrier_id=self.order_barrier + self.warpgroup, number_of_threads=256)

    @cute.jit
    def _hand_over(self, tile: Int32) -> None:
        """The last WGMMA of this tile is issued: lets the other warpgroup begin the next tile, if there is one."""
        if cutlass.const_expr(self.plan.config.pingpong):
            if tile + self.order.step < self.order.tiles:
                cute.arch.barrier_arrive(barrier_id=self.order_barrier + 1 - self.warpgroup, number_of_threads=256)

    @cute.jit
    def _store(
        self, accumulator: cute.Tensor, place: tuple[Int32, ...], rows: list[Numbers],
        ahead: tuple[cute.Tensor | None, ...] | None, phase: Int32
    ) -> None:
        """Finishes, stages and stores a tile with this parity; returns as soon as the last TMA store is issued."""
        plan, config = self.plan, self.plan.config
        groups, dtype = self._groups, ELEMENT_TYPES[plan.problem.out_dtype]
        upcoming = ahead
        regions = [i // plan.mma_tiles for i in range(plan.regions_per_tile)]
        every = [(region * groups + j) * COLUMN_GROUP for region in regions for j in range(groups)]
        upcoming_columns = self._column_numbers(every[0])
        for i in cutlass.range_constexpr(plan.regions_per_tile):
            region, mma_tile = divmod(i, plan.mma_tiles)
            buffer = i % config.store_stages
            ahead = upcoming
            if cutlass.const_expr(i + 1 < plan.regions_per_tile):
                upcoming = self._ahead(place, i + 1)
            for first in cutlass.range_constexpr(0, groups, LOADED_GROUPS):
                # Of a buffer's first groups before the wait for it, which the loads may then overlap.
                numbers = range(first, min(first + LOADED_GROUPS, groups))
                columns = [(region * groups + j) * COLUMN_GROUP for j in numbers]
                residuals = [self._residual(place, mma_tile, column) for column in columns]
                if cutlass.const_expr(first == 0):
                    self._await_buffer(i, phase)
                for j in cutlass.range_constexpr(len(columns)):
                    # A group ahead: what is staged might be the same memory, for all that the assembler knows.
                    of_columns, number = upcoming_columns, i * groups + first + j + 1
                    if cutlass.const_expr(number < len(every)):
                        upcoming_columns = self._column_numbers(every[number])
                    if cutlass.const_expr(self.residual is not None):
                        residuals[j] = self._staged_residual(buffer, first + j)
                    rounded = finish(
                        as_floats(self._sums(accumulator, mma_tile, columns[j])),
                        self._bias(ahead, first + j, rows[mma_tile], of_columns), self.activation, dtype,
                        scale=self._scales(rows[mma_tile], of_columns), residual=residuals[j],
                        out_factor=self.addends.out_factor
                    )
                    self._stage_group(rounded, buffer, first + j)
            self.staging.store(buffer, *self._block(place, mma_tile, region))
            self._refill(place, i)

    @cute.jit
    def _await_buffer(self, i: cutlass.Constexpr[int], phase: Int32) -> None:
        """Waits until the buffer of the tile's region ``i`` may be written: it is empty, or has the residual."""
        if cutlass.const_expr(self.residual is None):
            self.staging.acquire()
        else:
            stages = self.plan.config.store_stages
            use, uses = i // stages, self.plan.regions_per_tile // stages  # of the buffer in a tile
            parity = phase * (uses % 2) ^ use % 2
            cute.arch.mbarrier_wait(self.residual.full + i % stages, parity)

    @cute.jit
    def _fetch_residual(self, tile: Int32) -> None:
        """Asks for the residual of a tile's first regions; the stores before have all the WGMMAs' time to be read."""
        if cutlass.const_expr(self.residual is not None):
            finishes = True
            if cutlass.const_expr(self.partials is not None):
                finishes = self.partials.slice == self.partials.finisher
            if finishes:
                place = self._place(tile)
                if self.staging.stores:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    for i in cutlass.range_constexpr(self.plan.config.store_stages):
                        self._fetch_region(place, i)

    @cute.jit
    def _refill(self, place: tuple[Int32, ...], i: cutlass.Constexpr[int]) -> None:
        """Asks for a later region's residual once region ``i`` is stored, of many buffers into one that is read by now.
        """
        unread = int(self.plan.config.store_stages > 2)
        upcoming = i - unread + self.plan.config.store_stages
        if cutlass.const_expr(self.residual is not None and i >= unread and upcoming < self.plan.regions_per_tile):
            if self.staging.stores:
                cute.arch.cp_async_bulk_wait_group(unread, read=True)
                self._fetch_region(place, upcoming)

    @cute.jit
    def _fetch_region(self, place: tuple[Int32, ...], i: cutlass.Constexpr[int]) -> None:
        region, mma_tile = divmod(i, self.plan.mma_tiles)
        self.residual.fetch(i % self.plan.config.store_stages, *self._block(place, mma_tile, region))

    @cute.jit
    def _sums(
        self, accumulator: cute.Tensor, mma_tile: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """The eight accumulators of a column group, over all slices of K."""
        values = cute.make_rmem_tensor(8, sums_type(self.plan))
        for j in cutlass.range_constexpr(8):
            # Accumulators of an MMA tile: pair, row half, 8 columns.
            values[j] = accumulator[(j % 2, j // 2 % 2, column // 8 + j // 4), mma_tile, 0]
        if cutlass.const_expr(self.partials is not None):
            self.partials.add(values, (mma_tile * self.plan.config.tile_n + column) // 8)
        return values

    @property
    def _groups(self) -> int:
        """Column groups of a store buffer."""
        return self.plan.store_columns // COLUMN_GROUP

    @property
    def activation(self) -> str:
        return self.plan.problem.activation

    @cute.jit
    def _place(self, tile: Int32) -> tuple[Int32, ...]:
        """Where a tile is: this warp's first row, the first column, the batch."""
        plan, config = self.plan, self.plan.config
        m_tile, n_tile, batch = self.order.coordinates(tile)
        row = (m_tile * config.cluster_m + self.rank_m) * config.tile_m + self.thread // 32 * WARP_ROWS
        if cutlass.const_expr(not config.pingpong):
            row += self.warpgroup * plan.warpgroup_rows
        return row, (n_tile * config.cluster_n + self.rank_n) * config.tile_n, batch

    def _rows(self, place: tuple[Int32, ...], mma_tile: int) -> tuple[Int32, Int32]:
        """The two rows of an MMA tile of which a thread has values."""
        row = place[0] + mma_tile * 64 + self.thread % 32 // 4
        return row, row + 8

    def _row_numbers(self, place: tuple[Int32, ...], mma_tile: int) -> Numbers:
        """Numbers of both rows of an MMA tile."""
        return Numbers([self.addends.row_factor(row, place[2]) for row in self._rows(place, mma_tile)])

    def _ahead(self, place: tuple[Int32, ...], i: int) -> tuple[cute.Tensor | None, ...] | None:
        """Values of the bias for region ``i`` of a tile, where they are loaded a store buffer ahead."""
        return None

    @cute.jit
    def _bias(
        self, ahead: tuple[cute.Tensor | None, ...] | None, group: cutlass.Constexpr[int], rows: Numbers,
        columns: Numbers
    ) -> cute.Tensor | None:
        """Values of the bias for the eight accumulators of a column group."""
        if cutlass.const_expr(self.bias is None):
            return None
        values = cute.make_rmem_tensor(8, Float32)
        for j in cutlass.range_constexpr(8):
            values[j] = rows.biases[j // 2 % 2] if columns.biases is None else columns.biases[j // 4 * 2 + j % 2]
        return values

    @cute.jit
    def _scales(self, rows: Numbers, columns: Numbers) -> Float32 | cute.Tensor | None:
        """Multipliers of the eight accumulators of a column group, or the call's number."""
        scales = self.addends.scales
        if cutlass.const_expr(scales is None or (scales.rows is None and scales.features is None)):
            return None if scales is None else scales.call
        values = cute.make_rmem_tensor(8, Float32)
        for j in cutlass.range_constexpr(8):
            of_column = self._other_factor if columns.factors is None else columns.factors[j // 4 * 2 + j % 2]
            of_row = None if rows.factors is None else rows.factors[j // 2 % 2]
            values[j] = multipliers(of_row, of_column)
        return values

    @property
    def _other_factor(self) -> Float32 | None:
        """The factor of all columns of a WGMMA, where they have none of their own."""
        return None

    # ---- numbers of a tile's columns, by shared memory -------------------------------------------------------------
    @cute.jit
    def _fetch_numbers(self, tile: Int32) -> list[list[Float32]]:
        """Loads this thread's numbers of a tile, which come while the tensor cores work."""
        if cutlass.const_expr(self.kept is None):
            return []
        place = self._place(tile)
        return [[self._number(kind, place, column) for column in self.kept.columns] for kind in self.kept.kinds]

    def _number(self, kind: str, place: tuple[Int32, ...], column: Int32) -> Float32:
        """A factor or the bias of a column of a WGMMA."""
        if kind == "bias":
            return biases(self.bias, place[1] + column, 1, 1)[0]
        return self.addends.column_factors(place[1] + column, place[2], 1, 1)[0]

    @cute.jit
    def _keep_numbers(self, numbers: list[list[Float32]]) -> None:
        """Writes them to shared memory."""
        if cutlass.const_expr(self.kept is not None):
            self.kept.write(numbers, waits=not self.plan.config.pingpong)

    def _column_numbers(self, column: int) -> Numbers:
        """Numbers of a thread's four columns in a column group."""
        kept = self.kept
        if kept is None:
            return Numbers()
        first = column + self.thread % 4 * 2
        return Numbers(*(kept.read(kind, first) if kind in kept.kinds else None for kind in ("scale", "bias")))

    @cute.jit
    def _prefetch_residual(self, tile: Int32) -> None:
        """Asks for the residual of this warp's rows, which comes while the tensor cores work on the tile."""
        residual = self.addends.residual
        if cutlass.const_expr(residual is not None):
            place, lane = self._place(tile), self.thread % 32
            line = LINE_BYTES * 8 // residual.element_type.width
            for mma_tile in cutlass.range_constexpr(self.plan.mma_tiles):
                for first in cutlass.range_constexpr(0, self.plan.config.tile_n, 2 * line):
                    column = place[1] + first + lane // 16 * line
                    self.addends.prefetch(place[0] + mma_tile * 64 + lane % 16, column, place[2])

    @cute.jit
    def _residual(
        self, place: tuple[Int32, ...], mma_tile: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """Addends of the eight accumulators of a column group, after the activation."""
        if cutlass.const_expr(self.addends.residual is None):
            return None
        values = cute.make_rmem_tensor(8, self.addends.residual.element_type)
        rows = self._rows(place, mma_tile)
        for i in cutlass.range_constexpr(4):
            first = place[1] + column + i // 2 * 8 + self.thread % 4 * 2
            pair = self.addends.addends(rows[i % 2], first, place[2], 2)
            values[2 * i], values[2 * i + 1] = pair[0], pair[1]
        return values

    def _block(self, place: tuple[Int32, ...], mma_tile: int, region: int) -> tuple[Int32, ...]:
        """The box of the output that a store buffer goes to."""
        row, first_column, batch = place
        row_block = row // self.plan.store_rows + mma_tile * (64 // self.plan.store_rows)
        return row_block, first_column // self.plan.store_columns + region, batch

    @cute.jit
    def _staged_residual(self, buffer: cutlass.Constexpr[int], group: cutlass.Constexpr[int]) -> cute.Tensor:
        """The residual of 16 rows x 16 columns, where `_stage_group` will put the results."""
        dtype = self.residual.dtype
        values = cute.make_rmem_tensor(8, dtype)
        if cutlass.const_expr(dtype is Float32):
            for i, target in enumerate(self._pair_places(buffer, group)):
                pair = cute.make_tensor(values.iterator + 2 * i, 2)
                cute.autovec_copy(cute.make_tensor(target, 2), pair)
        else:
            operation = warp.LdMatrix8x8x16bOp(transpose=self.TRANSPOSES, num_matrices=4)
            atom = cute.make_copy_atom(operation, dtype)
            source = cute.make_tensor(self._matrix_row(buffer, group, dtype), (8, 1))
            cute.copy(atom, source, cute.make_tensor(values.iterator, (8, 1)))
        return values

    def _matrix_row(self, buffer: int, group: int, dtype: type) -> cute.Pointer:
        """The row of a column group whose address this lane gives to ``stmatrix`` and ``ldmatrix``.

        Lanes 8 i to 8 i + 7 give the rows of matrix i: rows 0-7, rows 8-15, and both 8 columns on.
        """
        lane = self.thread % 32
        address = self.staging.chunk(lane % 16, group * 2 + lane // 16) + self.staging.offset(buffer)
        return cute.recast_ptr(address, dtype=dtype)

    def _pair_places(self, buffer: int, group: int) -> list[cute.Pointer]:
        """Where this lane's pairs of a column group are, of 32-bit elements: half of a 16-byte chunk each."""
        lane, places = self.thread % 32, []
        for half in range(2):
            for row_half in range(2):
                chunk = group * 4 + half * 2 + lane % 4 // 2
                target = self.staging.chunk(lane // 4 + row_half * 8, chunk) + self.staging.offset(buffer)
                places.append(cute.recast_ptr(target + cute.assume(lane % 2 * 8, divby=8), dtype=Float32))
        return places

    @cute.jit
    def _stage_group(self, values: cute.Tensor, buffer: cutlass.Constexpr[int], group: cutlass.Constexpr[int]) -> None:
        """Writes 16 rows x 16 columns of the warp to a store buffer."""
        lane = self.thread % 32
        if cutlass.const_expr(values.element_type.width == 8):
            # A thread has pairs of neighbouring columns, and stmatrix moves four bytes of a row for each.
            pairs = cute.recast_tensor(values, Int16)
            for half in cutlass.range_constexpr(2):
                for row_half in cutlass.range_constexpr(2):
                    target = self.staging.chunk(lane // 4 + row_half * 8, group) + self.staging.offset(buffer)
                    target += cute.assume(half * 8 + lane % 4 * 2, divby=2)
                    cute.make_tensor(cute.recast_ptr(target, dtype=Int16), 1)[0] = pairs[half * 2 + row_half]
        elif cutlass.const_expr(values.element_type is Float32):
            # stmatrix moves 16-bit elements only.
            for i, target in enumerate(self._pair_places(buffer, group)):
                pair = cute.make_tensor(values.iterator + 2 * i, 2)
                cute.autovec_copy(pair, cute.make_tensor(target, 2))
        else:
            target = self._matrix_row(buffer, group, values.element_type)
            target = cute.make_tensor(target, (8, 1))
            operation = warp.StMatrix8x8x16bOp(transpose=self.TRANSPOSES, num_matrices=4)
            atom = cute.make_copy_atom(operation, values.element_type)
            cute.copy(atom, cute.make_tensor(values.iterator, (8, 1)), target)


# --- the same of out^T = b * a^T -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TransposedMma(GemmMma):
    """Computes and stores this warpgroup's columns of the tiles of its cluster, where ``out^T = b * a^T``.

    Columns of the output are the rows of a WGMMA, rows of the output its columns. ``stmatrix`` transposes back what a
    warp has, 16 columns of the output; four warps fill store buffers with rows of 128 bytes.

    A place is the first column of the output that this warp has, the first row of the tile, the batch. Column groups
    of the accumulators are 16 rows of the output.
    """

    TRANSPOSES: ClassVar[bool] = True

    @property
    def _groups(self) -> int:
        return self.plan.store_rows // COLUMN_GROUP

    def _features(self, place: tuple[Int32, ...], mma_tile: int) -> tuple[Int32, Int32]:
        """The two columns of the output of which a thread has values."""
        feature = place[0] + mma_tile * 64 + self.thread % 32 // 4
        return feature, feature + 8

    @cute.jit
    def _row_numbers(self, place: tuple[Int32, ...], mma_tile: cutlass.Constexpr[int]) -> Numbers:
        """Numbers of both columns of the output."""
        features, scales = self._features(place, mma_tile), self.addends.scales
        factors, added = None, None
        if cutlass.const_expr(scales is not None and scales.features is not None):
            factors = [self.addends.column_factors(feature, place[2], 1, 1)[0] for feature in features]
        if cutlass.const_expr(self.bias is not None):
            added = [biases(self.bias, feature, 1, 1)[0] for feature in features]
        return Numbers(factors, added)

    def _number(self, kind: str, place: tuple[Int32, ...], column: Int32) -> Float32:
        return self.addends.row_factor(place[1] + column, place[2])

    @property
    def _other_factor(self) -> Float32 | None:
        return self.addends.scales.call

    def _block(self, place: tuple[Int32, ...], mma_tile: int, region: int) -> tuple[Int32, ...]:
        row_block = place[1] // self.plan.store_rows + region
        return row_block, (place[0] + mma_tile * 64) // self.plan.store_columns, place[2]

    def _matrix_row(self, buffer: int, group: int, dtype: type) -> cute.Pointer:
        """Lanes 8 i to 8 i + 7 give rows of the output of matrix i: both halves of 16 columns, and of 8 rows on."""
        lane, place = self.thread % 32, self.thread // 32 % self.plan.store_warps
        row, chunk = group * COLUMN_GROUP + lane // 16 * 8 + lane % 8, place * 2 + lane // 8 % 2
        return cute.recast_ptr(self.staging.chunk(row, chunk) + self.staging.offset(buffer), dtype=dtype)
