"""Unit counts: closed forms for strides, a lane-by-lane model for random accesses, known facts of whole kernels."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options, Report
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.observe.counters import instruction_class
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.definitions import access_costs
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.ptx_launch import launch

COUNTED = Options(counters=True, detectors=False)
REGISTERS = {4: "%r10", 8: "{%r10, %r11}", 16: "{%r10, %r11, %r12, %r13}"}
VECTOR = {4: "", 8: ".v2", 16: ".v4"}


def run(body: str, *, options: Options = COUNTED, items: int = 65536) -> Report:
    """One warp; %r1 = lane, %r2 = shared base, %d1 = address of array p0 (int32 [items])."""
    head = "mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d1, [p0];\n"
    memory = aligned(np.zeros(items, np.int32))
    text = module(head + body + "\nret;", parameters=1)
    return launch(text, memory, dynamic_smem=32768, options=options)


def access(name: str, space: str, nbytes: int, stride: int, guard: str = "") -> str:
    """A load or store by lanes at ``stride`` items of ``nbytes``."""
    step = f"mul.lo.u32 %r3, %r1, {nbytes * stride};\n"
    if space == "shared":
        address = "add.u32 %r4, %r2, %r3;\n"
        place = "%r4"
    else:
        address = "cvt.u64.u32 %d2, %r3; add.s64 %d2, %d1, %d2;\n"
        place = "%d2"
    operands = {"ld": f"{REGISTERS[nbytes]}, [{place}]", "st": f"[{place}], {REGISTERS[nbytes]}"}[name]
    return step + address + f"{guard} {name}.{space}{VECTOR[nbytes]}.u32 {operands};"


@pytest.mark.parametrize("name", ["ld", "st"])
@pytest.mark.parametrize("nbytes", [4, 8, 16])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 17, 32])
def test_strided_shared_access(name: str, nbytes: int, stride: int) -> None:
    """Lanes i and j of a group share banks when ``stride * (i - j)`` is a multiple of the group's size."""
    units = run(access(name, "shared", nbytes, stride)).units
    together = 128 // nbytes
    degree = math.gcd(stride, together)
    kind = f"{name}.shared.{nbytes}B"
    assert units.total("requests", kind) == 1
    assert units.total("bytes", kind) == 32 * nbytes
    assert units.total("wavefronts", kind) == 32 // together * degree
    assert units.total("bank_conflicts", kind) == 32 // together * (degree - 1)
    assert units.total("ideal_wavefronts", kind) == nbytes // 4
    assert units.total("wavefronts") == units.total("wavefronts", kind)


def test_lanes_with_one_address_share_a_wavefront() -> None:
    for nbytes in (4, 8, 16):
        loads = run("mov.u32 %r1, 0;\n" + access("ld", "shared", nbytes, 1)).units
        assert loads.total("wavefronts", "ld.shared") == {4: 1, 8: 1, 16: 2}[nbytes]
        assert loads.total("ideal_wavefronts", "ld.shared") == 1


def test_only_active_lanes_count() -> None:
    few = "setp.lt.u32 %p1, %r1, 8;\n"
    units = run(few + access("st", "shared", 16, 1, "@%p1") + few + access("ld", "global", 4, 8, "@%p1")).units
    assert units.total("wavefronts", "st.shared.16B") == 1
    assert units.total("bytes", "st.shared.16B") == 128
    assert units.total("sectors", "ld.global.4B") == 8
    none = run("setp.gt.u32 %p1, %r1, 40;\n" + access("st", "shared", 16, 1, "@%p1")).units
    assert none.units == {} and none.instructions["warp 0"]["st.shared"] == 1


def test_addresses_at_once_and_one_by_one() -> None:
    """Neighbouring accesses are executed as one gather; each is a request of its own."""
    body = access("ld", "shared", 4, 32) + "\nld.shared.u32 %r20, [%r4+4];\nld.shared.u32 %r21, [%r4+8];"
    units = run(body).units
    assert units.total("requests", "ld.shared.4B") == 3
    assert units.total("wavefronts", "ld.shared.4B") == 3 * 32


@pytest.mark.parametrize("stride, sectors, lines", [(1, 4, 1), (2, 8, 2), (8, 32, 8), (32, 32, 32), (64, 32, 32)])
def test_global_sectors(stride: int, sectors: int, lines: int) -> None:
    for name in ("ld", "st"):
        units = run(access(name, "global", 4, stride)).units
        assert units.total("requests", f"{name}.global.4B") == 1
        assert units.total("sectors", f"{name}.global.4B") == sectors
        assert units.total("lines", f"{name}.global.4B") == lines
        assert units.total("l2_bytes_read") == (32 * sectors if name == "ld" else 0)
        assert units.total("l2_bytes_written") == (32 * sectors if name == "st" else 0)
    assert run(access("ld", "global", 16, 1)).units.total("sectors", "ld.global.16B") == 16


def test_uniform_loads_and_generic_addresses() -> None:
    units = run("ld.global.u32 %r5, [%d1];\nld.shared.v2.u32 {%r6, %r7}, [%r2];").units
    assert units.total("sectors", "ld.global.4B") == units.total("requests", "ld.global.4B") == 1
    assert units.total("wavefronts", "ld.shared.8B") == 1
    through = (
        "mul.lo.u32 %r3, %r1, 8; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d3, %r4; cvta.shared.u64 %d3, %d3;\n"
        "ld.u32 %r10, [%d3];"
    )
    assert run(through).units.total("wavefronts", "ld.shared.4B") == 2


def test_matrices() -> None:
    """Eight rows of 16 bytes, 128 apart, lie in the same four banks; 144 apart they cover all."""
    for pitch, degree in ((16, 1), (128, 8), (144, 1), (64, 4)):
        body = f"mul.lo.u32 %r3, %r1, {pitch}; add.u32 %r4, %r2, %r3;\n"
        load = body + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];"
        store = body + "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4], {%r10, %r11};"
        for text, kind, count in ((load, "ldmatrix.shared.16B", 4), (store, "stmatrix.shared.16B", 2)):
            units = run(text).units
            assert units.total("wavefronts", kind) == count * degree
            assert units.total("bank_conflicts", kind) == count * (degree - 1)
            assert units.total("ideal_wavefronts", kind) == count
            assert units.total("bytes", kind) == 128 * count


def test_matrices_of_another_cta() -> None:
    """As other loads from there, they cost no wavefronts of the own shared memory."""
    body = (
        "mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; mad.lo.u32 %r2, %r1, 16, %r2; mov.u32 %r3, %cluster_ctarank;\n"
        "st.shared.b32 [%r2], %r1; barrier.cluster.arrive; barrier.cluster.wait;\n"
        "xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;\n"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10, %r11}, [%r4];\n"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r12}, [%r2];\nbarrier.cluster.arrive; barrier.cluster.wait;\nret;"
    )
    units = launch(module(body, parameters=0), grid=(2, 1, 1), cluster=(2, 1, 1), options=COUNTED).units
    assert units.total("bytes", "ldmatrix.cluster.16B") == 2 * 256
    assert units.total("requests", "ldmatrix.cluster.16B") == units.total("requests", "ldmatrix.shared.16B") == 2
    assert units.total("bytes", "ldmatrix.shared.16B") == 2 * 128
    spans = [each.shared for each in units.by_instruction if each.opcode.startswith("ldmatrix")]
    assert spans[0] == (0, 0) and spans[1][1] - spans[1][0] == 128


def test_bytes_of_shared_memory_that_an_instruction_accesses() -> None:
    """From the first to the last that a lane of any cluster does, of active lanes alone."""
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r3, %r5, 2048, %r2;
    mad.lo.u32 %r4, %r1, 16, %r3; setp.lt.u32 %p1, %r1, 4; setp.gt.u32 %p2, %r1, 29;
    st.shared.u32 [%r4], %r1;
    @%p1 ld.shared.u32 %r10, [%r4];
    @%p2 atom.shared.add.u32 %r10, [%r4], 1;
    stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4], {%r10, %r11};
    ret;"""
    units = launch(module(body, parameters=0), grid=(2, 1, 1), dynamic_smem=4096, options=COUNTED).units
    found = {each.opcode.split(".")[0]: each.shared for each in units.by_instruction}
    first, far = found["st"][0], 2048
    ends = {
        "st": (0, far + 31 * 16 + 4), "ld": (0, far + 3 * 16 + 4), "atom": (30 * 16, far + 31 * 16 + 4),
        "stmatrix": (0, far + 16 * 16),
    }  # fmt: skip
    assert {name: tuple(byte - first for byte in found[name]) for name in ends} == ends and found["mad"] == (0, 0)


def test_atomics_serialise_by_bank() -> None:
    for stride, wavefronts in ((0, 32), (1, 1), (4, 4)):
        body = f"mul.lo.u32 %r3, %r1, {4 * stride}; add.u32 %r4, %r2, %r3;\natom.shared.add.u32 %r10, [%r4], 1;"
        assert run(body).units.total("wavefronts", "atom.shared.4B") == wavefronts
    body = "cvt.u64.u32 %d2, %r1; shl.b64 %d2, %d2, 2; add.s64 %d2, %d1, %d2;\nred.global.add.u32 [%d2], 1;"
    units = run(body).units
    assert units.total("sectors", "atom.global") == 4
    assert units.total("l2_bytes_read") == units.total("l2_bytes_written") == 128


@pytest.mark.parametrize(
    ("lanes", "sectors"),
    [("mov.u32 %r3, %r1", 4), ("mul.lo.u32 %r3, %r1, 32", 32), ("mov.u32 %r3, 0", 32), ("and.b32 %r3, %r1, 28", 16)],
)
def test_global_atomics_of_one_address_go_one_after_the_other(lanes: str, sectors: int) -> None:
    """What Nsight Compute reads on an H200: next to each other, a line apart, all at one address, fours at one."""
    body = f"{lanes}; mul.wide.u32 %d2, %r3, 4; add.s64 %d2, %d1, %d2;\nred.global.add.u32 [%d2], %r1;"
    assert run(body).units.total("sectors", "atom.global") == sectors


def test_cp_async() -> None:
    """Rows of 128 bytes apart in shared memory, consecutive in global memory; then half of the lanes read nothing."""
    body = """
    shl.b32 %r3, %r1, 7; add.u32 %r4, %r2, %r3; shl.b32 %r5, %r1, 4; cvt.u64.u32 %d2, %r5; add.s64 %d2, %d1, %d2;
    setp.lt.u32 %p1, %r1, 16; selp.b32 %r6, 16, 0, %p1;
    cp.async.cg.shared.global [%r4], [%d2], 16;
    cp.async.ca.shared.global [%r4], [%d2], 4, 4;
    cp.async.cg.shared.global [%r4], [%d2], 16, %r6;
    cp.async.wait_all;"""
    units = run(body).units
    assert units.total("wavefronts", "cp.async.shared.16B") == 2 * 32
    assert units.total("wavefronts", "cp.async.shared.4B") == 32
    assert units.total("sectors", "cp.async.global.16B") == 16 + 8
    assert units.total("bytes", "cp.async.global.16B") == 512 + 256
    assert units.total("l2_bytes_read") == 32 * (16 + 16 + 8) and not units.total("l2_bytes_written")
    assert units.instructions["warp 0"]["cp.async"] == 3


def test_bulk_copies_of_bytes() -> None:
    body = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mbarrier.init.shared.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.shared.b64 %d5, [%r2], 272;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%d1+16], 272, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%d1+4096], [%r2+128], 272;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:"""
    report = run(body)
    units = report.units
    for kind, metric in (("bulk.load", "l2_bytes_read"), ("bulk.store", "l2_bytes_written")):
        assert units.total("instructions", kind) == 1
        assert units.total("bytes", kind) == 272
        assert units.total("wavefronts", kind) == 3
        assert units.total(metric) == units.total(metric, kind) == 9 * 32  # 272 bytes from the middle of a sector
    assert report.tma_bytes_loaded == report.tma_bytes_stored == 272
    copies = [each.shared for each in units.by_instruction if each.opcode.startswith("cp.async.bulk.") and each.units]
    assert copies[0] == copies[1] and copies[0][1] - copies[0][0] == 272


def test_shared_memory_of_another_cta() -> None:
    body = """
    mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
    mapa.shared::cluster.u32 %r7, %r4, %r6; mapa.shared::cluster.u32 %r8, %r4, %r5;
    st.shared::cluster.u32 [%r7], %r1; st.shared::cluster.u32 [%r8+1024], %r1;
    barrier.cluster.arrive; barrier.cluster.wait;"""
    text = module("mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic;" + body + "ret;", parameters=0)
    units = launch(text, grid=(2, 1, 1), cluster=(2, 1, 1), options=COUNTED).units
    assert units.units["warp 0"]["st.cluster.4B"] == {"requests": 2, "bytes": 256}
    assert units.total("wavefronts", "st.shared.4B") == units.total("requests", "st.shared.4B") == 2


HOW = {name: CONSTANTS[f"METER_{name.upper()}"] for name in ("load", "store", "atomic")}
OWN = 2  # rank of the CTA


@given(
    nbytes=st.sampled_from([1, 2, 4, 8, 16, 32]),
    lanes=st.sets(st.integers(0, 31), min_size=1).map(sorted),
    span=st.sampled_from([1, 2, 8, 64, 1024]),
    doubled=st.sampled_from([0, 1, 2]),
    how=st.sampled_from(list(HOW)),
    space=st.sampled_from(["shared", "global", "cluster"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_accesses(
    nbytes: int, lanes: list[int], span: int, doubled: int, how: str, space: str, seed: int
) -> None:
    """``doubled``: lanes that differ in this bit of their number alone have one address."""
    rng = np.random.default_rng(seed)
    addresses = rng.integers(0, span, 32) * nbytes
    if doubled:
        addresses = addresses[np.arange(32) & ~doubled]
    chosen = {lane: int(addresses[lane]) for lane in lanes}
    given = addresses + ((OWN << 24) if space != "global" else 0)
    if space == "cluster":
        given[lanes[0]] ^= 1 << 24
    mask, meters = sum(1 << lane for lane in lanes), (STRUCTURES["Meter"] * CONSTANTS["METERS"])()
    tables = STRUCTURES["Tables"](meter=ctypes.addressof(meters), meter_rank=OWN)
    library().meter_access(ctypes.addressof(tables), given.ctypes.data, mask, 0, space != "global", HOW[how], nbytes)
    where = "shared" if (space, how) == ("cluster", "atomic") else space  # only loads and stores are told apart
    meter = meters[CONSTANTS[f"METER_{where.upper()}"]]
    assert sum(each.requests for each in meters) == 1
    assert (meter.requests, meter.bytes, meter.width) == (1, len(lanes) * nbytes, nbytes)
    cost, sectors = (0, 0, 0), (0, 0, 0)
    if where == "shared":
        shared = access_costs.shared_atomic(chosen) if how == "atomic" else None
        cost = shared or access_costs.shared(chosen, nbytes, how == "load")
    if where == "global":
        distinct = access_costs.pieces(chosen, 32)
        played = access_costs.atomic_sectors(chosen) if how == "atomic" else distinct
        sectors = played, access_costs.pieces(chosen, 128), 32 * distinct
    assert (meter.wavefronts, meter.conflicts, meter.ideal) == cost
    assert (meter.sectors, meter.lines, meter.moved) == sectors


def test_names_of_accesses() -> None:
    """What other instructions do on one GPU, and asynchronous ones: as what they count."""
    body = """
    multimem.st.weak.global.u32 [%d1], %r1; multimem.ld_reduce.weak.global.add.u32 %r5, [%d1];
    multimem.red.relaxed.gpu.global.add.u32 [%d1], 1;"""
    units = run(body).units.units["warp 0"]
    assert set(units) == {"st.global.4B", "ld.global.4B", "atom.global.4B"}
    assert units["atom.global.4B"] == {
        "requests": 1, "bytes": 128, "sectors": 32, "lines": 1, "l2_bytes_read": 32, "l2_bytes_written": 32,
    }  # fmt: skip
    body = """
    setp.ne.u32 %p1, %r1, 0; mul.lo.u32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
    @%p1 bra NEXT;
    mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 256;
NEXT:
    st.shared.u32 [%r4], %r1; bar.warp.sync -1;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r4], %r1, [%r2+1024];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r4], %r1, [%r2+1024];"""
    units = run(body).units
    for name in ("st", "st.async", "red.async"):
        assert units.total("wavefronts", f"{name}.shared.4B") == units.total("requests", f"{name}.shared.4B") == 1
        assert units.total("bytes", f"{name}.shared.4B") == 128


@pytest.mark.parametrize(
    "opcode, expected",
    [
        ("ld.shared::cluster.v4.u32", "ld.shared"),
        ("ld.u32", "ld.generic"),
        ("red.release.gpu.global.add.u32", "red.global"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix.shared"),
        ("add.s32", "integer"),
        ("add.rn.bf16x2", "float"),
        ("fma.rn.f32", "float"),
        ("and.b32", "logic"),
        ("tcgen05.mma.cta_group::2.kind::f8f6f4", "mma"),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tmem"),
        ("tcgen05.wait::ld.sync.aligned", "barrier"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3", "mma"),
        ("wgmma.wait_group.sync.aligned", "barrier"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group", "tma"),
        ("cp.async.bulk.wait_group.read", "barrier"),
        ("cp.async.cg.shared.global", "cp.async"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", "barrier"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", "tma"),
        ("mbarrier.try_wait.parity.shared.b64", "barrier"),
    ],
)
def test_instruction_classes(opcode: str, expected: str) -> None:
    assert instruction_class(opcode) == expected


@pytest.mark.parametrize("completion", ["eager", "lazy"])
def test_sm100_kernel_per_cta_and_tile(completion: str) -> None:
    """256 x 256 x 768 per CTA pair: each CTA fills 32 KB per K block of 128 bytes, and its MMAs read each byte once."""
    case = make_case(batch=256, positions=2, n=256, k=768, config=Sm100PatchEmbedConfig(), sm_count=2)
    options = Options(counters=True, completion=completion)
    report = emulate(case.plan, case.tensors, options)
    assert not case.mismatches().any()
    units, parts = report.units, 2 * case.plan.tiles
    assert units.ctas == 2 and case.plan.tiles == 2
    assert units.total("wavefronts", "tma.load") == 1536 * parts
    assert units.total("operand_wavefronts", "mma") == 1536 * parts
    assert units.total("bytes", "tma.load") == report.tma_bytes_loaded
    assert units.total("l2_bytes_read", "tma.load") == 32768 * 6 * parts
    assert units.total("bytes", "tma.store") == report.tma_bytes_stored == 128 * 256 * 2 * parts
    assert units.total("wavefronts", "tma.store") == 512 * parts
    assert units.total("wavefronts", "st.shared.16B") == 512 * parts
    assert units.total("bank_conflicts") == 0
    assert units.total("instructions", "mma", "mma") == report.mma_instructions == 24 * case.plan.tiles
    assert units.total("bytes", "tmem.ld") == 128 * 256 * 4 * parts
    assert units.total("tmem_bytes_written") == 24 * 128 * 256 * 4 * parts
    assert units.total("tmem_bytes_read") == 23 * 128 * 256 * 4 * parts
    assert units.total("bytes", "ld.global.16B", "epilogue") == 128 * 256 * 4 * parts
    assert {role: sum(kinds.values()) for role, kinds in units.instructions.items()} == report.by_role
    waits = {role: {kind for kind in kinds if kind.startswith("wait.mbarrier")} for role, kinds in units.units.items()}
    assert waits == {
        "load": {"wait.mbarrier.operands_empty"},
        "mma": {"wait.mbarrier.operands_full"},
        "epilogue": {"wait.mbarrier.accumulator_full"},
    }
    assert units.total("times", "wait.mbarrier", "epilogue") == units.total("times", "wait.mbarrier.accumulator_full")


@pytest.mark.parametrize("completion", ["eager", "lazy"])
def test_sm90_kernel_multicast_is_fetched_once(completion: str) -> None:
    config = Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1)
    case = make_case(batch=64, positions=2, n=256, k=256, config=config, sm_count=2)
    report = emulate(case.plan, case.tensors, Options(counters=True, completion=completion))
    assert not case.mismatches().any()
    units = report.units
    assert units.total("bytes", "tma.load") == report.tma_bytes_loaded == 2 * units.total("l2_bytes_read", "tma.load")
    # B of m64nNk32 is N rows of 32 bytes; A comes from registers.
    assert units.total("operand_wavefronts", "mma") == report.mma_instructions * 64 * 32 // 128
    assert units.total("bank_conflicts") == 0
    assert units.total("times", "wait.wgmma_group") > 0


def test_tma_sectors_end_at_the_tensor() -> None:
    """70 rows of 272 bytes of x and 200 of the weight: rows out of bounds are not fetched, ends are whole sectors."""
    config = Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1, cluster=1, weight="streamed", warpgroups=1)
    case = make_case(batch=70, positions=1, n=200, k=272, config=config, sm_count=1)
    units = emulate(case.plan, case.tensors, Options(counters=True)).units
    assert not case.mismatches().any()

    def sectors(rows: int, pitch: int, base: int) -> int:
        return sum(
            (base + r * pitch + min(k + 128, pitch) - 1) // 32 - (base + r * pitch + k) // 32 + 1
            for r in range(rows)
            for k in range(0, pitch, 128)
        )

    x, weight = (sectors(len(t), 272, t.data_ptr()) for t in (case.tensors.x, case.tensors.weight))
    column_tiles, row_tiles = -(-200 // 64), -(-70 // 64)
    assert units.total("l2_bytes_read", "tma.load") == 32 * (x * column_tiles + weight * row_tiles)


def test_off_by_default() -> None:
    assert run("mov.u32 %r5, 1;", options=Options()).units is None
