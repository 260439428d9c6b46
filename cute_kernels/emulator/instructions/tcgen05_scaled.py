"""tcgen05.mma with block scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.emulator.graph.block import BlockBuilder, Call
from cute_kernels.emulator.instructions.accesses import enter
from cute_kernels.emulator.instructions.memory import address_value
from cute_kernels.emulator.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.ptx.decode import Instruction, Memory
from cute_kernels.emulator.units.matrix.scaled_mma import SCALED_KINDS, Scales

if TYPE_CHECKING:
    from cute_kernels.emulator.state.lane_masks import LaneValues
    from cute_kernels.emulator.units.sm import Warp

#: PTX ISA, "Block Scaling": kind -> scales of a row by .scale_vec or by its alias; the first is the default, if any.
_COUNTS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4},
}
_VECTORS = {name for counts in _COUNTS.values() for name in counts if name}
SCALED_QUALIFIERS = ("block_scale", *_VECTORS, *(f"kind::{kind}" for kind in SCALED_KINDS))


def mma(
    warp: Warp, mask: int, form: tuple[str, int, int, bool], matrices: tuple[LaneValues, LaneValues, LaneValues],
    instruction: LaneValues, scales: tuple[LaneValues, LaneValues], accumulate: LaneValues,
) -> None:  # fmt: skip
    """tcgen05.mma with block scaling, once per executing lane.

    Args:
        warp, mask: who issues.
        form: kind, cta_group, scales of a row, and whether A is in tensor memory.
        matrices: D, A and B: tensor-memory addresses and descriptors.
        instruction: the instruction descriptor.
        scales: tensor-memory addresses of those of A and B.
        accumulate: the enable-input-d predicate.
    """
    warp.cluster.progress += 1
    if not isinstance(accumulate, bool):
        accumulate = bool(accumulate & mask & -mask)
    kind, cta_group, count, a_in_tmem = form
    for lane, (d, a, b, descriptor, *places) in zip(
        lane_numbers(mask), each_lane(mask, *matrices, instruction, *scales)
    ):
        enter(warp, lane)
        warp.cluster.tensor_core.mma(
            kind=kind,
            cta_group=cta_group,
            rank=warp.cta.rank,
            d=d,
            a=a,
            b=b,
            instruction=descriptor,
            accumulate=accumulate,
            a_in_tmem=a_in_tmem,
            scales=Scales(*places, count),
            describe=f"by {warp.label}",
        )


def lower_scaled_mma(block: BlockBuilder, instruction: Instruction, cta_group: int) -> None:
    """Lowers a tcgen05.mma with .block_scale.

    Raises:
        UnsupportedPTX: a kind without scales, a number of scales that it does not have, sparsity and what else is not
            executed.
    """
    parts = instruction.parts
    kinds = [part[6:] for part in parts if part.startswith("kind::")]
    named = [part for part in parts if part in _VECTORS]
    counts = _COUNTS[kinds[0]] if len(kinds) == 1 else {}
    vector = named[0] if named else ""
    if len(named) > 1 or vector not in counts:
        allowed = ", ".join(f".{name}" for name in counts if name) or "none"
        raise instruction.refuse(f"one kind with scales is needed, and one of its numbers of scales ({allowed})")
    d, a, b, descriptor, scale_a, scale_b, enable = instruction.operands
    a_in_tmem = isinstance(a, Memory)
    matrices = (
        address_value(block, d),
        address_value(block, a) if a_in_tmem else block.whole(block.value(a, 64)),
        block.whole(block.value(b, 64)),
    )
    word = block.whole(block.value(descriptor, 32))
    scales = address_value(block, scale_a), address_value(block, scale_b)
    accumulate = block.value(enable, 1)
    form = (kinds[0], cta_group, counts[vector], a_in_tmem)
    call = Call(mma, [form, matrices, word, scales, accumulate])
    block.anchor(call, [], [*matrices, word, *scales, accumulate])
