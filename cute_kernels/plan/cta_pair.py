"""Common parts of the SM100 plans: clusters of CTA pairs, one warp role after the other, stages filled by both."""

from __future__ import annotations

from cute_kernels.plan.base import reject


class CtaPairs:
    """Mixin of plans whose CTAs work in pairs; the dense GEMM and the patch embed lay out a pair alike."""

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, a multiple of ``cta_group``."""
        return self.cta_group

    @property
    def sharing_pairs(self) -> int:
        """Pairs whose MMAs read what one CTA loads, its own among them."""
        return 1

    @property
    def clusters(self) -> int:
        """Persistent clusters: as many as the multiprocessors can hold, never more than there are tiles."""
        return min(self.sm_count // self.ctas, self.tiles)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.ctas, 1, 1)

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of each warp of a CTA, by hardware warp index."""
        return ("load", "mma") + ("epilogue",) * self.epilogue_warps

    @property
    def b_stage_bytes(self) -> int:
        """Each CTA holds its half of the columns."""
        return self.config.tile_n // self.cta_group * self.k_block_bytes

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage in one CTA."""
        return self.a_stage_bytes + self.b_stage_bytes

    @property
    def stage_tx_bytes(self) -> int:
        """Bytes that the leader's full barrier expects per stage: TMA of both CTAs signals the leader."""
        return self.stage_bytes * self.cta_group

    def check_sm_count(self) -> None:
        """Raises ValueError if the device cannot hold one cluster."""
        if self.sm_count < self.ctas:
            reject("sm_count", self.sm_count, f"a cluster needs {self.ctas} multiprocessors", self.ctas)
