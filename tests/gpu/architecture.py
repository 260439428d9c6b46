"""Which of the supported architectures the device at hand has, real or emulated."""

from __future__ import annotations

import torch

from cute_kernels.plan.base import arch_of

WITH_SELECTIONS = ("sm_90a", "sm_100a")
"""Architectures whose own kernels these tests are of. On others `ANYWHERE` alone is collected."""

ANYWHERE = "test_mma_sync.py"
"""The file of the kernels of ``mma.sync``, which every GPU since Ampere runs."""

NEEDS_SM90 = ("test_gemm_split.py", "test_images_gather.py")
"""Files of what only SM90 has a kernel for: the split of K, and 16-bit pixels in patches of 32 and 64.
`tests/package/test_gpu_suite.py` asks the plans whether that is still so."""


def at_hand() -> str | None:
    """A key of `cute_kernels.plan.ARCHS`, or None without a GPU or with one that has no kernel."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return arch_of(capability)
