"""Common parts of the plans of SM90a kernels that compute ``out^T = weight * x^T``.

Features are the rows of a WGMMA, which a warpgroup keeps for the whole launch; rows of ``x`` are its columns. The parts
of such kernels are in `cute_kernels.kernels.sm90.transposed`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, flag, number
from cute_kernels.common.words import counted
from cute_kernels.plan import patches_sm90
from cute_kernels.plan.base import reject, room_for_stages
from cute_kernels.plan.tiles import FeatureTiles

WARPGROUP_FEATURES = 64
"""Rows of a WGMMA: the output features that one warpgroup computes."""

CONSUMER_REGISTERS = {1: 240, 2: 232, 3: 160}
"""Registers per consumer thread by consumer warpgroups, which setmaxnreg gives them of the register file's 65,536."""

PRODUCER_REGISTERS = {1: 40, 2: 40, 3: 32}
"""Registers per producer thread by consumer warpgroups; setmaxnreg takes multiples of 8."""

STAGE_BARRIER_BYTES = 16
"""Two mbarriers of a stage: full and empty."""

ADDRESSING_REGISTERS = 32
"""Registers of a consumer besides weight fragments and accumulators, as the assembler reports it without spills."""

BLOCK_REGISTERS = 16
"""Registers per thread of a warpgroup's weight fragments for one K block: 64 x 128 bytes over 128 threads."""


@dataclass(frozen=True)
class TransposedPlan(FeatureTiles):
    """A persistent kernel whose tiles are ``tile_rows`` rows of ``x`` by the ``warpgroups * 64`` features of one CTA.

    The ``cluster`` CTAs of a cluster share their tiles of ``x``, as `FeatureTiles` says.

    Subclasses say what a tile is and what a stage holds: `tile_rows`, `tiles`, `stage_bytes`, `prefetches_table`; and
    what the model of time asks for besides: `work`.
    """

    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm90_graph"

    tile_rows = number()
    """Rows of ``x`` in a tile, the N of a WGMMA."""
    resident = flag(lambda self: self.config.weight == "registers")
    """The weight stays in registers; otherwise it comes through the stages with ``x``."""
    stage_bytes = number()
    """Operand bytes of one stage in one CTA; all of them complete on this CTA's full barrier."""

    @property
    def weight_stage_bytes(self) -> int:
        """Bytes of a streamed weight in a stage."""
        return 0 if self.resident else self.features * self.k_block_bytes * self.config.stage_blocks

    staging_bytes = number(lambda self: self.tile_rows * WARPGROUP_FEATURES * self.out_bytes)
    """Per warpgroup: ``tile_rows`` rows of 64 features, 128 bytes a row as SWIZZLE_128B needs."""
    part_blocks = fact(lambda self: (self.config.stage_blocks,))
    """K blocks of a stage in each part of it that is an operand of its own."""

    def multiplies(self, block: int, step: int) -> bool:
        """Whether a step of ``mma_k_bytes`` of a K block of every stage is multiplied: one of zeros need not be."""
        return True

    prefetches_table = flag()
    """No table values are awaited in the epilogue."""
    features = number(lambda self: self.config.warpgroups * WARPGROUP_FEATURES)
    ctas = number(lambda self: self.config.cluster)

    # ---- warps -----------------------------------------------------------------------------------------------------
    stage_ctas = number(lambda self: self.config.cluster)
    """CTAs that fill a stage of operands, and so wait for it to be free: those of the cluster, by multicast."""
    roles = fact(lambda self: ("mma",) * (4 * self.config.warpgroups) + ("load", "idle", "idle", "idle"))
    """Consumer warpgroups first, then the producer warpgroup, of which one warp loads."""
    load_warp = number(lambda self: 4 * self.config.warpgroups)
    consumer_registers = number(lambda self: CONSUMER_REGISTERS[self.config.warpgroups])
    producer_registers = number(lambda self: PRODUCER_REGISTERS[self.config.warpgroups])
    handover_stage = number(lambda self: min(self.tile_stages - 1, max(0, self.config.stages - self.tile_stages + 1)))
    """Stage of a tile after whose issue the next warpgroup may begin the same tile.

    The last one where the ring holds two tiles: then one warpgroup has the tensor cores to itself while another
    stores. With a shorter ring an earlier one, since a stage is free only when every warpgroup has read it.
    """

    # ---- registers -------------------------------------------------------------------------------------------------
    accumulator_registers = number(lambda self: self.tile_rows // 2)
    weight_registers = number(lambda self: self.k_blocks * BLOCK_REGISTERS if self.resident else 0)
    """Registers per thread of resident weight fragments."""
    needed_registers = number(lambda self: self.weight_registers + self.accumulator_registers + ADDRESSING_REGISTERS)
    """Registers that a consumer thread holds through a tile."""
    entry_registers = number(lambda self: self.arch.register_file // self.threads // 8 * 8)
    """Registers of a thread before setmaxnreg takes effect, which its WGMMAs' accumulators have to fit as well."""


def work_of(
    plan: TransposedPlan, *, block_bytes: float, beyond: float, memory: float, is_rows: bool, multiplied: float = 1.0,
    boxes: patches_sm90.Numbers = (0.0, 0.0, 0.0, 0.0), flat: bool = False, positions: int = 0, ragged: bool = False
) -> patches_sm90.Work:
    """The work of a launch.

    Args:
        block_bytes: of ``x`` in a K block.
        beyond: rows of ``x`` in a K block beyond its end, which a CTA loads.
        memory: bytes of device memory.
        is_rows: ``x`` is rows, no images.
        multiplied: share of the steps of K that are multiplied.
        boxes: the first four of `patches_sm90.Work.boxes`.
        flat: table rows are found one by one.
        positions: of a tile.
        ragged: of `patches_sm90.Work`.
    """
    c, groups, rows = plan.config, plan.config.warpgroups, plan.tile_rows
    elements = groups * WARPGROUP_FEATURES * rows / 1024
    late = bool(plan.problem.table_rows) and not plan.prefetches_table
    streamed = 0 if plan.resident else plan.features
    together = max(1, plan.sm_count // plan.ctas // plan.feature_groups)
    busy = plan.clusters * plan.ctas / plan.sm_count
    return patches_sm90.Work(
        once=(is_rows, not is_rows, 0, c.cluster > 1, groups * plan.k_blocks if plan.resident else 0, 0),
        epilogue=(elements, 0, elements * flat, groups * rows * late, positions),
        boxes=(*boxes, 0, 0, 0),
        block=(1, 0, 1 / c.stage_blocks),
        wgmma=multiplied * plan.features * rows * patches_sm90.BLOCK_MACS / patches_sm90.MACS_PER_CLOCK,
        fetched=block_bytes / c.cluster + streamed * plan.k_block_bytes,
        shared=(groups + 1) * rows + 2 * streamed,
        beyond=beyond + min(plan.features, plan.padded_n - plan.problem.n) * (streamed > 0),
        ragged=ragged,
        of_stage=c.stage_blocks,
        stages=c.stages,
        groups=groups,
        in_turn=(groups > 1, 0),
        k_blocks=plan.k_blocks,
        waves=patches_sm90.waves(plan.tiles, together) * max(1, math.ceil(busy)),
        share=min(1, busy),
        memory=memory,
    )


def of_tiles(beyond: int, tiles: int, at_once: bool) -> float:
    """Rows of a tile beyond the end of what so many tiles have: of the last one, or, of several that a cluster takes
    one after the other, in the mean."""
    return beyond if at_once or tiles == 1 else beyond / tiles


def check_barriers(plan: TransposedPlan) -> None:
    """The region of the barriers has a full and an empty one for each stage; operands begin right behind it."""
    most = plan.barrier_bytes // STAGE_BARRIER_BYTES
    if plan.config.stages > most:
        rule = f"the {plan.barrier_bytes:,} B of barriers hold those of {most} stages"
        others = plan.smem_bytes - plan.config.stages * plan.stage_bytes
        room = (plan.arch.smem_bytes - others) // plan.stage_bytes
        reject("stages", plan.config.stages, rule, max(2, min(most, room)))


def check_registers(
    plan: TransposedPlan, name: str, rows: int, step: int, otherwise: tuple[str, object, object]
) -> None:
    """Weight fragments, accumulators and addressing of a consumer thread, against what setmaxnreg gives it.

    Reported is the field ``name``, a multiple of ``step`` with ``rows`` rows of a tile for each unit; where the weight
    alone is too much, ``otherwise``: name, value and nearest legal value.
    """

    def fit(room: int) -> int:
        """The largest value whose accumulators have room in so many registers."""
        return plan.tile_rows * room // plan.accumulator_registers // (rows * step) * step

    value = plan.tile_rows // rows
    # The assembler says that a WGMMA's accumulators must fit what a thread has at entry, too.
    at_entry = plan.entry_registers
    if plan.accumulator_registers + ADDRESSING_REGISTERS > at_entry:
        rule = (
            f"{plan.accumulator_registers} registers of accumulators and {ADDRESSING_REGISTERS} for addressing, the "
            f"limit with {plan.threads} threads is {at_entry}"
        )
        reject(name, value, rule, fit(at_entry - ADDRESSING_REGISTERS))
    if plan.needed_registers <= plan.consumer_registers:
        return
    rule = (
        f"{plan.weight_registers} registers of weight, {plan.accumulator_registers} of accumulators and "
        f"{ADDRESSING_REGISTERS} for addressing make {plan.needed_registers}, the limit with "
        f"{counted(plan.config.warpgroups, 'warpgroup')} is {plan.consumer_registers}"
    )
    smaller = fit(plan.consumer_registers - plan.weight_registers - ADDRESSING_REGISTERS)
    if smaller >= step:
        reject(name, value, rule, smaller)
    reject(otherwise[0], otherwise[1], rule, otherwise[2])


def ring_stages(plan: TransposedPlan) -> int:
    """Two tiles' worth of stages, or what shared memory holds beside what is no stage; at least 2."""
    return max(2, min(room_for_stages(plan), 2 * plan.tile_stages))
