"""A kernel launch as host code made it."""

from dataclasses import dataclass, field

from cute_kernels.dsl.allocations import Allocations

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class CapturedLaunch:
    """One kernel launch.

    Attributes:
        kernel_name: entry point in the PTX.
        grid, block, cluster: (x, y, z); a launch without clusters has cluster (1, 1, 1).
        dynamic_smem: bytes.
        params: one byte string per kernel parameter, of the sizes that the PTX declares.
        ptx: text of the module.
        programmatic: programmatic stream serialisation: it may begin before the launch before it is over.
        cooperative: the chip has to hold all clusters at once.
        machine_code: fat binary of the module, b"" where it is not known; nothing executes it here.
        stream: its handle; 0: the default stream.
        allocations: what the module's kernels allocate in shared memory, for reports; none where that is not known.
    """

    kernel_name: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    params: tuple[bytes, ...]
    ptx: str = field(repr=False)
    programmatic: bool = False
    cooperative: bool = False
    stream: int = field(default=0, compare=False)
    machine_code: bytes = field(default=b"", repr=False, compare=False)
    allocations: tuple[Allocations, ...] = field(default=(), repr=False, compare=False)
