"""Barriers: named barriers of a CTA, the cluster barrier, mbarriers; and waiting in general.

A blocking function returns None after setting ``warp.wait``; the warp then executes the same basic block again when
the scheduler resumes it. What it has already done (its arrival) is remembered in ``warp.token``.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError
from cute_kernels.emulator.isa.instructions.integers import shift_by
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer, never_varies
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction, Memory, Operand, Sink
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import FULL, Constant, Pack, Value
from cute_kernels.emulator.machine.state.lane_faults import lanes_apart
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.register_pool import RegisterPool
from cute_kernels.emulator.machine.state.warp import NamedWait, Wait, until_progress
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.happens_before import Offset
from cute_kernels.emulator.races.memory_order import sync_order
from cute_kernels.emulator.races.sync_point import Order

_PARITY = _ALL_THREADS = CONSTANTS["FLAG"]  # of ``mbarrier_wait`` and ``named_barrier``
_SLEPT = CONSTANTS["SLEPT"]
_VOTES = "d, a:u32, c:pred; d, a:u32, b:u32, c:pred"
_BARRIER = (
    "cta|cluster? shared|shared::cta|shared::cluster? b64; acquire|release|relaxed > cta|cluster; "
    "cta|cluster > acquire|release|relaxed"
)


def lane_numbers(mask: int) -> Iterator[int]:
    """The lanes of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def require_whole_warp(warp: Warp, mask: int, name: str) -> None:
    """.aligned instructions must be executed by all threads of the warp together (else undefined: PTX ISA)."""
    if mask != warp.live:
        raise lanes_apart(warp, mask, name)


def named_barrier(
    block: BlockBuilder, operation: str, operands: Sequence[Operand],
    predicate: Sequence[Value] = (), results: Sequence[tuple[str, bool]] = (),
) -> list[Value]:  # fmt: skip
    """An operation on a named barrier, ``operation`` as the core calls it; operands are its number and threads or none:
    all of the CTA.
    """
    number, *threads = (block.agreed(block.value(operand, 32)) for operand in operands)
    flags = CONSTANTS[operation] | (0 if threads else _ALL_THREADS)
    which = Pack([number, threads[0] if threads else Constant(0, 32)])
    return block.operation(
        "named_barrier", which, *predicate, flags=flags, results=results, blocking=operation != "BAR_ARRIVE"
    )


@family(
    "barrier.sync", "barrier.cta.sync", destinations=0, blocking=True, operands="a:u32, b:u32?", qualifiers="aligned?",
)  # fmt: skip
@family("bar.sync", "bar.cta.sync", destinations=0, blocking=True, operands="a:u32, b:u32?")
def _bar_sync(block: BlockBuilder, instruction: Instruction) -> None:
    """bar.sync, barrier.sync."""
    named_barrier(block, "BAR_SYNC", instruction.operands)


@family("barrier.arrive", "barrier.cta.arrive", destinations=0, operands="a:u32, b:u32", qualifiers="aligned?")
@family("bar.arrive", "bar.cta.arrive", destinations=0, operands="a:u32, b:u32")
def _bar_arrive(block: BlockBuilder, instruction: Instruction) -> None:
    """bar.arrive, barrier.arrive."""
    named_barrier(block, "BAR_ARRIVE", instruction.operands)


@family(
    "barrier.red", "barrier.cta.red", varies=never_varies, blocking=True, operands=_VOTES,
    qualifiers="popc aligned? u32; and|or aligned? pred",
)  # fmt: skip
@family(
    "bar.red", "bar.cta.red", varies=never_varies, blocking=True, operands=_VOTES, qualifiers="popc u32; and|or pred",
)  # fmt: skip
def _bar_red(block: BlockBuilder, instruction: Instruction) -> None:
    """bar.red, barrier.red: .popc.u32, .and.pred, .or.pred."""
    parts = instruction.parts[1:]
    mode = next(part for part in parts if part in ("popc", "and", "or"))
    destination, *operands = instruction.operands
    predicate = block.value(operands.pop(), 1)
    operation = f"BAR_RED_{mode.upper()}"
    (vote,) = named_barrier(block, operation, operands, [predicate], [(parts[-1], True)])
    block.define(destination, vote)


@family("bar.warp.sync", destinations=0, operands="membermask:u32")
def _bar_warp_sync(block: BlockBuilder, instruction: Instruction) -> None:
    """bar.warp.sync."""
    members = block.value(instruction.operands[0], 32)
    if isinstance(members, Constant) and members.value == FULL and not block.divergent:
        block.operation("converge", flags=CONSTANTS["FLAG"], watched=True)  # all 32 lanes execute this block together
    else:
        block.operation("converge", members)


def cluster_arrive(warp: Warp, mask: int, order: int) -> None:
    """barrier.cluster.arrive: each thread arrives once per phase."""
    warp.cluster.barrier.arrive(warp, mask, order)


def cluster_wait(warp: Warp, mask: int, order: int) -> bool | None:
    barrier = warp.cluster.barrier
    generation = barrier.check_waits(warp, mask)
    if barrier.generation == generation:
        warp.wait = NamedWait(barrier)
        return None
    barrier.leave(warp, mask, order)
    return True


@family("barrier.cluster.arrive", destinations=0, operands="", qualifiers="release|relaxed? aligned?")
def _cluster_arrive(block: BlockBuilder, instruction: Instruction) -> None:
    """barrier.cluster.arrive."""
    parts = instruction.parts[3:]
    block.call(cluster_arrive, sync_order([*parts, "cluster"]))


@family("barrier.cluster.wait", destinations=0, blocking=True, operands="", qualifiers="acquire? aligned?")
def _cluster_wait(block: BlockBuilder, instruction: Instruction) -> None:
    """barrier.cluster.wait."""
    parts = instruction.parts[3:]
    block.call(cluster_wait, sync_order([*parts, "cluster"]), blocking=True)


def each_lane(mask: int, *values: LaneValues) -> list[tuple[int, ...]]:
    """Tuples of per-lane Python values of the executing lanes."""
    if mask and not mask & (mask - 1):  # one lane: nearly always
        lane = mask.bit_length() - 1
        return [tuple([v if isinstance(v, int) else int(v[lane]) for v in values])]
    if all(isinstance(v, int) for v in values):
        return [values] * mask.bit_count()
    return [tuple(v if isinstance(v, int) else int(v[lane]) for v in values) for lane in lane_numbers(mask)]


def mbarrier_init(warp: Warp, mask: int, address: LaneValues, count: LaneValues) -> None:
    """mbarrier.init by each executing lane; lanes that name one place and one count leave the same as one of them.
    Raises BarrierMisuse: several lanes do, and races are looked for. PTX defines an initialisation where no valid
    mbarrier lies, which is so for the first lane alone."""
    cluster, lanes = warp.cluster, each_lane(mask, address, count)
    cluster.progress += 1
    for (where, expected), times in Counter(lanes).items():
        cluster.barriers.init(where, expected, warp.label, warp.executing())
        if warp.agent is not None:
            cluster.barriers.watch(where, cluster.tracker.initialise(warp.agent, where))
            if times > 1:
                error = functools.partial(_initialised_together, cluster.barriers, where, times)
                cluster.report_once("barrier-init-lanes", error)


def _initialised_together(barriers: MBarriers, where: int, times: int) -> BarrierMisuse:
    message = f"mbarrier.init by {times} lanes at once of one place: {barriers.describe(where)}"
    return BarrierMisuse(message).know("barrier-init-lanes", barrier=barriers.state(where))


def mbarrier_inval(warp: Warp, mask: int, address: LaneValues) -> None:
    warp.cluster.progress += 1
    for (where,) in each_lane(mask, address):
        if warp.agent is not None:
            warp.cluster.tracker.invalidate(warp.agent, where)
        warp.cluster.barriers.inval(where)


@family(
    *(f"mbarrier.{name}_wait{parity}" for name in ("try", "test") for parity in ("", ".parity")), blocking=True,
    varies=lambda instruction, varies: any(map(varies, instruction.operands[1:3])),
    operands=lambda parts: "waitComplete:pred, [addr], {}, suspendTimeHint:u32?".format(
        "phaseParity:u32" if "parity" in parts else "state:b64"
    ),
    qualifiers=f"acquire|relaxed? {_BARRIER}".replace("|shared::cluster", ""),
)  # fmt: skip
def _mbarrier_wait(block: BlockBuilder, instruction: Instruction) -> None:
    """mbarrier.try_wait, mbarrier.test_wait, by parity or by state; the time limit operand is ignored."""
    parts = instruction.parts[1:]
    parity = "parity" in parts
    address = address_value(block, instruction.operands[1])
    state = block.value(instruction.operands[2], 32 if parity else 64)
    uniform = address.uniform and state.uniform
    flags = CONSTANTS[instruction.parts[1].upper()] | _PARITY * parity
    order, results = sync_order(parts), [("pred", uniform)]
    (done,) = block.operation("mbarrier_wait", address, state, flags=flags, order=order, results=results, blocking=True)
    block.define(instruction.operands[0], done)


@family(
    "mbarrier.expect_tx", "mbarrier.complete_tx", destinations=0, operands="[addr], txCount:u32",
    qualifiers=f"relaxed? {_BARRIER}",
)  # fmt: skip
@family("mbarrier.init", destinations=0, operands="[addr], count:u32", qualifiers="shared|shared::cta? b64")
@family("mbarrier.inval", destinations=0, operands="[addr]", qualifiers="shared|shared::cta? b64")
def _mbarrier_setup(block: BlockBuilder, instruction: Instruction) -> None:
    """mbarrier.init, inval, expect_tx, complete_tx."""
    name = instruction.parts[1]
    values = [address_value(block, instruction.operands[0])]
    values += [block.value(operand, 32) for operand in instruction.operands[1:]]
    if name in ("init", "inval"):
        block.call(mbarrier_init if name == "init" else mbarrier_inval, *values)
    else:
        block.operation("mbarrier", *values, flags=CONSTANTS[name.upper()], order=Order.RELAXED)


@family(
    *(f"mbarrier.arrive{drop}{expect}" for drop in ("", "_drop") for expect in ("", ".expect_tx")),
    operands=lambda parts: f"state:b64, [addr], {'txCount:u32' if parts[2:3] == ('expect_tx',) else 'count:u32?'}",
    varies=always_varies, qualifiers=f"release|relaxed? {_BARRIER}",
)  # fmt: skip
def _mbarrier_arrive(block: BlockBuilder, instruction: Instruction) -> None:
    """mbarrier.arrive, arrive.expect_tx, arrive_drop, on the own CTA or a remote one."""
    parts = instruction.parts[1:]
    operands = list(instruction.operands)
    destination = Sink() if isinstance(operands[0], Memory) else operands.pop(0)
    address = address_value(block, operands[0])
    count = block.value(operands[1] if len(operands) > 1 else Immediate(1), 32)
    name = instruction.parts[1]
    if "expect_tx" in parts:
        if name == "arrive_drop":
            raise instruction.refuse("mbarrier.arrive_drop.expect_tx is not implemented")
        name = "arrive_expect_tx"
    results = [] if isinstance(destination, Sink) else [("u64", False)]
    states = block.operation(
        "mbarrier", address, count, flags=CONSTANTS[name.upper()], order=sync_order(parts), results=results
    )
    for state in states:
        block.define(destination, state)


@family("mbarrier.pending_count", operands="count:u32, state:b64", qualifiers="b64")
def _mbarrier_pending_count(block: BlockBuilder, instruction: Instruction) -> None:
    """mbarrier.pending_count: arrivals that were pending before the one that gave the state."""
    state = block.value(instruction.operands[1], 64)
    pending = block.pure(shift_by("shr", "u64", CONSTANTS["MBARRIER_PENDING"]), state)
    block.define(instruction.operands[0], block.resize(pending, 32))


def pause(warp: Warp, mask: int) -> bool | None:
    """nanosleep: gives way until something changes."""
    if warp.token == _SLEPT:
        warp.token, warp.timed_out = 0, False
        return True
    warp.token = _SLEPT
    warp.wait = until_progress(warp.cluster, "(nanosleep)", key="nanosleep")
    return None


@family("nanosleep", destinations=0, blocking=True, operands="t:u32", qualifiers="u32")
def _nanosleep(block: BlockBuilder, instruction: Instruction) -> None:
    """nanosleep: other warps run meanwhile; the duration has no meaning here."""
    block.call(pause, blocking=True)


def wait_for_grid(warp: Warp, mask: int) -> None:
    """griddepcontrol.wait: the launch before is over, and what it did is ordered in front of what follows."""
    if warp.agent is not None:
        warp.cluster.tracker.predecessor_done(warp.agent)


@family("griddepcontrol", destinations=0, operands="", qualifiers="wait|launch_dependents")
def _griddepcontrol(block: BlockBuilder, instruction: Instruction) -> None:
    """griddepcontrol.wait / launch_dependents: launches run one after the other, so that none waits for another."""
    if "wait" in instruction.parts:
        block.call(wait_for_grid)


def lower_registers(warp: Warp, mask: int, count: int) -> None:
    """setmaxnreg.dec: what the warp has beyond ``count`` per thread is free for others."""
    pool = warp.cta.registers
    if pool is not None:
        pool.held[warp.index] = min(pool.held[warp.index], count)
        note_registers(warp, None)


def raise_registers(warp: Warp, mask: int, count: int) -> bool | None:
    """setmaxnreg.inc: blocks while the CTA has too few free registers."""
    pool = warp.cta.registers
    if pool is None:  # not known at entry: ptxas ignores the instruction
        return True
    if not pool.has_room(warp.index, count):
        need = warp.index, count
        warp.wait = Wait("setmaxnreg", lambda: pool.has_room(*need), lambda: pool.describe(*need))
        return None
    pool.held[warp.index] = max(pool.held[warp.index], count)
    note_registers(warp, pool)
    return True


def note_registers(warp: Warp, taken: RegisterPool | None) -> None:
    """For the certificate: a warp gives registers, or has ``taken`` some.

    Whoever takes some waits for those who give, so that these must not wait for that; and each warp does it once.
    """
    agent, pool = warp.agent, warp.cta.registers
    if agent is None:
        return
    order = agent.order(FULL)
    waits = taken is None and any(order[column] >= clock for column, clock in pool.takers)
    if waits or warp.index in pool.changed:
        text = "registers are given and taken in an order that may leave a warp waiting"
        warp.cluster.places.add(("pool", warp.executing(), text))
    pool.changed.add(warp.index)
    if taken is not None:
        pool.takers.append((agent.base + Offset.READ, agent.clock))


def _registers(instruction: Instruction) -> int:
    count = as_integer(instruction, instruction.operands[0])
    if count not in range(24, 257, 8):
        raise instruction.refuse(f"{count} registers; legal are multiples of 8 from 24 to 256")
    return count


@family("setmaxnreg.dec", destinations=0, operands="imm_reg_count:imm", qualifiers="sync aligned u32")
def _setmaxnreg_dec(block: BlockBuilder, instruction: Instruction) -> None:
    """setmaxnreg.dec: gives registers to the other warps of the CTA."""
    block.call(lower_registers, _registers(instruction))


@family(
    "setmaxnreg.inc", destinations=0, blocking=True, own_turn=False, operands="imm_reg_count:imm",
    qualifiers="sync aligned u32",
)  # fmt: skip
def _setmaxnreg_inc(block: BlockBuilder, instruction: Instruction) -> None:
    """setmaxnreg.inc: takes registers that others of the CTA do not hold, and waits for them."""
    block.call(raise_registers, _registers(instruction), blocking=True)


def trap(warp: Warp, mask: int, opcode: str) -> None:
    """trap: the program stops itself."""
    if mask:
        raise EmulatorError(f"the kernel executed {opcode}").know("trap")


@family("trap", "brkpt", destinations=0, operands="")
def _trap(block: BlockBuilder, instruction: Instruction) -> None:
    """trap; brkpt, which stops a program without a debugger."""
    block.call(trap, instruction.opcode)


@family("pmevent", "pmevent.mask", destinations=0, operands="a:imm")
def _pmevent(block: BlockBuilder, instruction: Instruction) -> None:
    """pmevent: triggers counters of the GPU that no program sees; no effect."""
