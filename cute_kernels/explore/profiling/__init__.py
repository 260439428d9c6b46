"""In-kernel timing: launches whose warps write clock stamps, what the stamps say, and a timeline of them."""

from cute_kernels.explore.profiling.record import Profile, WarpRecord, decode, phase_name, record
from cute_kernels.explore.profiling.statistics import (
    PhaseStatistics,
    RoleBalance,
    has_equilibrium,
    phase_statistics,
    role_balance,
)
from cute_kernels.explore.profiling.timeline import AXIS, EMULATED_AXIS, timeline

__all__ = [
    "AXIS",
    "EMULATED_AXIS",
    "PhaseStatistics",
    "Profile",
    "RoleBalance",
    "WarpRecord",
    "decode",
    "has_equilibrium",
    "phase_name",
    "phase_statistics",
    "record",
    "role_balance",
    "timeline",
]
