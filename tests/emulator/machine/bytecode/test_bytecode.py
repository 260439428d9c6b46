"""Bytecode: every instruction form against its definition; units of the core against those of Python.

Results, counts, and the words of every error have to be the same.
"""

from __future__ import annotations

import contextlib
import gc
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.core.pure_operations import pure_operation
from cute_kernels.emulator.errors import EmulatorError, Hang, ProxyFenceMissing
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.bytecode.execution import Execution, translate
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.operations.compile import compile_plan
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.exact_sums import emulate
from tests.emulator.instruction_cases import check
from tests.emulator.isa.instructions.test_conversions import CONVERSION
from tests.emulator.isa.instructions.test_instructions import FLOAT, INTEGER
from tests.emulator.kernel_inputs import make_case
from tests.emulator.machine.bytecode.test_whole_programs import REGISTERS, interpreted, program_text, statements
from tests.emulator.ptx_launch import launch
from tests.nightly import nightly

FORMS = {**INTEGER, **FLOAT, **CONVERSION}


@pytest.mark.parametrize("name", FORMS)
def test_every_instruction_form(name: str) -> None:
    """One launch of a warp for each set of operands, which literals and uniform registers are too."""
    check(FORMS[name], 1, Options())


@pytest.mark.parametrize(
    "name",
    ["add_u32", "mul_hi_s64", "div_s32", "shr_s16", "shf_l_clamp", "bfe_s64", "prmt_b32", "setp_lt_u32", "pack2x32",
     "fma_f32", "fma_f32_ftz_sat", "min_f32", "fma_bf16", "mul_f16", "cvt_bf16_f32_rn", "cvt_rni_s32_f32",
     "extend_s16_32_32", "select_pred", "dp4a_8_0_s32_u32"],
)  # fmt: skip
def test_frequent_operations_do_not_call_python(name: str) -> None:
    assert pure_operation(name) is not None


@settings(max_examples=60)
@given(
    program=st.lists(statements(2), min_size=3, max_size=9),
    threads=st.sampled_from([32, 64, 40, 7]),
    seed=st.integers(0, 3),
)
def test_random_programs(program: list[tuple], threads: int, seed: int) -> None:
    memory, common, registers, expected = interpreted(program, threads)
    text = program_text(program, list(range(REGISTERS)))
    options = Options(seed=seed, interleave="random")
    launch(text, memory, registers, common, block=(threads, 1, 1), options=options)
    assert registers.tolist() == [r for r, _ in expected]
    assert memory.tolist() == [m for _, m in expected]


SCHEDULES = [
    {},
    {"completion": "lazy", "detectors": False},
    {"completion": "random", "interleave": "random", "spurious_try_wait_failures": True, "seed": 5},
]
NARROW = Sm100PatchEmbedConfig(epilogue="bf16x2", tmem_load_width=64)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        pytest.param(config, schedule, marks=() if daily else nightly, id=f"{schedule}-{config}")
        for config, numbers in ((Sm100PatchEmbedConfig(), (1, 2)), (NARROW, (0,)))
        for daily, schedule in ((i in numbers, schedule) for i, schedule in enumerate(SCHEDULES))
    ],
)
def test_kernel_gives_the_same_results(config: Sm100PatchEmbedConfig, schedule: dict[str, object]) -> None:
    case = make_case(batch=3, positions=100, n=config.tile_n + 72, k=400, config=config, sm_count=2, seed=1)
    case.tensors.out.fill_(float("nan"))
    emulate(case.plan, case.tensors, Options(**schedule))
    assert not case.mismatches().any()


def test_lanes_that_run_for_longer_than_a_turn_while_others_of_their_warp_wait() -> None:
    """The lower lanes wait at the cluster barrier until the upper ones have exited, 30,000 blocks later."""
    text = module("""
        mov.u32 %r1, %tid.x; mov.u32 %r5, 0; setp.lt.u32 %p1, %r1, 16;
        @%p1 bra WAIT;
    LOOP:
        add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 30000;
        @%p2 bra LOOP;
        ret;
    WAIT:
        barrier.cluster.arrive; barrier.cluster.wait;
        ret;
    """, parameters=0)
    # 4 before they part, those of the loop, barrier.cluster.arrive and .wait, one ret: the branch to the other exits.
    assert launch(text, options=Options()).warp_instructions == 4 + 3 * 30_000 + 2 + 1


@pytest.mark.parametrize(
    ("space", "width"),
    [(space, width) for space in ("shared", "global", "") for width in (1, 2, 4, 8, 16, 32)[: 5 + (space != "shared")]],
)
@pytest.mark.parametrize("detectors", [True, False])
def test_loads_and_stores_of_every_width(space: str, width: int, detectors: bool) -> None:
    """Rows of the array go through memory in another order, under a guard that turns lanes off."""
    element = {1: "u8", 2: "u16"}.get(width, "u32")
    count = max(width // 4, 1)
    vector = f".v{count}" if count > 1 else ""
    names = [f"%h{i}" if width <= 2 else f"%r{50 + i}" for i in range(count)]
    group = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    dot = f".{space}" if space else ""
    text = f"""
        mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, {width}, %d0;
        xor.b32 %r2, %r1, 5; setp.ne.u32 %p1, %r1, 9; ld.global{vector}.{element} {group}, [%d1];
        mov.u32 %r3, dynamic; cvt.u64.u32 %d3, %r3; cvta.shared.u64 %d3, %d3;
        ld.param.u64 %d4, [p1]; mov.u64 %d5, {"%d4" if space == "global" else "%d3"};
        mad.wide.u32 %d6, %r2, {width}, %d5; mad.lo.u32 %r6, %r2, {width}, %r3;
        mov.u64 %d7, {"%d6" if space != "shared" else "0"};
        @%p1 st{dot}{vector}.{element} [{"%r6" if space == "shared" else "%d7"}], {group};
        bar.warp.sync 0xFFFFFFFF;
        setp.ne.u32 %p2, %r2, 9;
        @%p2 ld{dot}{vector}.{element} {group}, [{"%r6" if space == "shared" else "%d7"}];
        ld.param.u64 %d8, [p2]; mad.wide.u32 %d8, %r1, {width}, %d8; st.global{vector}.{element} [%d8], {group};
        ret;
    """
    data = aligned(np.random.default_rng(width).integers(0, 256, (32, width)).astype(np.uint8))
    scratch, out = aligned(np.zeros_like(data)), aligned(np.zeros_like(data))
    if detectors and space != "global":  # lane 12 reads what lane 9 would have stored
        with pytest.raises(EmulatorError, match="read of uninitialised shared memory"):
            launch(module(text, parameters=3), data, scratch, out, options=Options())
        return
    launch(module(text, parameters=3), data, scratch, out, options=Options(detectors=detectors))
    assert (np.delete(out, (9, 12), 0) == np.delete(data, (9, 12), 0)).all()


FAULTS = {
    "misaligned": "add.s64 %d2, %d1, 2; st.global.u32 [%d2], %r1;",
    "outside": "add.s64 %d2, %d1, 128; ld.global.u32 %r3, [%d2];",
    "one lane outside": "mad.lo.u32 %r4, %r1, 1, 1; mul.wide.u32 %d3, %r4, 4; add.s64 %d2, %d0, %d3;"
    "st.global.u32 [%d2], %r1;",
    "end of the address space": "mov.u64 %d2, -4; st.global.u32 [%d2], %r1;",
    "one lane at the end of the address space": "setp.eq.u32 %p1, %r1, 3; selp.b64 %d2, -4, %d1, %p1;"
    "ld.global.u32 %r3, [%d2];",
    "generic at the end of the address space": "setp.eq.u32 %p1, %r1, 3; selp.b64 %d2, -4, %d1, %p1;"
    "ld.u32 %r3, [%d2];",
    "read-only": "ld.param.u64 %d2, [p1]; st.global.u32 [%d2], %r1;",
    "uninitialised": "ld.shared.u32 %r3, [dynamic];",
    "uninitialised lanes": "mul.lo.u32 %r3, %r1, 4; mov.u32 %r4, dynamic; add.u32 %r4, %r4, %r3;"
    "setp.lt.u32 %p1, %r1, 30; @%p1 st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4];",
    "beyond shared memory": "mov.u32 %r3, 300000; mad.lo.u32 %r3, %r1, 4, %r3; st.shared.u32 [%r3], %r1;",
    "end of shared memory": "mov.u32 %r3, 5120; st.shared.v2.u32 [%r3], {%r1, %r1};",  # 1024 + 4100 bytes
    "foreign CTA": "mov.u32 %r3, 0x01000400; st.shared::cluster.u32 [%r3], %r1;",
    "mbarrier": "mbarrier.init.shared.b64 [dynamic], 1; mul.lo.u32 %r3, %r1, 4; mov.u32 %r4, dynamic;"
    "add.u32 %r3, %r3, %r4; st.shared.u32 [%r3], %r1;",
    "parity": "mbarrier.try_wait.parity.shared.b64 %p1, [dynamic], 0;",
    "elect": "elect.sync _|%p1, 15; selp.u32 %r1, 1, 2, %p1;",
    "shuffle": "setp.lt.u32 %p1, %r1, 7; @%p1 bra A; ret; A: shfl.sync.idx.b32 %r3, %r1, 20, 31, 127;",
    "trap": "setp.eq.u32 %p1, %r1, 3; @%p1 trap;",
    "agreement": "bar.sync %r1, 32;",
    "generic of two spaces": "mov.u32 %r3, dynamic; cvt.u64.u32 %d3, %r3; cvta.shared.u64 %d3, %d3;"
    "setp.lt.u32 %p1, %r1, 8; selp.b64 %d2, %d1, %d3, %p1; st.u32 [%d2], %r1;",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported_at_their_line(name: str) -> None:
    text = module(f"{THREAD_OUTPUT}\n{FAULTS[name]}\nst.global.u32 [%d1], %r1;\nret;")
    with pytest.raises(EmulatorError, match="PTX line"):
        _launch_with_constants(text, Options())


TENSOR = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, 4, %d0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; bar.warp.sync 0xFFFFFFFF;
    ld.shared.u32 %r3, [%r2];
    add.u32 %r4, %r1, 100; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1};
    add.u32 %r5, %r3, 1; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r4}; tcgen05.wait::st.sync.aligned;
"""
TENSOR_END = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32; ret;"
TENSOR_FAULTS = {
    "foreign lanes": "add.u32 %r3, %r3, 0x200000; tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3];",
    "free columns": "add.u32 %r3, %r3, 31; tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3];",
    "beyond the last column": "add.u32 %r3, %r3, 511; tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3];",
    "load by some lanes": "setp.lt.u32 %p1, %r1, 9; @%p1 bra A; bra B; A: add.u32 %r1, %r1, 1; "
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3]; B:",
    "wait by some lanes": "setp.lt.u32 %p1, %r1, 9; @%p1 bra A; bra B; A: tcgen05.wait::ld.sync.aligned; B:",
    "members": "bar.warp.sync 15;",
    "members elsewhere": "setp.lt.u32 %p1, %r1, 9; @%p1 bra A; bra B; A: bar.warp.sync 0xFFFFFFFF; B:",
}


@pytest.mark.parametrize("detectors", [False, True])
@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_faults_of_tensor_memory_are_reported_at_their_line(name: str, detectors: bool) -> None:
    text = module(TENSOR + TENSOR_FAULTS[name] + TENSOR_END, parameters=1)
    with pytest.raises(EmulatorError, match="PTX line"):
        launch(text, _OUT, options=Options(detectors=detectors))


def calls_of_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets a list to which the core adds what it calls Python for."""
    called: list[str] = []
    call = Execution.call

    def counted(self: Execution, site: int, mask: int) -> int:
        instruction = self.translation.sites[site].instruction
        called.append("exit" if instruction is None else instruction.opcode)
        return call(self, site, mask)

    monkeypatch.setattr(Execution, "call", counted)
    return called


def test_what_only_detectors_hear_of_stays_in_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
        tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3]; tcgen05.wait::ld.sync.aligned;
        tcgen05.fence::after_thread_sync; fence.proxy.async.shared::cta; bar.warp.sync 0xFFFFFFFF;
        setp.lt.u32 %p1, %r1, 9; @!%p1 bra B; add.u32 %r6, %r6, %r7; B: mad.lo.u32 %r6, %r7, 1000, %r6;
        st.global.u32 [%d1], %r6;
    """
    called = calls_of_python(monkeypatch)
    names = {}
    for detectors in (False, True):
        out = np.zeros(32, np.uint32)
        called.clear()
        launch(module(TENSOR + body + TENSOR_END, parameters=1), out, options=Options(detectors=detectors))
        lanes = np.arange(32)
        assert (out == 1000 * (lanes + 100) + lanes + np.where(lanes < 9, lanes + 100, 0)).all()
        names[detectors] = {name.split(".sync")[0] for name in called}
    setup = {"tcgen05.alloc.cta_group::1", "tcgen05.dealloc.cta_group::1"}
    assert names[False] == setup
    assert names[True] == setup


NESTED = (
    THREAD_OUTPUT
    + """
    mov.u32 %r2, 0; mov.u32 %r3, 0; and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 0; setp.lt.u32 %p2, %r1, LIMIT;
NEXT:
    @%p1 bra JOIN;
    add.u32 %r3, %r3, 1; @%p2 bra INNER;
    add.u32 %r3, %r3, 10; bra MEET;
INNER:
    add.u32 %r3, %r3, 100;
MEET:
    add.u32 %r3, %r3, 1000;
JOIN:
    add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 50;
    @%p3 bra NEXT;
    st.global.u32 [%d1], %r3; ret;
"""
)


@pytest.mark.parametrize("limit", [0, 12, 32])
def test_branches_inside_branches(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python."""
    called = calls_of_python(monkeypatch)
    text = module(NESTED.replace("LIMIT", str(limit)), parameters=1)
    out = np.zeros(32, np.uint32)
    launch(text, out)
    lanes = np.arange(32)
    assert (out == np.where(lanes % 2, 50 * (1001 + np.where(lanes < limit, 100, 10)), 0)).all()
    assert not called


_OUT, _FIXED = aligned(np.zeros(32, np.uint32)), aligned(np.zeros(32, np.uint32))
_FIXED.flags.writeable = False


def _launch_with_constants(text: str, options: Options) -> None:
    memory = GlobalMemory()
    memory.register_tensor(_OUT, "out")
    memory.register_tensor(_FIXED, "fixed", writable=False)
    params = [struct.pack("<Q", array.ctypes.data) for array in (_OUT, _FIXED)]
    run(text, grid=(1, 1, 1), block=(32, 1, 1), dynamic_smem=4100, params=params, memory=memory, options=options)


def test_a_wait_for_an_mbarrier_that_hangs_is_reported() -> None:
    body = "mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared.b64 [dynamic], 64;\n"
    body += "W: mbarrier.try_wait.parity.shared.b64 %p1, [dynamic], 0; @!%p1 bra W; ret;"
    with pytest.raises(Hang, match="mbarrier"):
        launch(module(body), 0, 0)


@pytest.mark.parametrize("options", [Options(), Options(interleave="random")], ids=str)
def test_endless_loops_without_effect_are_found(options: Options) -> None:
    text = module("mov.u32 %r1, 0; S: xor.b32 %r1, %r1, 1; bra S;")
    with pytest.raises(Hang, match="livelock"):
        launch(text, 0, 0, options=options)


def test_stores_are_reported_to_the_detectors() -> None:
    """Native code logs stores; the log is read before the asynchronous unit looks."""
    case = make_case(batch=1, positions=128, n=256, k=128)
    artifact = compile_plan(case.plan, emulated=True)
    text = "\n".join(line for line in artifact.ptx.splitlines() if "fence.proxy.async" not in line)
    with pytest.raises(ProxyFenceMissing):
        emulate(case.plan, case.tensors, Options(), artifact=replace(artifact, ptx=text))


def test_any_exception_leaves_native_code_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MBarriers, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(module("mbarrier.init.shared.b64 [dynamic], 1; ret;"), 0, 0)


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("error", [False, True])
def test_translation_collects_no_garbage(collecting: bool, error: bool) -> None:
    """Afterwards, whatever came of it, garbage is collected as before: of the youngest objects, once."""
    text = module("add.u32 %r1, %r1, 1; " * 2000 + ("add.u32 %r1;" if error else ""))
    collections: list[int] = []
    translate.cache_clear()
    parse.cache_clear()
    enabled = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    gc.callbacks.append(lambda phase, facts: collections.append(facts["generation"]) if phase == "start" else None)
    try:
        with pytest.raises(EmulatorError) if error else contextlib.nullcontext():
            translate(text, None, (32, 1, 1))
        found, now = list(collections), gc.isenabled()
    finally:
        gc.callbacks.pop()
        (gc.enable if enabled else gc.disable)()
    assert now == collecting and len(found) <= 1
