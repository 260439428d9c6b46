"""What orders wgmmas: groups and waits, and what the race detector knows of them, against `definitions.wgmma`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import ProxyFenceMissing, SharedMemoryRace
from cute_kernels.emulator.machine.units.matrix.wgmma import PENDING
from cute_kernels.testing.ptx import aligned
from tests.emulator.definitions.wgmma import WARPS, Order, needed
from tests.emulator.machine.units.matrix.test_wgmma import COMMIT, FENCE, POLICIES, REPEATED, changed, run
from tests.emulator.matrix_cases import THREADS, Wgmma
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

STEPS = 4
CASE = Wgmma(n=8, a_in_registers=True, steps=STEPS)
COMPLETION = st.sampled_from(POLICIES)
INTERLEAVE = st.sampled_from(["round_robin", "random", "starve"])

# --- a warpgroup, and a fifth warp that stores to its operand ---------------------------------------------------------

REGISTERS = ".reg .pred %p, %q<5>, %r<8>; .reg .b32 %w, %l;"


def first_of_other() -> str:
    """%r s: whether the chunk of 16 bytes that a lane has in each half of B belongs to step s, in the first half."""
    return "\n".join([
        "mov.b32 %v0, 0; mov.b32 %v1, 0; mov.b32 %v2, 0; mov.b32 %v3, 0;",
        "and.b32 %l, %thread, 31; shl.b32 %i, %l, 4; add.u32 %i, %i, %shared;",
        "shr.u32 %w, %l, 3; and.b32 %l, %l, 7; xor.b32 %l, %l, %w; shr.u32 %l, %l, 1;",  # 128B swizzle
        *(f"setp.eq.u32 %r{step}, %l, {step};" for step in range(STEPS)),
        "xor.b32 %l, %l, 2;",
        *(f"setp.eq.u32 %r{STEPS + step}, %l, {step};" for step in range(STEPS)),
        "bar.sync 0;",
    ])  # fmt: skip


def store(step: int | None) -> str:
    """Lanes store the chunks of B that are theirs: of all steps, or of one."""
    values = "{%v0, %v1, %v2, %v3}"
    if step is None:
        return f"st.shared.v4.b32 [%i], {values}; st.shared.v4.b32 [%i+512], {values};"
    return f"@%r{step} st.shared.v4.b32 [%i], {values}; @%r{STEPS + step} st.shared.v4.b32 [%i+512], {values};"


Event = tuple[str, int | None]


def program(events: list[Event]) -> str:
    """What the warpgroup does, with an operation at each "mma", and what the fifth warp does."""
    before, *operations = CASE.ptx().split("setp.ne.b32 %p")
    operations[-1], after = operations[-1].split(COMMIT)
    apart = "setp.ge.u32 %q4, %thread, 128; mov.u32 %shared, dynamic; @%q4 bra OTHER; ld.param.u64 %image"
    before = before.replace(".reg .pred %p;", REGISTERS).replace("ld.param.u64 %image", apart)
    main = [before, "shr.u32 %w, %thread, 5;", *(f"setp.eq.u32 %q{i}, %w, {i};" for i in range(WARPS))]
    other = ["OTHER:", first_of_other()]
    for number, (what, argument) in enumerate(events):
        if what == "mma":
            main.append(f"setp.ne.b32 %p{operations.pop(0)}")
        elif what == "barrier":
            main.append("bar.sync 0;")
            other.append("bar.sync 0;")
        elif what == "meet":
            main.append(f"@!%q{argument} bra S{number}; bar.sync {5 + argument}, 64; S{number}:")
            other.append(f"bar.sync {5 + argument}, 64;")
        elif what in ("fence", "fence_other"):
            (main if what == "fence" else other).append("fence.proxy.async;")
        elif what == "store":
            other.append(store(argument))
        elif what == "publish":
            other.append("st.shared.b32 [%shared+1024], %v0;")
        elif what == "look":
            main.append(f"@%q{argument} ld.shared.b32 %i, [%shared+1024];")
        else:
            main.append(COMMIT if what == "commit" else f"wgmma.wait_group.sync.aligned {argument};")
    start, end = after.rsplit("}", 1)
    return "\n".join([*main, COMMIT, start, *other, "ret;\n}", end])


def defined(events: list[Event]) -> Order:
    order, steps = Order(), iter(range(STEPS))
    for what, argument in events:
        if what == "store":
            order.store(set(range(STEPS)) if argument is None else {argument})
        elif what == "mma":
            order.mma(next(steps))
        else:
            getattr(order, what)(*([] if argument is None else [argument]))
    return order


def result(overwritten: set[int]) -> np.ndarray:
    """D, where the operations of some steps read zeros."""
    a, b, d = CASE.values()
    kept = [k for k in range(a.shape[1]) if k // CASE.k not in overwritten]
    return CASE.fragments((a[:, kept] @ b[:, kept].T + d).astype(np.float32))


IN_ORDER: list[Event] = [("barrier", None), ("store", None), ("fence_other", None), ("barrier", None)]
WAITED: list[Event] = [("commit", None), ("wait", 0), *IN_ORDER]
EVENTS = st.one_of(
    st.sampled_from([[("barrier", None)], [("fence", None)], [("fence_other", None)], [("commit", None)]]),
    st.integers(0, 2).map(lambda newest: [("commit", None), ("wait", newest)]),
    st.sampled_from([IN_ORDER, WAITED]),
    st.integers(0, WARPS - 1).map(lambda warp: [("meet", warp)]),
    st.sampled_from([None, *range(STEPS)]).map(lambda step: [("store", step)]),
)
BETWEEN = st.lists(EVENTS, max_size=3).map(lambda found: [event for events in found for event in events])


def with_look(events: list[Event], places: tuple[int, int], warp: int | None) -> list[Event]:
    """Somewhere the fifth warp stores beside the operands, and one of the warpgroup loads that later; None: neither."""
    first, last = sorted(place % (len(events) + 1) for place in places)
    look = [] if warp is None else [("look", warp)]
    return [*events[:first], *([("publish", None)] if look else []), *events[first:last], *look, *events[last:]]


PROGRAMS = st.builds(
    with_look,
    st.lists(BETWEEN, min_size=STEPS, max_size=STEPS).map(
        lambda found: [event for events in found for event in (*events, ("mma", None))]
    ),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.none() | st.integers(0, WARPS - 1),
)
ERRORS = {SharedMemoryRace: "race", ProxyFenceMissing: "unfenced"}


@settings(max_examples=examples(150, 5000))
@given(events=PROGRAMS, completion=COMPLETION, interleave=INTERLEAVE, seed=st.integers(0, 99))
def test_races_of_operations_and_stores(events: list[Event], completion: str, interleave: str, seed: int) -> None:
    order = defined(events)
    options = Options(arithmetic="exact", completion=completion, interleave=interleave, seed=seed)
    try:
        out = run(CASE, program(events), options, threads=32 * (WARPS + 1))
    except (SharedMemoryRace, ProxyFenceMissing) as error:
        assert ERRORS[type(error)] in order.wrong
    else:
        assert not order.wrong
        assert np.array_equal(out, result(order.overwritten))


def test_an_operand_that_changes_while_earlier_operations_are_in_flight() -> None:
    """Each step's part of B becomes 0, with barriers alone: D stays as it was."""
    events = [
        event
        for step in range(STEPS)
        for event in (("barrier", None), ("store", step), ("fence_other", None), ("barrier", None), ("mma", None))
    ]
    assert not defined(events).wrong and defined(events).overwritten == set(range(STEPS))
    for completion in POLICIES:
        out = run(CASE, program(events), Options(completion=completion, interleave="random"), threads=160)
        assert np.array_equal(out, result(set(range(STEPS))))


@pytest.mark.parametrize("completion", POLICIES)
def test_warps_know_what_they_stored_themselves(completion: str) -> None:
    case, options = Wgmma(n=8, a_in_registers=True), Options(completion=completion)
    again = "ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%wide]; st.shared.v4.b32 [%wide], {%v0, %v1, %v2, %v3};"
    out = run(case, changed(case, (FENCE, f"{again} fence.proxy.async; {FENCE}")), options)
    assert np.array_equal(out, case.fragments(case.expected()))
    with pytest.raises(ProxyFenceMissing):
        run(case, changed(case, (FENCE, f"{again} {FENCE}")), options)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("completion", POLICIES)
def test_a_wait_comes_after_what_other_warps_knew_when_they_issued(completion: str, waits: bool) -> None:
    """A warp learns from its wait what the fifth warp did before it met another one."""
    wait = [("commit", None), ("wait", 0)] if waits else []
    events = [("publish", None), ("meet", 0), ("mma", None), *wait, ("look", 2), *[("mma", None)] * (STEPS - 1)]
    options = Options(completion=completion, arithmetic="exact")
    if not waits:
        assert defined(events).wrong == {"race"}
        with pytest.raises(SharedMemoryRace):
            run(CASE, program(events), options, threads=160)
        return
    assert not defined(events).wrong
    assert np.array_equal(run(CASE, program(events), options, threads=160), result(set()))


# --- groups and waits -------------------------------------------------------------------------------------------------

MOST = 6  # operations, each with accumulators of its own
GROUPS = st.lists(
    st.one_of(st.sampled_from(["mma", "mma", "commit"]), st.integers(0, 3).map("wait {}".format)), max_size=16
).filter(lambda events: events.count("mma") <= MOST)


def after_waits(events: list[str], options: Options) -> np.ndarray:
    """What registers of operations hold behind waits: after each the first accumulator of all before, [.., threads]."""
    case, rows, issued, body = Wgmma(n=8, a_in_registers=True), 0, 0, []
    (mma,) = [line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async")]
    for event in events:
        if event == "mma":
            registers = ", ".join(f"%e{4 * issued + i}" for i in range(4))
            body.append(re.sub(r"\{%d.*?\}", f"{{{registers}}}", mma))
            issued += 1
        elif event == "commit":
            body.append(COMMIT)
        else:
            body.append(f"wgmma.wait_group.sync.aligned {event.split()[1]};")
            body += [f"add.u32 %f{rows + j}, %e{4 * j}, 0;" for j in range(issued)]
            rows += issued
    zeros = [f"mov.b32 %e{i}, 0;" for i in range(4 * issued)]
    stores = [f"st.global.b32 [%out+{4 * THREADS * row}], %f{row};" for row in range(rows)]
    others = f".reg .b32 %e<{4 * MOST}>, %f<{rows + 1}>;"
    first = case.ptx().split(mma)[0].replace(".reg .pred %p;", f".reg .pred %p; {others}")
    text = "\n".join([first.replace(FENCE, "\n".join([*zeros, FENCE])), *body, *stores, "ret;\n}"])
    (image, _), out = case.image(), aligned(np.zeros((max(rows, 1), THREADS), np.uint32))
    launch(
        text, aligned(image), aligned(case.registers()), out,
        block=(THREADS, 1, 1), dynamic_smem=len(image), options=options,
    )  # fmt: skip
    return out[:rows]


@settings(max_examples=examples(80, 3000))
@given(events=GROUPS, completion=COMPLETION, interleave=INTERLEAVE, seed=st.integers(0, 99))
def test_waits_leave_the_newest_groups(events: list[str], completion: str, interleave: str, seed: int) -> None:
    """Operations of other groups may be complete or not."""
    events = [*events, "commit", "wait 0"]
    case, waits = Wgmma(n=8, a_in_registers=True), [i for i, event in enumerate(events) if event.startswith("wait")]
    a, b, _ = case.values()
    product = case.fragments((a @ b.T).astype(np.float32))[0]
    options = Options(detectors=False, completion=completion, interleave=interleave, seed=seed)
    rows = iter(after_waits(events, options))
    for at in waits:
        complete = needed(events[:at], int(events[at].split()[1]))
        for number in range(events[:at].count("mma")):
            found = next(rows)
            assert np.array_equal(found, product) or (number >= complete and set(found) <= {PENDING, *product.tolist()})


@pytest.mark.parametrize("detectors", [True, False])
@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize(("count", "commit"), [(20, True), (150, False)], ids=["groups", "operations of one group"])
def test_any_number_may_be_in_flight(count: int, commit: bool, completion: str, detectors: bool) -> None:
    case = Wgmma(n=8, a_in_registers=True)
    (mma,) = [line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async")]
    text = changed(case, (mma, "\n".join([mma, COMMIT if commit else ""] * count)))
    a, b, d = case.values()
    options = Options(completion=completion, detectors=detectors, arithmetic="exact")
    out = run(case, text, options, hardware=REPEATED)
    assert np.array_equal(out, case.fragments((d + count * (a @ b.T)).astype(np.float32)))
