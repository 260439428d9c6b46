"""What plans of kernels have in common that compute ``out^T = weight * x^T``: every CTA keeps its features."""

from __future__ import annotations

from abc import abstractmethod

from cute_kernels.plan.base import Plan

COLUMN_GROUP = 8
"""Columns of a tensor core's result that its accumulators repeat with: a thread has two of each."""


class FeatureSlabs(Plan):
    """A persistent kernel that takes every tile of ``x`` once for each group of clusters.

    A CTA keeps its `features`, its slab, for the whole launch. The `ctas` of a cluster have neighbouring slabs;
    `groups` clusters cover all features, and every group walks the tiles in the same order, so that ``x`` comes from
    DRAM once and from L2 afterwards.
    """

    @property
    @abstractmethod
    def features(self) -> int:
        """Output features of one CTA."""

    @property
    @abstractmethod
    def ctas(self) -> int:
        """CTAs of a cluster."""

    @property
    @abstractmethod
    def tiles(self) -> int:
        """Tiles of ``x``; each is taken once by every group."""

    @property
    def slabs(self) -> int:
        return -(-self.problem.n // self.features)

    @property
    def groups(self) -> int:
        """Clusters that together cover all features."""
        return -(-self.slabs // self.ctas)

    @property
    def padded_n(self) -> int:
        """Features rounded up to what all CTAs together compute, so that table reads need no bounds check."""
        return self.groups * self.ctas * self.features

    @property
    def clusters(self) -> int:
        """As many whole groups as the device holds at once, at least one, never more than there are tiles."""
        resident_groups = self.sm_count // self.ctas // self.groups
        return max(1, min(resident_groups, self.tiles)) * self.groups

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.ctas, 1, 1)

    @property
    def tile_stages(self) -> int:
        """Stages that one tile takes."""
        return -(-self.k_blocks // self.config.stage_blocks)
