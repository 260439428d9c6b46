"""Patches out of images by ``cp.async``, as rows of an operand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.kernels.sm80.instructions import cp_async_16
from cute_kernels.kernels.sm80.load import Chore, Load, key_of_row, team_thread
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.images_sm80 import Sm80ImagesPlan


@dataclass(frozen=True)
class Grid:
    """Images and their patches: sizes of a launch, those that are divided by as factors and shifts."""

    batch: Int32
    height: Int32
    width: Int32
    grid_width: cute.FastDivmodDivisorV2
    positions: cute.FastDivmodDivisorV2

    def patch(self, plan: Sm80ImagesPlan, eight: Int32, inside: Int32) -> tuple[Int32, Int32]:
        """(image, position) of one of eight rows of the product."""
        if plan.config.tile_images == 1:
            return divmod(8 * eight + inside, self.positions)
        group, position = divmod(eight, self.positions)
        return 8 * group + inside, position


def grid_of(batch: Int32, height: Int32, width: Int32, patch: int) -> Grid:
    """The grid of patches of images of this size. Divisors are prepared where this is called: on the host."""
    down, right = height // patch, width // patch
    return Grid(batch, height, width, cute.FastDivmodDivisorV2(right), cute.FastDivmodDivisorV2(down * right))


@dataclass(frozen=True)
class PatchLoad(Load):
    """Copies the rows of this thread's patches, or its piece of them. ``sources``: address of each patch's first piece
    that is this thread's; ``targets``: (offset of the patch's row in a stage, of the piece in it); ``line``,
    ``channel``: from row to row of an image, and from channel to channel, all in bytes."""

    plan: Sm80ImagesPlan
    sources: list[Int64]
    targets: list[tuple[Int32, Int32]]
    line: Int32
    channel: Int64

    def copies(self, stage: Int32, block: Int32, exists: Int32) -> list[Chore]:
        """Copies of one block of K, rows of the patches, into the stage at this address; none if ``exists`` is 0."""
        plan, patch = self.plan, self.plan.problem.patch
        first = block * plan.patch_rows
        offset = Int64(first // patch) * self.channel + Int64(first % patch * self.line)

        def copy(source: Int64, base: Int32, cell: Int32, row: int) -> None:
            place = stage + base + (cell ^ (row * plan.pieces * 16))
            cp_async_16(place, 0, source + offset + Int64(row * self.line), exists)

        return [
            lambda source=source, base=base, cell=cell, row=row: copy(source, base, cell, row)
            for source, (base, cell) in zip(self.sources, self.targets, strict=True)
            for row in range(plan.patch_rows // plan.parts)
        ]


def patch_load(plan: Sm80ImagesPlan, images: cute.Pointer, first: Int32, grid: Grid) -> PatchLoad:
    """The load of the patches that are rows of the product from ``first`` on; beyond the images the last one again."""
    problem = plan.problem
    size = ITEMSIZE[problem.in_dtype]
    thread = team_thread(plan)
    local, part, piece = _place(plan, thread)
    line = grid.width * size
    channel = Int64(grid.height) * Int64(line)
    of_part = plan.patch_rows // plan.parts
    sources, targets = [], []
    for i in range(plan.config.tile_m // plan.pass_patches):
        row = local + i * plan.pass_patches
        image, position = grid.patch(plan, first // 8 + row // 8, row % 8)
        image = cutlass.min(image, grid.batch - 1)
        down, right = divmod(position, grid.grid_width)
        start = Int64(image) * (channel * problem.channels)
        start += Int64(down * problem.patch + part * of_part) * Int64(line)
        start += Int64(right * (problem.patch * size) + piece * 16)
        sources.append(images.toint() + start)
        cell = part * (of_part * plan.pieces) + piece
        targets.append((row * plan.config.row_bytes, (cell ^ key_of_row(row, plan.chunks)) * 16))
    return PatchLoad(plan, sources, targets, line, channel)


def _place(plan: Sm80ImagesPlan, thread: Int32) -> tuple[Int32, Int32, Int32]:
    """(patch of a pass, part of its rows, piece of a row) of a thread.

    With several pieces to a row, eight lanes write pieces of 8 / pieces patches, whose keys differ in the bits that the
    pieces leave: patches with the upper bits of the key first, and what is left of it from eight lanes to the next.
    """
    pieces = plan.pieces
    lane, warp = thread % 32, thread // 32
    if pieces == 1:
        local = thread % plan.pass_patches
        if plan.config.tile_images == 8:
            local = local - lane + ((lane & 1) << 3) + ((lane >> 1) & 7) + (lane & 16)
        return local, thread // plan.pass_patches, Int32(0)
    inside, outside = (lane // pieces) % (8 // pieces), lane // 8
    if plan.chunks == 8:
        low = pieces * inside + outside % pieces
    else:  # two rows of 64 bytes lie side by side in the banks, and share a key
        low = (inside & 1) + (4 * (inside >> 1) + 2 * (outside & 1) if pieces == 2 else 2 * outside)
    of_warp = 32 // pieces
    warps = plan.pass_patches // of_warp
    high = outside // pieces if pieces == 2 else 0
    return warp % warps * of_warp + 8 * high + low, warp // warps, lane % pieces
