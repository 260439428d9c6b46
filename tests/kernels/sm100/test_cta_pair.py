"""CTA masks of a cluster of pairs, against the definition of who shares what."""

from __future__ import annotations

import pytest
from cutlass import Int32

from cute_kernels.config import GemmProblem, Sm100GemmConfig
from cute_kernels.kernels.sm100.cta_pair import ClusterPlace
from cute_kernels.plan import make_plan


def ctas_of(mask: Int32 | int) -> set[int]:
    return {cta for cta in range(32) if int(getattr(mask, "value", mask)) >> cta & 1}


@pytest.mark.parametrize("pairs", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_masks(pairs: tuple[int, int]) -> None:
    places = {
        2 * (m + pairs[0] * n) + rank: ClusterPlace(rank, m, n, pairs)
        for n in range(pairs[1])
        for m in range(pairs[0])
        for rank in range(2)
    }
    assert sorted(places) == list(range(2 * pairs[0] * pairs[1]))
    for cta, place in places.items():
        same_row = {c for c, p in places.items() if p.m == place.m}
        same_column = {c for c, p in places.items() if p.n == place.n}
        same_rank = {c for c, p in places.items() if p.rank == place.rank}
        # A CTA multiplies 128 rows of a, and holds half of the rows of b of its pair.
        assert ctas_of(place.a_mask) == same_row & same_rank
        assert ctas_of(place.b_mask) == same_column & same_rank
        assert ctas_of(place.pair_mask) == same_row & same_column == {place.leader, place.leader + 1}
        assert place.leads == (cta == place.leader)
        # Whoever's loads this pair receives must hear when it has read them.
        pair = ctas_of(place.pair_mask)
        loaders = {c for c, p in places.items() if pair & (ctas_of(p.a_mask) | ctas_of(p.b_mask))}
        assert ctas_of(place.load_mask) == loaders


@pytest.mark.parametrize("cluster", [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_commits_that_a_cta_hears_are_the_arrivals_that_the_plan_counts(cluster: tuple[int, int]) -> None:
    plan = make_plan(GemmProblem(512, 512, 512), Sm100GemmConfig(stages=2, cluster_m=cluster[0], cluster_n=cluster[1]))
    leaders = [ClusterPlace(0, m, n, plan.pairs) for m in range(plan.pairs[0]) for n in range(plan.pairs[1])]
    for cta in range(plan.ctas):
        assert sum(cta in ctas_of(leader.load_mask) for leader in leaders) == plan.sharing_pairs
