"""Where a CTA is in a cluster of CTA pairs, and which other CTAs it shares operands with."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32

from cute_kernels.plan import Sm100GemmPlan, Sm100PatchEmbedPlan
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

PAIR = 0b11
"""CTA mask of the first pair of a cluster."""


@dataclass(frozen=True)
class ClusterPlace:
    """A CTA of a cluster of ``pairs[0]`` x ``pairs[1]`` pairs along the rows and the columns of the output.

    CTA ``rank`` of pair (m, n) has cluster rank ``rank + 2 * (m + pairs[0] * n)``: `tcgen05` pairs neighbouring ranks.
    Pairs of one row of the cluster multiply the same rows of ``a``, pairs of one column the same rows of ``b``; what
    they share is split between the CTAs of equal ``rank``, each of which loads its part for all of them.

    Attributes:
        rank: which CTA of its pair; 0 leads.
        m, n: which pair.
        pairs: pairs of the cluster along rows and columns.
        cta_group: CTAs that multiply together; 1: there are no pairs, and the CTA is alone.
    """

    rank: Int32
    m: Int32 | int = 0
    n: Int32 | int = 0
    pairs: tuple[int, int] = (1, 1)
    cta_group: int = 2

    @property
    def leads(self) -> Boolean:
        return self.rank == 0

    @property
    def leader(self) -> Int32 | int:
        """Cluster rank of the leading CTA of this pair."""
        return 2 * (self.m + self.pairs[0] * self.n)

    @property
    def pair_mask(self) -> Int32 | int:
        """CTAs of this pair."""
        return PAIR << self.leader

    @property
    def load_mask(self) -> Int32 | int:
        """CTAs that load something for this pair: those of its row and of its column of pairs."""
        return PAIR * (self._row() | self._column())

    @property
    def a_mask(self) -> Int32:
        """CTAs that receive what this one loads of ``a``."""
        return Int32(self._row()) << self.rank

    @property
    def b_mask(self) -> Int32:
        """CTAs that receive what this one loads of ``b``."""
        return Int32(self._column()) << self.rank

    def _row(self) -> Int32 | int:
        """Leaders of the pairs with the same rows."""
        return sum(1 << 2 * self.pairs[0] * i for i in range(self.pairs[1])) << (2 * self.m)

    def _column(self) -> Int32 | int:
        """Leaders of the pairs with the same columns."""
        return sum(1 << 2 * i for i in range(self.pairs[0])) << (2 * self.pairs[0] * self.n)


def cluster_place(plan: Sm100PatchEmbedPlan | Sm100GemmPlan | Sm100TransposedPlan, cluster_rank: Int32) -> ClusterPlace:
    """The place of the CTA of a cluster rank; masks are constants where the cluster is one pair."""
    if plan.ctas == plan.cta_group:
        return ClusterPlace(cluster_rank, cta_group=plan.cta_group)
    pair = cluster_rank // 2
    return ClusterPlace(cluster_rank % 2, pair % plan.pairs[0], pair // plan.pairs[0], plan.pairs)
