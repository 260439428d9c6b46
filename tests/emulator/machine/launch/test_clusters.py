"""Clusters in several processes: memory, reports and errors are those of one process, whatever the clusters do."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from cute_kernels.config import (
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import EmulatorError, GlobalMemoryRace, Hang, IllegalAccess
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap, encode
from cute_kernels.operations.runtime import emulated
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.cluster_launches import COUNTS, CTAS, PLACE, SCHEDULES, compare, outcome, plain, told
from tests.emulator.gemm_inputs import make_gemm_case
from tests.emulator.image_inputs import make_images_case
from tests.emulator.kernel_inputs import make_case
from tests.nightly import examples, nightly


def rotated(names: Iterable[str]) -> list[ParameterSet]:
    """Each with the number of a schedule: by day with one, in turn."""
    return [
        pytest.param(name, number, marks=() if number == turn % len(SCHEDULES) else nightly)
        for turn, name in enumerate(names)
        for number in range(len(SCHEDULES))
    ]


# --- our kernels ----------------------------------------------------------------------------------------------------


KERNELS: dict[str, Callable[[], Any]] = {
    "sm100": lambda: make_case(
        batch=9, positions=100, n=128, k=128, config=Sm100PatchEmbedConfig(tile_n=128), sm_count=8, seed=1
    ),
    "sm90": lambda: make_case(batch=9, positions=60, n=136, k=144, config=Sm90PatchEmbedConfig(), sm_count=6, seed=2),
    "sm100 images": lambda: make_images_case(
        batch=9, config=Sm100ImagesConfig(), arch="sm_100a", sm_count=8, seed=3
    ),
    "sm90 images": lambda: make_images_case(
        batch=9, config=Sm90ImagesConfig(), arch="sm_90a", sm_count=6, seed=4
    ),
    "sm100 gemm": lambda: make_gemm_case(m=600, n=200, k=136, config=Sm100GemmConfig(), sm_count=8, seed=5),
    "sm90 gemm": lambda: make_gemm_case(m=600, n=200, k=136, config=Sm90GemmConfig(), sm_count=6, seed=6),
}


@pytest.mark.parametrize(("kernel", "number"), rotated(KERNELS))
def test_our_kernels_are_the_same_in_several_processes(kernel: str, number: int):
    case = KERNELS[kernel]()
    poison = case.tensors.out.clone()
    bytes_of = case.tensors.out.view(torch.uint8)
    found = []
    for processes in (1, 2 + number):
        case.tensors.out.copy_(poison)
        options = dataclasses.replace(SCHEDULES[number], processes=processes, counters=number == 0)
        report = emulated.launch(case.plan, case.tensors, options)
        assert (report.processes, report.one_process) == (min(processes, report.clusters), "")
        found.append((plain(report), bytes_of.numpy().tobytes()))
    assert report.clusters > 2
    assert found[0] == found[1]
    assert (bytes_of != poison.view(torch.uint8)).any()


# --- independent programs -------------------------------------------------------------------------------------------


def test_clusters_that_write_single_bytes_of_the_same_sixteen():
    body = f"""mul.lo.u32 %r4, %r1, {CTAS}; add.u32 %r4, %r4, %r2; cvt.u64.u32 %d2, %r4; add.s64 %d1, %d0, %d2;
        add.u32 %r5, %r2, 65; st.global.b8 [%d1], %r5; ret;"""
    values = np.full(CTAS * 32, 0x77777777, np.uint32)
    report = compare(body, values=values)
    assert report.processes == COUNTS[-1]


def test_all_clusters_read_what_none_writes():
    body = "ld.global.b32 %r4, [%d0]; add.u32 %r4, %r4, %r3; @!%p1 st.global.b32 [%d1], %r4; ret;"
    assert compare(body).processes == COUNTS[-1]


def test_a_write_of_the_value_that_is_there_is_a_write():
    out = np.arange(CTAS * 32, dtype=np.uint32)
    assert compare("st.global.b32 [%d1], %r3; ret;", values=out).processes == COUNTS[-1]


def test_processes_are_no_more_than_clusters():
    values = np.zeros(64, np.uint32)
    _, report = outcome("st.global.b32 [%d1], %r3; ret;", Options(processes=7), values, grid=2)
    assert report.processes == 2


def test_chosen_clusters_in_their_order_and_progress_counts_them():
    calls: list[tuple[int, int]] = []
    options = Options(clusters=(5, 0, 3), processes=2, progress=lambda done, total: calls.append((done, total)))
    values = np.full(CTAS * 32, 7, np.uint32)
    content, report = outcome("st.global.b32 [%d1], %r2; ret;", options, values)
    assert np.frombuffer(content, np.uint32)[::32].tolist() == [0, 7, 7, 3, 7, 5]
    assert report.clusters == 3 and report.processes == 2
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_counts_are_added_in_the_order_of_the_clusters():
    # Cluster 0 takes longest, and each cluster does something that those before it do not.
    body = """setp.eq.u32 %p4, %r2, 0; mov.u32 %r9, 0; @!%p4 bra DONE;
        LOOP: add.u32 %r9, %r9, 1; setp.lt.u32 %p5, %r9, 60000; @%p5 bra LOOP; ld.global.b16 %h1, [%d1]; DONE:
        @%p2 bra THREE; @%p3 bra FOUR; st.global.b32 [%d1], %r9; ret;
        THREE: st.global.b8 [%d1], %r9; ret; FOUR: shl.b32 %r4, %r1, 2; mov.b32 %r5, dynamic; add.u32 %r5, %r5, %r4;
        st.shared.b32 [%r5], %r4; ret;"""
    assert compare(body, Options(counters=True)).processes == COUNTS[-1]


def test_the_same_again_and_again():
    # Processes take turns in any order; what they leave does not show it.
    body = """mov.u32 %r9, 0; mul.lo.u32 %r8, %r2, 700; LOOP: add.u32 %r9, %r9, 1; setp.lt.u32 %p5, %r9, %r8;
        @%p5 bra LOOP; ld.global.b32 %r4, [%d1]; mad.lo.u32 %r4, %r4, %r9, %r1; st.global.b32 [%d1], %r4; ret;"""
    values = np.arange(CTAS * 32, dtype=np.uint32)
    content, report = outcome(body, Options(), values)
    out = aligned(values)
    for turn in range(examples(2, 50)):
        options = Options(processes=5 - turn % 4)
        again, found = outcome(body, options, values, out=out)
        assert again == content and plain(found) == plain(report) and found.processes == options.processes


# --- faults ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "clusters 3 and 4 write one item": (
        "@%p3 add.s64 %d1, %d1, -128; st.global.b32 [%d1], %r3; ret;", GlobalMemoryRace,
    ),
    "cluster 4 reads what cluster 3 has written": (
        "@!%p3 st.global.b32 [%d1], %r3; @%p3 ld.global.b32 %r4, [%d1+-128]; ret;", GlobalMemoryRace,
    ),
    "cluster 4 writes what cluster 3 has read": (
        """@%p2 ld.global.b32 %r4, [%d1]; @%p3 st.global.b32 [%d1+-128], %r3; ret;""", GlobalMemoryRace,
    ),
    "all clusters write one item": ("st.global.b32 [%d0], %r3; ret;", GlobalMemoryRace),
    "cluster 3 stores out of bounds": ("@%p2 add.s64 %d1, %d1, 4096; st.global.b32 [%d1], %r2; ret;", IllegalAccess),
    "clusters 3 and 4 store out of bounds": (
        "@%p2 add.s64 %d1, %d1, 8192; @%p3 add.s64 %d1, %d1, 4096; st.global.b32 [%d1], %r2; ret;", IllegalAccess,
    ),
    "cluster 3 hangs": ("st.global.b32 [%d1], %r2; @%p2 bra HERE; ret; HERE: bra HERE;", Hang),
    "cluster 4 waits for ever, and cluster 3 is out of bounds": (
        """@%p2 st.global.b32 [%d1+4096], %r1; @!%p3 bra LAST; @%p1 mbarrier.init.shared.b64 [dynamic], 1;
        bar.warp.sync -1; HERE: mbarrier.try_wait.parity.shared.b64 %p5, [dynamic], 0; @!%p5 bra HERE; LAST: ret;""",
        IllegalAccess,
    ),
    "cluster 3 traps": ("st.global.b32 [%d1], %r2; @%p2 trap; ret;", EmulatorError),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "number"), rotated(FAULTS))
def test_reports_are_those_of_one_process(fault: str, number: int):
    body, kind = FAULTS[fault]
    found = outcome(body, SCHEDULES[number], np.arange(CTAS * 32, dtype=np.uint32))[1]
    assert isinstance(found, tuple) and issubclass(found[0], kind)
    assert compare(body, SCHEDULES[number]) is None


def test_reports_after_which_execution_goes_on_come_in_the_order_of_the_clusters():
    body = "@%p2 st.global.b32 [%d0], %r3; @%p3 st.global.b32 [%d0], %r3; st.global.b32 [%d1], %r3; ret;"
    found = []
    for processes in (1, 2):
        reports: list[EmulatorError] = []

        def go_on(error: EmulatorError, reports: list[EmulatorError] = reports) -> bool:
            reports.append(error)
            return True

        values = np.zeros(CTAS * 32, np.uint32)
        content, report = outcome(body, Options(processes=processes, going_on=go_on), values)
        found.append((content, plain(report), [told(each)[0] for each in reports]))
    assert found[0] == found[1] and len(found[0][2]) >= 2
    assert report.one_process == "something is reported of a cluster"


def behind(bodies: tuple[str, str], processes: int) -> tuple[str, list[tuple[object, str]]]:
    """Why the second of two launches that may overlap was in one process, and its reports."""
    out = aligned(np.zeros(CTAS * 32, np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    found: list[tuple[object, str]] = []

    def go_on(error: EmulatorError) -> bool:
        found.append((told(error)[0], str(error).replace(hex(out.ctypes.data), "out")))
        return True

    for number, body in enumerate(bodies):
        report = run(
            module(f"{PLACE} {body}", parameters=1), grid=CTAS, block=32, memory=memory, programmatic=number > 0,
            options=Options(processes=processes, going_on=go_on), params=out.ctypes.data.to_bytes(8, "little"),
        )  # fmt: skip
        assert number or not found
    return report.one_process, found


FIRST = ("st.global.b32", "st.global.b8", "st.release.gpu.global.b32", "ld.global.b32")
SECOND = ("st.global.b32", "st.global.b8", "st.relaxed.gpu.global.b32", "ld.global.b32")


def both_allowed(first: str, second: str) -> bool:
    strong = all("relaxed" in opcode or "release" in opcode for opcode in (first, second))
    return strong or all(opcode.startswith("ld") for opcode in (first, second))


def accesses(opcodes: Iterable[str]) -> str:
    """Thread t of a warp does the t-th of these to its item."""
    lines = []
    for lane, opcode in enumerate(opcodes):
        operands = "%r9, [%d1]" if opcode.startswith("ld") else "[%d1], %r3"
        lines.append(f"setp.eq.u32 %p5, %r1, {lane}; @%p5 {opcode} {operands};")
    return " ".join(lines)


@pytest.mark.parametrize("wait", ["", "griddepcontrol.wait;"])
def test_what_processes_did_is_known_to_a_launch_that_may_overlap(wait: str):
    pairs = list(itertools.product(FIRST, SECOND))
    first, second = zip(*pairs, strict=True)
    bodies = f"{accesses(first)} ret;", f"{wait} {accesses(second)} ret;"
    (_, one), (why, several) = (behind(bodies, processes) for processes in (1, 2))
    assert one == several
    assert why == ("" if wait else "something is reported of a cluster")
    places = [int(re.search(r"byte (\d+) of out", message)[1]) // 4 for _, message in one]
    racing = [] if wait else [lane for lane, pair in enumerate(pairs) if not both_allowed(*pair)]
    assert sorted(places) == [32 * cta + lane for cta in range(CTAS) for lane in racing]


def test_what_processes_record_of_a_large_array_stays_their_own():
    # Its shadow memory is mapped, and is there from the first launch on when the second one's processes are forked.
    out = aligned(np.zeros((CTAS, 1 << 15), np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    body = """griddepcontrol.wait; mov.u32 %r4, 0; mul.wide.u32 %d2, %r2, 131072; mul.wide.u32 %d3, %r1, 16;
        add.s64 %d2, %d2, %d3; add.s64 %d1, %d0, %d2; NEXT: ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%d1];
        add.u32 %r5, %r5, 1; st.global.v4.b32 [%d1], {%r5, %r6, %r7, %r8}; add.s64 %d1, %d1, 512;
        add.u32 %r4, %r4, 1; setp.lt.u32 %p5, %r4, 256; @%p5 bra NEXT; ret;"""
    for number in range(2):
        report = run(
            module(f"{PLACE} {body}", parameters=1), grid=CTAS, block=32, memory=memory, options=Options(processes=2),
            params=out.ctypes.data.to_bytes(8, "little"), programmatic=number > 0,
        )  # fmt: skip
        assert (report.processes, report.one_process) == (2, "")
    assert (out[:, ::4] == 2).all() and (out.reshape(-1, 4)[:, 1:] == 0).all()


# --- clusters that depend on each other -----------------------------------------------------------------------------

DEPENDENT = {
    "red.global": ("red.global.add.u32 [%d0], 1; ret;", "combines with global memory"),
    "generic atom": ("atom.add.u32 %r4, [%d0], 1; ret;", "combines with global memory"),
    "bulk reduction": (
        """shl.b32 %r4, %r1, 2; mov.b32 %r5, dynamic; add.u32 %r5, %r5, %r4; st.shared.b32 [%r5], %r1;
        fence.proxy.async.shared::cta; bar.warp.sync -1; @!%p1 bra LAST;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [dynamic], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; LAST: ret;""",
        "combines with global memory",
    ),
    "a signal": (
        """@%p2 st.release.gpu.global.b32 [%d0], 1234; @!%p3 bra LAST;
        SPIN: ld.acquire.gpu.global.b32 %r4, [%d0]; setp.ne.u32 %p5, %r4, 1234; @%p5 bra SPIN;
        st.global.b32 [%d1], %r4; LAST: ret;""",
        "may read what another cluster signals",
    ),
    "volatile": ("ld.volatile.global.b32 %r4, [%d1]; st.global.b32 [%d1], %r4; ret;", "another cluster signals"),
    "cluster launch control": (
        """@%p1 mbarrier.init.shared.b64 [dynamic], 1; bar.warp.sync -1; st.global.b32 [%d1], %r2;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 16; elect.sync _|%p5, -1;
        @%p5 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [dynamic+16], [dynamic]; SPIN: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic], 0; @!%p4 bra SPIN; ret;""",
        "asks for the clusters that are left",
    ),
    "tensor maps": (
        "fence.proxy.tensormap::generic.acquire.gpu [%d0], 128; st.global.b32 [%d1], %r3; ret;", "makes tensor maps",
    ),
    "strong stores to one place": (
        "st.relaxed.gpu.global.b32 [%d0+64], %r2; ret;",
        "one cluster writes byte 64 of out, and another one reads or writes it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DEPENDENT)
def test_dependent_clusters_run_in_one_process_which_says_so(what: str):
    body, why = DEPENDENT[what]
    for options in SCHEDULES:
        report = compare(body, options)
        assert report.processes == 1 and why in report.one_process


def test_printing_is_in_the_order_of_clusters(capfd: pytest.CaptureFixture):
    head = """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .global .align 1 .b8 text[4] = {37, 100, 10, 0};"""
    registers = ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<2>; .local .align 8 .b8 depot[8]; .reg .b64 %SP;"
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra LAST;
    mov.u64 %d1, depot; cvta.local.u64 %d1, %d1; st.b32 [%d1], %r1; mov.u64 %d2, text; cvta.global.u64 %d2, %d2;
    { .param .b64 p0; .param .b64 p1; .param .b32 back; st.param.b64 [p0], %d2; st.param.b64 [p1], %d1;
    call.uni (back), vprintf, (p0, p1); ld.param.b32 %r3, [back]; } LAST: ret;"""
    text = module(body, parameters=0, head=head, registers=registers)
    report = run(text, grid=5, block=32, options=Options(processes=3))
    assert capfd.readouterr().out == "0\n1\n2\n3\n4\n"
    assert "prints or stops" in report.one_process


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(processes=2, detectors=False), "the race detector is off"),
        (Options(processes=2, without=("races",)), "the race detector is off"),
        (Options(processes=2, clusters=(1,)), "it has one cluster"),
    ],
)
def test_options_that_ask_for_one_process(options: Options, why: str):
    _, report = outcome("st.global.b32 [%d1], %r3; ret;", options, np.zeros(CTAS * 32, np.uint32))
    assert report.processes == 1 and why in report.one_process


def test_a_timeline_is_written_by_one_process(tmp_path):
    options = Options(processes=2, trace=tmp_path / "trace.json")
    _, report = outcome("st.global.b32 [%d1], %r3; ret;", options, np.zeros(CTAS * 32, np.uint32))
    assert report.one_process == "a timeline is written" and (tmp_path / "trace.json").exists()


def test_one_process_has_nothing_to_say():
    _, report = outcome("red.global.add.u32 [%d0], 1; ret;", Options(), np.zeros(CTAS * 32, np.uint32))
    assert (report.processes, report.one_process) == (1, "")


def test_arrays_that_share_memory():
    store = aligned(np.zeros(CTAS * 32 + 16, np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(store[: CTAS * 32], "left", writable=False)
    memory.register_tensor(store[16:], "right")
    text = module(f"{PLACE} st.global.b32 [%d1], %r3; ret;", parameters=1)
    options = Options(processes=2)
    parameters = store[16:].ctypes.data.to_bytes(8, "little")
    report = run(text, grid=CTAS, block=32, params=parameters, memory=memory, options=options)
    assert report.one_process == "left and right share memory"
    assert store[16:].tolist() == list(range(CTAS * 32))


def test_memory_that_processes_share():
    # The processes' writes would be seen before it is known that they are apart.
    out = torch.zeros(CTAS * 32, dtype=torch.int32).share_memory_()
    text = module(f"{PLACE} st.global.b32 [%d1], %r3; ret;", parameters=1)
    report = run(text, grid=CTAS, block=32, args=[out], options=Options(processes=2))
    assert "is in memory that processes share" in report.one_process
    assert out.tolist() == list(range(CTAS * 32))


@pytest.mark.parametrize("writer", [0, 3])
def test_a_cluster_that_overwrites_a_tensor_map_of_others(writer: int):
    """By a plain store, and no fence says that it is a map."""
    out = aligned(np.arange(CTAS * 32 + 96, dtype=np.uint32))
    made = encode(TensorMap(out.ctypes.data + 128 * CTAS, "u32", (32, 2), (128,), (32, 1), (1, 1)))
    out[-32:] = np.frombuffer(made, np.uint32)
    body = f"""add.s64 %d3, %d0, {CTAS * 128 + 256}; mov.u32 %r4, dynamic; mov.u32 %r5, 0; @!%p1 bra END;
        mbarrier.init.shared.b64 [%r4], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 128;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r4+512], [%d3, {{%r5, %r5}}], [%r4];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p4, [%r4], 0; @!%p4 bra WAIT;
        ld.shared.b32 %r6, [%r4+512]; st.global.b32 [%d1], %r6;
        setp.eq.u32 %p5, %r2, {writer}; @!%p5 bra END; add.s64 %d4, %d0, {CTAS * 128 + 128}; st.global.b64 [%d3], %d4;
    END:
        ret;"""
    values, found = out.copy(), []
    for processes in (1, 2):
        content, report = outcome(body, Options(processes=processes), values, out=out)
        found.append((content, plain(report)))
    assert found[0] == found[1]
    assert report.one_process == "one cluster writes a tensor map that another one uses"
    assert len(set(np.frombuffer(content, np.uint32)[: 32 * CTAS : 32].tolist())) == 1 + (writer < CTAS - 1)
