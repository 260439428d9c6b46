"""Member masks: which lanes of a warp execute bar.warp.sync, shfl, vote, match, redux or elect together."""

from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.ptx.program import Instruction, Operand
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.values import Value
from cute_kernels.emulator.machine.state.lane_faults import masks_differ, wrong_members
from cute_kernels.emulator.machine.state.lane_masks import LaneValues, block_lanes
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.memory_order import masks_by_address

_WITH_MEMBERS = ("shfl", "vote", "match", "redux", "elect")  # their last operand is a mask


def varies_with_members(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """Whether a result that all lanes of a group share can differ between lanes: there may be several groups."""
    return varies(instruction.operands[-1])


def gather(block: BlockBuilder, instruction: Instruction) -> None:
    """Waits for the lanes that have to execute an instruction together and come to it on several paths."""
    if instruction.parts[0] in _WITH_MEMBERS or instruction.parts[:2] == ("bar", "warp"):
        block.operation("gather", block.value(instruction.operands[-1], 32))
    else:
        block.operation("gather", flags=CONSTANTS["FLAG"])


def check_members(warp: Warp, mask: int, members: int, name: str) -> None:
    """All lanes that membermask names have to execute the instruction together, and it must name the executing ones."""
    if members & warp.live & ~mask or mask & ~members:
        raise wrong_members(warp, mask, members, name)


def call_members(
    block: BlockBuilder, function: Callable[..., LaneValues | None], *args: object, members: Value,
    results: Sequence[tuple[str, bool]] = (), effects: bool = True,
) -> list[Value]:  # fmt: skip
    """Adds a call of ``function(warp, lanes, *args, members)`` for the lanes of each member mask, which all name the
    mask ``members``; its result or none. ``results``: storage type, and whether all lanes of a group have the same (as
    for `BlockBuilder.call`). ``effects``: whether it is executed for more than its results."""
    if members.uniform:
        return block.call(function, *args, members, results=results, effects=effects)
    type_, shared = results[0] if results else ("", False)
    varying = [(type_, False) for type_, _ in results]
    return block.call(_by_members, function, type_, shared, members, *args, results=varying, effects=effects)


def _by_members(
    warp: Warp, mask: int, function: Callable[..., LaneValues | None], type_: str, shared: bool, masks: np.ndarray,
    *args: object,
) -> LaneValues | None:  # fmt: skip
    """Lanes that name the same mask are a group of their own (PTX ISA): results of all, a lane mask or uint32 [32]."""
    groups = masks_by_address(mask, masks)
    voted, values = 0, np.zeros(32, np.uint32)
    for members, lanes in groups.items():
        if members & mask & ~lanes:
            raise masks_differ(lanes, members, groups)
        result = function(warp, lanes, *args, members)
        if type_ == "pred":
            voted |= (lanes if result else 0) if shared else result & lanes
        elif type_:
            chosen = block_lanes(lanes)
            values[chosen] = np.broadcast_to(np.asarray(result, np.uint32), 32)[chosen]
    return voted if type_ == "pred" else values if type_ else None
