"""Each place that stands against a certificate is tried: its two events in the other order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels.commands import cli
from cute_kernels.emulator import Options
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.checking.search import Budget, Finding, PastPhases, Search
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs.recorded import Recorder, Replay
from cute_kernels.emulator.steps import Step
from cute_kernels.testing import assert_certified, emulation
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.races import test_allocations as allocations
from tests.emulator.races.interleavings import BYTES, Machine, drawn, ptx_of
from tests.emulator.races.test_phases import FAULTS, LATER, MARK
from tests.emulator.reports import report_files
from tests.nightly import daily_or_all

#: One lane of each warp; %r4: which CTA.
ONE_LANE = "and.b32 %r3, %r1, 31; setp.ne.u32 %p8, %r3, 0; @%p8 bra END; mov.u32 %r4, %ctaid.x;"
ONE = f"{THREAD_OUTPUT} {ONE_LANE}"
SPLIT = "setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER;"
CLUSTERS = "setp.ne.u32 %p2, %r4, 0; @%p2 bra OTHER;"
SHORT = """st.relaxed.gpu.global.u32 [%d0], 1; bra.uni BACK; BACK: st.relaxed.gpu.global.u32 [%d0], 0; bra END;"""
LOOK = f"{LATER} ld.relaxed.gpu.global.u32 %r8, [%d0]; setp.eq.u32 %p4, %r8, 0; @%p4 bra END; trap;"
#: Bodies, grid, threads. The fault shows if one warp comes in a short time of the other's, or of another cluster's.
FAULTY = {
    "a warp sees what another takes back": (f"{ONE} {SPLIT} {SHORT} OTHER: {LOOK} END: ret;", 1, 64),
    "behind a computation that takes long": (
        f"{ONE} {SPLIT} {SHORT} OTHER: {LOOK} END: ret;".replace("30000", "400000"), 1, 64),
    "a cluster sees what another takes back": (f"{ONE} {CLUSTERS} {SHORT} OTHER: {LOOK} END: ret;", 2, 32),
    "in shared memory": (
        f"""{THREAD_OUTPUT} setp.ne.u32 %p9, %r1, 0; @!%p9 st.shared.u32 [dynamic], 0; bar.sync 0; {ONE_LANE} {SPLIT}
        {SHORT} OTHER: {LOOK} END: ret;""".replace("gpu.global", "cta.shared::cta").replace("[%d0]", "[dynamic]"),
        1, 64),
}  # fmt: skip
SOUND = {
    "a count that is read behind a barrier": (
        f"""{ONE} red.relaxed.gpu.global.inc.u32 [%d0], 99; END: bar.sync 0; setp.ne.u32 %p3, %r1, 0; @%p3 bra DONE;
        ld.global.u32 %r8, [%d0]; st.global.u32 [%d0+128], %r8; DONE: ret;""", 1, 96),
    "the last of all clusters": (
        f"""{ONE} atom.relaxed.gpu.global.add.u32 %r8, [%d0], 1; setp.ne.u32 %p3, %r8, 2; @%p3 bra END;
        st.global.u32 [%d0+128], 7; END: ret;""", 3, 32),
}  # fmt: skip


def recorded(
    body: str, grid: int, threads: int, options: Options | None = None, words: np.ndarray | None = None,
    smem: int = 4096,
) -> tuple[Recorder, np.ndarray]:
    """The launch with its certificate, and the memory that it refers to."""
    words, recorder = aligned(np.zeros(512, np.uint32)) if words is None else words, Recorder()
    text = module(body, parameters=1)
    shape = (grid, 1, 1), (threads, 1, 1), (1, 1, 1), smem
    parameters = (words.ctypes.data.to_bytes(8, "little"),)
    recorder.take(
        CapturedLaunch("k", *shape, parameters, text, False), [(words.ctypes.data, words.nbytes)], overlaps=False
    )
    recorder.ended(launch(text, words, grid=shape[0], block=shape[1], dynamic_smem=smem, options=options or Options()))
    return recorder, words


def found(name: str) -> tuple[Search, Finding | None, np.ndarray]:
    recorder, words = recorded(*(FAULTY | SOUND)[name])
    search = Search(recorder.launches, Budget(None, 0))
    return search, search.run(), words


@pytest.mark.parametrize("name", FAULTY)
def test_a_place_is_shown_that_other_schedules_do_not_show(name: str) -> None:
    """The steps show it again, those that the search took and those that are left of them."""
    search, finding, _ = found(name)
    assert finding is not None and finding.error.kind == "trap" and search.tally.systematic == 0
    assert [step.kind for step in finding.schedule.steps] == ["h"] and " before " in finding.order
    for schedule in (finding.schedule, finding.fewest.schedule):
        again = Replay(finding.recorded)
        with pytest.raises(type(finding.error), match="trap"):
            again.run(schedule.options())
    assert {step.kind for step in finding.fewest.schedule.steps} == {"w"}
    shown = [each.shown for place in search.launches[0].certificate.places for each in place.meetings]
    assert "trap" in shown
    certificate = dataclasses.replace(finding.recorded.certificate, places=())
    without = [dataclasses.replace(finding.recorded, certificate=certificate)]
    assert Search(without, Budget(None, 20), always=True).run() is None


def test_allocations_of_tensor_memory_are_tried_in_the_other_order() -> None:
    """Each warp stores the columns that it gets."""
    first, second = allocations.HOSTILE["two allocations in any order"]
    body = f"{THREAD_OUTPUT} setp.ge.u32 %p2, %r1, 32; @%p2 bra SECOND; {first} bra END; SECOND: {second} END: ret;"
    recorder, _ = recorded(body, 1, 64, smem=allocations.ALONE)
    finding = Search(recorder.launches, Budget(None, 0)).run()
    assert finding is not None and finding.text.startswith("the result depends on the schedule")
    assert finding.order == "CTA 0 warp 1 before CTA 0 warp 0 tcgen05.alloc"


@pytest.mark.parametrize("name", SOUND)
def test_a_place_that_does_not_matter_is_not_shown(name: str) -> None:
    search, finding, words = found(name)
    assert finding is None and search.tally.places > 1
    shown = [each.shown for place in search.launches[0].certificate.places for each in place.meetings]
    assert len(shown) == search.tally.places and set(shown) == {""}
    assert search.tally.systematic == (9 if SOUND[name][1] > 1 else 3), "no warp is starved"
    lines = search.launches[0].certificate.lines()
    assert sum(line.startswith("  tried: ") and line.endswith(": not shown") for line in lines) == len(shown)


def order_of(*steps: str, grid: int = 1, threads: int = 96) -> list[int]:
    """Tickets that warps have drawn, in order of warps, under steps."""
    body = f"""{ONE} atom.relaxed.gpu.global.add.u32 %r8, [%d0+1024], 1; shr.u32 %r9, %r1, 5;
        mad.lo.u32 %r9, %r4, {threads // 32}, %r9; mul.wide.u32 %d4, %r9, 4; add.u64 %d4, %d4, %d0;
        st.global.u32 [%d4], %r8; END: ret;"""
    words = aligned(np.zeros(512, np.uint32))
    options = Options(steps=tuple(map(Step.of, steps)))
    launch(module(body, parameters=1), words, grid=(grid, 1, 1), block=(threads, 1, 1), options=options)
    return words[: grid * threads // 32].tolist()


def test_a_warp_goes_on_right_behind_the_other_event() -> None:
    (place,) = recorded(f"{ONE} atom.relaxed.gpu.global.inc.u32 %r8, [%d0], 9; END: ret;", 1, 96)[
        0].launches[0].certificate.places  # fmt: skip
    count = place.meetings[0].first[2] + 5  # of the kernel here
    hold = f"0h0:{count}-0w"
    assert order_of() == [0, 1, 2]
    assert order_of(f"{hold}1:{count}") == [1, 0, 2]
    assert order_of(f"{hold}2:{count}") == [2, 0, 1]
    assert order_of(f"0h0:{count}-0w2:{count}", f"0h1:{count}-0w0:{count}") == [1, 2, 0]
    assert order_of(f"0h0:{count}-0w1:{count}", f"0h1:{count}-0w0:{count}") == [1, 2, 0], "in the end one goes on"
    assert order_of(f"0h0:{count}-0w1:999") == [1, 0, 2], "the other ends before"
    assert order_of(f"0h0:{count}-2w0:{count}", grid=3, threads=32) == [2, 0, 1]
    assert order_of(f"0h0:{count}-1w0:{count}", grid=3, threads=32) == [1, 0, 2]


def test_events_that_are_in_order_are_no_place_to_try() -> None:
    add = "atom.relaxed.gpu.global.inc.u32 %r8, [%d0], 9;"
    body = f"{THREAD_OUTPUT} {SPLIT} {{}} bar.sync 1, 64; bra END; OTHER: {{}} END: ret;"
    for second, meetings in ((f"bar.sync 1, 64; {add}", 0), (f"{add} bar.sync 1, 64;", 1)):
        recorder, _ = recorded(body.format(add, second), 1, 64)
        places = recorder.launches[0].certificate.places
        assert sum(bool(place.meetings) for place in places) == meetings


@pytest.mark.parametrize("name, kind", [
    ("flashinfer#3700", "hang"), ("bytes of a copy", "phase-ambiguous"), ("inval", "uninitialised-barrier"),
    ("arrival at an mbarrier", ""), ("cutlass#3654", None),
])  # fmt: skip
def test_what_a_phase_that_order_does_not_keep_apart_leads_to(
    name: str, kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report names the place, and says whether the other order shows a fault, which is reported as well. Of an
    mbarrier that nobody waits for none does; lanes of one warp step together."""
    body = MARK.sub(lambda match: match[2] or "", FAULTS[name][2])
    monkeypatch.chdir(tmp_path)
    Path("k.ptx").write_text(module(body, parameters=1))
    shape = {"grid": 1, "block": 64, "dynamic_smem": 4096, "arguments": ["x"]}
    Path("k.json").write_text(json.dumps({"arrays": {"x": {"dtype": "uint32", "shape": [64]}}, "launches": [shape]}))
    words = ["--report", "r.json", "--sarif", "r.sarif", "k.ptx", "k.json"]
    assert cli.main(["check", "--quiet", "--arch", "sm_100a", *words]) == 3
    printed, report = capsys.readouterr().err, report_files.validated(Path("r.json"))
    assert [each["kind"] for each in report["diagnostics"]] == [FAULTS[name][0], *([kind] if kind else [])]
    (facts,) = report["launches"]
    tried = [each for place in facts["certificate"]["places"] for each in place.get("tried", ())]
    assert {(each["shown"], each["found"]) for each in tried} == ({(bool(kind), kind)} if kind is not None else set())
    (run,) = json.loads(Path("r.sarif").read_text())["runs"]
    assert run["properties"]["certificates"] == {"1": facts["certificate"]}
    assert ("  note: tried: " in printed) == bool(tried)
    untried = {"lanes of a warp step together in the emulator": 2} if name == "cutlass#3654" else {}
    assert report["summary"]["untried"] == untried and facts["certificate"].get("untried", {}) == untried
    reasons = Counter(each.get("untried", "") for each in facts["certificate"]["places"])
    assert {why: count for why, count in reasons.items() if why} == untried
    assert ("  note: not tried: lanes of a warp step together in the emulator" in printed) == bool(untried)
    if kind:
        assert f"shown by {tried[0]['schedule']}: {kind}\n" in printed
        assert f"  note: in this order: {tried[0]['events']}\n" in printed
        (replay,) = re.findall(r"^  replay: cute-kernels (.* --steps .*)$", printed, re.MULTILINE)
        arguments = shlex.split(replay)
        assert cli.main([arguments[0], "--quiet", *arguments[1:]]) == 3
        assert capsys.readouterr().err.startswith(f"error[{kind}]: ")


def test_a_fault_beside_a_phase_is_reported_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a later launch, to which the program comes although the first has a place."""
    body = MARK.sub(lambda match: match[2] or "", FAULTS["flashinfer#3700"][2])
    for name, text in (("k", body), ("late", f"{THREAD_OUTPUT} trap; ret;")):
        (tmp_path / f"{name}.ptx").write_text(module(text, parameters=1).replace(".entry k", f".entry {name}"))
    program = tmp_path / "program.ptx"
    first, second = ((tmp_path / f"{name}.ptx").read_text() for name in ("k", "late"))
    program.write_text(first + second[second.index(".visible") :].replace("dynamic", "more"))
    shape = {"grid": 1, "block": 64, "arguments": ["x"]}
    launches = [{"kernel": "k", "dynamic_smem": 4096, **shape}, {"kernel": "late", **shape}]
    (tmp_path / "program.json").write_text(
        json.dumps({"arrays": {"x": {"dtype": "uint32", "shape": [64]}}, "launches": launches})
    )
    assert cli.main(["check", "--quiet", "--arch", "sm_100a", str(program), str(program.with_suffix(".json"))]) == 3
    kinds = re.findall(r"^error\[(.*?)\]", capsys.readouterr().err, re.MULTILINE)
    assert kinds == ["trap", "arrival-early"]


def test_a_place_without_another_result_is_no_finding() -> None:
    """Where results may differ, that one does is said of the place all the same."""
    body = f"{ONE} atom.relaxed.gpu.global.add.u32 %r8, [%d0+1024], 1; st.global.u32 [%d1], %r8; END: ret;"
    recorder, _ = recorded(body, 1, 64)
    search = Search(recorder.launches, Budget(None, 0), results_may_differ=True)
    assert search.run() is None
    (place,) = search.launches[0].certificate.places
    assert place.tried[0].shown.startswith("the result depends on the schedule")
    assert " ".join(Schedule(steps=place.tried[0].steps).arguments()) == place.tried[0].schedule


TWICE = f"""{ONE} setp.gt.u32 %p5, %r1, 63; @%p5 bra LAST; {SPLIT} {SHORT}
    OTHER: {SHORT.replace("[%d0]", "[%d0+64]").replace("BACK", "AGAIN")}
    LAST: {LATER} ld.relaxed.gpu.global.u32 %r8, [%d0]; ld.relaxed.gpu.global.u32 %r9, [%d0+64];
    and.b32 %r8, %r8, %r9; setp.eq.u32 %p4, %r8, 0; @%p4 bra END; trap; END: ret;"""


def test_a_fault_that_two_places_have_together() -> None:
    """One warp sees what two others take back."""
    recorder, _ = recorded(TWICE, 1, 96)
    search = Search(recorder.launches, Budget(None, 0))
    finding = search.run()
    assert finding is not None and finding.error.kind == "trap" and len(finding.schedule.steps) == 2
    assert finding.order.count(" before ") == 2 and search.tally.places >= 2 and search.tally.orders >= 1
    for schedule in (finding.schedule, finding.fewest.schedule):
        with pytest.raises(type(finding.error), match="trap"):
            Replay(finding.recorded).run(schedule.options())
    recorder, _ = recorded(TWICE, 1, 96)
    assert Search(recorder.launches, Budget(None, 20, orders=0)).run() is None


@pytest.mark.parametrize("grid, threads", [(1, 96), (1, 128), (3, 32)])
def test_all_orders_of_tickets_are_tried(grid: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warp's ticket, by brute force: every order of so many warps."""
    body = f"""{ONE} atom.relaxed.gpu.global.add.u32 %r8, [%d0+1024], 1; shr.u32 %r9, %r1, 5;
        mad.lo.u32 %r9, %r4, {threads // 32}, %r9; mul.wide.u32 %d4, %r9, 4; add.u64 %d4, %d4, %d0;
        st.global.u32 [%d4], %r8; END: ret;"""
    recorder, _ = recorded(body, grid, threads)
    warps, seen, run = grid * threads // 32, [], Replay.run

    def noted(self: Replay, *arguments: object, **keywords: object) -> object:
        outcome = run(self, *arguments, **keywords)
        seen.append(tuple(outcome.memory[0].view(np.uint32)[:warps].tolist()))
        return outcome

    monkeypatch.setattr(Replay, "run", noted)
    search = Search(recorder.launches, Budget(None, 0, orders=1000), results_may_differ=True)
    assert search.run() is None
    orders = set(itertools.permutations(range(warps)))
    assert set(seen) == orders and search.tally.orders == search.tally.known
    assert search.tally.orders <= 8 * len(orders), "the same orders again and again"
    few = Search(recorder.launches, Budget(None, 0, orders=2), results_may_differ=True)
    assert few.run() is None and few.tally.orders == 2 < few.tally.known


def searched(seed: int) -> tuple[str, Search] | None:
    """What brute force says of a drawn program, and its places, tried; None: its run is certified, or at fault."""
    program = drawn(seed)
    machine = Machine(program)
    truth = machine.explore(20_000)
    words = aligned(np.zeros(1024 // 4 + BYTES // 4 * len(machine.codes), np.uint32))
    for number in range(len(machine.codes)):
        words[(1024 + BYTES * number) // 4] = number
    try:
        recorder, _ = recorded(ptx_of(program, machine), 1, 32 * machine.warps, Options(going_on=PastPhases()), words)
    except EmulatorError:
        return None
    if truth is None or recorder.launches[0].certificate.given:
        return None
    search = Search(recorder.launches, Budget(None, 0, orders=20), places_alone=True, reduction=0)
    shown = search.run() is not None
    return ("sound" if truth.sound else "faulty") + (", shown" if shown else ""), search


def test_what_is_shown_is_so_by_brute_force() -> None:
    """No place of a sound program is shown, and of most others one is."""
    found = [each for each in map(searched, daily_or_all([*range(100), 213, 377], range(4000))) if each is not None]
    counts = Counter(verdict for verdict, _ in found)
    assert not counts["sound, shown"] and counts["sound"] > 1, counts
    assert counts["faulty, shown"] >= 2 * max(1, counts["faulty"]), counts
    late = [search for verdict, search in found if search.launches[0].certificate.lines()[2].endswith("lazy: hang")]
    assert late, "asynchronous work came late"


def test_two_events_meet_once_whatever_they_share() -> None:
    """Counts at 32 addresses: of the pairs inside a cluster and between clusters some of both are tried."""
    body = f"""{THREAD_OUTPUT} and.b32 %r5, %r1, 31; mul.wide.u32 %d4, %r5, 4; add.u64 %d4, %d4, %d0;
        red.relaxed.gpu.global.inc.u32 [%d4], 99; ret;"""
    recorder, _ = recorded(body, 3, 96)
    (place,) = recorder.launches[0].certificate.places
    assert len({(each.first, each.second) for each in place.meetings}) == len(place.meetings) == 8
    search = Search(recorder.launches, Budget(None, 0, orders=5))
    assert search.run() is None and (search.tally.places, search.tally.orders) == (3, 5)
    tried = search.launches[0].certificate.places[0].tried
    assert {each.first[0] == each.second[0] for each in tried} == {True, False} and len(tried) == 3


UNTRIED = {
    "draw": (f"{ONE} mov.u32 %r8, %clock; st.global.u32 [%d0], %r8; END: ret;", "no two events of it are known"),
    "unknown": (f"{ONE} discard.global.L2 [%d0], 128; END: ret;", "what else an instruction could do is not known"),
    "answer": (
        f"{THREAD_OUTPUT} setp.ne.u32 %p9, %r1, 0; @%p9 bra END; mbarrier.init.shared.b64 [dynamic], 1; "
        "mbarrier.test_wait.parity.shared.b64 %p4, [dynamic], 1; selp.u32 %r8, 1, 2, %p4; st.global.u32 [%d0], %r8; "
        "END: ret;", "a look has the answer that the barrier has"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNTRIED)
def test_a_place_that_cannot_be_tried_says_why(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the lines of the certificate, which a test that asserts it shows as well, and with a count in the summary."""
    body, why = UNTRIED[kind]
    monkeypatch.chdir(tmp_path)
    Path("k.ptx").write_text(module(body, parameters=1))
    shape = {"grid": 1, "block": 32, "dynamic_smem": 4096, "arguments": ["x"]}
    Path("k.json").write_text(json.dumps({"arrays": {"x": {"dtype": "uint32", "shape": [64]}}, "launches": [shape]}))
    words = ["check", "--seeds", "0", "--arch", "sm_100a", "--report", "r.json", "k.ptx", "k.json"]
    assert cli.main(words) == 0
    printed, report = capsys.readouterr().out, report_files.validated(Path("r.json"))
    (place,) = report["launches"][0]["certificate"]["places"]
    assert place["kind"] == kind and place["untried"].startswith(why) and "tried" not in place
    assert report["summary"]["untried"] == {place["untried"]: 1}
    assert f"  not tried: {place['untried']}\n" in printed
    assert f"; 1 place not tried (1: {place['untried']}); clean\n" in printed
    with emulation("sm_100a") as session, pytest.raises(AssertionError, match=f"not tried: {why}"):
        session.launch_ptx(Path("k.ptx"), torch.zeros(64, device="cuda"), grid=1, block=32, dynamic_smem=4096)
        assert_certified(session)


def test_a_place_that_no_time_was_left_for_says_so() -> None:
    """One that was tried says nothing of it."""
    for seconds, untried in ((1e-9, {"no time was left": 1}), (None, {})):
        recorder, _ = recorded(*SOUND["the last of all clusters"])
        search = Search(recorder.launches, Budget(seconds, 0))
        search.run()
        assert search.launches[0].certificate.untried == untried
