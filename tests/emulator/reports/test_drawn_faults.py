"""Faults that a generator draws: what a report names of each is judged by a rule that was written before it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator.reports.drawn_faults import HELD_OUT, PROGRAMS, faults, judge
from tests.emulator.reports.planted_causes import report, source_of
from tests.nightly import by_day

#: Of those by which the rows were written: each of another argument.
NAMED = (
    "attention_sm90: wrong stage of v_full (line 71, mbarrier_arrive_and_expect_tx)",
    "chain_sm100: parity of p_empty changes in every turn of the loop (line 133, mbarrier_wait)",
    "chain_sm100: waits for o_full instead of q_full (line 97, mbarrier_wait)",
    "cluster_sums: count of room plus 1 (line 37, mbarrier_init)",
    "cluster_sums: drop arrival at empty (line 59, mbarrier_arrive)",
    "cluster_sums: one turn less (line 51, for)",
    "cluster_sums: drop wait for room (line 61, mbarrier_wait)",
    "double_sm80: drop sync_threads (line 68, sync_threads)",
    "tickets_sm90: parity of told stays (line 83, mbarrier_wait)",
    "tickets_sm90: waits for taken instead of told (line 83, mbarrier_wait)",
    "tickets_sm90: drop wait for taken (line 43, mbarrier_wait)",
    "tickets_sm90: drop wait for free (line 57, mbarrier_wait)",
    "tickets_sm90: arrival without bytes at full (line 59, mbarrier_arrive_and_expect_tx)",
    "tickets_sm90: drop wait for told (line 50, mbarrier_wait)",
    "tickets_sm90: signals told instead of taken (line 76, mbarrier_arrive)",
    "chain_sm100: mask of the own CTA for full (line 93, copy)",
    "chain_sm100: commit at empty of the own CTA alone (line 119, commit)",
    "chain_sm100: signals s_full instead of p_empty (line 120, commit)",
    "chain_sm100: copy signals empty instead of full (line 91, copy)",
    "chain_sm100: other stage (line 91, b_to)",
    "cluster_sums: behind line 62 (line 61, mbarrier_wait)",
    "cluster_sums: count of full plus 1 (line 33, mbarrier_init)",
    "cluster_sums: waits for full instead of empty (line 46, mbarrier_wait)",
    "cluster_sums: waits for room instead of came (line 70, mbarrier_wait)",
    "attention_sm90: drop announcement at v_full (line 71, mbarrier_arrive_and_expect_tx)",
    "attention_sm90: behind line 70 (line 69, mbarrier_wait)",
    "turns_sm90: in front of line 54 (line 58, mbarrier_arrive)",
    "turns_sm90: drop wait for turn (line 53, mbarrier_wait)",
    "turns_sm90: parity of full changes in every turn of the loop (line 49, mbarrier_wait)",
    "relay_sm90: in front of line 62 (line 63, mbarrier_arrive)",
    "relay_sm90: signals filled instead of used (line 66, mbarrier_arrive)",
    "relay_sm90: parity of filled (line 57, mbarrier_wait)",
    "relay_sm90: parity of stored (line 58, mbarrier_wait)",
    "cluster_sums: one turn less (line 53, for)",
    "cluster_sums: copy signals room instead of came (line 64, store_async_dsmem)",
    "tickets_sm90: wrong stage of told (line 66, mbarrier_wait)",
    "tickets_sm90: drop wait for told (line 83, mbarrier_wait)",
    "attention_sm90: one turn less (line 86, for)",
    "halves_sm90: one turn less (line 47, for)",
    "halves_sm90: drop announcement at loaded (line 43, mbarrier_arrive_and_expect_tx)",
)
_BY_DAY = NAMED[1::3]


@pytest.mark.parametrize("program", by_day([*PROGRAMS, *HELD_OUT], [*PROGRAMS[:2], *HELD_OUT]))
def test_programs_without_a_fault(program: str, tmp_path: Path) -> None:
    assert report(source_of(program), program, tmp_path) is None


@pytest.mark.parametrize("name", by_day(NAMED, _BY_DAY))
def test_the_mend_is_named(name: str) -> None:
    program, _, rest = name.partition(": ")
    (fault,) = (each for each in faults(program) if each.name == rest)
    outcome, help_ = judge(fault)
    assert outcome == "named", help_
