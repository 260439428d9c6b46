"""A table of several runs: the last run of a case counts, and ratios stay inside of a run."""

from __future__ import annotations

import pytest

from bench.cases import Case
from bench.overview import behind, by_images, collect, main, missing, report
from bench.peers import OURS
from bench.results import CaseResult, PeerResult, Results, to_json
from bench.timing import Protocol, Run


def peer(name: str, scope: str, burst: float, sustained: float) -> PeerResult:
    runs = [Run("burst", 0, 5, burst), Run("sustained", 0, 100, sustained)]
    return PeerResult(name, scope, runs=runs)


def run(cases: dict[tuple[int, int], tuple[PeerResult, ...]], date: str = "today") -> Results:
    results = [CaseResult(Case("m", images, s, 768, 768, images), list(peers)) for (s, images), peers in cases.items()]
    return Results(date, "python -m bench", {"cute_kernels source": "abc"}, Protocol(), results)


EARLIER = run(
    {
        (196, 8): (
            peer(OURS, "complete", 4.0, 8.0), peer("a", "complete", 3.0, 12.0), peer("g", "GEMM only", 1.0, 1.0),
        ),
        (196, 1): (peer(OURS, "complete", 2.0, 2.0), peer("a", "complete", 3.0, 2.0)),
    }
)  # fmt: skip
LATER = run({(196, 8): (peer(OURS, "complete", 2.0, 5.0), peer("b", "complete", 3.0, 4.0))}, "tomorrow")


def test_the_last_run_of_a_case_counts() -> None:
    rows = collect([EARLIER, LATER])
    assert [(row.result.case.images, row.run) for row in rows] == [(1, 1), (8, 2)]
    assert rows[1].ratios("burst") == {"b": 1.5}


def test_a_peer_that_is_as_fast_is_not_beaten_and_a_bare_gemm_is_no_complete_peer() -> None:
    rows = collect([EARLIER])
    assert behind(rows, "burst") == [("m/196 x 8", "a", 0.75)]
    assert behind(rows, "sustained") == [("m/196 x 1", "a", 1.0)]


def test_the_report_holds_both_tables_and_the_counts() -> None:
    text = report([EARLIER, LATER])
    assert "| m/196 x 8 | 2 | 2.0000 | - | 1.50 |" in text and "| m/196 x 8 | 2 | 5.0000 | - | 0.80 |" in text
    assert "burst: ahead of every complete peer in 2 of 2." in text
    assert "sustained: ahead of every complete peer in 0 of 2; m/196 x 1: a 1.000; m/196 x 8: b 0.800." in text


def test_peers_that_were_not_timed_are_counted() -> None:
    """Case 8 is the later run's, which has no peer a; a peer with a reason instead of times was not timed either."""
    rows = collect([EARLIER, LATER])
    assert missing(rows) == {"a": ["m/196 x 8"], "b": ["m/196 x 1"]}
    failed = run({(196, 1): (peer(OURS, "complete", 1.0, 1.0), PeerResult("c", "complete", reason="no package"))})
    assert missing(collect([failed])) == {"c": ["m/196 x 1"]}
    assert missing(collect([EARLIER])) == {}, "a GEMM alone is no complete peer"
    text = report([EARLIER, LATER])
    assert "Complete peers not timed, in cases of 2: a in 1, b in 1; none of these in 0." in text
    lines = by_images(rows).splitlines()
    assert lines[2:] == ["| 1 | 1 | 0 | 1 | 1.500 | 1.000 |", "| 8 | 1 | 1 | 0 | 1.500 | 0.800 |"]


def test_the_order_of_the_files_does_not_matter(tmp_path, capsys) -> None:
    """Later is what the date says, not what stands last on the command line."""
    files = [tmp_path / "b.json", tmp_path / "a.json"]
    for path, results in zip(files, (EARLIER, LATER), strict=True):
        path.write_text(to_json(results))
    main([str(path) for path in files])
    text = capsys.readouterr().out
    main([str(path) for path in reversed(files)])
    assert capsys.readouterr().out == text and "| m/196 x 8 | 2 | 2.0000 |" in text


def test_a_case_without_our_times_is_refused() -> None:
    broken = run({(196, 1): (PeerResult(OURS, "complete", reason="broken"), peer("a", "complete", 1.0, 1.0))})
    with pytest.raises(ValueError, match="run 1, m/196 x 1"):
        collect([broken])
