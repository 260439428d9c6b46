"""From global to shared memory by ``cp.async``: rows of a matrix, and patches out of images.

A row of a stage is 64 or 128 bytes of K, whose pieces of 16 bytes are swizzled: eight lanes that copy, or that
``ldmatrix`` reads for, meet eight different groups of banks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.kernels.sm80.instructions import add_opaque, cp_async_16, round_tf32_in_place
from cute_kernels.plan.sm80 import Sm80Plan

Chore = Callable[[], None]
"""Emits one instruction, or a few that belong together, between the products of a step."""


def team_thread(plan: Sm80Plan) -> Int32:
    """This thread's number in its team."""
    thread, _, _ = cute.arch.thread_idx()
    return thread if plan.teams == 1 else thread % plan.team_threads


def team_of(plan: Sm80Plan) -> Int32:
    """This warp's team."""
    thread, _, _ = cute.arch.thread_idx()
    return Int32(0) if plan.teams == 1 else cute.arch.make_warp_uniform(thread // plan.team_threads)


def sync_team(plan: Sm80Plan) -> None:
    """Waits for all warps of this one's team."""
    if plan.teams == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=1 + team_of(plan), number_of_threads=plan.team_threads)


def shared_base(plan: Sm80Plan) -> Int32:
    """Address of what this warp's team has of shared memory."""
    base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint() + plan.kept_bytes
    return base if plan.teams == 1 else base + team_of(plan) * plan.team_bytes


class Load(Protocol):
    """This thread's part in filling an operand."""

    def copies(self, stage: Int32, block: Int32, exists: Int32) -> list[Chore]:
        """Copies of one block of K into the stage at this address, none if ``exists`` is 0."""

    def roundings(self, stage: Int32, exists: Int32) -> list[Chore]:
        """Roundings of what this thread has copied there, once its copies are complete."""
        return []


def key_of_row(row: Int32 | int, chunks: int) -> Int32 | int:
    """Key that the numbers of a row's pieces are changed by (exclusive or), if ``ldmatrix`` reads eight rows in order.

    Linear in the bits of the row: that of a sum of rows without common bits is the exclusive or of theirs.
    """
    high = (row >> 3) & 1
    return (row & 7) ^ (high << 2) if chunks == 8 else ((row >> 1) & 3) ^ (high << 1)


def key_of_column(row: Int32 | int, chunks: int, lane_columns: int) -> Int32 | int:
    """The key of a row of B, which is read in such an order that a lane gets ``lane_columns`` columns side by side."""
    high = (row >> (3 if lane_columns == 8 else 2)) & 3
    return high * 2 + (row & 1) if chunks == 8 else high


@dataclass(frozen=True)
class RowsLoad:
    """Copies ``tile_rows`` rows of a matrix ``[rows, K]``, this thread one piece of every `Sm80Plan.pass_rows`: from
    ``source``, its first piece, to ``target`` in a stage. Behind ``rows`` and ``bytes_left``, that the matrix and a
    row have from there on, there are zeros; ``key``: of a row, as `key_of_row`."""

    plan: Sm80Plan
    source: Int64
    target: Int32
    pitch: Int64
    rows: Int32
    bytes_left: Int32
    tile_rows: int
    key: Callable[[int], int]

    def copies(self, stage: Int32, block: Int32, exists: Int32) -> list[Chore]:
        """Copies of one block of K into the stage at this address, none if ``exists`` is 0."""
        row_bytes, step = self.plan.config.row_bytes, self.plan.pass_rows
        size = 16 * Int32(block * row_bytes < self.bytes_left)
        source = [self.source + Int64(block * row_bytes)]

        def copy(i: int) -> None:
            if i:
                source[0] = add_opaque(source[0], self.pitch * step)
            there = cutlass.select_(self.rows > i * step, size, Int32(0))
            cp_async_16(stage + self._place(i), i * step * row_bytes, source[0], exists, there)

        return [lambda i=i: copy(i) for i in range(self.tile_rows // step)]

    def roundings(self, stage: Int32, exists: Int32) -> list[Chore]:
        """Roundings of what this thread has copied, once its copies are complete."""
        row_bytes, step = self.plan.config.row_bytes, self.plan.pass_rows
        return [
            lambda i=i: round_tf32_in_place(stage + self._place(i), i * step * row_bytes, exists)
            for i in range(self.tile_rows // step)
        ]

    def _place(self, i: int) -> Int32:
        flipped = self.key(i * self.plan.pass_rows) * 16
        return self.target ^ flipped if flipped else self.target


def rows_load(
    plan: Sm80Plan, matrix: cute.Pointer | Int64, first: Int32, rows: Int32, k_bytes: Int32, *, of_b: bool,
    part: tuple[Int32, Int32] | None = None
) -> RowsLoad:
    """The load of A's rows, or of B's, from row ``first`` on of a matrix of ``rows`` rows of ``k_bytes`` bytes.

    ``part``: of every row's bytes those from the first of these to the second, in place of all.
    """
    c, chunks = plan.config, plan.chunks
    thread = team_thread(plan)
    chunk, row = thread % chunks, thread // chunks

    def key(r: Int32 | int) -> Int32 | int:
        return key_of_column(r, chunks, plan.lane_columns) if of_b else key_of_row(r, chunks)

    address = matrix.toint() if isinstance(matrix, cute.Pointer) else matrix
    pitch, (start, end) = Int64(k_bytes), part or (0, k_bytes)
    inside = chunk * 16 + start
    offset = c.tile_m * c.row_bytes if of_b and not plan.keeps_b else 0
    return RowsLoad(
        plan,
        source=address + Int64(first + row) * pitch + Int64(inside),
        target=offset + row * c.row_bytes + ((chunk ^ key(row)) * 16),
        pitch=pitch,
        rows=rows - first - row,
        bytes_left=end - inside,
        tile_rows=c.tile_n if of_b else c.tile_m,
        key=key,
    )
