"""The host entry that all kernels over images have in common: their operands as tensors, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.host import PatchEmbedHost, launch_clusters
from cute_kernels.plan.patch_embed_images.base import ImagesPlan


@dataclass(frozen=True)
class ImagesOperands:
    """What a launch is given: pointers, and sizes in images, pixels and features."""

    images: cute.Pointer
    weight: cute.Tensor
    weight_low: cute.Tensor | None
    scale: cute.Pointer | None
    table: cute.Pointer | None
    out: cute.Pointer
    batch: Int32
    height: Int32
    width: Int32
    n: Int32
    grid_height: Int32
    grid_width: Int32


class ImagesHost(PatchEmbedHost):
    """Images, their sizes and features are launch arguments; channels are not."""

    plan: ImagesPlan

    @cute.jit
    def __call__(
        self,
        images_pointer: cute.Pointer,
        weight_pointer: cute.Pointer,
        weight_low_pointer: cute.Pointer | None,
        scale_pointer: cute.Pointer | None,
        table_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        batch: Int32,
        height: Int32,
        width: Int32,
        n: Int32,
        clusters: Int32,
        profile: cute.Pointer | None,
        stream,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, problem, k = self.plan, self.plan.problem, self.plan.weight_columns_of_k
        rows = cute.make_layout((n, k), stride=(k, 1))
        low = None if weight_low_pointer is None else cute.make_tensor(weight_low_pointer, rows)
        operands = ImagesOperands(
            images_pointer, cute.make_tensor(weight_pointer, rows), low, scale_pointer, table_pointer, out_pointer,
            batch, height, width, n, height // problem.patch, width // problem.patch,
        )  # fmt: skip
        launch_clusters(self.kernel(self.arguments(operands), profile), plan, clusters, stream)
