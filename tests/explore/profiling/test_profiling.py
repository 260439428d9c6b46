"""What is made of clock stamps: decoding, statistics by an independent count, timelines."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.explore.profiling import phase_statistics, role_balance, timeline
from cute_kernels.explore.profiling.record import Profile, decode, phase_name
from cute_kernels.explore.profiling.statistics import has_equilibrium
from cute_kernels.plan import Plan, make_plan
from cute_kernels.plan.base import BEGIN, COUNT, FINISH, HEADER, SM, Phase, profile_shape, wait_phase, with_profile
from tests.emulator.observe.test_trace import check_well_formed, read, slices, thread_names

WAIT = wait_phase(0, empty=True)
TILE_OF = {"load": [Phase.TILE, WAIT, Phase.ISSUE, WAIT, Phase.ISSUE], "mma": [Phase.TILE, WAIT, Phase.MATH]}
TILES, STAMPS, RATE = 5, 64, 1.5
"""Of a warp; the latter in clocks per nanosecond."""

Memory = tuple[torch.Tensor, dict[tuple[int, int], list[tuple[int, int]]]]


@pytest.fixture(scope="module")
def plan() -> Plan:
    problem = PatchEmbedProblem(m=1000, n=128, k=256, table_rows=10)
    return with_profile(make_plan(problem, Sm90PatchEmbedConfig(cluster=2), "sm_90a", sm_count=4), STAMPS)


def written(plan: Plan, tiles: int = TILES) -> Memory:
    """A buffer as a launch leaves it, and (clock, phase) of every stamp by CTA and warp.

    The counter of every multiprocessor has an offset of its own; the time of the device has none.
    """
    draw = random.Random(0)
    memory = torch.zeros(profile_shape(plan), dtype=torch.int64)
    stamps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for cta in range(plan.grid[0]):
        offset = draw.randrange(10**12)
        for warp, role in enumerate(plan.roles):
            time = 10**9 + 1000 * warp
            clock = offset + int(RATE * 1000 * warp)
            row = memory[cta, warp]
            row[SM], row[BEGIN], row[BEGIN + 1] = cta, clock, time
            made = []
            for phase in [Phase.ISSUE, *TILE_OF.get(role, []) * tiles, Phase.END]:
                clock += draw.randrange(1, 900)
                made.append((clock, int(phase)))
            row[COUNT], row[FINISH] = len(made), clock
            row[FINISH + 1] = time + round((clock - int(row[BEGIN])) / RATE)
            words = [clock << 8 | phase for clock, phase in made[:STAMPS]]
            row[HEADER : HEADER + len(words)] = torch.tensor(words)
            stamps[cta, warp] = made
    return memory, stamps


@pytest.fixture(scope="module")
def memory(plan: Plan) -> Memory:
    return written(plan)


@pytest.fixture(scope="module")
def profile(plan: Plan, memory: Memory) -> Profile:
    return decode(plan, memory[0])


# --- plans -----------------------------------------------------------------------------------------------------------


def test_the_operand_is_there_with_stamps_alone() -> None:
    problem = PatchEmbedProblem(m=1000, n=128, k=256, table_rows=10)
    plan = make_plan(problem, None, "sm_90a")
    (off,) = (operand for operand in plan.operands if operand.name == "profile")
    (on,) = (operand for operand in with_profile(plan, 8).operands if operand.name == "profile")
    assert not off.present and not off.written and on.present and on.written
    assert dataclasses.replace(with_profile(plan, 8), profile=0) == plan
    assert profile_shape(with_profile(plan, 8)) == (plan.grid[0], len(plan.roles), HEADER + 8)


@pytest.mark.parametrize("stamps", [0, -8, 12, 1 << 31])
def test_stamps_that_are_not_possible(plan: Plan, stamps: int) -> None:
    most = ((2**31 - 1) // (plan.grid[0] * len(plan.roles)) - HEADER) // 8 * 8
    with_profile(plan, most)
    nearest = {0: 8, -8: 8, 12: 8, 1 << 31: most}[stamps]
    with pytest.raises(ValueError, match=rf"stamps = {stamps}: must be.*up to {most}; .*: {nearest}$"):
        with_profile(plan, stamps)


def test_kernels_without_stamps_are_named() -> None:
    with pytest.raises(NotImplementedError, match=r"kernels of gemm \(Sm90GemmPlan\) write no clock stamps"):
        with_profile(make_plan(GemmProblem(256, 256, 256), None, "sm_90a"), 8)
    chain = make_plan(PatchEmbedImagesProblem(8, 3, 224, 224, 28, 768), None, "sm_90a")
    with pytest.raises(NotImplementedError, match="chains kernels, of patchify and patch_embed: profile them one by"):
        with_profile(chain, 8)
    assert with_profile(chain.launches[-1], 8).profile == 8


# --- decoding --------------------------------------------------------------------------------------------------------


def test_decoded_stamps_are_those_that_were_written(plan: Plan, memory: Memory, profile: Profile) -> None:
    assert [(warp.cta, warp.warp) for warp in profile.warps] == list(memory[1])
    for warp in profile.warps:
        made = memory[1][warp.cta, warp.warp]
        assert list(zip(warp.clocks.tolist(), warp.phases.tolist())) == made
        assert (warp.role, warp.sm, warp.lost) == (plan.roles[warp.warp], warp.cta, 0)
        assert warp.finish[0] == made[-1][0]
    assert profile.clocks_per_nanosecond == pytest.approx(RATE, rel=2e-3)


def test_lost_stamps_are_counted_and_their_tile_is_left_out(plan: Plan, profile: Profile) -> None:
    memory, stamps = written(plan, tiles=20)
    lossy = decode(plan, memory)
    assert lossy.lost == sum(max(0, len(made) - STAMPS) for made in stamps.values()) > 0
    whole = {role: (STAMPS - 1) // len(phases) for role, phases in TILE_OF.items()}
    for found in phase_statistics(lossy, equilibrium=False):
        assert found.tiles == plan.grid[0] * min(20, whole[found.role])


def test_memory_of_no_launch_is_refused(plan: Plan, memory: Memory) -> None:
    with pytest.raises(ValueError, match="memory has no stamps of 48 warps, the first of them warp 0 of CTA 0"):
        decode(plan, torch.zeros_like(memory[0]))
    with pytest.raises(ValueError, match=r"memory is \[3, 12, 72\] of torch.int64: must be \[4, 12, 72\]"):
        decode(plan, memory[0][:3])
    with pytest.raises(ValueError, match="of torch.int32: must be"):
        decode(plan, memory[0].int())


# --- statistics ------------------------------------------------------------------------------------------------------


def counted(memory: Memory, plan: Plan, first: int, last: int) -> dict[tuple[int, str], list[int]]:
    """Clocks of each tile by warp and phase, stamp by stamp; tiles ``first`` to ``last`` of every CTA."""
    graph, found = Profile(plan, ()).graph, defaultdict(list)
    for (_, warp), made in memory[1].items():
        tiles: list[dict[str, int]] = []
        for (clock, phase), (end, _) in zip(made, made[1:]):
            if phase == Phase.TILE:
                tiles.append(defaultdict(int))
            if tiles:
                tiles[-1][phase_name(graph, phase)] += end - clock
                tiles[-1]["all"] += end - clock
        for tile in tiles[first:last]:
            for name, clocks in tile.items():
                found[warp, name].append(clocks)
    return found


@pytest.mark.parametrize("equilibrium", [True, False])
def test_statistics_are_those_of_an_independent_count(plan, memory, profile, equilibrium: bool) -> None:
    expected = counted(memory, plan, *((1, TILES - 1) if equilibrium else (0, TILES)))
    found = {(s.warp, s.phase): s for s in phase_statistics(profile, equilibrium=equilibrium)}
    assert set(found) == set(expected)
    for key, clocks in expected.items():
        assert found[key].tiles == len(clocks) == plan.grid[0] * (TILES - 2 * equilibrium)
        assert found[key].mean == pytest.approx(np.mean(clocks), rel=1e-12)
        assert found[key].p95 == pytest.approx(np.percentile(clocks, 95), rel=1e-12)
        assert found[key].most == max(clocks)
        assert found[key].waits == key[1].startswith("wait")


def test_balance_of_roles(plan: Plan, memory: Memory, profile: Profile) -> None:
    """Means over the warps of a role: what is there of phases adds up to a tile."""
    expected = counted(memory, plan, 1, TILES - 1)
    balance = {role.role: role for role in role_balance(profile)}
    assert set(balance) == {"mma", "load"}
    for role, found in balance.items():
        warps = [warp for warp, name in enumerate(plan.roles) if name == role]
        mean = {
            name: np.mean([np.mean(expected[warp, name]) for warp in warps]) for name in (*found.phases, "all")
        }
        assert found.phases == pytest.approx({name: mean[name] for name in found.phases})
        assert found.total == pytest.approx(mean["all"]) == pytest.approx(sum(found.phases.values()))
        assert found.waiting == pytest.approx(mean["wait operands_empty"])


def test_two_tiles_have_no_equilibrium(plan: Plan) -> None:
    short = decode(plan, written(plan, tiles=2)[0])
    assert not has_equilibrium(short) and has_equilibrium(decode(plan, written(plan, tiles=3)[0]))
    with pytest.raises(ValueError, match="no warp has 3 tiles"):
        phase_statistics(short)
    assert phase_statistics(short, equilibrium=False)


# --- timelines -------------------------------------------------------------------------------------------------------


def test_timeline_places_multiprocessors_by_the_time_of_the_device(plan, memory, profile, tmp_path) -> None:
    """Clocks of CTAs differ by up to 10^12; warp for warp they begin within what rounding to nanoseconds leaves."""
    timeline(profile, clusters=2, tiles=2).write(tmp_path / "trace.json", "time")
    events = read(tmp_path / "trace.json")
    check_well_formed(events)
    assert set(thread_names(events).values()) == {f"warp {i} {role}" for i, role in enumerate(plan.roles)}
    begins = defaultdict(dict)
    for event in slices(events, "work") + slices(events, "wait"):
        warp = event["tid"] - 1
        begins[warp].setdefault(event["pid"] - 1, event["ts"])
    for warp, found in begins.items():
        for cta, begin in found.items():
            first, row = memory[1][cta, warp][0][0], memory[0][cta, warp]
            time = int(row[BEGIN + 1]) + (first - int(row[BEGIN])) / RATE
            assert begin == pytest.approx((time - 10**9) / 1e3, abs=0.02)
    names = {event["name"] for event in slices(events, "wait")}
    assert names == {"wait operands_empty"}


def test_timeline_of_some_tiles_and_clusters(plan: Plan, profile: Profile) -> None:
    def tiles(**options: int | None) -> dict[int, int]:
        events = timeline(profile, **options).events
        load = plan.roles.index("load") + 1
        found: dict[int, int] = defaultdict(int)
        for event in events:
            found[event["pid"] - 1] += event["ph"] == "X" and event["name"] == "tile" and event["tid"] == load
        return found

    assert tiles(clusters=1, tiles=3) == {0: 3, 1: 3}
    assert tiles(clusters=9, tiles=None) == dict.fromkeys(range(4), TILES)
    for name in ("clusters", "tiles"):
        with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
            timeline(profile, **{name: 0})
