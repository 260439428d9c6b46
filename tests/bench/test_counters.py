"""The comparison of counts with Nsight Compute: emulated cases, how ncu's output is read, and the table of both."""

from __future__ import annotations

import pytest

from bench import counter_cases as cases
from bench import counters

CASES = {case.name: case for case in cases.ptx_cases()}
REQUESTS = cases.CTAS * cases.WARPS


def values(case: cases.PtxCase) -> dict[str, float]:
    report = counters.emulate_ptx(case)
    return {counter.name: counter.emulated(report) for counter in counters.COUNTERS}


@pytest.mark.parametrize(
    "name, counter, per_request",
    [
        ("case_ld_shared_4_stride32", "shared wavefronts, ld", 32),
        ("case_ld_shared_8_stride1", "shared wavefronts, ld", 2),
        ("case_ld_shared_16_same", "shared wavefronts, ld", 2),
        ("case_st_shared_16_stride2", "bank conflicts, st", 4),
        ("case_st_shared_4_odd", "shared wavefronts, st", 1),
        ("case_ldmatrix_x4_128", "shared wavefronts, ld", 32),
        ("case_stmatrix_x2_144", "bank conflicts, st", 0),
        ("case_atom_shared_same", "shared wavefronts, atom", 32),
        # Besides the access itself, every warp loads 4 sectors of addresses and stores 4 of results.
        ("case_ld_global_4_stride32", "global sectors, ld", 32 + 4),
        ("case_st_global_16_stride1", "global sectors, st", 16 + 4),
        ("case_ld_global_2_same", "global sectors, ld", 1 + 4),
        ("case_red_global_fours", "global sectors, red", 4),
    ],
)
def test_emulated_cases(name: str, counter: str, per_request: int) -> None:
    assert values(CASES[name])[counter] == per_request * REQUESTS


def test_our_kernel() -> None:
    """Its tensors fit its plan, and what it stores is the output."""
    name = next(iter(cases.SM90_CONFIGS))
    found = counters.emulate_sm90(name)
    problem = cases.SM90_PROBLEM
    assert found["L2 bytes written"] == problem.m * problem.n * 2
    assert found["bank conflicts, st"] == 0


def test_names_are_unique_and_counters_have_metrics() -> None:
    assert len(CASES) == len(cases.ptx_cases())
    assert len({counter.name for counter in counters.COUNTERS}) == len(counters.COUNTERS)
    assert all(counter.metrics for counter in counters.COUNTERS)


def ncu_csv(rows: list[tuple[str, str, str]]) -> str:
    header = '"ID","Process ID","Kernel Name","launch__grid_size","smsp__inst_executed.sum","lts__t_bytes.sum"'
    lines = ["==PROF== Connected", header, '"","","","","inst","byte"']
    lines += [f'"{i}","77","{name}","4","{a}","{b}"' for i, (name, a, b) in enumerate(rows)]
    return "\n".join([*lines, "==WARNING== Note: Running with unmodified GPU clocks"]) + "\n"


def test_ncu_output() -> None:
    names = counters.case_names()
    rows = [(n if n.startswith("case_") else "patch_embed_sm90a_0", "1,234", "n/a") for n in names]
    metrics = counters.parse_csv(ncu_csv(rows))
    assert list(metrics) == names
    assert all(found == {"smsp__inst_executed.sum": 1234.0} for found in metrics.values())
    with pytest.raises(RuntimeError, match="expected"):
        counters.parse_csv(ncu_csv(rows[1:]))
    with pytest.raises(RuntimeError, match="expected"):
        counters.parse_csv(ncu_csv([rows[1], rows[0], *rows[2:]]))


def test_metrics_are_chosen_by_what_ncu_knows() -> None:
    query = """Device NVIDIA H200 (gh100)
----------------------- ------------ --------
Metric Name             Metric Type  Metric Unit  Metric Description
lts__t_sectors_op_read  Counter      sector       # of LTS sectors for reads
smsp__inst_executed     Counter      inst         # of warp instructions executed
sm__pipe_gmma_ratio     Ratio        %            not a count
sm__inst_gmma_new       Counter      inst         what this unit counts is to be found out
"""
    assert counters.chosen_metrics(query) == {
        "lts__t_sectors_op_read.sum",
        "smsp__inst_executed.sum",
        "sm__inst_gmma_new.sum",
    }


def test_metrics_become_counts() -> None:
    """The first known metric counts; sectors that stand for bytes have 32."""
    metrics = {
        "a": {"lts__t_sectors_op_read.sum": 10.0, "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 7.0},
        "b": {"lts__t_sectors_op_read.sum": 10.0, "lts__t_sectors_srcunit_tex_op_read.sum": 9.0},
        "c": {"lts__t_bytes.sum": 5.0, "unknown.sum": 1.0},
    }
    assert counters.as_counts(metrics) == {
        "a": {"L2 bytes read": 320.0, "global sectors, ld": 7.0},
        "b": {"L2 bytes read": 288.0},
        "c": {"L2 bytes": 5.0},
    }


def test_table() -> None:
    conflicts, issued = "bank conflicts, ld", "warp instructions"
    emulated = {
        "case_a": {counter.name: 0.0 for counter in counters.COUNTERS} | {conflicts: 8.0},
        "case_b": {counter.name: 0.0 for counter in counters.COUNTERS} | {conflicts: 6.0},
        "sm90 default": {counter.name: 0.0 for counter in counters.COUNTERS} | {issued: 110.0},
    }
    profiled = {"case_a": {conflicts: 8.0}, "case_b": {conflicts: 4.0}, "sm90 default": {issued: 100.0}}
    text = counters.table(emulated, profiled)
    assert f"| {conflicts} | 2 | 1 | +2 | `case_b` |" in text
    assert f"| case_b | {conflicts} | 6 | 4 | +50.0% |" in text
    assert f"| sm90 default | {issued} | 110 | 100 | +10.0% |" in text
    assert f"| case_a | {conflicts}" not in text
