"""What the SM100 plans have in common: clusters of two CTAs, one warp role after the other, stages filled by both."""

from __future__ import annotations


class CtaPairs:
    """Mixin of plans with ``cta_group`` CTAs in a cluster; the dense GEMM and the patch embed lay out a pair alike."""

    @property
    def clusters(self) -> int:
        """Persistent clusters: one per pair of multiprocessors, never more than there are tiles."""
        return min(self.sm_count // self.cta_group, self.tiles)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.cta_group, 1, 1)

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
