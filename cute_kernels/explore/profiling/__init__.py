"""In-kernel timing: launches whose warps write clock stamps, what the stamps say, and a timeline of them."""

from cute_kernels.explore.profiling.record import record
from cute_kernels.explore.profiling.statistics import phase_statistics, role_balance
from cute_kernels.explore.profiling.timeline import timeline

__all__ = ["phase_statistics", "record", "role_balance", "timeline"]
