"""Words for what is wrong with lanes that execute an instruction, or with operands of theirs that have to be the same.

The core finds it (``core/together.c``), or a Python function of an instruction.
"""

import ctypes
from collections.abc import Iterable

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, UnsupportedPTX
from cute_kernels.emulator.machine.state.warp import WarpState

#: What the core finds wrong.
FAULTS = {CONSTANTS[name] for name in ("LANES_DIFFER", "MASKS_DIFFER", "WRONG_MEMBERS", "WRONG_LANES")}


def fault(what: int, fault: ctypes.Structure, warp: WarpState) -> EmulatorError:
    """A `Fault` of the core, in words."""
    lanes = fault.mask
    if what == CONSTANTS["WRONG_LANES"]:
        return _part_of_a_warp(warp, lanes)
    if what == CONSTANTS["WRONG_MEMBERS"]:
        return wrong_members(warp, lanes, fault.members, _name(warp))
    bits = fault.bits or 32
    operands = (getattr(ctypes, f"c_uint{bits}") * 32).from_address(fault.operands)
    executing = [operands[lane] for lane in range(32) if fault.executing >> lane & 1]
    if what == CONSTANTS["LANES_DIFFER"]:
        return BarrierMisuse(f"an operand that must be the same in all lanes is {sorted(set(executing))}")
    return masks_differ(lanes, fault.members, dict.fromkeys(executing))


def _name(warp: WarpState) -> str:
    """The instruction without its qualifiers: ``bar.sync``, ``elect.sync``, ``tcgen05.wait``, ``ldmatrix``."""
    first, *others = (part.partition("::")[0] for part in warp.cluster.place_of(warp).parts)
    if first.endswith("matrix"):
        return first
    if first in ("wgmma", "wmma") or others[:1] in (["ld"], ["st"]):
        return f"{first}.{others[0]}"
    return ".".join([first, *(part for part in others if part in ("sync", "arrive", "red", "warp", "wait"))][:3])


def _part_of_a_warp(warp: WarpState, lanes: int) -> EmulatorError:
    parts, name = warp.cluster.place_of(warp).parts, _name(warp)
    if parts[0] != "barrier" or "aligned" in parts:
        return lanes_apart(warp, lanes, name)
    return UnsupportedPTX(  # PTX lets divergent parts of a warp arrive one by one
        f"{name} without .aligned by a part of a warp (lanes {lanes:#010x} of {warp.live:#010x}) is not implemented"
    )


def lanes_apart(warp: WarpState, mask: int, name: str) -> BarrierMisuse:
    """Error of an .aligned instruction that only lanes ``mask`` of a warp execute (undefined: PTX ISA)."""
    message = f"{name} is executed by lanes {mask:#010x} of a warp with live lanes {warp.live:#010x}"
    return BarrierMisuse(message).know("divergence")


def wrong_members(warp: WarpState, mask: int, members: int, name: str) -> EmulatorError:
    """Error of lanes that are not all that their member mask names."""
    if name == "bar.warp.sync" and not mask & ~members:
        # Legal since sm_70 if the other lanes execute one as well; here paths meet only where their branch ends.
        return UnsupportedPTX(
            f"{name} with membermask {members:#010x} by a part of the lanes that it names ({mask:#010x} of "
            f"{warp.live:#010x}): waiting for lanes on other paths is not implemented"
        )
    return BarrierMisuse(
        f"{name} with membermask {members:#010x} is executed by lanes {mask:#010x} of a warp with live lanes "
        f"{warp.live:#010x}"
    )


def masks_differ(lanes: int, members: int, masks: Iterable[int]) -> BarrierMisuse:
    """Error of lanes whose member mask has others that execute the instruction with another of the masks."""
    others = ", ".join(f"{other:#010x}" for other in masks if other != members)
    return BarrierMisuse(
        f"lanes {lanes:#010x} name the membermask {members:#010x}, and other lanes that are in it name {others}"
    )
