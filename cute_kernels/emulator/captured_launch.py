"""A kernel launch as host code made it."""

from dataclasses import dataclass, field

from cute_kernels.dsl.allocations import Allocations

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class CapturedLaunch:
    """One kernel launch."""

    kernel_name: str  # entry point in the PTX
    # grid, block, cluster: (x, y, z); a launch without clusters has cluster (1, 1, 1)
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int  # bytes
    params: tuple[bytes, ...]  # one byte string per kernel parameter, of the sizes that the PTX declares
    ptx: str = field(repr=False)  # text of the module
    programmatic: bool = False  # programmatic stream serialisation: it may begin before the launch before it is over
    cooperative: bool = False  # the chip has to hold all clusters at once
    stream: int = field(default=0, compare=False)  # its handle; 0: the default stream
    # fat binary of the module, b"" where it is not known; nothing executes it here
    machine_code: bytes = field(default=b"", repr=False, compare=False)
    # what the module's kernels allocate in shared memory, for reports; none where that is not known
    allocations: tuple[Allocations, ...] = field(default=(), repr=False, compare=False)
