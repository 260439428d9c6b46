"""Which warps a schedule starves, and seeds that starve each warp of a kernel."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from cute_kernels.emulator.machine.state.async_engine import cluster_random


class Starvable(Protocol):
    """A warp, of which is asked: its CTA, and its role or number, which warps of several CTAs share."""

    @property
    def cta(self) -> object: ...

    @property
    def track(self) -> str: ...


W = TypeVar("W", bound=Starvable)


def draw_starved(rng: random.Random, warps: Sequence[W]) -> frozenset[W]:
    """Draws warps of a cluster: all of one role, those of one role in one CTA, or a single one."""
    victim = rng.choice(warps)
    kinds = (
        [warp for warp in warps if warp.track == victim.track],
        [warp for warp in warps if warp.track == victim.track and warp.cta is victim.cta], [victim],
    )
    return frozenset(rng.choice(kinds))


class _Warp(NamedTuple):
    cta: int
    track: str


def seeds_for_each_warp(ctas: int, warps: int) -> list[int]:
    """The least seeds that starve, in the first cluster of a launch, warp 0 of all CTAs, warp 1 of all CTAs, ...
    ``ctas``: of a cluster; ``warps``: of a CTA; none of them has a role."""
    cluster = [_Warp(cta, f"warp {index}") for cta in range(ctas) for index in range(warps)]
    wanted = {frozenset(warp for warp in cluster if warp.track == f"warp {index}"): index for index in range(warps)}
    found: dict[int, int] = {}
    seed = 0
    while len(found) < warps:
        starved = draw_starved(cluster_random(seed, 0)[0], cluster)
        if starved in wanted:
            found.setdefault(wanted[starved], seed)
        seed += 1
    return [found[index] for index in range(warps)]
