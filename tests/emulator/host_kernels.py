"""CuTe DSL host functions with known launches, for test_host.py. CuTe DSL compiles from files only."""

from __future__ import annotations

import itertools
import operator

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync


@cute.kernel
def fill(pointer: cute.Pointer, count: Int32, value: Float32):
    """pointer[i] = value for i < count."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        cute.make_tensor(pointer, cute.make_layout((count,)))[thread] = value


@cute.jit
def launch_fill(pointer: cute.Pointer, count: Int32, value: Float32, stream: cuda.CUstream):
    """Grid, block, cluster and shared memory all differ from their defaults; the grid depends on an argument."""
    fill(pointer, count, value).launch(
        grid=(2 * count, 3, 5), block=(64, 2, 1), cluster=(2, 1, 1), smem=4096, stream=stream
    )


@cute.jit
def launch_plain(pointer: cute.Pointer, count: Int32, value: Float32, stream: cuda.CUstream):
    """No cluster, no shared memory."""
    fill(pointer, count, value).launch(grid=(count, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launch_twice(pointer: cute.Pointer, count: Int32, value: Float32, stream: cuda.CUstream):
    """Two kernels from one host function."""
    fill(pointer, count, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
    fill(pointer, count + 1, value).launch(grid=(2, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launch_smem(pointer: cute.Pointer, count: Int32, value: Float32, stream: cuda.CUstream):
    """As many bytes of dynamic shared memory as the argument says."""
    fill(pointer, count, value).launch(grid=(1, 1, 1), block=(32, 1, 1), smem=count, stream=stream)


@cute.jit
def launch_cooperative(pointer: cute.Pointer, count: Int32, value: Float32, stream: cuda.CUstream):
    fill(pointer, count, value).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, cooperative=True)


@cute.kernel
def read_through(atom: cute.CopyAtom, tensor: cute.Tensor):
    """A kernel with a tensor map among its parameters."""
    cpasync.prefetch_descriptor(atom)


class TensorMapHost:
    """Encodes one tensor map for loads or stores.

    Args:
        box: elements per dimension, innermost first.
        swizzle: a name of `cute_kernels.emulator.machine.units.copies.tensor_map.SWIZZLES`.
        store: for stores.
    """

    SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B_atom32B": (2, 5, 2)}

    def __init__(self, box: tuple[int, ...], swizzle: str, store: bool = False) -> None:
        self.box, self.swizzle, self.store = box, swizzle, store
        self.compact = tuple(itertools.accumulate((1, *box[:-1]), operator.mul))

    @cute.jit
    def __call__(self, pointer: cute.Pointer, shape: cute.Shape, strides: cute.Stride, stream: cuda.CUstream):
        """``strides`` are those of dimensions 1.., in elements."""
        tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=(1, *strides)))
        layout = cute.make_layout(self.box, stride=self.compact)
        layout = cute.make_composed_layout(cute.make_swizzle(*self.SWIZZLES[self.swizzle]), 0, layout)
        direction = cpasync.CopyBulkTensorTileS2GOp() if self.store else cpasync.CopyBulkTensorTileG2SOp()
        atom, view = cpasync.make_tiled_tma_atom(direction, tensor, layout, self.box)
        read_through(atom, view).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


class Im2colMapHost:
    """Encodes one tensor map in im2col mode, of a tensor with extents C, W, (H, (D,)) N.

    Args:
        pixels, channels: of one copy; channels of 2 bytes fill the swizzle span.
        lower_corner, upper_corner, steps: per dimension W, (H, (D)).
        swizzle: a name of `cute_kernels.emulator.machine.units.copies.tensor_map.SWIZZLES`.
    """

    def __init__(
        self, pixels: int, channels: int, lower_corner: tuple[int, ...], upper_corner: tuple[int, ...],
        steps: tuple[int, ...], swizzle: str,
    ) -> None:  # fmt: skip
        self.tile = pixels, channels
        self.corners, self.steps, self.swizzle = (lower_corner, upper_corner), steps, swizzle

    @cute.jit
    def __call__(self, pointer: cute.Pointer, shape: cute.Shape, strides: cute.Stride, stream: cuda.CUstream):
        """``strides`` are those of dimensions 1.., in elements."""
        layout = cute.make_layout((shape[1:], shape[0]), stride=(strides, 1))
        tensor = cute.make_tensor(pointer, layout)
        pixels, channels = self.tile
        shared = cute.make_layout((pixels, channels), stride=(channels, 1))
        shared = cute.make_composed_layout(cute.make_swizzle(*TensorMapHost.SWIZZLES[self.swizzle]), 0, shared)
        zeros, ones = (0,) * len(self.steps), (1,) * len(self.steps)
        lower, upper = self.corners
        atom, view = cpasync.make_im2col_tma_atom(
            cpasync.CopyBulkTensorIm2ColG2SOp(), tensor, shared, self.tile, lower, upper, lower, upper, self.steps,
            zeros, ones,
        )  # fmt: skip
        read_through(atom, view).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def tensor_map_arguments(pointer: cute.Pointer, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
    """Run-time arguments of a `TensorMapHost`."""
    return pointer, tuple(map(Int32, shape)), tuple(map(Int64, strides)), cuda.CUstream(0)


@cute.kernel
def fill_tensor(tensor: cute.Tensor):
    """tensor[i] = 1."""
    thread, _, _ = cute.arch.thread_idx()
    tensor[thread] = Float32(1.0)


@cute.jit
def launch_tensor(tensor: cute.Tensor, stream: cuda.CUstream):
    """A kernel that takes a tensor."""
    fill_tensor(tensor).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
