"""What the host functions of all kernels have in common: how they launch."""

from __future__ import annotations

import math
from typing import Any

from cutlass import Int32

from cute_kernels.plan import Plan


def launch_clusters(kernel: Any, plan: Plan, clusters: Int32, stream: Any) -> None:
    """Launches persistent clusters, one CTA per multiprocessor, with programmatic dependent launch.

    Args:
        kernel: device function with its arguments.
        plan: gives threads, cluster and shared memory.
        clusters: how many.
        stream: where.
    """
    kernel.launch(
        grid=(clusters * math.prod(plan.cluster), 1, 1),
        block=(plan.threads, 1, 1),
        cluster=plan.cluster,
        smem=plan.smem_bytes,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
