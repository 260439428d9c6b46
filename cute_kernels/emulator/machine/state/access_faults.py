"""Words for what is wrong with an access of lanes to memory, which the core finds (``core/memory.c``)."""

import ctypes

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.isa.ptx.decode_stack import NOWHERE
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.smem import (
    OFFSET_MASK,
    RANK_SHIFT,
    ClusterMemory,
    SharedMemory,
    parameter_offset,
)
from cute_kernels.emulator.machine.state.warp import WarpState

_NAMES = {
    CONSTANTS[f"ACCESS_{name}"]: name
    for name in (
        "MISALIGNED", "NO_CTA", "EXITED", "OUTSIDE", "UNNAMED", "BARRIER", "UNINITIALISED", "UNREGISTERED", "MIXED",
        "NOT_SHARED", "LOCAL", "OTHER_CTA",
    )
}  # fmt: skip
#: What the core finds wrong, and those of it that it may go on after.
FAULTS, REPORTS = set(_NAMES), {CONSTANTS[f"ACCESS_{name}"] for name in ("UNINITIALISED", "OTHER_CTA")}
_SPACES = {CONSTANTS[f"SPACE_{name.upper()}"]: name for name in ("shared", "global", "generic", "param", "local")}
_SPACE, _WRITE, _TOGETHER = (CONSTANTS[f"ACCESS_{name}"] for name in ("SPACE", "WRITE", "TOGETHER"))
_WORD = (1 << 64) - 1


def fault(
    what: int, fault: ctypes.Structure, memory: ClusterMemory, gmem: GlobalMemory, warp: WarpState | None
) -> EmulatorError:
    """A `Fault` of the core, in words: of a warp, or (None) of asynchronous work."""
    name, nbytes, write = _NAMES[what], fault.nbytes, bool(fault.how & _WRITE)
    together, space = bool(fault.how & _TOGETHER), _SPACES[fault.how & _SPACE]
    address = fault.address & _WORD if together else fault.address
    if name == "MISALIGNED":
        message = f"misaligned {space} {'store' if write else 'load'} of {nbytes} bytes at {address:#x}"
        return IllegalAccess(message).know("misaligned")
    if name == "MIXED":
        return IllegalAccess("a generic access whose lanes address different spaces, or parameters, is not implemented")
    if name == "NOT_SHARED":
        opcode = warp.cluster.place_of(warp).parts[0]
        message = f"{opcode} at the generic address {address:#x}, which is not one of shared memory"
        return IllegalAccess(message).know("out-of-bounds")
    if name == "OTHER_CTA":
        opcode = warp.cluster.place_of(warp).opcode
        where = f"{address:#x}, which is in the shared memory of CTA {address >> RANK_SHIFT}"
        message = f"{opcode} of CTA {warp.cta.rank} at {where}: it may access its own CTA's alone"
        return IllegalAccess(message).know("other-cta")
    if name == "LOCAL":
        return local_together(address, nbytes)
    if space == "param":
        return outside_parameters(address, nbytes, len(warp.cluster.params))
    if space == "local":
        return _outside_local(warp, address, nbytes, fault.lanes)
    if space == "global":
        return gmem.refusal(address, nbytes, write)
    if name == "NO_CTA":
        return memory.no_cta(address)
    cta = memory.ctas[address >> RANK_SHIFT]
    return _shared(name, cta, address & OFFSET_MASK, nbytes, write, together)


def _shared(name: str, cta: SharedMemory, offset: int, nbytes: int, write: bool, together: bool) -> EmulatorError:
    if name == "EXITED":
        return cta.has_exited()
    if name == "OUTSIDE":
        return cta.outside(offset, nbytes)
    if name == "UNNAMED":
        return cta.unnamed(offset, nbytes)
    if name == "BARRIER":
        return cta.on_barrier(offset, nbytes, write)
    return cta.uninitialised_range(offset, nbytes) if together else cta.uninitialised(offset, nbytes)


def local_together(address: int, nbytes: int) -> EmulatorError:
    """Error of a load by lanes together of local memory, where one address is another place in each lane."""
    message = f"load of {nbytes} bytes at {address:#x}, an address of local memory, another place in each lane"
    return IllegalAccess(f"{message}: one read for all lanes is not implemented").know("out-of-bounds")


def outside_parameters(address: int, nbytes: int, size: int) -> EmulatorError:
    """Error of a load that leaves the ``size`` bytes of parameters."""
    start = parameter_offset(address)
    message = f"load of {nbytes} bytes at offset {start} of {size} parameter bytes"
    return IllegalAccess(message).know("out-of-bounds")


def _outside_local(warp: WarpState, addresses: int, nbytes: int, mask: int) -> EmulatorError:
    """``addresses``: where those of the lanes of a mask are, one after the other."""
    if warp.local is None:
        return IllegalAccess("access to local memory by a kernel that declares none")
    places = (ctypes.c_int64 * (mask & 0xFFFFFFFF).bit_count()).from_address(addresses)
    places = sorted({ctypes.c_int32(place).value for place in places})  # in front of the memory they are negative
    message = f"local access of {nbytes} bytes at {[hex(place) for place in places[:4]]} of {warp.local.shape[1]} bytes"
    if places[-1] >= NOWHERE >> 1:
        message += "; alloca found no room on the stack for it, or was asked for 0 bytes"
    return IllegalAccess(message).know("out-of-bounds")
