"""Each detector can be left out alone: its fault is not reported then, and the others are."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.config import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, SharedMemoryRace
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.emulator.options import DETECTORS
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.matrix_cases import Wgmma
from tests.emulator.ptx_launch import launch
from tests.emulator.record_matrix_on_gpu import result_array

ALLOCATE = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+48], 32; bar.warp.sync -1;
    ld.shared.b32 %r20, [dynamic+48];"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"
#: By detector: a kernel with its fault alone, what is reported, what it writes where that is not looked for.
FAULTS = {
    "races": (
        f"""{THREAD_OUTPUT} shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; st.shared.b32 [%r5], %r1;
        xor.b32 %r6, %r3, 4; add.s32 %r6, %r6, %r4; ld.shared.b32 %r9, [%r6]; st.global.b32 [%d1], %r9; ret;""",
        SharedMemoryRace, "nothing orders the two", [n ^ 1 for n in range(32)],
    ),
    # A tile of 16 valid items, of which the others are read and thrown away.
    "uninitialised": (
        f"""{THREAD_OUTPUT} shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; setp.lt.u32 %p1, %r1, 16;
        @%p1 st.shared.b32 [%r5], %r1; ld.shared.b32 %r9, [%r5]; selp.b32 %r9, %r9, 99, %p1; st.global.b32 [%d1], %r9;
        ret;""",
        IllegalAccess, "read of uninitialised shared memory", [*range(16), *[99] * 16],
    ),
    "exits": (
        f"{THREAD_OUTPUT} {ALLOCATE} st.global.b32 [%d1], %r1; ret;", IllegalAccess,
        "exits with 32 TMEM columns allocated", list(range(32)),
    ),
    # Warp 0 names lanes 32 to 63: its own lanes are 0 to 31.
    "tensor_lanes": (
        f"""{THREAD_OUTPUT} {ALLOCATE} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {{%r1}};
        tcgen05.wait::st.sync.aligned; add.u32 %r21, %r20, 0x200000;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r21]; tcgen05.wait::ld.sync.aligned; add.u32 %r9, %r9, 5;
        {FREE} st.global.b32 [%d1], %r9; ret;""",
        IllegalAccess, "starts at lane 32; the warp may touch the lanes of its quarter 0", list(range(5, 37)),
    ),
}  # fmt: skip


def execute(body: str, options: Options) -> list[int]:
    out = np.zeros(32, np.uint32)
    launch(module(body, parameters=1), out, options=options)
    return out.tolist()


@pytest.mark.parametrize("name", FAULTS)
def test_one_is_left_out(name: str):
    body, error, message, expected = FAULTS[name]
    with pytest.raises(error, match=message):
        execute(body, Options())
    assert execute(body, Options(without=(name,))) == expected
    others = tuple(other for other in DETECTORS if other != name)
    with pytest.raises(error, match=message):
        execute(body, Options(without=others))
    assert execute(body, Options(detectors=False)) == expected


def test_registers_of_a_wgmma_in_flight():
    case = Wgmma(n=8)
    image, _ = case.image()
    text = case.ptx().replace("wgmma.wait_group.sync.aligned 0;", "add.f32 %d0, %d0, 0f00000000;")
    text = text.replace("ret;", "wgmma.wait_group.sync.aligned 0; ret;")

    def run(options: Options) -> None:
        launch(
            text, aligned(image), aligned(case.registers()), result_array(case), block=(128, 1, 1),
            dynamic_smem=len(image), options=options, hardware="a faulty program",
        )  # fmt: skip

    for options in (Options(), Options(without=("races", "uninitialised", "exits"))):
        with pytest.raises(IllegalAccess, match="is an accumulator of the wgmma"):
            run(options)
    run(Options(without=("registers",)))


def test_tensor_memory_that_nobody_wrote():
    body = f"""{THREAD_OUTPUT} {ALLOCATE} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r20];
        tcgen05.wait::ld.sync.aligned; and.b32 %r9, %r9, 0; add.u32 %r9, %r9, %r1; {FREE}
        st.global.b32 [%d1], %r9; ret;"""
    with pytest.raises(IllegalAccess, match="uninitialised TMEM"):
        execute(body, Options())
    assert execute(body, Options(without=("uninitialised",))) == list(range(32))


def test_the_memory_of_an_mbarrier_that_is_no_more():
    """mbarrier.inval leaves bytes that hold nothing; an mbarrier that lives is none of this detector's affairs."""
    body = f"""{THREAD_OUTPUT} setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mbarrier.init.shared.b64 [dynamic], 1; INVAL
        ld.shared.b32 %r9, [dynamic]; END: st.global.b32 [%d1], %r1; ret;"""
    gone = body.replace("INVAL", "mbarrier.inval.shared.b64 [dynamic];")
    with pytest.raises(IllegalAccess, match="uninitialised"):
        execute(gone, Options())
    options = Options(without=("uninitialised",))
    assert execute(gone, options) == list(range(32))
    with pytest.raises(IllegalAccess, match="touches the live mbarrier"):
        execute(body.replace("INVAL", ""), options)


#: One of two arrivals has come at the end; with EXPECT, bytes are outstanding too.
LEFT = f"""{THREAD_OUTPUT} setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mbarrier.init.shared.b64 [dynamic], 2;
    mbarrier.arriveEXPECT END: st.global.b32 [%d1], %r1; ret;"""
ARRIVALS, BYTES = ".shared.b64 %d3, [dynamic];", ".expect_tx.shared.b64 %d3, [dynamic], 16;"


def test_an_mbarrier_in_the_middle_of_a_phase():
    some, message = LEFT.replace("EXPECT", ARRIVALS), "the kernel ends in the middle of a phase"
    assert execute(some, Options()) == list(range(32))
    with pytest.raises(BarrierMisuse, match=message):
        execute(some, Options(strict=True))
    with pytest.raises(BarrierMisuse, match=f"{message}.* 16 transaction bytes pending"):
        execute(LEFT.replace("EXPECT", BYTES), Options())
    # Bytes are announced, and not loaded.
    tail = LEFT.replace("EXPECT", BYTES).replace("[dynamic], 2;", "[dynamic], 1;")
    assert execute(tail, Options()) == list(range(32))
    with pytest.raises(BarrierMisuse, match=f"{message}.* 0 of 1 arrivals pending, 16 transaction bytes pending"):
        execute(tail, Options(strict=True))
    left_out = Options(strict=True, without=("exits",))
    assert execute(LEFT.replace("EXPECT", BYTES), left_out) == list(range(32))


def test_lanes_that_initialise_one_mbarrier():
    """PTX defines the first of them alone; what they leave is the same."""
    body = f"""{THREAD_OUTPUT} setp.ge.u32 %p1, %r1, LANES; @%p1 bra W; mbarrier.init.shared.b64 [dynamic], 1; W:
        bar.warp.sync -1; setp.ne.u32 %p1, %r1, 0; @!%p1 mbarrier.arrive.shared.b64 %d3, [dynamic];
        V: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra V; st.global.b32 [%d1], %r1; ret;"""
    assert execute(body.replace("LANES", "1"), Options()) == list(range(32))
    two = body.replace("LANES", "2")
    with pytest.raises(BarrierMisuse, match="mbarrier.init by 2 lanes at once of one place: mbarrier at") as error:
        execute(two, Options())
    assert error.value.kind == "barrier-init-lanes" and error.value.warp == "CTA 0 warp 0"
    assert execute(two, Options(detectors=False)) == list(range(32))
    counts = two.replace("[dynamic], 1", "[dynamic], %r2")
    counts = counts.replace("setp.ge.u32", "add.u32 %r2, %r1, 1; setp.ge.u32", 1)
    with pytest.raises(BarrierMisuse, match="mbarrier.init over a live mbarrier"):
        execute(counts, Options(detectors=False))


def test_names_that_are_none():
    with pytest.raises(ValueError, match="without = 'leaks': must be one of 'races', 'uninitialised', 'registers', "):
        Options(without=("leaks",))
    with pytest.raises(TypeError, match="without = 'races': must be a tuple of names"):
        Options(without="races")


def test_every_detector_has_a_fault_here():
    assert {*FAULTS, "registers"} == set(DETECTORS)


@pytest.mark.parametrize(
    "config", [Sm100PatchEmbedConfig(), Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1)]
)
def test_sound_kernels_are_clean_whatever_is_left_out(config: Sm100PatchEmbedConfig | Sm90PatchEmbedConfig) -> None:
    """What one detector knows, of bytes that a copy has brought for example, does not depend on another."""
    case = make_case(batch=300, positions=2, n=256, k=256, config=config, sm_count=2)
    for left_out in (*((name,) for name in DETECTORS), DETECTORS):
        case.tensors.out.fill_(float("nan"))
        emulate(case.plan, case.tensors, Options(without=left_out))
        assert not case.mismatches().any(), left_out


def test_a_store_of_uninitialised_bytes_is_found_without_races() -> None:
    """By a tensor copy that has been executed before, which is the core's then."""
    out = aligned(np.zeros(32, np.uint32))
    tensor = TensorMap(out.ctypes.data, "u32", (32,), (), (32,), (1,))
    text = module(
        """ld.param.u64 %d1, [p0]; mov.b32 %r4, dynamic; mov.u32 %r1, %tid.x; mov.u32 %r2, 0;
        shl.b32 %r3, %r1, 2; add.s32 %r5, %r4, %r3; st.shared.b32 [%r5], %r1; add.u32 %r6, %r1, 7;
        st.shared.b32 [%r5+128], %r6;
        fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
        NEXT: cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d1, {0}], [%r4];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; add.u32 %r4, %r4, 128;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 3; @%p2 bra NEXT;
        DONE: ret;""",
        parameters=1,
    )
    with pytest.raises(IllegalAccess, match="uninitialised"):
        options = Options(without=("races",))
        launch(text, tensor, reachable=(out,), options=options)
    assert out.tolist() == list(range(7, 39))


def test_who_expects_another_number_of_threads_is_reported_at_both_lines():
    text = module("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra FEWER;\nbar.sync 1, 64;\nret;\n"
                  "FEWER: bar.sync 1, 96;\nret;")  # fmt: skip
    with pytest.raises(BarrierMisuse, match="expects .* threads where") as raised:
        launch(text, np.zeros(1), np.zeros(1), block=(64, 1, 1), options=Options())
    report = diagnose(raised.value)
    lines = [text.splitlines()[place.ptx_line - 1] for place in (report.place, report.related[0].places[0])]
    assert sorted(lines) == ["FEWER: bar.sync 1, 96;", "bar.sync 1, 64;"]
    assert {place.warps[0].index for place in (report.place, report.related[0].places[0])} == {0, 1}


_SWAPPED = f"""{THREAD_OUTPUT} mov.u64 %d2, dynamic; mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d2, %d3;
    xor.b32 %r3, %r1, 32; mul.wide.u32 %d5, %r3, 4;
    add.s64 %d6, %d2, %d5; sub.s64 %d7, %d1, %d3; add.s64 %d7, %d7, %d5; mov.b32 %r4, 0;"""
#: Bodies of a loop in which every access races, or reads what nobody wrote, and kinds of reports.
_AGAIN = {
    "shared": ("st.shared.b32 [%d4], %r1; ld.shared.b32 %r5, [%d6];", {"shared-race", "uninitialised-read"}),
    "global": ("st.global.b32 [%d1], %r1; ld.global.b32 %r5, [%d7];", {"global-race"}),
    "lanes": ("st.shared.b32 [%d4], %r1; xor.b32 %r6, %r1, 1; shl.b32 %r6, %r6, 2; mov.b32 %r7, dynamic;"
              "add.s32 %r7, %r7, %r6; ld.shared.b32 %r5, [%r7];", {"lanes-race"}),
}  # fmt: skip


@pytest.mark.parametrize("name", _AGAIN)
def test_a_report_is_made_once(name: str):
    """However often the same instructions race, and whatever the loop does besides."""
    body, kinds = _AGAIN[name]
    loop = f"""LOOP: {body}
        add.s32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 20; @%p1 bra LOOP; st.global.b32 [%d1], %r4; ret;"""
    found = []
    out = np.zeros(64, np.uint32)

    def go_on(error: EmulatorError) -> bool:
        other = error.facts.other
        earlier = other and (other.verb, tuple(one.line for one in other.instructions))
        found.append((error.kind, error.ptx_line, earlier))
        return True

    launch(module(_SWAPPED + loop, parameters=1), out, block=64, dynamic_smem=1024, options=Options(going_on=go_on))
    assert {kind for kind, *_ in found} == kinds
    assert len(found) == len(set(found))
    assert out.tolist() == [20] * 64
