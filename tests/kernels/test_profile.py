"""Kernels with clock stamps, executed: the same results, a stamp for every edge of every tile, in order."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
import torch

from cute_kernels.config import (
    Config,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.emulator import Options, default_options
from cute_kernels.explore.profiling.record import Profile, phase_name, record
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import Plan
from cute_kernels.plan.base import COUNT, HEADER, profile_shape, with_profile
from tests.emulator.cases import Case
from tests.emulator.exact_sums import emulate as launch
from tests.emulator.gather_inputs import make_gather_case
from tests.emulator.image_inputs import make_images_case
from tests.emulator.kernel_inputs import make_case
from tests.nightly import by_day, nightly

CONFIGS: dict[str, Config] = {
    "sm90": Sm90PatchEmbedConfig(tile_rows=32, warpgroups=2, stages=3, stage_blocks=1, cluster=1, order="flat"),
    "sm100": Sm100PatchEmbedConfig(tile_n=128, stages=3, epilogue_warps=4, order="flat"),
    "sm100, weight on chip": Sm100ResidentConfig(
        weight="smem", order="flat", tile_rows=32, tile_positions=1, cta_group=1, accumulators=2, mma_columns=32,
        tmem_load_width=16, stages=3, stage_blocks=1,
    ),
}  # fmt: skip
SHAPES = {"sm90": (7, 23), "sm100": (40, 16), "sm100, weight on chip": (8, 25)}
"""Images and positions: three and more tiles for each of the two CTAs, or for both as a pair, the last one not full."""

Sequence = list[str]


@dataclass(frozen=True)
class Launched:
    case: Case
    profile: Profile

    @property
    def plan(self) -> Plan:
        return self.case.plan


@functools.cache
def launched(name: str) -> Launched:
    batch, positions = SHAPES[name]
    case = make_case(batch=batch, positions=positions, n=128, k=256, config=CONFIGS[name], sm_count=2)
    with default_options(Options(arithmetic="exact")):
        return Launched(case, record(case.plan, case.tensors, stamps=256, device="emulator"))


def names(profile: Profile, phases: torch.Tensor) -> Sequence:
    return [phase_name(profile.graph, int(phase)) for phase in phases]


def tiles_of(plan: Plan, cta: int) -> int:
    """Of a CTA: they are dealt in turn to the clusters of a group; all features are one group here."""
    return len(range(cta // math.prod(plan.cluster), plan.tiles, plan.clusters))


def expected_tile(plan: Plan, role: str) -> Sequence:
    """What a warp does for one tile, written down from the sources of the roles."""
    blocks = 2  # of K, 128 bytes each
    read = ["wait operands_full", "issue"]
    if role == "load":
        return ["tile"] + ["wait operands_empty", "issue"] * blocks
    if plan.arch.name == "sm_90a":
        return [
            "tile", "wait order barrier", *read, *read, "wait MMAs", "wait MMAs", "wait staging", "math", "store",
        ]  # fmt: skip
    if role == "mma":
        return ["tile", "wait accumulator_empty", "issue", *read * blocks, "commit"]
    if isinstance(plan.config, Sm100ResidentConfig):
        chunks = ["read", "math"] * (32 // 16)
        return ["tile", "wait accumulator_full", "read", "wait staging", *chunks, "store"]
    chunk, last = ["read", "math", "wait staging", "staging"], ["read", "math", "staging", "store"]
    first = ["tile", "wait accumulator_full", "read", "stagger"]
    return [*first, *chunk, *last, *chunk, *last]


@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_those_of_the_kernel_without_stamps(name: str) -> None:
    assert not launched(name).case.mismatches().any()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tile_has_every_edge(name: str) -> None:
    plan, profile = launched(name).plan, launched(name).profile
    assert len(profile.warps) == plan.grid[0] * len(plan.roles)
    working = Counter()
    for warp in profile.warps:
        found = names(profile, warp.phases)
        assert found[-1] == "end" and "end" not in found[:-1] and warp.lost == 0
        first = found.index("tile") if "tile" in found else len(found) - 1
        if first == len(found) - 1:
            # Warps that fill a warpgroup, and the MMA warp of a pair's second CTA.
            assert warp.role == "idle" or (warp.role == "mma" and warp.cta % 2)
            continue
        working[warp.role] += 1
        tiles = tiles_of(plan, warp.cta)
        after = ["wait operands_empty", "issue"] * plan.config.stages if warp.role == "load" else []
        assert found[first:-1] == expected_tile(plan, warp.role) * tiles + after
    assert set(working) == {role for role in plan.roles if role != "idle"}
    assert tiles_of(plan, 0) >= 3


@pytest.mark.parametrize("name", CONFIGS)
def test_stamps_of_a_warp_are_monotonous(name: str) -> None:
    for warp in launched(name).profile.warps:
        clocks = [warp.begin[0], *warp.clocks.tolist(), warp.finish[0]]
        assert all(first < second for first, second in zip(clocks, clocks[1:]))
        assert warp.begin[1] < warp.finish[1]
        assert warp.sm == warp.cta, "the emulator has a multiprocessor for every CTA"


@pytest.mark.parametrize("name", CONFIGS)
def test_off_by_default_without_a_trace(name: str) -> None:
    """Neither clock is read, nor is there a parameter for the buffer."""
    plans = launched(name).plan, with_profile(launched(name).plan, 256)
    plain, stamped = (compile_plan(plan, emulated=True).ptx for plan in plans)
    for register in ("%clock64", "%globaltimer", "%smid"):
        assert register not in plain and register in stamped
    entry, stamped_entry = (text[text.index(".entry") : text.index("{")] for text in (plain, stamped))
    assert stamped_entry.count(".param") == entry.count(".param") + 1
    assert plans[0].kernel_key != plans[1].kernel_key


@pytest.mark.parametrize("name", by_day(CONFIGS, daily=("sm100, weight on chip",)))
def test_without_room_stamps_are_counted_and_nothing_else_is_written(name: str) -> None:
    """A second launch is the same schedule: what was kept are the first stamps, in every bit."""
    kept, whole = 8, launched(name)
    plan = with_profile(whole.plan, kept)
    memory = torch.zeros(profile_shape(plan), dtype=torch.int64)
    launch(plan, whole.case.tensors.replace(profile=memory))
    for warp in whole.profile.warps:
        row = memory[warp.cta, warp.warp]
        words = [int(clock) << 8 | int(phase) for clock, phase in zip(warp.clocks, warp.phases)]
        assert int(row[COUNT]) == len(words)
        assert row[HEADER:].tolist() == (words + [0] * kept)[:kept]


def images_case(name: str) -> Case:
    if name == "sm90, 16 bits":
        return make_gather_case(batch=6, n=64, sm_count=2)
    patch = 14 if "repacked" in name else 16
    arch = "sm_100a" if name.startswith("sm100") else "sm_90a"
    config = Sm90ImagesConfig() if patch == 14 else None
    return make_images_case(
        batch=24, grid=(2, 8), n=64, patch=patch, config=config, arch=arch, sm_count=2
    )


@nightly
@pytest.mark.parametrize("name", ["sm90", "sm90, repacked", "sm90, 16 bits", "sm100"])
def test_kernels_over_images(name: str) -> None:
    """The same result, and a tile for a tile in every warp that works."""
    case = images_case(name)
    profile = record(case.plan, case.tensors, stamps=1024, device="emulator")
    assert not case.mismatches().any()
    tiles: dict[tuple[int, str], Counter] = defaultdict(Counter)
    for warp in profile.warps:
        found = names(profile, warp.phases)
        assert found[-1] == "end" and warp.lost == 0
        tiles[warp.cta, warp.role][found.count("tile")] += 1
    for (cta, role), found in tiles.items():
        expected = tiles_of(case.plan, cta)
        second = name == "sm100" and cta % case.plan.cta_group
        if role == "idle" or (role == "mma" and second):
            expected = 0
        if getattr(case.plan.config, "pingpong", False) and name == "sm90, 16 bits" and role == "mma":
            assert sum(count * warps for count, warps in found.items()) == 4 * expected, "two warpgroups share them"
        else:
            assert set(found) == {expected}, (cta, role)
