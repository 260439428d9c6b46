"""What the detectors say where synchronisation is missing in an SM100 kernel whose weight stays on chip."""

from __future__ import annotations

from cute_kernels.emulator.errors import Hang, ProxyFenceMissing, SharedMemoryRace, TensorMemoryRace

MISSING_SYNCHRONISATION = [
    (r"fence\.proxy\.async.*;", ProxyFenceMissing, r"\(epilogue\)"),
    (r"tcgen05\.wait::st.*;", TensorMemoryRace, r"tcgen05"),
    (r"tcgen05\.wait::ld.*;", TensorMemoryRace, r"tcgen05"),
    (r"cp\.async\.bulk\.wait_group\.read.*;", SharedMemoryRace, r"TMA store .* read before"),
    (r"mbarrier\.arrive\.relaxed.*;", Hang, r"\(mma\) waits for parity"),
]
"""Instructions that are taken out, the error, and what its message says."""
