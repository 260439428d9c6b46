"""wgmma in the core: accumulators in the registers' own memory, filled in when an operation completes.

Sums that tests compute, and the unit in Python, are the reference.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.compile import compile_plan
from cute_kernels.config import GemmProblem, Sm90GemmConfig, Sm90PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.bytecode.execution import translate
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.units.matrix.wgmma import WgmmaUnit
from cute_kernels.plan import make_plan
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.matrix_cases import Wgmma, integer_wgmma_cases, wgmma_cases
from tests.emulator.python_units import units, with_both_units
from tests.emulator.units.matrix.test_wgmma import COMMIT, FENCE, WAIT, changed, run, run_with_report

POLICIES = ("eager", "lazy", "random")
BLOCK = (128, 1, 1)
CASES = [case for case in wgmma_cases() if case.n <= 64]
INTEGER_CASES = list(integer_wgmma_cases())


@pytest.mark.parametrize("case", [*CASES[:: max(1, len(CASES) // 40)], *INTEGER_CASES[::9]], ids=repr)
def test_every_kind_of_operand(case: Wgmma) -> None:
    translate(case.ptx(), None, BLOCK)  # nothing of it is left to Python
    out = run(case, options=Options())
    assert np.array_equal(out, case.fragments(case.expected()))


@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize("completion", POLICIES)
def test_a_kernel_with_units_of_either(weight: str, completion: str) -> None:
    """Outputs and counts; the schedule as well, because each back end draws from the same seed."""
    config = Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1, weight=weight)
    reports, results = [], []
    for native in (True, False):
        with units(native):
            case = make_case(batch=3, positions=100, n=136, k=272, sm_count=2, seed=5, config=config)
            options = Options(seed=11, completion=completion, interleave="random")
            reports.append(emulate(case.plan, case.tensors, options))
            assert not case.mismatches().any()
            results.append(case.tensors.out)
    assert torch.equal(*results)
    assert reports[0].by_opcode == reports[1].by_opcode and reports[0].by_role == reports[1].by_role


def test_our_kernels_run_natively() -> None:
    for plan in (
        make_case(config=Sm90PatchEmbedConfig()).plan,
        make_case(config=Sm90PatchEmbedConfig(tile_rows=64, weight="streamed")).plan,
        make_plan(GemmProblem(256, 256, 256), Sm90GemmConfig(), sm_count=2),
    ):
        translate(compile_plan(plan).ptx, None, (plan.threads, 1, 1))


@pytest.mark.parametrize("order", [(2, 1, 0, 3), (3, 2, 1, 0), (0, 2, 1, 3)])
def test_accumulators_in_any_order(order: tuple[int, ...]) -> None:
    """Registers lie in memory by their names, which need not be the order of the operands."""
    case = Wgmma(n=8, steps=2)
    text = re.sub(r"%d([0-3])\b", lambda match: f"%d{order[int(match[1])]}", case.ptx())
    assert text != case.ptx()
    translate(text, None, BLOCK)
    assert np.array_equal(run(case, text, Options()), case.fragments(case.expected()))


def test_computed_accumulators_reach_the_operation() -> None:
    """The old D is not what memory holds when the block begins, but computed in it."""
    case = Wgmma(n=8)
    text = changed(case, (FENCE, f"add.f32 %d0, %d0, 0f3F800000; mov.b32 %d2, %d0; {FENCE}"))
    outs = with_both_units(lambda: run(case, text, Options()))
    assert np.array_equal(*outs)
    assert not np.array_equal(outs[0], case.fragments(case.expected()))


@pytest.mark.parametrize("native", [False, True], indirect=True)
def test_accumulators_that_a_move_has_packed(native: bool) -> None:
    """Two halves that change places, by moves and by a permutation of bytes."""
    case = Wgmma(n=8)
    moves = ".reg .b16 %half<2>; mov.b32 {%half0, %half1}, %d0; mov.b32 %d1, {%half1, %half0};"
    packed, permuted = (
        run(case, changed(case, (FENCE, f"{{ {swap} }} {FENCE}")), Options())
        for swap in (moves, "prmt.b32 %d1, %d0, 0, 0x1032;")
    )
    assert np.array_equal(packed, permuted)
    assert not np.array_equal(packed, run(case, options=Options()))


@pytest.mark.parametrize(
    "edit", [(WAIT, ""), (FENCE, ""), (COMMIT, ""), (WAIT, "wgmma.wait_group.sync.aligned 1;")],
    ids=["no wait", "no fence", "no commit", "wait for an older group"],
)  # fmt: skip
def test_hazards_are_found_as_in_python(edit: tuple[str, str]) -> None:
    case = Wgmma(n=8)
    words = []
    for native in (True, False):
        with units(native):
            with pytest.raises(IllegalAccess) as caught:
                run(case, changed(case, edit), Options())
            words.append(str(caught.value))
    assert words[0] == words[1]


DETECTORS = {"detectors": Options(), "none": Options(detectors=False), "counters": Options(counters=True)}


@pytest.mark.parametrize("options", DETECTORS.values(), ids=DETECTORS)
@pytest.mark.parametrize("case", [*CASES[:: max(1, len(CASES) // 12)], *INTEGER_CASES[::40]], ids=repr)
def test_the_core_executes_what_takes_effect_at_once(
    case: Wgmma, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python, which takes over what the core leaves, is not asked; what is counted is the same."""
    counts = []
    for native in (False, True):
        with units(native):
            if native:
                monkeypatch.setattr(WgmmaUnit, "issue", None)
            out, report = run_with_report(case, None, dataclasses.replace(options))
            assert np.array_equal(out, case.fragments(case.expected()))
            rows = report.units.rows() if options.counters else []
            counts.append([row for row in rows if row[1] == "mma"] + [report.mma_instructions])
    assert counts[0] == counts[1] and counts[0][-1] == case.steps
    assert len(counts[0]) == (3 if options.counters else 1)


@pytest.mark.parametrize("detectors", [True, False])
@pytest.mark.parametrize("in_registers", [True, False])
@pytest.mark.parametrize(
    ("count", "commit"), [(20, True), (70, False)], ids=["more groups than it keeps", "more operations than it keeps"]
)
def test_python_takes_over(
    count: int, commit: bool, in_registers: bool, detectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle: the first warp has issued what the others still have to."""
    case = Wgmma(n=8, a_in_registers=in_registers)
    (mma,) = [line for line in case.ptx().splitlines() if line.startswith("wgmma.mma_async")]
    text = changed(case, (mma, "\n".join([mma, COMMIT if commit else ""] * count)))
    with units(False):
        expected = run(case, text, Options(detectors=detectors))
    warps, issue = [], WgmmaUnit.issue

    def issued(unit: WgmmaUnit, rank: int, warp: int, *rest: Any) -> None:
        warps.append(warp)
        issue(unit, rank, warp, *rest)

    monkeypatch.setattr(WgmmaUnit, "issue", issued)
    assert np.array_equal(run(case, text, Options(detectors=detectors)), expected)
    assert not np.array_equal(expected, case.fragments(case.expected()))
    first, *others = sorted(warps.count(warp) for warp in range(4))
    assert 0 < first < count and others == [count] * 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("setp.ne.b32 %p, 1, 0;", "setp.lt.u32 %p, %thread, 64;"),
        ("setp.ne.b32 %p, 1, 0;", "setp.ne.u32 %p, %thread, 70;"),
        ("fence.proxy.async;\n", ""),
        (WAIT, "wgmma.wait_group.sync.aligned 7;\nbra.uni END;\nEND:\n"),
    ],
    ids=["warps differ", "lanes differ", "no fence", "not waited for"],
)
def test_what_is_wrong_is_said_as_in_python(old: str, new: str) -> None:
    case, words = Wgmma(n=8, steps=2), []
    text = changed(case, (old, new))
    if old == WAIT:  # an accumulator in flight must not be looked at
        text = "\n".join(line for line in text.splitlines() if not line.startswith("st.global"))
    for native in (True, False):
        with units(native):
            with pytest.raises(EmulatorError) as caught:
                run(case, text, Options())
            words.append((type(caught.value), str(caught.value)))
    assert words[0] == words[1]


def test_two_warpgroups_read_one_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is ordered before the other: the race detector keeps a reader of each."""
    monkeypatch.setattr(WgmmaUnit, "issue", None)
    case = make_case(positions=128, n=136, k=272, sm_count=2, config=Sm90PatchEmbedConfig(tile_rows=64))
    report = emulate(case.plan, case.tensors, Options())
    assert report.mma_instructions and not case.mismatches().any()
