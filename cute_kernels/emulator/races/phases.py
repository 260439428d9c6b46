"""Phases of mbarriers and named barriers that order does not keep apart, in words: what the core finds at a barrier."""

import ctypes

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.facts import Side
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.isa.ptx.waits import loads_behind
from cute_kernels.emulator.races.checks import RaceChecks
from cute_kernels.emulator.races.happens_before import WARP_COLUMNS, Agent
from cute_kernels.emulator.races.sync_point import SyncPoint

_AGAINST = {
    CONSTANTS[name] for name in ("ARRIVAL_EARLY", "BYTES_EARLY", "ANNOUNCED_LATE", "LANES_OVERTAKEN")
}
_COMMIT, _BYTES, _ANNOUNCES = (CONSTANTS[name] for name in ("TENSOR_COMMIT", "COMPLETE_TX", "EXPECT_TX"))


def place_of(address: int) -> str:
    """Place of an mbarrier, in words."""
    return f"shared offset {address & 0xFFFFFF} of CTA {address >> 24}"


def phase_before(phase: int) -> str:
    """The phase before one, in words."""
    return f"phase {phase - 1}" if phase else "the phase before the first, which counts as complete"


def stands_against(what: int) -> bool:
    """Whether a fault stands against the certificate, and is reported at the end if nothing else is."""
    return what in _AGAINST


def relied_on(races: RaceChecks, what: int, place: int) -> bool:
    """Whether a fault is none for kernels in use: lanes that have waited load together, and one hands all of it over.

    docs/emulator/contract.md, "Loads that one lane hands over"; the certificate does not take it for granted.
    """
    return what == CONSTANTS["LANES_OVERTAKEN"] and races.launch.flow is not None and loads_behind(
        races.launch.flow, place
    )


def fault(races: RaceChecks, what: int, fault: ctypes.Structure, agent: Agent | None) -> BarrierMisuse | None:
    """A fault of phases (`Fault`) that the core has found; None: it is another one."""
    address = fault.address
    if what == CONSTANTS["PHASE_AMBIGUOUS"]:
        return BarrierMisuse(
            f"{agent.label} waits for phase {fault.phase} of the mbarrier at {place_of(address)}, but nothing orders "
            f"that after phase {fault.phase - 1}: a wait that comes before it is complete is one for "
            f"{phase_before(fault.phase - 1)}, which has the same parity, and passes at once"
        ).know("phase-ambiguous", **races.barrier_facts(address), phase=fault.phase)
    if what in (CONSTANTS["PHASE_OVERRUN"], CONSTANTS["LANES_OVERTAKEN"]):
        return _overtaken(races, address, fault.warp, fault.place, what == CONSTANTS["LANES_OVERTAKEN"])
    if what == CONSTANTS["ANNOUNCED_LATE"]:
        return announced_late(races, address, fault.warp, fault.place)
    if what not in (CONSTANTS["ARRIVAL_EARLY"], CONSTANTS["BYTES_EARLY"]):
        return None
    if address < 0:
        number = -1 - address
        point, name = agent.warp.cta.named.point(number), f"named barrier {number} of CTA {agent.rank}"
    else:
        point, name = races.points[address], f"the mbarrier at {place_of(address)}"
    who, instruction = _issuer(races, fault.warp), _instruction(races, fault.place)
    error = early(races, point, name, (fault.operation, who, fault.column), address)
    return error.at(instruction, who)


def early(
    races: RaceChecks, point: SyncPoint, name: str, contribution: tuple[int, str, int], address: int
) -> BarrierMisuse:
    """A contribution to a phase may be counted in the one before. ``races``: the detector. ``point``, ``name``: the
    barrier, and what it is called. ``contribution``: what it is (an operation of the core's), by whom, and a column of
    the phase before that it does not know. ``address``: of the mbarrier, or -1."""
    operation, who, column = contribution
    phase = point.completed
    other, what = _other(races, point, column, phase, address)
    kind, noun = "arrival-early", "arrival" if operation != _COMMIT else "tcgen05.commit"
    if address >= 0 and operation in (_BYTES, _ANNOUNCES):
        kind, noun = "bytes-early", "copy's bytes" if operation == _BYTES else "expect_tx"
    error = BarrierMisuse(
        f"the {noun} by {who} for phase {phase} of {name} may be counted in phase {phase - 1}: nothing orders it after "
        f"{what}"
    ).know(kind, other=other, **races.barrier_facts(address) if address >= 0 else {})
    if address < 0:
        error.know(sentence=f"an arrival at {name} may be counted in the phase before the one that it is meant for")
    return error


def announced_late(races: RaceChecks, address: int, warp: int, place: int) -> BarrierMisuse:
    """Bytes, or an arrival of cp.async, are announced for a phase that may be complete by then."""
    label, instruction = _issuer(races, warp), _instruction(races, place)
    steps = 0 if races.barriers is None else races.barriers.latest(address, warp)[1]
    return BarrierMisuse(
        f"{label} announces what phase {races.points[address].completed} of the mbarrier at {place_of(address)} "
        "awaits, but no arrival in the phase is ordered after that: all arrivals may come before, and complete it"
    ).know(
        "announced-late",
        other=Side("announces", () if instruction is None else (instruction,), label, steps=steps),
        **races.barrier_facts(address),
    )


def invalidated_in_use(races: RaceChecks, address: int, agent: Agent, column: int) -> BarrierMisuse:
    """mbarrier.inval by a warp that does not know of a use of the mbarrier."""
    point = races.points[address]
    other, what = _other(races, point, column, point.completed, address)
    return BarrierMisuse(
        f"{agent.label} invalidates the mbarrier at {place_of(address)}, but nothing orders that after {what}"
    ).know("inval-order", other=other, **races.barrier_facts(address))


def invalidated_before(races: RaceChecks, address: int, agent: Agent) -> BarrierMisuse:
    """mbarrier.init by a warp that does not know of the mbarrier.inval before."""
    return BarrierMisuse(
        f"{agent.label} initialises the mbarrier at {place_of(address)} again, but nothing orders that after the "
        "mbarrier.inval of the one that lay there"
    ).know("inval-order", **races.barrier_facts(address))


def _overtaken(races: RaceChecks, address: int, warp: int, place: int, lanes: bool) -> BarrierMisuse:
    phase, label, wait = races.points[address].completed, _issuer(races, warp), _instruction(races, place)
    late = "the barrier may run ahead of the wait by two phases, which have the same parity"
    if not phase:
        late = "a wait that comes later is one for phase 1, which has the same parity"
    who = f"the wait of {label} for {phase_before(phase)}"
    if lanes:
        who = f"the wait for {phase_before(phase)} by some lanes of {label}, which another lane of it overtakes"
    return BarrierMisuse(
        f"phase {phase} of the mbarrier at {place_of(address)} completes, but nothing orders that after {who}: {late}"
    ).know(
        "lanes-overtaken" if lanes else "phase-overrun",
        **races.barrier_facts(address),
        other=Side("waits", () if wait is None else (wait,), label),
    )


def _issuer(races: RaceChecks, warp: int) -> str:
    return races.agents[warp].label if 0 <= warp < len(races.agents) else "an asynchronous operation"


def _instruction(races: RaceChecks, place: int) -> Instruction | None:
    return races.launch.flow.kernel.instructions[place] if races.launch.flow is not None and place >= 0 else None


def _other(races: RaceChecks, point: SyncPoint, column: int, phase: int, address: int) -> tuple[Side | None, str]:
    """The agent whose operation an event has to come after, by a column of it, and the operation in words."""
    owner = next((one for one in races.agents if one.base <= column < one.base + WARP_COLUMNS), None)
    if owner is None:
        copies = "the copies whose bytes complete" if column == point.column else "an asynchronous arrival in"
        return None, f"{copies} phase {phase - 1}"
    place, steps = point.arrival_of(owner.number)
    if address >= 0 and races.barriers is not None:
        place, steps = races.barriers.latest(address, owner.number)
    instruction = _instruction(races, place)
    done = f"what {owner.label} does before phase {phase - 1} is complete"
    if instruction is None:
        return None, done
    verb = "waits" if "wait" in instruction.parts[1] else "arrives"
    what = f"that {owner.label} {verb} at PTX line {instruction.line}"
    return Side(verb, (instruction,), owner.label, steps=steps), what
