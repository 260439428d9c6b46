"""Timelines: well-formed, consistent with the report, and arrows that begin at what released a wait."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_kernels.config import Config, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator import Hang, Options, Report
from cute_kernels.kernels.graph import sm90_graph, sm100_graph
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.ptx_launch import launch

Event = dict[str, Any]
CONFIGS = {"sm100": Sm100PatchEmbedConfig(), "sm90": Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1)}


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text())["traceEvents"]


def slices(events: list[Event], category: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def thread_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def flows(events: list[Event]) -> list[tuple[Event, Event]]:
    """(start, end) of each arrow."""
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]], "an arrow has one start and one end"
            ends[event["id"]][event["ph"]] = event
    return [(pair["s"], pair["f"]) for pair in ends.values()]


def check_well_formed(events: list[Event]) -> None:
    """Slices of a track nest or are disjoint; arrows begin and end inside slices, and end later than they begin."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= set(thread_names(events))
    for spans in tracks.values():
        assert len(set(spans)) == len(spans)
        assert spans == sorted(spans, key=lambda span: (span[0], -span[1])), "an outer slice comes first in the file"
        open_ends: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"slice {begin} to {end} crosses the end {open_ends[-1]}"
            open_ends.append(end)
    for start, end in flows(events):
        assert start["ts"] < end["ts"]
        for event in (start, end):
            assert any(a < event["ts"] < b for a, b in tracks[event["pid"], event["tid"]])


def run_case(config: Config, path: Path | None, **options: Any) -> tuple[Report, np.ndarray]:
    case = make_case(batch=70, positions=2, n=256, k=256, config=config, sm_count=2, seed=3)
    report = emulate(case.plan, case.tensors, Options(trace=path, **options))
    assert not case.mismatches().any()
    return report, case


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"completion": "lazy"},
        {"completion": "random", "interleave": "random", "seed": 5, "spurious_try_wait_failures": True},
    ],
    ids=["eager", "lazy", "random"],
)
def test_a_kernel(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    report, case = run_case(CONFIGS[name], path, **options)
    events = read(path)
    check_well_formed(events)

    names = thread_names(events)
    instructions: Counter[str] = Counter()
    for event in slices(events, "work"):
        instructions[names[event["pid"], event["tid"]].split()[2]] += event["args"]["instructions"]
    assert instructions == report.by_role
    assert len(names) >= len(case.plan.roles) * 2

    copies = slices(events, "tma")
    loads = [int(event["name"].split()[1]) for event in copies if event["name"].startswith("load")]
    assert sum(loads) == report.tma_bytes_loaded
    assert sum(int(e["name"].split()[1]) for e in copies if e["name"].endswith("write")) == report.tma_bytes_stored
    engine = {"sm100": "tcgen05", "sm90": "wgmma"}[name]
    assert sum("mma" in event["name"] for event in slices(events, engine)) == report.mma_instructions

    steps = report.warp_instructions + sum(len(slices(events, unit)) for unit in ("tma", engine))
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == steps

    kinds = Counter(start["name"] for start, _ in flows(events))
    assert kinds["issue"] == len(copies) + len(slices(events, engine))
    waits = [event for event in slices(events, "wait") if "polling" not in event["name"]]
    assert kinds["release"] >= 0.9 * len(waits)  # the others timed out

    graph = {"sm100": sm100_graph, "sm90": sm90_graph}[name](case.plan)
    barriers = [event["name"] for event in slices(events, "instruction") if event["name"].startswith("arrive")]
    assert {text.split()[1] for text in barriers} <= set(graph.barrier_names()) and barriers
    passed = [event["name"] for event in slices(events, "instruction") if event["name"].startswith("passed")]
    assert {text.split()[1].split("[")[0] for text in passed} == {barrier.name for barrier in graph.barriers()}

    plain, _ = run_case(CONFIGS[name], None, **options)
    assert (plain.by_role, plain.by_opcode) == (report.by_role, report.by_opcode), "recording changed the schedule"


HANDSHAKE = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shr.u32 %r3, %r1, 5; ld.param.u64 %d1, [p0];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 32;
READY:
    bar.sync 0;
    setp.eq.u32 %p2, %r3, 1;
    @%p2 bra WAIT;
    mov.u32 %r5, 0;
LOOP:
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p3, %r5, 100;
    @%p3 bra LOOP;
    ARRIVE
    ret;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;
    @!%p4 bra WAIT;
    st.global.u32 [%d1], %r3;
    ret;
"""
ARRIVE = "mbarrier.arrive.shared.b64 %d5, [%r2];"


def test_arrows_begin_at_the_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = module(HANDSHAKE.replace("ARRIVE", ARRIVE), parameters=1)
    options = Options(trace=path, roles=("arrives", "waits"))
    launch(text, aligned(np.zeros(4, np.int32)), block=(64, 1, 1), options=options)
    events = read(path)
    check_well_formed(events)
    names = thread_names(events)
    arrows = [
        (names[s["pid"], s["tid"]], s["ts"] - 0.5, names[f["pid"], f["tid"]], f["ts"] - 0.5) for s, f in flows(events)
    ]
    arrivals = [e for e in slices(events, "instruction") if e["name"] == "arrive mbarrier 0x400"]
    (wait,) = [e for e in slices(events, "wait") if e["name"] == "wait mbarrier 0x400"]
    assert len(arrivals) == 1
    assert ("warp 0 arrives", arrivals[0]["ts"], "warp 1 waits", wait["ts"] + wait["dur"]) in arrows
    # The last warp at bar.sync releases the first.
    (named,) = [e for e in slices(events, "wait") if e["name"] == "wait bar"]
    assert [a for a in arrows if a[2:] == ("warp 0 arrives", named["ts"] + named["dur"])][0][0] == "warp 1 waits"
    # After bar.sync the arriving warp executes 3 instructions, then 100 times 3, the arrival and ret.
    last = max((e for e in slices(events, "work") if e["tid"] == arrivals[0]["tid"]), key=lambda e: e["ts"])
    assert arrivals[0]["ts"] - last["ts"] == 1 + 3 + 300 and last["ts"] + last["dur"] - arrivals[0]["ts"] == 2


BULK = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d1, [p0];
    shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d2, %r3; add.s64 %d2, %d1, %d2;
    cp.async.ca.shared.global [%r4], [%d2], 4;
    cp.async.ca.shared.global [%r4+128], [%d2], 4;
    cp.async.wait_all;
    fence.proxy.async;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1+256], [%r2], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE: ret;
"""


def test_copies_release_their_groups(tmp_path: Path) -> None:
    """cp.async and bulk stores have no mbarrier: the last copy that a wait needs is where its arrow begins."""
    path = tmp_path / "trace.json"
    memory = aligned(np.arange(128, dtype=np.int32))
    launch(module(BULK, parameters=1), memory, options=Options(trace=path, completion="lazy"))
    assert memory[64:].tolist() == 2 * list(range(32))
    events = read(path)
    check_well_formed(events)
    copies = slices(events, "cp.async") + slices(events, "bulk")
    names = {(e["pid"], e["tid"], e["ts"] + e["dur"]): e["name"] for e in copies}
    arrows = [names.get((s["pid"], s["tid"], s["ts"] + 0.5)) for s, _ in flows(events) if s["name"] == "release"]
    assert arrows == ["copy 4 B per lane", "store 256 B: write"]
    waits = sorted(slices(events, "wait"), key=lambda event: event["ts"])
    assert [event["name"] for event in waits] == ["wait cp.async", "wait bulk_group"]


def test_a_hang_leaves_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = module(HANDSHAKE.replace("ARRIVE", ""), parameters=1)
    with pytest.raises(Hang):
        launch(text, aligned(np.zeros(4, np.int32)), block=(64, 1, 1), options=Options(trace=path))
    events = read(path)
    check_well_formed(events)
    last = max(slices(events, "wait"), key=lambda event: event["ts"] + event["dur"])
    assert last["name"] == "wait mbarrier 0x400" and "32 of 32 arrivals pending" in last["args"]["reason"]


def test_no_folder_to_write_into(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trace = .*missing"):
        launch(module("ret;", parameters=0), options=Options(trace=tmp_path / "missing" / "trace.json"))


def test_clusters_are_processes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    launch(module("ret;", parameters=0), grid=(4, 1, 1), cluster=(2, 1, 1), options=Options(trace=path))
    events = read(path)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [f"cluster {c}, CTA {r}" for c in range(2) for r in range(2)]
    assert {event["ts"] for event in slices(events, "work")} == {0, 1}


def test_a_folder_for_a_trace_is_refused_before_the_launch(tmp_path: Path) -> None:
    out = aligned(np.zeros(32, np.uint32))
    body = "mov.u32 %r1, 7; ld.param.u64 %d1, [p0]; st.global.u32 [%d1], %r1; ret;"
    with pytest.raises(IsADirectoryError, match="is a folder"):
        launch(module(body, parameters=1), out, options=Options(trace=tmp_path))
    assert not out.any()
