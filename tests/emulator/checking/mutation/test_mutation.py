"""The mutation tool itself, on a kernel of a dozen instructions: what it changes, what is noticed, what it reports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.judge import Verdict, instruction_limits, judge, place_of
from cute_kernels.emulator.checking.mutation.mutants import mutants
from cute_kernels.emulator.checking.mutation.target import Outcome
from cute_kernels.testing.ptx import module
from tests.emulator.checking.mutation import __main__ as command
from tests.emulator.checking.mutation import workers
from tests.emulator.checking.mutation.__main__ import recorded
from tests.emulator.checking.mutation.reviewed import Review
from tests.emulator.checking.mutation.summary import as_json, markdown, summarise
from tests.emulator.checking.mutation.targets import ROLE_FILES, SCHEDULES, TARGETS
from tests.emulator.ptx_launch import launch

# Warp 0 writes a word of shared memory that warp 1 copies to global memory: one mbarrier says when. The second barrier
# of the CTA and the fence order nothing that is not ordered already.
BODY = """mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0];
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [dynamic], 1;
READY:
bar.sync 0;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra READER;
@%p1 bra END;
st.shared.b32 [dynamic+128], 1234;
mbarrier.arrive.shared.b64 %d2, [dynamic];
bra END;
READER:
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0;
@!%p3 bra WAIT;
ld.shared.b32 %r2, [dynamic+128];
setp.ne.u32 %p4, %r1, 32;
@%p4 bra END;
st.global.b32 [%d1], %r2;
END:
fence.acq_rel.cta;
ret;"""
SMALL_SCHEDULES = {"eager": Options(), "random": Options(seed=1, interleave="random")}


class Small:
    ptx = module(BODY)

    def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        out = np.zeros(4, np.uint32)
        report = launch(ptx, out, 0, block=(64, 1, 1), options=options)
        return Outcome(report.warp_instructions, "" if out[0] == 1234 else f"{out[0]} instead of 1234")


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    small = Small()
    limits = instruction_limits(small, SMALL_SCHEDULES)
    return [judge("small", small, mutant, SMALL_SCHEDULES, limits) for mutant in mutants(small.ptx)]


def test_every_synchronisation_instruction_is_changed_and_nothing_else() -> None:
    original = Small.ptx.splitlines()
    found = list(mutants(Small.ptx))
    for mutant in found:
        changed = mutant.ptx.splitlines()
        assert len(changed) == len(original)
        different = [i + 1 for i, (old, new) in enumerate(zip(original, changed)) if old != new]
        assert different == [mutant.line], mutant.key
        assert mutant.original in original[mutant.line - 1]
    assert list(dict.fromkeys((mutant.opcode, mutant.following) for mutant in found)) == [
        ("mbarrier.init.shared.b64", "bar.sync mbarrier.arrive.shared.b64"),
        ("bar.sync", "mbarrier.arrive.shared.b64 mbarrier.try_wait.parity.shared.b64"),
        ("mbarrier.arrive.shared.b64", "mbarrier.try_wait.parity.shared.b64 fence.acq_rel.cta"),
        ("mbarrier.try_wait.parity.shared.b64", "fence.acq_rel.cta"),
        ("fence.acq_rel.cta", ""),
    ]
    assert sorted({mutant.key for mutant in found}) == [
        "count+1 mbarrier.init.shared.b64 #0",
        "count-1 mbarrier.init.shared.b64 #0",
        "drop bar.sync #0",
        "drop fence.acq_rel.cta #0",
        "drop mbarrier.arrive.shared.b64 #0",
        "drop mbarrier.init.shared.b64 #0",
        "drop mbarrier.try_wait.parity.shared.b64 #0",
        "other parity mbarrier.try_wait.parity.shared.b64 #0",
        "relaxed mbarrier.arrive.shared.b64 #0",
        "relaxed mbarrier.try_wait.parity.shared.b64 #0",
    ]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("cp.async.bulk.wait_group.read 1;", ["", "cp.async.bulk.wait_group.read 2;"]),
        (
            "cp.async.bulk.wait_group 0;",
            ["", "cp.async.bulk.wait_group 1;", "cp.async.bulk.wait_group.read 0;"],
        ),
        (
            "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+8], %r2;",
            [
                "",
                "@%p1 mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 %d1, [%r1+8], %r2;",
                "{ .reg .b32 mutated; @%p1 add.s32 mutated, %r2, 16; "
                "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+8], mutated; }",
                "{ .reg .b32 mutated; @%p1 add.s32 mutated, %r2, -16; "
                "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+8], mutated; }",
                "@%p1 mbarrier.arrive.shared.b64 %d1, [%r1+8];",
            ],
        ),
        (
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
            [
                "",
                "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1];",
                "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r1];",
            ],
        ),
        (
            "bar.sync 3, 128;",
            [
                "",
                "{ .reg .b32 mutated; add.s32 mutated, 128, 32; bar.sync 3, mutated; }",
                "{ .reg .b32 mutated; add.s32 mutated, 128, -32; bar.sync 3, mutated; }",
            ],
        ),
        ("barrier.cluster.arrive.release.aligned;", ["", "barrier.cluster.arrive.relaxed.aligned;"]),
        ("elect.sync %r5|%p7, -1;", ["{ mov.b32 %r5, 0; setp.eq.b32 %p7, 0, 0; }"]),
        ("elect.sync _|%p7, -1;", ["{ setp.eq.b32 %p7, 0, 0; }"]),
        ("atom.acq_rel.gpu.global.add.u32 %r1, [%d1], 1;", [
            "atom.relaxed.gpu.global.add.u32 %r1, [%d1], 1;",
            "atom.acq_rel.cta.global.add.u32 %r1, [%d1], 1;",
        ]),
        ("add.s32 %r1, %r2, %r3;", []),
        ("// bar.sync 0;", []),
    ],
)  # fmt: skip
def test_what_becomes_of_a_statement(statement: str, expected: list[str]) -> None:
    assert [mutant.ptx for mutant in mutants(statement)] == expected


def test_both_halves_of_a_cluster_barrier() -> None:
    text = "barrier.cluster.arrive;\nadd.s32 %r1, %r1, 1;\nbarrier.cluster.wait;\nret;\n"
    both = [mutant.ptx for mutant in mutants(text) if mutant.mutation == "drop with its wait"]
    assert both == ["\nadd.s32 %r1, %r1, 1;\n\nret;\n"]


def test_what_is_noticed_and_by_what(verdicts: list[Verdict]) -> None:
    killers = {verdict.key: verdict.killer for verdict in verdicts}
    assert killers["drop mbarrier.arrive.shared.b64 #0"] == "hang"
    assert killers["count+1 mbarrier.init.shared.b64 #0"] == "hang"
    assert killers["drop mbarrier.init.shared.b64 #0"] == "uninitialised-barrier"
    assert killers["drop mbarrier.try_wait.parity.shared.b64 #0"] in ("shared-race", "uninitialised-read")
    assert killers["drop fence.acq_rel.cta #0"] == ""


def test_a_worker_runs_original_and_mutant(verdicts: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Watched(Small):
        def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
            used.append((ptx == self.ptx, options.strict))
            return super().run(ptx, options, repeat)

    monkeypatch.setattr(workers, "TARGETS", {"watched": Watched()})
    monkeypatch.setattr(workers, "SCHEDULES", {"eager": Options()})
    assert workers._judge(None, "watched", 0, strict=True).killer == verdicts[0].killer
    assert used == [(True, True), (False, True)]


def asked_of_small(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the mutants that a run with these arguments judges."""
    asked = []
    monkeypatch.setattr(command, "TARGETS", {"small": Small()})
    monkeypatch.setattr(command, "judge_all", lambda work, jobs, strict: asked.extend(work) or [])
    monkeypatch.setattr("sys.argv", ["mutation", "--target", "small", *arguments])
    assert command.main() == 0
    return [number for _, number in asked]


def test_every_kth_mutant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Samples of all offsets are disjoint and make up the whole; none is a complete run, which asks for more."""
    samples = [asked_of_small(["--every", "4", "--offset", str(j)], monkeypatch) for j in range(4)]
    assert samples[1] == [1, 5, 9]
    assert sorted(sum(samples, [])) == list(range(10)) == list(range(len(list(mutants(Small.ptx)))))
    for wrong, complaint in (
        (["--every", "0"], "--every 0: at least 1 is needed"),
        (["--every", "3", "--offset", "3"], "--offset 3: 0 to 2 are possible with --every 3"),
        (["--offset", "-1"], "--offset -1: 0 to 0 are possible with --every 1"),
    ):
        with pytest.raises(SystemExit):
            asked_of_small(wrong, monkeypatch)
        assert complaint in capsys.readouterr().err


def test_the_score_leaves_out_equivalent_mutants_and_complains_of_the_rest(verdicts: list[Verdict]) -> None:
    fence = Review("drop", "fence.acq_rel.cta", "*", True, "nothing follows it")
    stale = Review("drop", "no.such.opcode", "*", True, "never")
    survivors = [verdict for verdict in verdicts if verdict.survived]
    gaps = [v for v in survivors if v.opcode != "fence.acq_rel.cta"]
    unreviewed = summarise(verdicts, [])
    assert unreviewed.unreviewed == survivors
    assert unreviewed.score == (len(verdicts) - len(survivors)) / len(verdicts)
    assert any("not reviewed: small: drop fence" in text for text in unreviewed.complaints(least=0, complete=True))

    known = [Review(v.mutation, v.opcode, "*", False, "a gap") for v in gaps]
    summary = summarise(verdicts, [fence, stale, *known])
    assert summary.score == len(summary.killed) / (len(verdicts) - 1)
    complaints = summary.complaints(least=0, complete=True)
    assert complaints == ["matches no survivor any more: drop no.such.opcode at *"]
    assert summary.complaints(least=1.01, complete=False) == [f"the score {summary.score:.1%} is below 101%"]

    wrong = summarise(verdicts, [fence, *known, Review("drop", "mbarrier.arrive.shared.b64", "*", True, "wrongly")])
    assert any(
        "reviewed as equivalent, but killed (hang)" in text for text in wrong.complaints(least=0, complete=False)
    )

    text = markdown(summary, verdicts)
    assert "nothing follows it" in text and f"| small | {len(verdicts)} |" in text
    statuses = {entry["key"]: entry["status"] for entry in as_json(summary, verdicts)["mutants"]}
    assert statuses["drop fence.acq_rel.cta #0"] == "equivalent"
    assert statuses["drop mbarrier.arrive.shared.b64 #0"] == "killed"


def test_verdicts_of_earlier_runs_are_read_back(verdicts: list[Verdict], tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, (verdicts[:3], verdicts[3:])):
        path.write_text(json.dumps(as_json(summarise(part, []), part)))
    assert recorded(paths) == verdicts


def test_recorded_verdicts_of_a_part_are_judged_without_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """An unreviewed survivor fails; that a part is no complete run is known from the mutants of all targets."""
    monkeypatch.setattr(command, "TARGETS", {"small": Small()})
    found = [Verdict("small", mutant.key, mutant.mutation, mutant.opcode, 1, "", "", "", killer="Hang")
             for mutant in mutants(Small.ptx)]  # fmt: skip
    file = tmp_path / "run.json"
    for verdicts, complaint in (
        (found, "matches no survivor any more"),
        ([*found[:-1], dataclasses.replace(found[-1], killer="")], "not reviewed: small"),
        (found[:-1], ""),
    ):
        file.write_text(json.dumps(as_json(summarise(verdicts), verdicts)))
        monkeypatch.setattr("sys.argv", ["mutation", "--recorded", str(file)])
        assert command.main() == int(bool(complaint))
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.quick])
def test_the_unchanged_kernel_is_clean(name: str) -> None:
    """As the mutants are judged: strictly, and twice in a row."""
    instruction_limits(TARGETS[name], {"eager": SCHEDULES["eager"]})


def test_the_place_names_helper_and_role(tmp_path: Path) -> None:
    """Inline assembly counts its lines on from the call, and column 0 stands for the whole kernel."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "load.py").write_text("def run():\n    first()\n    second()\n")
    (folder / "pipes.py").write_text("def wait():\n    pass\n\n\ndef arrive():\n    pass\n")
    ptx = f"""
    .loc 1 1 0
    .loc 1 3 5
    .loc 2 2 5
    // begin inline asm
    .loc 2 6 5
    mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0;
    // end inline asm
    .loc 2 6 5
    mbarrier.arrive.shared.b64 %rd1, [%r1];
    .loc 1 2 5
    bar.sync 0;
    .file 1 "{folder}/load.py"
    .file 2 "{folder}/pipes.py"
    """
    places = {mutant.opcode.split(".")[1]: place_of(ptx, mutant.line, ROLE_FILES) for mutant in mutants(ptx)}
    assert places == {
        "try_wait": "pipes.py:2 (wait) in load.py:3 (run)",
        "arrive": "pipes.py:6 (arrive) in load.py:3 (run)",
        "sync": "load.py:2 (run)",
    }
    assert place_of(ptx, 7) == "pipes.py:2 (wait)"
    assert place_of("bar.sync 0;", 1) == ""
