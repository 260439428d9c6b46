"""Generic addresses: where the windows of shared memory, local memory and kernel parameters begin."""

from cute_kernels.emulator.core.layout import CONSTANTS

#: Generic addresses: shared memory, local memory and kernel parameters appear as windows above every host address.
SHARED_WINDOW = CONSTANTS["SHARED_WINDOW"]
LOCAL_WINDOW = CONSTANTS["LOCAL_WINDOW"]
PARAM_WINDOW = CONSTANTS["PARAM_WINDOW"]


def parameter_offset(address: int) -> int:
    """Offset in the parameter block of an address of it: of one in the window, or in a register of 32 bits, without."""
    return address - PARAM_WINDOW if address >= LOCAL_WINDOW else address
