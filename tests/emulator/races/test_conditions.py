"""Each condition of the certificate alone stands against one that would be wrong: another schedule shows it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.races import certificate, phases
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.public_bugs import wait
from tests.emulator.races import test_allocations as allocations
from tests.emulator.races.test_phases import COPY, FAULTS, MARK, SETUP, one

SCHEDULES = [Options()]
SCHEDULES += [Options(seed=seed, interleave=how) for seed in range(8) for how in ("starve", "random")]
SCHEDULES += [
    Options(seed=seed, interleave="starve", completion=how) for seed in range(8) for how in ("lazy", "random")
]
HOLD = "mov.u32 %r22, 60; HOLD: sub.u32 %r22, %r22, 1; setp.ne.u32 %p3, %r22, 0; @%p3 bra HOLD;"
INIT = "setp.ne.u32 %p9, %r1, 0; @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], {}; READY: bar.sync 0;"
ONE = "and.b32 %r3, %r1, 31; setp.ne.u32 %p8, %r3, 0; @%p8 bra END;"  # the other lanes are done
STORE = "st.global.u32 [%d1], %r8;"
ADD = "red.global.add.f32 [%d0], {};"
BULK = """{one} mov.b32 %r8, {value}; st.shared.v4.b32 [dynamic+{place}], {{%r8, %r8, %r8, %r8}};
    fence.proxy.async.shared::cta;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [dynamic+{place}], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
BIG = "0f4B800000"  # 2^24, to which 1 makes no difference
SMALL, LESS = "0f3F800000", "0fBF800000"


def halves(first: str, second: str, before: str = "") -> str:
    """What warps 0 and 1 do."""
    split = "setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER;"
    return f"{THREAD_OUTPUT} {before} {split} {first} bra END; OTHER: {second} END: ret;"


def fault(name: str, hold: str = "") -> str:
    """The faulty form of a program of phases; its first warp may be held up as well."""
    body = MARK.sub(lambda match: match[2] or "", FAULTS[name][2]).replace("30000", "300")
    return body.replace("bra OTHER;", f"bra OTHER; {hold}", 1)


REGISTERS = {"entry": ".maxnreg 64 .reqntid 256", "target": "sm_90a", "block": (256, 1, 1)}
TENSOR = {"target": "sm_100a", "dynamic_smem": allocations.ALONE}
READ = "ld.shared.u32 %r20, [dynamic+1024]; st.global.u32 [%d0+256], %r20; bra END;"
LOOK = "mbarrier.test_wait.parity.shared.b64 %p4, [dynamic], 0; selp.u32 %r8, 1, 2, %p4;"
ARRIVE = "mbarrier.arrive.shared.b64 {}, [dynamic];"
#: By kind and beginning of the text: program, shape, whether another schedule of the emulator shows it.
CONDITIONS: dict[tuple[str, str], tuple[str, dict[str, object], bool]] = {
    ("arrival-early", "the arrival by"): (fault("flashinfer#3700"), {}, True),
    ("bytes-early", "the copy's bytes by"): (
        f"""{SETUP} {one(ARRIVE.format("_") + "mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 128;", "FIRST")}
        {wait("SEEN", "dynamic", 1)} bra END; OTHER: {one(COPY.format("dynamic+1024"), "SENT")} END: ret;""", {}, True),
    ("announced-late", "CTA 0 warp 0 announces"): (
        fault("an announcement by itself", HOLD).replace("bra END;", READ, 1), {}, True),
    ("lanes-overtaken", "phase"): (fault("cutlass#3654"), {}, False),  # lanes of a warp step together
    ("inval-order", "CTA 0 warp 0 invalidates"): (fault("inval", HOLD), {}, True),
    ("inval-order", "CTA 0 warp 1 initialises"): (fault("init after inval", HOLD), {}, True),
    ("allocation-order", "tcgen05"): (halves(*allocations.HOSTILE["a permit that is given up"]), TENSOR, True),
    ("allocation-order", "tcgen05.st"): (
        halves(*allocations.HOSTILE["a use by a warp that does not know of the allocation"]), TENSOR, True),
    ("pool", "CTAs of a multiprocessor"): (
        f"{allocations.ALLOC} {allocations.AGAIN} {allocations.FREE} {allocations.FREE_AGAIN}",
        {"target": "sm_100a", "block": (32, 1, 1)}, False),  # CTAs run in turn
    ("pool", "registers are given"): (
        "mov.u32 %r1, %tid.x; setp.ge.u32 %p2, %r1, 128; @%p2 bra OTHER; setmaxnreg.dec.sync.aligned.u32 40; "
        "bar.sync 1, 256; setmaxnreg.inc.sync.aligned.u32 64; bra END; OTHER: setmaxnreg.inc.sync.aligned.u32 88; "
        "bar.sync 1, 256; setmaxnreg.dec.sync.aligned.u32 40; END: ret;", REGISTERS, False),
    ("draw", "time, or"): (halves(f"mov.u32 %r8, %clock; {STORE}", f"mov.u32 %r8, %clock; {STORE}"), {}, True),
    ("draw", "another order of atomic"): (halves(ADD.format(SMALL), ADD.format(LESS)), {}, True),
    ("draw", "another order of sums by bulk"): (
        halves(BULK.format(one=ONE, value=SMALL, place=0), BULK.format(one=ONE, value=LESS, place=64)), {}, True),
    ("draw", "a strong access"): (
        halves("st.relaxed.gpu.global.u32 [%d0+512], 1;", f"ld.relaxed.gpu.global.u32 %r8, [%d0+512]; {STORE}"),
        {}, True),
    ("draw", "another order of operations on multicast"): (
        halves("multimem.red.relaxed.gpu.global.add.f32 [%d0], %r6;", "multimem.red.relaxed.gpu.global.add.f32 [%d0], "
               "%r7;", f"mov.b32 %r6, {SMALL}; mov.b32 %r7, {LESS};"), {}, True),
    ("draw", "which lanes are together"): (halves(f"activemask.b32 %r8; {STORE}", ""), {}, False),  # always the same
    ("answer", "a look at an mbarrier"): (
        halves(f"{ONE} {ARRIVE.format('_')}", f"{LOOK} {STORE}", INIT.format(1)), {}, False),  # it looks again late
    ("answer", "a state of an mbarrier"): (
        halves(f"{ONE} {ARRIVE.format('%d4')} st.global.u64 [%d0], %d4;",
               f"{ONE} {ARRIVE.format('%d4')} st.global.u64 [%d0+256], %d4;", INIT.format(3)), {}, True),
    ("unknown", "an instruction of which"): (halves("discard.global.L2 [%d0], 128;", ""), {}, False),  # does nothing
}  # fmt: skip
#: Conditions that no row has, and why.
LEFT_OUT = {
    "how many arrivals are pending": "the state that it takes flows into it: the row of states",
    "which cluster is left": "tests/emulator/checking/test_search.py has a scheduler of tiles",
    "a fence of tensor maps": "the detectors do not follow it: no schedule shows anything",
}


def outcome(body: str, options: Options, **shape: object):
    """The certificate, or None, and the bits or the kind of a fault; a report of a condition lets the run go on."""
    options = dataclasses.replace(options, going_on=lambda error: any(error.kind == kind for kind, _ in CONDITIONS))
    words = aligned(np.zeros(256, np.uint32))
    words[0] = int(BIG[2:], 16)
    head = {name: shape.pop(name) for name in ("target", "entry") if name in shape}
    text = module(body, parameters=1, **head)
    try:
        found = launch(text, words, options=options, hardware="an example", **({"block": (64, 1, 1)} | shape))
    except EmulatorError as error:
        return None, error.kind
    return found.certificate, words.tobytes()


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: ": ".join(condition))
def test_a_certificate_would_be_wrong_without_a_condition(condition: tuple[str, str]):
    """Nothing else stands against it, in any run that ends; and these leave different bits, or some do not end."""
    kind, start = condition
    body, shape, shown = CONDITIONS[condition]
    results = set()
    for options in SCHEDULES if shown else SCHEDULES[:1]:
        found, result = outcome(body, options, **shape)
        results.add(result)
        if found is not None and options.completion == "eager":
            places = [place for place in found.places if place.kind != "reported"]
            fits = [place.kind == kind and place.text.startswith(start) for place in places]
            assert places and all(fits), found.lines()
    assert any(isinstance(result, bytes) for result in results) and (len(results) > 1) == shown, results


def test_no_condition_is_left_out():
    texts = [text for _, text in CONDITIONS] + list(LEFT_OUT)
    rules = ast.walk(ast.parse(inspect.getsource(certificate._against) + inspect.getsource(certificate._of_mbarrier)))
    said = [rule.value.elts[1] for rule in rules if isinstance(rule, ast.Yield)]
    said = [each.value for each in said if isinstance(each, ast.Constant)] + list(certificate._CLASSES.values())
    assert len(said) > 8
    assert [each for each in said if not any(each.startswith(text) for text in texts)] == []
    kinds = set(re.findall(r'"([a-z]+-[a-z]+)"', inspect.getsource(certificate.Place))) | {"pool", "draw", "answer"}
    assert {kind for kind, _ in CONDITIONS} == kinds | {"unknown"}
    assert len(phases._AGAINST) == 4
