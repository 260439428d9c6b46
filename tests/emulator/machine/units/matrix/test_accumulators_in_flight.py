"""Registers of a wgmma in flight that other instructions touch, against a program's numbers in its order.

A program here is PTX of moves, wgmmas, waits and branches. Its reference executes the lines one after the other, each
wgmma at once: as long as only whole registers are moved, it makes no difference when a wgmma completes.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.bytecode.execution import translate
from cute_kernels.emulator.machine.units.matrix.wgmma import PENDING
from tests.emulator.machine.units.matrix.test_wgmma import COMMIT, FENCE, POLICIES, WAIT, run
from tests.emulator.matrix_cases import THREADS, Wgmma
from tests.nightly import examples

CASE = Wgmma(n=8)
(MMA,) = [line for line in CASE.ptx().splitlines() if line.startswith("wgmma.mma_async")]
D, E, F = ([f"%{letter}{row}" for row in range(4)] for letter in "def")
NAMES = [*D, *E, *F]
WAIT_FOR_OLDER = "wgmma.wait_group.sync.aligned 1;"
NEXT = "bra.uni NEXT;\nNEXT:"
DETECTORS = {
    "all": Options(arithmetic="exact"),
    "not of registers": Options(arithmetic="exact", without=("registers",)),
    "none": Options(arithmetic="exact", detectors=False),
}


def mma(registers: list[str], accumulate: bool = True) -> str:
    """The wgmma of the case on other registers, and its group."""
    text = re.sub(r"\{.*\}", f"{{{', '.join(registers)}}}", MMA)
    return f"{text if accumulate else text.replace('%p', '%never')}\n{COMMIT}"


def moves(targets: list[str], sources: list[str]) -> str:
    return "\n".join(f"mov.b32 {target}, {source};" for target, source in zip(targets, sources, strict=True))


def three_times(*body: str) -> str:
    count = "add.u32 %count, %count, 1;\nsetp.lt.u32 %again, %count, 3;\n@%again bra LOOP;"
    return "\n".join(["mov.u32 %count, 0;\nLOOP:", *body, count])


def program(body: str, shown: list[str]) -> str:
    """``body`` behind the fence, with the old D in %d and zeros in %e and %f; ``shown`` is the result."""
    (first, *_), stored = CASE.ptx().split("st.global"), []
    for row, name in enumerate(shown):
        stored.append(f"st.global.b32 [%out+{4 * THREADS * row}], {name};")
    start = f"{moves([*E, *F], ['0'] * 8)}\nsetp.ne.b32 %never, 0, 0;"
    text = "\n".join([first.replace(f"{MMA}\n{COMMIT}\n{WAIT}", f"{start}\n{body}"), *stored, "ret;\n}"])
    assert body in text
    others = ".reg .b32 %e<4>, %f<4>, %g, %count; .reg .pred %never, %again, %some; .reg .b16 %h<2>;"
    return text.replace(".reg .pred %p;", f".reg .pred %p; {others}")


def in_order(body: str, shown: list[str]) -> np.ndarray:
    """What registers hold when every instruction takes effect in its turn: uint32 [shown, 128]."""
    a, b, d = CASE.values()
    product = CASE.fragments((a @ b.T).astype(np.float32)).view(np.float32)
    held = dict(zip(D, CASE.fragments(d.astype(np.float32)).view(np.float32)))
    held |= {name: np.zeros(THREADS, np.float32) for name in (*E, *F, "0")}
    before, *loop = re.split(r"LOOP:|@%again bra LOOP;", body)
    for line in "".join([before, *(loop[:1] * 3), *loop[1:]]).splitlines():
        if line.startswith("wgmma.mma_async"):
            for row, name in enumerate(re.search(r"\{(.*)\}", line)[1].split(", ")):
                held[name] = product[row] + held["0" if "%never" in line else name]
        elif move := re.fullmatch(r"mov\.b32 (.*), (.*);", line):
            held[move[1]] = held[move[2]]
    return np.stack([held[name] for name in shown]).view(np.uint32)


LEGAL = {
    "copied back when it is complete": ([mma(D), moves(["%e1"], ["%d1"]), WAIT, moves(["%d0"], ["%e1"])], D),
    "copied in another block": ([mma(D), NEXT, moves(E, D), WAIT], E),
    "a copy is copied": ([mma(D), moves(E, D), NEXT, moves(F, E), moves(["%e0"], ["%e1"]), WAIT], ["%e0", *F[1:]]),
    "both go on": ([mma(D), moves(E, D), mma(E), WAIT], [*D[:2], *E[:2]]),
    "both go on in another block": ([mma(D), moves(E, D), NEXT, mma(D), mma(D), mma(E), WAIT], [*D[:2], *E[2:]]),
    "overwritten": ([mma(D), mma(E), moves(["%d1", "%e2"], ["%e1", "%d2"]), WAIT], ["%d1", "%e1", "%e2", "%d2"]),
    "exchanged": ([mma(D), mma(E), moves(F, D), moves(D, E), moves(E, F), NEXT, mma(E), WAIT], [*D[:2], *E[:2]]),
    "the old one comes back": ([mma(D), moves(E, D), mma(D), moves(D, E), WAIT], D),
    "nobody holds it any more": ([mma(D), mma(E), moves(D, E), NEXT, mma(D), WAIT], [*D[:2], *E[:2]]),
    "the older one is complete": (
        [mma(D), moves(E, D), mma(F), moves(["%e3"], ["%f3"]), WAIT_FOR_OLDER, moves(["%d0"], ["%e1"]), NEXT, WAIT],
        ["%d0", "%e0", "%e3", "%f0"],
    ),
    "many before the first is complete": ([mma(D)] * 40 + [moves(E, D), NEXT, mma(E), WAIT], [*D[:2], *E[:2]]),
    "in another order": ([mma(D), moves(E, D), mma([D[2], D[0], D[3], D[1]]), WAIT], [*D[:2], *E[:2]]),
    "a loop goes on with a copy": ([three_times(mma(D), moves(E, D), mma(E), moves(D, E)), WAIT], D),
    "a loop turns copies round": (
        [mma(D), mma(E), mma(F, accumulate=False),
         three_times(mma(D), moves(["%g"], ["%d0"]), moves(D, E), moves(E, F), moves(["%f0"], ["%g"]), WAIT_FOR_OLDER),
         WAIT],
        ["%d0", "%e0", "%f0", "%f1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("detectors", DETECTORS)
@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("name", LEGAL)
def test_a_copy_is_filled_like_the_original(name: str, completion: str, detectors: str) -> None:
    lines, shown = LEGAL[name]
    body = "\n".join(lines)
    for interleave in ("round_robin", "random"):
        options = dataclasses.replace(DETECTORS[detectors], completion=completion, interleave=interleave, seed=3)
        assert np.array_equal(run(CASE, program(body, shown), options), in_order(body, shown))


def _three_of(names: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=3, max_size=3)


_FOUR = st.permutations(D) | st.permutations(E) | st.permutations(NAMES).map(lambda names: names[:4])
_STEPS = st.one_of(
    st.builds(moves, _three_of(NAMES), _three_of([*NAMES, "0"])),
    st.builds(mma, _FOUR, st.booleans()),
    st.sampled_from(["NEXT", "NEXT", WAIT, WAIT_FOR_OLDER]),
)  # fmt: skip


@settings(max_examples=examples(60, 2000))
@given(
    steps=st.lists(_STEPS, min_size=3, max_size=16), looped=st.slices(16), completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random", "starve"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_moves_and_wgmmas(steps: list[str], looped: slice, completion: str, interleave: str, seed: int) -> None:
    """Registers in flight are overwritten, too, so that the detector of registers does not look."""
    steps = [f"bra.uni NEXT{i};\nNEXT{i}:" if step == "NEXT" else step for i, step in enumerate(steps)]
    first, last, _ = looped.indices(len(steps))
    if first < last:
        steps[first:last] = [three_times(*steps[first:last])]
    body, shown = "\n".join([*steps, WAIT]), NAMES[seed % 9 : seed % 9 + 4]
    options = dataclasses.replace(
        DETECTORS["not of registers"], completion=completion, interleave=interleave, seed=seed
    )
    assert np.array_equal(run(CASE, program(body, shown), options), in_order(body, shown))


# --- what an instruction finds before a wgmma has completed -----------------------------------------------------------


def unwaited(*lines: str, shown: list[str], completion: str = "lazy", **options: bool) -> np.ndarray:
    """Executed without detectors."""
    asked = dataclasses.replace(DETECTORS["none"], completion=completion, **options)
    return run(CASE, program("\n".join(lines), shown), asked)


def test_what_is_read_too_early() -> None:
    """Whoever does not wait reads a NaN, unless the wgmma is complete."""
    lines = [mma(D), "add.u32 %e0, %d0, 0;", moves(["%e1"], ["%d1"]), NEXT, "add.u32 %e2, %e1, 0;", WAIT]
    out = unwaited(*lines, shown=["%e0", "%e2", "%d0", "%e1"])
    result = in_order(mma(D), D)
    assert (out[:2] == PENDING).all() and np.array_equal(out[2:], result[:2])
    eager = unwaited(*lines, shown=["%e0", "%e2", "%d0", "%e1"], completion="eager")
    by_warp = [np.array_equal(*pair) for pair in zip(np.split(eager[0], 4), np.split(result[0], 4))]
    assert by_warp.count(True) == 1, "the warp that issues last: with it the wgmma is complete"
    assert (eager[0] == PENDING).sum() == 96 and np.array_equal(eager[2:], result[:2])


def test_an_accumulator_stored_too_early() -> None:
    out = unwaited(mma(D), f"st.global.b32 [%out+{4 * THREADS * 3}], %d3;", WAIT, shown=D[:3])
    assert (out[3] == 0xFFF1DEAD).all() and np.array_equal(out[:3], in_order(mma(D), D[:3]))


@pytest.mark.parametrize("lines", [(), (NEXT,)], ids=["same block", "another block"])
def test_what_overwrites_an_accumulator_stays(lines: tuple[str, ...]) -> None:
    some = "setp.lt.u32 %some, %thread, 40;\n@%some mov.b32 %d2, 9;"
    out = unwaited(mma(D), *lines, "mov.b32 %d1, 7;", some, moves(["%e0"], ["%d3"]), "add.u32 %d3, %count, 5;", WAIT,
                   shown=["%e0", *D[1:]])  # fmt: skip
    assert np.array_equal(out[0], in_order(mma(D), ["%d3"])[0])
    assert (out[1] == 7).all() and (out[3] == 5).all()
    assert (out[2, :40] == 9).all() and (out[2, 40:] == PENDING).all(), "lanes that keep what they have lose it"


def test_halves_of_an_accumulator_are_no_copy() -> None:
    lines = [mma(D), "mov.b32 {%h0, %h1}, %d0;", "mov.b32 %e0, {%h0, %h1};", WAIT]
    text = program("\n".join(lines), D)
    with pytest.raises(IllegalAccess, match="register %d0 is an accumulator of the wgmma"):
        run(CASE, text)
    assert (unwaited(*lines, shown=["%e0", *D[:3]])[0] == PENDING).all()


# --- where lanes may have diverged ------------------------------------------------------------------------------------


def diverging(limit: int) -> str:
    """Threads from ``limit`` on copy, which the emulator cannot know to be whole warps."""
    test = f"mul.lo.u32 %count, %thread, 3;\nsetp.lt.u32 %some, %count, {3 * limit};\n@%some bra SKIP;"
    return "\n".join([mma(D), test, moves(["%e0"], ["%d0"]), "SKIP:", WAIT])


@pytest.mark.parametrize("completion", POLICIES)
def test_whole_warps_copy_where_lanes_may_have_diverged(completion: str) -> None:
    out = run(CASE, program(diverging(64), ["%e0", *D[1:]]), Options(arithmetic="exact", completion=completion))
    expected = in_order(mma(D), D)
    assert np.array_equal(out[0, 64:], expected[0, 64:]) and not out[0, :64].any()
    assert np.array_equal(out[1:], expected[1:])


@pytest.mark.parametrize("completion", POLICIES)
def test_a_part_of_a_warp_cannot_copy(completion: str) -> None:
    text = program(diverging(70), ["%e0", *D[1:]])
    with pytest.raises(UnsupportedPTX, match="lanes 0xffffffc0 of a warp with live .* copy an accumulator") as error:
        run(CASE, text, Options(completion=completion))
    assert error.value.instruction == "mov.b32 %e0, %d0"
    out = unwaited(diverging(70), shown=["%e0", *D[1:]])
    assert not out[0, :70].any() and (out[0, 70:96] == PENDING).all()
    assert np.array_equal(out[0, 96:], in_order(mma(D), ["%d0"])[0, 96:])


# --- the same where nothing is in flight ------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", POLICIES)
def test_accumulators_change_places_before_a_wgmma(completion: str) -> None:
    body = "\n".join([moves(["%g", "%d0", "%d1", "%e0"], ["%d0", "%d1", "%g", "%d2"]), mma(D), WAIT])
    shown = [*D[:3], "%e0"]
    out = run(CASE, program(body, shown), Options(arithmetic="exact", completion=completion))
    assert np.array_equal(out, in_order(body, shown))


@pytest.mark.parametrize("completion", POLICIES)
def test_an_old_accumulator_is_the_a_fragment(completion: str) -> None:
    """A is what the accumulators were, and they begin anew."""
    case = Wgmma(n=8, a_in_registers=True)
    text = case.ptx()
    text = text.replace("ld.global.b32 %a0,", "ld.global.b32 %keep,").replace(FENCE, "mov.b32 %d0, %keep;" + FENCE)
    text = text.replace("setp.ne.b32 %p, 1, 0;", "mov.b32 %a0, %d0;\nmov.b32 %d0, 0;\nsetp.ne.b32 %p, 1, 0;")
    text = text.replace(".reg .pred %p;", ".reg .pred %p; .reg .b32 %keep;")
    a, b, d = case.values()
    expected = case.fragments((a @ b.T + d).astype(np.float32))
    expected[0] = case.fragments((a @ b.T).astype(np.float32))[0]
    assert np.array_equal(run(case, text, Options(arithmetic="exact", completion=completion)), expected)


def test_kernels_that_copy_nothing_in_flight_stay_with_the_core() -> None:
    assert translate(CASE.ptx(), None, (THREADS, 1, 1)).spare is None
    assert translate(program("\n".join([mma(D), moves(E, D), WAIT]), E), None, (THREADS, 1, 1)).spare is not None
