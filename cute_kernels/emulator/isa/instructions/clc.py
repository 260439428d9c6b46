"""Cluster launch control: a running cluster takes over the work of one that has not started.

try_cancel asks for the next cluster of the grid and writes a 16-byte answer to shared memory; query_cancel reads it.
The encoding of the answer is opaque in PTX; here bit 0 says whether a cluster was taken, and the upper three words hold
the %ctaid of its first CTA.
"""

import functools
import struct

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.instructions.compare import integer_compare
from cute_kernels.emulator.isa.instructions.integers import binary
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, shared_address
from cute_kernels.emulator.machine.units.sm import Cluster, Warp
from cute_kernels.emulator.races.tracker import Operation

ANSWER_BYTES = 16


def try_cancel(warp: Warp, mask: int, destination: LaneValues, barrier: LaneValues, multicast: bool) -> None:
    """clusterlaunchcontrol.try_cancel.async, once per executing lane."""
    cluster = warp.cluster
    cluster.progress += 1
    for lane, (where, signal) in zip(lane_numbers(mask), each_lane(mask, destination, barrier)):
        if where % ANSWER_BYTES:
            raise IllegalAccess(f"clusterlaunchcontrol.try_cancel to {where:#x}, which is not 16-byte aligned")
        ranks = range(len(cluster.ctas)) if multicast else [cluster.memory.resolve(where)[0]]
        targets = [
            (shared_address(rank, where & OFFSET_MASK), shared_address(rank, signal & OFFSET_MASK)) for rank in ranks
        ]
        text = f"clusterlaunchcontrol.try_cancel by {warp.label}"
        operations = []
        if warp.agent is not None:
            cluster.tracker.enter(warp.agent, lane)
            for target, signalled in targets:
                operation = cluster.tracker.copy(signalled, text)
                cluster.tracker.async_write(target >> 24, target & OFFSET_MASK, ANSWER_BYTES, operation)
                operations.append(operation)
        run = functools.partial(_answer, cluster, targets, operations)
        cluster.engine.submit(AsyncOp(("clc", cluster.index), run, text))


def _answer(cluster: Cluster, targets: list[tuple[int, int]], operations: list[Operation]) -> None:
    first = cluster.take_cluster()
    answer = struct.pack("<4I", first is not None, *(first or (0, 0, 0)))
    for i, (where, signal) in enumerate(targets):
        if operations:
            cluster.tracker.complete_copy(operations[i], signal, where >> 24)
        cluster.memory.view(where, ANSWER_BYTES, write=True)[:] = np.frombuffer(answer, np.uint8)
        cluster.barriers.complete_tx(signal, ANSWER_BYTES)


@family(
    "clusterlaunchcontrol.try_cancel.async", destinations=0, operands="[addr], [mbar]",
    qualifiers="shared::cta? mbarrier::complete_tx::bytes multicast::cluster::all? b128",
)  # fmt: skip
def _try_cancel(block: BlockBuilder, instruction: Instruction) -> None:
    """clusterlaunchcontrol.try_cancel, to the own CTA or to all CTAs of the cluster."""
    parts = instruction.parts[1:]
    addresses = [address_value(block, operand) for operand in instruction.operands]
    block.call(try_cancel, *addresses, "multicast::cluster::all" in parts)


def _query_operands(parts: tuple[str, ...]) -> str:
    if "is_canceled" in parts:
        return "pred:pred, response:b128"
    return ("{xdim}4:b32" if "v4" in parts else "reg:b32") + ", response:b128"


@family(
    "clusterlaunchcontrol.query_cancel", operands=_query_operands,
    qualifiers="is_canceled pred b128; get_first_ctaid::{x,y,z} b32 b128; get_first_ctaid v4 b32 b128",
)  # fmt: skip
def _query_cancel(block: BlockBuilder, instruction: Instruction) -> None:
    """clusterlaunchcontrol.query_cancel.is_canceled and .get_first_ctaid."""
    what = instruction.parts[2]
    words = block.split(block.value(instruction.operands[1], 128), 4)
    if what == "is_canceled":
        flag = block.pure(binary("and", "b32"), words[0], block.value(Immediate(1), 32))
        canceled = block.pure(integer_compare("ne", "b32"), flag, block.value(Immediate(0), 32))
        block.define(instruction.operands[0], canceled)
    elif what == "get_first_ctaid":
        for item, word in zip(instruction.operands[0].items, [*words[1:], words[0]]):  # the fourth is unspecified
            block.define(item, word)
    else:
        block.define(instruction.operands[0], words[1 + "xyz".index(what[-1])])
