"""Images -> rows of patches, at the speed of a copy: for images that the tensor cores' loads cannot read themselves.

One CTA moves one row of patches of one image: its pixels are a contiguous strip per channel (one strip if channels are
last), and its rows of patches are contiguous too. Between the two lies shared memory, where the permutation costs no
memory traffic.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels import dsl
from cute_kernels.kernels import ptx
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.plan.patchify import PatchifyPlan


class PatchifyKernel:
    """Host entry and kernel for one plan; batch and size of the images are launch arguments."""

    def __init__(self, plan: PatchifyPlan) -> None:
        self.plan = plan
        self.pixel = ELEMENT_TYPES[plan.problem.in_dtype]
        self.element = ELEMENT_TYPES[plan.problem.out_dtype]

    @cute.jit
    def __call__(
        self,
        images_pointer: cute.Pointer,
        x_pointer: cute.Pointer,
        batch: Int32,
        grid_rows: Int32,
        grid_columns: Int32,
        stream,
    ) -> None:
        """Launches one CTA per image and row of patches."""
        plan, problem = self.plan, self.plan.problem
        pixels = grid_columns * (problem.patch * problem.patch)  # of one channel's strip
        strips = 1 if problem.channels_last else problem.channels
        strip = pixels * (problem.channels // strips)
        self.kernel(images_pointer, x_pointer, strip, grid_rows, grid_columns).launch(
            grid=(batch * grid_rows, 1, 1),
            block=(plan.threads, 1, 1),
            smem=strip * (strips * plan.pixel_bytes),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, images: cute.Pointer, rows: cute.Pointer, strip: Int32, grid_rows: Int32, grid_columns: Int32
    ) -> None:
        plan, problem = self.plan, self.plan.problem
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        image = block // grid_rows
        storage = cute.recast_ptr(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16), dtype=self.pixel)
        strips = cutlass.const_expr(1 if problem.channels_last else problem.channels)

        ptx.griddepcontrol()
        # A channel's strips of an image follow each other; the channels follow each other.
        first = Int64(image) * Int64(strips * grid_rows) + Int64(block - image * grid_rows)
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
            values = cute.make_rmem_tensor(cute.make_layout((plan.unit, units)), self.element)
            for j in cutlass.range_constexpr(units):
                self._gather(storage, strip, grid_columns, patch, k + j * plan.unit, values[None, j])
            stored = cute.make_tensor(
                out + cute.assume(i * plan.store_elements, divby=plan.store_elements),
                cute.make_layout(plan.store_elements),
            )
            cute.autovec_copy(cute.make_tensor(values.iterator, cute.make_layout(plan.store_elements)), stored)

    @cute.jit
    def _gather(
        self, storage: cute.Pointer, strip: Int32, grid_columns: Int32, patch: Int32, k: Int32, target: cute.Tensor
    ) -> None:
        """``unit`` neighbouring elements of a row, which are neighbours in the image too; zeros beyond the last."""
        plan, problem = self.plan, self.plan.problem
        side, channels = problem.patch, problem.channels
        width = grid_columns * side
        loaded = cute.make_rmem_tensor(cute.make_layout(plan.unit), self.pixel)
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
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(plan.unit)), loaded)
        if cutlass.const_expr(self.pixel is self.element):
            for i in cutlass.range_constexpr(plan.unit):
                target[i] = loaded[i]
        else:
            target.store(loaded.load().to(self.element))


@cute.jit
def _copy_vector(source: cute.Pointer, target: cute.Pointer, count: cutlass.Constexpr[int]) -> None:
    """One load and one store of a thread."""
    values = cute.make_rmem_tensor(cute.make_layout(count), source.dtype)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(count)))


dsl.name_kernel(PatchifyKernel.kernel, "patchify")
