"""Images -> rows of patches, at the speed of a copy: for images that the tensor cores' loads cannot read themselves.

One CTA moves one row of patches of one image: its pixels are a contiguous strip per channel (one strip if channels are
last), and its rows of patches are contiguous too. Between the two lies shared memory, where the permutation costs no
memory traffic.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.host import ELEMENT_TYPES, Operands
from cute_kernels.plan.patchify import PITCH_PAD_BYTES, PatchifyPlan

LOADS_AT_ONCE = 3
"""Pieces of 16 bytes by a thread: three channels of a row of 16 patches of 14 are 588 of them, of 256 threads."""

_WORDS = {1: cutlass.Int8, 2: cutlass.Int16, 4: Int32, 8: Int64}
"""Numbers by their bytes."""


class PatchifyKernel:
    """Host entry and kernel for one plan; batch and size of the images are launch arguments."""

    def __init__(self, plan: PatchifyPlan) -> None:
        self.plan = plan
        self.pixel = ELEMENT_TYPES[plan.problem.in_dtype]
        self.element = ELEMENT_TYPES[plan.problem.out_dtype]

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Launches one CTA per image and row of patches."""
        plan, problem = self.plan, self.plan.problem
        pixels = o.grid_columns * (problem.patch * problem.patch)  # of one channel's strip
        strips = 1 if problem.channels_last else problem.channels
        strip = pixels * (problem.channels // strips)
        smem = strip * (strips * plan.in_bytes)
        if cutlass.const_expr(plan.gathers_vectors):
            smem += problem.channels * problem.patch * PITCH_PAD_BYTES
        # Not itself a dependent launch: its many small CTAs would take the multiprocessors that the kernel before it is
        # about to use. Back to back that took 12.1 us for 7.6 at 3 images of 256 patches of 14, 28.9 for 20.3 at 2 of
        # 1,369, as long at 64 and 512 images, and 4.9 for 5.5 at one (H200, bench/results: 2026-11-30-h200).
        self.kernel(o.images, o.x, strip, o.grid_rows, o.grid_columns).launch(
            grid=(o.batch * o.grid_rows, 1, 1), block=(plan.threads, 1, 1), smem=smem, stream=stream
        )

    @cute.kernel
    def kernel(
        self, images: cute.Pointer, rows: cute.Pointer, strip: Int32, grid_rows: Int32, grid_columns: Int32
    ) -> None:
        plan, problem = self.plan, self.plan.problem
        block = cute.arch.block_idx()[0]
        image = block // grid_rows
        storage = cute.recast_ptr(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16), dtype=self.pixel)
        strips = cutlass.const_expr(1 if problem.channels_last else problem.channels)

        if cutlass.const_expr(plan.overlaps):
            ptx.griddepcontrol()
        # A channel's strips of an image follow each other; the channels follow each other.
        first = Int64(image) * Int64(strips * grid_rows) + Int64(block - image * grid_rows)
        move = self._move_vectors if plan.gathers_vectors else self._move
        move(images, rows, storage, first, strip, grid=(grid_rows, grid_columns))

    @cute.jit
    def _move(
        self, images: cute.Pointer, rows: cute.Pointer, storage: cute.Pointer, first: Int64, strip: Int32,
        grid: tuple[Int32, Int32]
    ) -> None:
        """Strips as they are, then one store after the other, whose place in a patch is worked out for each."""
        plan, problem = self.plan, self.plan.problem
        thread, block, (grid_rows, grid_columns) = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], grid
        strips = cutlass.const_expr(1 if problem.channels_last else problem.channels)
        vector = plan.load_pixels
        for channel in cutlass.range_constexpr(strips):
            source = images + cute.assume((first + channel * Int64(grid_rows)) * Int64(strip), divby=vector)
            target = storage + cute.assume(channel * strip, divby=vector)
            for i in cutlass.range(thread, strip // vector, plan.threads, unroll=4):
                offset = cute.assume(i * vector, divby=vector)
                _copy_vector(source + offset, target + offset, vector)
        cute.arch.sync_threads()

        per_row = cutlass.const_expr(plan.row_elements // plan.store_elements)
        offset = Int64(block) * Int64(grid_columns * plan.row_elements)
        out = rows + cute.assume(offset, divby=plan.store_elements)
        for i in cutlass.range(thread, grid_columns * per_row, plan.threads, unroll=2):
            patch = i // per_row
            k = (i - patch * per_row) * plan.store_elements
            units = plan.store_elements // plan.unit
            values = cute.make_rmem_tensor((plan.unit, units), self.element)
            for j in cutlass.range_constexpr(units):
                self._gather(storage, strip, grid_columns, patch, k + j * plan.unit, values[None, j])
            self._store(out + cute.assume(i * plan.store_elements, divby=plan.store_elements), values)

    @cute.jit
    def _move_vectors(
        self, images: cute.Pointer, rows: cute.Pointer, storage: cute.Pointer, first: Int64, strip: Int32,
        grid: tuple[Int32, Int32]
    ) -> None:
        """Rows of pixels with a pad between them, then vectors: a thread's place in a patch is worked out once."""
        plan, problem = self.plan, self.plan.problem
        thread, block, (grid_rows, grid_columns) = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], grid
        side, channels, vector = problem.patch, problem.channels, plan.load_pixels
        half = cutlass.const_expr(vector // 2)  # rows begin on 8 bytes
        width = grid_columns * side
        pitch = width + PITCH_PAD_BYTES // plan.in_bytes
        in_row = width // vector
        source = images + cute.assume(first * Int64(strip), divby=vector)
        to_next = Int64(grid_rows - 1) * Int64(strip)  # from the end of a channel's strip to that of the next channel
        total = channels * side * in_row
        # All channels together, and several loads under way before the first one's pixels are stored: none of them
        # behind a branch, where those that are too many load the last pixels again, and none moved past the barrier.
        for base in cutlass.range(0, total, LOADS_AT_ONCE * plan.threads, unroll=1):
            start = base + thread
            values = cute.make_rmem_tensor((half, 2, LOADS_AT_ONCE), self.pixel)
            for load in cutlass.range_constexpr(LOADS_AT_ONCE):
                i = min(start + load * plan.threads, total - 1)
                distance = Int64(i // in_row // side) * to_next + Int64(i * vector)
                place, loaded = source + cute.assume(distance, divby=vector), values[None, None, load]
                cute.autovec_copy(cute.make_tensor(place, vector), cute.make_tensor(loaded.iterator, vector))
            cute.arch.sync_warp()
            for load in cutlass.range_constexpr(LOADS_AT_ONCE):
                i = start + load * plan.threads
                if i < total:
                    row = i // in_row
                    offset = row * pitch + (i - row * in_row) * vector
                    for j in cutlass.range_constexpr(2):
                        target = storage + cute.assume(offset + j * half, divby=half)
                        cute.autovec_copy(values[None, j, load], cute.make_tensor(target, half))
        cute.arch.sync_threads()

        units = cutlass.const_expr(plan.store_elements // plan.unit)
        together = cutlass.const_expr(plan.threads // plan.vectors)  # patches at a time
        patch = thread // plan.vectors
        k = (thread - patch * plan.vectors) * plan.store_elements
        places = cute.make_rmem_tensor(units, Int32)
        for j in cutlass.range_constexpr(units):
            at = k + j * plan.unit
            line = at // side
            places[j] = Int32(-1)
            if at < channels * side * side:
                places[j] = line * pitch + at - line * side
        out = rows + cute.assume(Int64(block) * Int64(grid_columns * plan.row_elements), divby=plan.store_elements)
        if patch < together:
            for p in cutlass.range(patch, grid_columns, together, unroll=2):
                values = cute.make_rmem_tensor((plan.unit, units), self.element)
                for j in cutlass.range_constexpr(units):
                    self._unit(storage, places[j], p * side, values[None, j])
                self._store(out + cute.assume(p * plan.row_elements + k, divby=plan.store_elements), values)

    def _store(self, target: cute.Pointer, values: cute.Tensor) -> None:
        """Stores what a thread has at once."""
        count = self.plan.store_elements
        cute.autovec_copy(cute.make_tensor(values.iterator, count), cute.make_tensor(target, count))

    @cute.jit
    def _unit(self, storage: cute.Pointer, place: Int32, first: Int32, target: cute.Tensor) -> None:
        """``unit`` elements at a place in a patch; zeros of no place, loaded from the first: a branch would cost more.
        """
        unit, there = self.plan.unit, place >= 0
        source = storage + cute.assume(max(place, 0) + first, divby=unit)
        if cutlass.const_expr(self.pixel is self.element):
            # One number: loaded byte by byte the unit would have to be put together again.
            word = _WORDS[unit * self.plan.in_bytes]
            value = cute.make_tensor(cute.recast_ptr(source, dtype=word), 1)[0]
            cute.recast_tensor(target, word)[0] = value if there else word(0)
        else:
            loaded = cute.make_rmem_tensor(unit, self.pixel)
            cute.autovec_copy(cute.make_tensor(source, unit), loaded)
            for i in cutlass.range_constexpr(unit):
                loaded[i] = loaded[i] if there else self.pixel(0)
            self._convert(loaded, target)

    @cute.jit
    def _gather(
        self, storage: cute.Pointer, strip: Int32, grid_columns: Int32, patch: Int32, k: Int32, target: cute.Tensor
    ) -> None:
        """``unit`` neighbouring elements of a row, which are neighbours in the image too; zeros beyond the last."""
        plan, problem = self.plan, self.plan.problem
        side, channels = problem.patch, problem.channels
        width = grid_columns * side
        loaded = cute.make_rmem_tensor(plan.unit, self.pixel)
        loaded.fill(self.pixel(0))
        if k < channels * side * side:
            if cutlass.const_expr(not problem.channels_last):
                channel = k // (side * side)
                pixel = k - channel * (side * side)
                row = pixel // side
                offset = channel * strip + row * width + patch * side + (pixel - row * side)
            elif cutlass.const_expr(problem.order == "hwc"):
                row = k // (side * channels)
                offset = (row * width + patch * side) * channels + (k - row * (side * channels))
            else:
                channel = k // (side * side)
                pixel = k - channel * (side * side)
                row = pixel // side
                offset = (row * width + patch * side + (pixel - row * side)) * channels + channel
            source = storage + cute.assume(offset, divby=plan.unit)
            cute.autovec_copy(cute.make_tensor(source, plan.unit), loaded)
        self._convert(loaded, target)

    @cute.jit
    def _convert(self, loaded: cute.Tensor, target: cute.Tensor) -> None:
        if cutlass.const_expr(self.pixel is self.element):
            for i in cutlass.range_constexpr(self.plan.unit):
                target[i] = loaded[i]
        else:
            target.store(loaded.load().to(self.element))


@cute.jit
def _copy_vector(source: cute.Pointer, target: cute.Pointer, count: cutlass.Constexpr[int]) -> None:
    values = cute.make_rmem_tensor(count, source.dtype)
    cute.autovec_copy(cute.make_tensor(source, count), values)
    cute.autovec_copy(values, cute.make_tensor(target, count))


compiling.name_kernel(PatchifyKernel.kernel, "patchify")
