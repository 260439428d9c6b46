"""Every case of instructions that sm_80 and sm_90 have and our kernels do not use."""

from __future__ import annotations

from tests.emulator.sm90_cases import Case, cp_async_cases, mma_cases
from tests.emulator.sm90_memory_cases import memory_cases
from tests.emulator.sm90_warp_cases import warp_cases


def cases() -> list[Case]:
    """Those of all files."""
    return [*mma_cases(), *cp_async_cases(), *memory_cases(), *warp_cases()]
