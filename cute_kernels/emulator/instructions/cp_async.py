"""Non-bulk asynchronous copies: cp.async, its groups, and arrivals on mbarriers when they are complete."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.values import FULL
from cute_kernels.emulator.instructions.memory import address_value
from cute_kernels.emulator.instructions.sync import each_lane
from cute_kernels.emulator.ptx.decode import Immediate, Instruction, Not, Register
from cute_kernels.emulator.ptx.families import as_integer, family, qualifiers
from cute_kernels.emulator.state.lane_masks import block_lanes
from cute_kernels.emulator.state.warp import Wait, Warp

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


class CopyWait(Wait):
    """cp.async.wait_group, wait_all."""

    kind = "cp.async"

    def __init__(self, warp: Warp, lanes: int, newest: int, every: bool) -> None:
        self.warp, self.lanes, self.newest, self.every = warp, lanes, newest, every
        self.key = ("cp.async", warp)

    def ready(self) -> bool:
        return _outstanding(self.warp, self.lanes, self.newest, self.every) is None

    def describe(self) -> str:
        copy = _outstanding(self.warp, self.lanes, self.newest, self.every)
        return f"waits for all but the {self.newest} newest of its cp.async groups, first {copy and copy.describe}"


def _outstanding(warp: Warp, lanes: int, newest: int, every: bool) -> Any:
    unit = warp.cluster.copies
    return unit.outstanding(warp, lanes, newest) or (unit.uncommitted(warp, lanes) if every else None)


def copy_lanes(warp: Warp, mask: int, target: Any, source: Any, nbytes: int, count: Any, ignore: Any) -> None:
    """cp.async.

    Args:
        warp, mask: who executes.
        target, source: shared and global addresses.
        nbytes: bytes written.
        count: src-size: bytes read, the rest is zero.
        ignore: ignore-src: mask of lanes (or bool) that read nothing.
    """
    warp.cluster.progress += 1
    lanes = block_lanes(mask)
    targets, sources, counts = (
        np.broadcast_to(np.asarray(x, np.int64), 32)[lanes] for x in (target, source, count)
    )
    if (counts > nbytes).any() or (counts < 0).any():
        raise IllegalAccess(f"cp.async of {nbytes} bytes with a src-size of {int(counts.max())}")
    ignored = FULL * ignore if isinstance(ignore, bool) else ignore
    if ignored:
        counts = np.where(block_lanes(ignored)[lanes], 0, counts)
    if (sources % nbytes).any() or (targets % nbytes).any():
        raise IllegalAccess(f"cp.async of {nbytes} bytes between addresses that are not multiples of {nbytes}")
    if warp.cluster.meter is not None:
        warp.cluster.meter.copies(targets, sources[counts > 0], nbytes, np.flatnonzero(lanes))
    warp.cluster.copies.copy(warp, mask, targets, sources, nbytes, counts)


@family("cp.async.ca", "cp.async.cg", destinations=0)
def _cp_async(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.ca, cp.async.cg: 4, 8 or 16 bytes per thread, with src-size or ignore-src."""
    parts = qualifiers(
        instruction,
        *("ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"),
        skip=2,
    )
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    if len(operands) not in (3, 4):
        raise instruction.refuse("destination, source, cp-size and optionally src-size or ignore-src are expected")
    nbytes = as_integer(instruction, operands[2])
    if nbytes not in _SIZES[parts[0]]:
        raise instruction.refuse(f"cp-size {nbytes}; legal for .{parts[0]} are {_SIZES[parts[0]]}")
    count: Any = nbytes
    ignore: Any = False
    if len(operands) == 4:
        fourth = operands[3]
        if isinstance(fourth, Not) or isinstance(fourth, Register) and block.bits_of(fourth.name) == 1:
            ignore = block.value(fourth, 1)
        elif isinstance(fourth, (Register, Immediate)):
            count = block.value(fourth, 32)
        else:
            raise instruction.refuse("src-size or ignore-src is expected")
    target = address_value(block, operands[0])
    block.call(copy_lanes, target, address_value(block, operands[1], 64), nbytes, count, ignore)


def commit_copies(warp: Warp, mask: int) -> None:
    """cp.async.commit_group."""
    warp.cluster.copies.commit(warp, mask)


@family("cp.async.commit_group", destinations=0)
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.commit_group."""
    qualifiers(instruction, "async", "commit_group")
    block.call(commit_copies)


def wait_copies(warp: Warp, mask: int, newest: int, every: bool) -> bool | None:
    """cp.async.wait_group (``newest`` groups may be incomplete), wait_all (``every``: committed or not)."""
    if _outstanding(warp, mask, newest, every) is not None:
        warp.wait = CopyWait(warp, mask, newest, every)
        return None
    warp.cluster.copies.waited(warp, newest, every)
    return True


@family("cp.async.wait_group", "cp.async.wait_all", destinations=0, blocking=True)
def _wait(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.wait_group, cp.async.wait_all."""
    every = "wait_all" in qualifiers(instruction, "async", "wait_group", "wait_all")
    newest = 0 if every else as_integer(instruction, instruction.operands[0])
    if not 0 <= newest < CONSTANTS["COPY_GROUPS"]:
        raise instruction.refuse(f"{newest} groups, executed are 0 to {CONSTANTS['COPY_GROUPS'] - 1}")
    block.call(wait_copies, newest, every, blocking=True)


def arrive_after_copies(warp: Warp, mask: int, address: Any, counted: bool) -> None:
    """cp.async.mbarrier.arrive by each executing lane."""
    warp.cluster.progress += 1
    for lane in range(32):
        if mask >> lane & 1:
            ((where,),) = each_lane(1 << lane, address)
            warp.cluster.copies.arrive(warp, lane, where, counted)


@family("cp.async.mbarrier.arrive", destinations=0)
def _arrive(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.mbarrier.arrive, with .noinc."""
    parts = qualifiers(instruction, "noinc", "shared", "shared::cta", "b64", skip=4)
    if not {"shared", "shared::cta"} & set(parts):
        raise instruction.refuse("a generic address is not implemented; .shared is")
    block.call(arrive_after_copies, address_value(block, instruction.operands[0]), "noinc" in parts)
