"""Statistics of phases: clocks of a tile, warp by warp, and which role has the least time to wait."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cute_kernels.explore.profiling.record import Profile, WarpRecord, is_wait, phase_name
from cute_kernels.plan.base import Phase

PHASES = 256
"""Numbers that a phase may have."""

NEEDED_TILES = 3
"""Tiles that a warp needs: with fewer no tile is between two others."""


@dataclass(frozen=True)
class PhaseStatistics:
    """Clocks of one phase in a tile, of the same warp of every CTA; of a phase that a tile has often, their sum.

    ``role``, ``warp``: of a CTA. ``phase``: its name; "tile" of all phases together stands as "all". ``waits``: whether
    the warp does nothing of its own in it. ``tiles``: how many were counted, of all CTAs together. ``mean``: clocks of
    a tile. ``p95``: 95th percentile, interpolated between tiles. ``most``: of any tile."""

    role: str
    warp: int
    phase: str
    waits: bool
    tiles: int
    mean: float
    p95: float
    most: float


@dataclass(frozen=True)
class RoleBalance:
    """A role in equilibrium: mean clocks of a tile over its warps.

    ``role``: name in the kernel's graph. ``phases``: clocks by name of the phase, in the order in which a tile has
    them. ``total``: from a tile to the next one. ``waiting``: of them, in phases in which the role does nothing of its
    own."""

    role: str
    phases: dict[str, float]
    total: float
    waiting: float


def tile_phases(warp: WarpRecord) -> torch.Tensor:
    """FP64 ``[tiles, 256]``: clocks of every phase in each tile of a warp; a tile ends where the next one begins.

    What comes before the first tile is left out. The last tile lasts until the role is over.
    """
    clocks, phases = warp.clocks, warp.phases
    tile = (phases == Phase.TILE).cumsum(0) - 1
    tiles = int(tile[-1]) + 1 if len(tile) else 0
    inside = tile[:-1] >= 0
    places = (tile[:-1] * PHASES + phases[:-1])[inside]
    lasted = (clocks[1:] - clocks[:-1])[inside].to(torch.float64)
    return torch.bincount(places, lasted, minlength=tiles * PHASES).view(-1, PHASES)[:tiles]


def has_equilibrium(profile: Profile) -> bool:
    """Whether any warp has a tile that is neither its first nor its last."""
    return any(int((warp.phases == Phase.TILE).sum()) >= NEEDED_TILES for warp in profile.warps)


def phase_statistics(profile: Profile, *, equilibrium: bool = True) -> list[PhaseStatistics]:
    """Statistics of every warp of a CTA and each of its phases, over all CTAs; warps without tiles are left out.

    ``profile``: stamps of a launch. ``equilibrium``: without the first and the last tile of each warp, when pipelines
    fill and drain. Raises ValueError: ``equilibrium``, and no warp has three tiles."""
    result = []
    for (role, warp), clocks, order in _of_warps(profile, equilibrium):
        columns = [(phase_name(profile.graph, phase), is_wait(phase), clocks[:, phase]) for phase in order]
        for name, waits, values in [*columns, ("all", False, clocks.sum(1))]:
            result.append(
                PhaseStatistics(
                    role=role,
                    warp=warp,
                    phase=name,
                    waits=waits,
                    tiles=len(values),
                    mean=float(values.mean()),
                    p95=float(values.quantile(0.95)),
                    most=float(values.max()),
                )
            )
    return result


def role_balance(profile: Profile, *, equilibrium: bool = True) -> list[RoleBalance]:
    """Balance of every role that has tiles: what a tile takes it, and how much of that it waits.

    Roles have the same total where the launch is long. The one that waits least is what the others wait for.

    ``profile``, ``equilibrium``: as for `phase_statistics`. Raises ValueError: as `phase_statistics`."""
    warps: dict[str, list[PhaseStatistics]] = defaultdict(list)
    for found in phase_statistics(profile, equilibrium=equilibrium):
        warps[found.role].append(found)
    result = []
    for role, found in warps.items():
        count = len({entry.warp for entry in found})
        phases: dict[str, float] = defaultdict(float)
        for entry in found:
            phases[entry.phase] += entry.mean / count
        total = phases.pop("all")
        waiting = sum(entry.mean for entry in found if entry.waits) / count
        result.append(RoleBalance(role, dict(phases), total, waiting))
    return result


def _of_warps(profile: Profile, equilibrium: bool) -> Iterator[tuple[tuple[str, int], torch.Tensor, list[int]]]:
    """Role and index of a warp, ``[tiles, 256]`` clocks of all CTAs, and the phases that it has, in order."""
    if equilibrium and not has_equilibrium(profile):
        raise ValueError(
            f"no warp has {NEEDED_TILES} tiles, and without the first and the last none is left: more rows or images, "
            "or fewer multiprocessors"
        )
    rows: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
    order: dict[tuple[str, int], dict[int, None]] = defaultdict(dict)
    for warp in profile.warps:
        clocks = tile_phases(warp)
        # The tile in which there was no more room is no whole one, and always the last.
        clocks = clocks[1:-1] if equilibrium else clocks[: len(clocks) - (warp.lost > 0)]
        if len(clocks):
            key = warp.role, warp.warp
            rows[key].append(clocks)
            first = int((warp.phases == Phase.TILE).nonzero()[0])
            order[key] |= dict.fromkeys(warp.phases[first:-1].tolist())
    for key, parts in sorted(rows.items(), key=lambda item: item[0][1]):
        yield key, torch.cat(parts), list(order[key])
