"""TMA copies by boxes: operations, swizzled boxes in shared memory, and the two sides of a copy."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup

Tma = tuple[cute.CopyAtom, cute.Tensor]
"""A TMA copy and the view of the tensor in global memory."""


def load_operation(sharers: int, *group: tcgen05.CtaGroup) -> cpasync.TmaCopyOp:
    """TMA load, of which each of the ``sharers`` CTAs loads its part for all."""
    kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
    return kind(*group)


def load_tma(
    tensor: cute.Tensor,
    layout: cute.Layout | cute.ComposedLayout,
    box: tuple[int, ...],
    sharers: int = 1,
    *group: tcgen05.CtaGroup,
) -> Tma:
    """Loads boxes of a tensor to shared memory, where one has this layout."""
    return cpasync.make_tiled_tma_atom(load_operation(sharers, *group), tensor, layout, box, num_multicast=sharers)


def store_tma(tensor: cute.Tensor, layout: cute.Layout | cute.ComposedLayout, box: tuple[int, ...]) -> Tma:
    """Stores boxes of a tensor from shared memory, where one has this layout."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box)


def swizzled(layout: cute.Layout, bits: int = 3) -> cute.ComposedLayout:
    """A layout with SWIZZLE_32B, 64B or 128B, by the bits that are changed."""
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, layout)


def k_major(dtype: type, box: tuple[int, ...], blocks: int) -> cute.ComposedLayout:
    """``[*box, blocks]``, K-major, SWIZZLE_128B; without the last mode for a single block.

    The second mode of a box is 128 bytes of K.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    shape = (*box, blocks) if blocks > 1 else box
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def shared_tensor(pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: type) -> cute.Tensor:
    """Shared memory with a swizzled layout, which its pointer carries."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def sides(
    atom: cute.CopyAtom, shared: cute.Tensor, memory: cute.Tensor, modes: int, share: tuple[int, int | Int32] = (1, 0)
) -> tuple[cute.Tensor, cute.Tensor]:
    """Both sides of a copy: boxes in shared memory, and boxes of the view of global memory.

    Args:
        atom: the copy.
        shared, memory: both by boxes.
        modes: those of a box, which become one.
        share: CTAs that share a box, and which of its parts this CTA copies.
    """
    groups = cute.group_modes(shared, 0, modes), cute.group_modes(memory, 0, modes)
    return cpasync.tma_partition(atom, share[1], cute.make_layout(share[0]), *groups)


def fetch(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer, multicast: Int16 | None = None
) -> None:
    """Starts the load of a box, whose bytes complete on ``barrier``.

    Args:
        atom: the load.
        source, target: the box in global and in shared memory.
        barrier: in each CTA that receives it.
        multicast: those CTAs as a bit mask; None: this one.
    """
    if multicast is None:
        cute.copy(atom, source, target, tma_bar_ptr=barrier)
    else:
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=multicast)


def all_ctas(ctas: int) -> Int16 | None:
    """Bit mask of the CTAs of a cluster; None of one alone."""
    return Int16((1 << ctas) - 1) if ctas > 1 else None
