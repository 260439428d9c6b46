"""What the host functions of all kernels have in common: how they launch; of patch embeds, what they are made of."""

from __future__ import annotations

import math
from typing import Any

from cutlass import Int32

from cute_kernels.kernels.graph import Graph
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


class PatchEmbedHost:
    """Host entry of a patch embed for one plan.

    A subclass has the device code, ``kernel(arguments, profile)``, `arguments`, and ``__call__`` with its operands.

    Attributes:
        plan, graph: what the kernel does, its roles and barriers.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph

    def arguments(self, operands: Any) -> Any:
        """What the kernel takes of its operands: TMA atoms with their views, and sizes in tiles."""
        raise NotImplementedError
