"""The chips: how much each has and allows, by the name that ``--arch`` and ``.target`` give it.

Per multiprocessor, CTA and thread: CUDA programming guide, "Technical Specifications per Compute Capability". Of the
product that stands for a compute capability: number of multiprocessors and L2 cache, as its driver reports them; rates
by NVIDIA's data sheets of A100 SXM 80 GB, H200 SXM and HGX B200, whose driver says the same of its memory
(https://github.com/pytorch/ao/pull/4002). Device memory: GB of the product's data sheet, the larger where it comes with
two, for B200 and B300 a part of HGX's 1.4 and 2.3 TB. They are counted in GiB, as drivers do, who report 1% less of it.
"""

import re
from dataclasses import dataclass, replace

_KIB, _MIB = 1 << 10, 1 << 20

CTA_SMEM_BYTES = 1 * _KIB
"""Shared memory that the system keeps of every CTA."""

DEFAULT_SMEM_BYTES = 48 * _KIB
"""Shared memory that every CTA may have without asking for more (cudaDevAttrMaxSharedMemoryPerBlock)."""

PORTABLE_CLUSTER = 8
"""CTAs of a cluster that every chip with clusters runs."""


@dataclass(frozen=True)
class Chip:
    """Limits of a chip.

    Attributes:
        name: target of PTX and compilers, e.g. ``"sm_100a"``.
        compute_capability: what the device reports.
        product: the device whose number of multiprocessors and L2 cache these are.
        gpcs: multiprocessors of each GPC, all of whose CTAs of a cluster share one; where that is not known, all of
            them as if in one.
        sm_smem_bytes: shared memory of one multiprocessor, of which every CTA takes `CTA_SMEM_BYTES` besides its own.
        l2_bytes: L2 cache.
        threads, ctas: that one multiprocessor holds.
        cluster: CTAs of a cluster at most, 1 where there are no clusters.
        tmem_columns: columns of tensor memory, each 128 lanes of 32 bits; 0 where there is none.
        max_registers: registers that one thread may have.
        register_file: 32-bit registers of one multiprocessor.
        tensor_rate: dense operations of tensor cores on 16 bits in a second, two for each product that is added; 8 bits
            have twice as many, TF32 half. 0 where it is not known here.
        memory_rate: bytes of device memory in a second; 0 where it is not known here.
        memory_gib: device memory.
    """

    name: str
    compute_capability: tuple[int, int]
    product: str
    gpcs: tuple[int, ...]
    sm_smem_bytes: int
    l2_bytes: int
    threads: int = 2048
    ctas: int = 32
    cluster: int = 1
    tmem_columns: int = 0
    max_registers: int = 255
    register_file: int = 65536
    tensor_rate: float = 0.0
    memory_rate: float = 0.0
    memory_gib: int = 80

    @property
    def device(self) -> str:
        """The name that an emulated device answers with."""
        return f"{self.product} (emulated)"

    @property
    def memory_bytes(self) -> int:
        """Device memory."""
        return self.memory_gib << 30

    @property
    def sm_count(self) -> int:
        """Multiprocessors."""
        return sum(self.gpcs)

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one CTA may have, static and dynamic."""
        return self.sm_smem_bytes - CTA_SMEM_BYTES

    @property
    def static_smem_bytes(self) -> int:
        """Shared memory that the variables of a kernel may have, as ptxas 13.0 limits it."""
        return self.smem_bytes if self.name.endswith("a") else DEFAULT_SMEM_BYTES


#: The GPCs of SM90 are those with which cuOccupancyMaxActiveClusters of one H100 agrees, for clusters of 1 to 16 CTAs
#: with one and two on a multiprocessor. Suffixes of a target: PTX ISA, ".target".
_HOPPER_GPCS = (18,) * 2 + (16,) * 5 + (8,) + (2,) * 4
_H200 = Chip(
    "sm_90", (9, 0), "H200", _HOPPER_GPCS, 228 * _KIB, 50 * _MIB, cluster=16, tensor_rate=989e12, memory_rate=4.8e12,
    memory_gib=141,
)  # fmt: skip
_B200 = Chip(
    "sm_100", (10, 0), "B200", (148,), 228 * _KIB, 126 * _MIB, cluster=16, tmem_columns=512, tensor_rate=2250e12,
    memory_rate=7.7e12, memory_gib=180,
)  # fmt: skip
_B300 = Chip(
    "sm_103", (10, 3), "B300", (148,), 228 * _KIB, 126 * _MIB, cluster=16, tmem_columns=512, memory_gib=288
)
_KNOWN = (
    (Chip("sm_80", (8, 0), "A100", (108,), 164 * _KIB, 40 * _MIB, tensor_rate=312e12, memory_rate=2.04e12), ""),
    (Chip("sm_86", (8, 6), "RTX 3090", (82,), 100 * _KIB, 6 * _MIB, 1536, 16, memory_gib=24), ""),
    (Chip("sm_87", (8, 7), "Jetson AGX Orin", (16,), 164 * _KIB, 4 * _MIB, 1536, 16, memory_gib=64), ""),
    (Chip("sm_89", (8, 9), "L40S", (142,), 100 * _KIB, 96 * _MIB, 1536, 24, memory_gib=48), ""),
    (_H200, "a"),
    (_B200, "af"),
    (_B300, "af"),
    (Chip("sm_110", (11, 0), "Jetson AGX Thor", (20,), 228 * _KIB, 32 * _MIB, 1536, 24, 16, 512, memory_gib=128), "af"),
    (Chip("sm_120", (12, 0), "RTX 5090", (170,), 100 * _KIB, 96 * _MIB, 1536, 24, 16, memory_gib=32), "af"),
    (Chip("sm_121", (12, 1), "GB10", (48,), 100 * _KIB, 24 * _MIB, 1536, 24, 16, memory_gib=128), "af"),
)

CHIPS: dict[str, Chip] = {
    f"{chip.name}{suffix}": replace(chip, name=f"{chip.name}{suffix}")
    for chip, suffixes in _KNOWN
    for suffix in ("", *suffixes)
}
"""Chips by every target that they run."""

MOST_SMEM_BYTES = max(chip.smem_bytes for chip in CHIPS.values())
"""Shared memory of a CTA of the chip that has most."""

DEFAULT_ARCH = "sm_100a"
"""The chip where none is named."""

_TARGET = re.compile(r"sm_(\d+)(\d)([af]?)")


def check_arch(arch: object) -> str:
    """An architecture that a user names. Raises ValueError: there is no such chip in `CHIPS`."""
    if arch not in CHIPS:
        raise ValueError(f"arch = {arch!r}: must be one of {', '.join(CHIPS)}")
    return arch


def chip_of(target: str) -> Chip:
    """The chip that PTX of a target is run on; one that is not in `CHIPS` counts as the newest that is older."""
    if target in CHIPS:
        return CHIPS[target]
    found = _TARGET.match(target)
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    older = [chip for chip in CHIPS.values() if chip.compute_capability <= capability]
    return max(older, key=lambda chip: chip.compute_capability, default=CHIPS["sm_80"])


def runs(target: str, chip: str) -> bool:
    """Whether a chip executes PTX of a target, e.g. ``"sm_100a"`` (PTX ISA, ".target"); its own suffix does not matter.

    PTX of a target without a suffix runs on this chip and all later ones, with "f" on this and later ones of the same
    family, which is the major version, with "a" on this chip alone.
    """
    wanted = _TARGET.fullmatch(target)
    if wanted is None:
        return target == chip
    generation, own = (int(wanted[1]), int(wanted[2])), chip_of(chip).compute_capability
    if wanted[3]:
        return own == generation or wanted[3] == "f" and own[0] == generation[0] and own > generation
    return own >= generation
