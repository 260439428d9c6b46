"""The comparison of counts with Nsight Compute: emulated cases, how ncu's output is read, and the table of both."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from bench import archive, counters, gemm_counters, image_counters
from bench import counter_cases as cases
from cute_kernels.config import GemmProblem, Sm100ImagesConfig
from cute_kernels.plan import make_plan
from tests.nightly import by_day

CASES = {case.name: case for case in cases.ptx_cases()}
REQUESTS = cases.CTAS * cases.WARPS
PROFILED = json.loads(archive.read_text(archive.recorded("2026-11-21-h200/counters.json")))["counts"]


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
        ("case_red_global_fours", "global sectors, red", 16),
    ],
)
def test_emulated_cases(name: str, counter: str, per_request: int) -> None:
    assert values(CASES[name])[counter] == per_request * REQUESTS


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_nsight_compute(name: str) -> None:
    """What is read on an H200 for the same PTX, wherever PTX and SASS, or caches, leave nothing open."""
    exact = [counter.name for counter in counters.COUNTERS if counter.exact and counter.name in PROFILED[name]]
    found = values(CASES[name])
    assert len(exact) == 12 and {c: found[c] for c in exact} == {c: PROFILED[name][c] for c in exact}


def test_our_kernel() -> None:
    """Its tensors fit its plan, and what it stores is the output."""
    name = next(iter(cases.CONFIGS["sm_90a"]))
    found = counters.emulate_kernel("sm_90a", name)
    problem = cases.PROBLEM
    assert found["L2 bytes written"] == problem.m * problem.n * 2
    assert found["bank conflicts, st"] == 0


def test_cases_of_every_architecture() -> None:
    """Our kernels have plans, the PTX assembles for the target that the device runs, and counts the same."""
    case = CASES["case_ld_shared_4_stride32"]
    for arch in cases.CONFIGS:
        assert all(cases.plan(arch, name).arch.name == arch for name in cases.CONFIGS[arch])
        assert counters.case_names(arch)[-3:] == list(cases.CONFIGS[arch])
        assert f".target {arch}\n" in case.ptx(arch)
        report = counters.emulate_ptx(case, arch)
        assert report.units.total("wavefronts", "ld.shared") == 32 * REQUESTS
        names = counters.case_names(arch)
        rows = [(name if name.startswith("case_") else cases.KERNEL_NAMES[arch], "1", "2") for name in names]
        assert list(counters.parse_csv(ncu_csv(rows), arch)) == names


@functools.cache
def counted(name: str) -> dict[str, float]:
    """Of a configuration of the dense GEMM: one tile of each pair of a cluster, and two K blocks, are enough."""
    config = gemm_counters.CONFIGS[name]
    rows = 2 * config.block_m * max(1, config.cluster_m // 2)
    problem = dataclasses.replace(gemm_counters.PROBLEM, m=rows, n=config.tile_n * config.cluster_n, k=128)
    return gemm_counters.counts(config, problem)


USUAL = ("Level 7", "`WIDE`, 2 x 2 CTAs")


@pytest.mark.parametrize("name", by_day(gemm_counters.CONFIGS, USUAL))
def test_gemm_counts_are_those_of_the_tile(name: str) -> None:
    """A pair reads (256 + columns) x 32 bytes per MMA and fetches (rows + columns) x 128 bytes per K block."""
    config = gemm_counters.CONFIGS[name]
    rows, columns = 2 * config.block_m, config.tile_n
    found = counted(name)
    assert found["UMMA operand reads"] == pytest.approx((256 + columns) * 32 / 128 / (2 * 256 * columns * 16 / 1e6))
    block = 2 * rows * columns * 64 / 1e6
    assert found["TMA fill"] == pytest.approx((rows + columns) * 128 / 128 / block)
    shared = rows / config.cluster_n + columns / (config.cluster_m // 2)
    assert found["L2 bytes read"] == pytest.approx(shared * 128 / block)
    assert found["MMAs"] == pytest.approx(1e6 / (2 * 256 * columns * 16))
    assert found["TMEM loads"] == pytest.approx(4 / 128 / (2 * 128 / 1e6))


def test_instructions_of_a_k_block() -> None:
    """Twice the MMAs of a K block are about twice the instructions of the warp that issues them."""
    level_8, level_7 = (gemm_counters.k_block_instructions(gemm_counters.CONFIGS[f"Level {i}"]) for i in (8, 7))
    assert level_8["mma"] == int(level_8["mma"]) and 4 < level_8["mma"] < 256
    assert 1.5 < level_7["mma"] / level_8["mma"] < 2.5
    assert level_7["load"] > level_8["load"] > 10


def test_the_default_of_large_problems_does_less_of_everything_than_level_7() -> None:
    """What justifies it: it takes Level 7's place in the chooser without a measurement."""
    assert gemm_counters.CONFIGS["`WIDE`"] == make_plan(GemmProblem(8192, 8192, 8192)).config
    for column, value in counted("Level 7").items():
        assert counted("`WIDE`")[column] <= value, column


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


def test_wavefronts_of_the_kernel_over_images() -> None:
    """Of 128 features x 256 patches: 768 B of each of this CTA's patches come in once and are read once, 2 B go out
    per feature and patch. A single CTA has all patches of its tile, one of a pair half of them."""
    one = Sm100ImagesConfig(cta_group=1, tile_patches=14, tile_images=8)
    counts = image_counters.per_tile(one, images=8, height=16)
    assert counts["TMA fill"] == counts["UMMA operand reads"] == 256 * 768 / 128
    assert counts["staging writes + TMA reads"] == 2 * 128 * 256 * 2 / 128 and not counts["of them bank conflicts"]
    assert counts["TMEM loads"] == 128 * 256 * 4 / 128
    assert counts["sum"] == sum(counts[name] for name in image_counters.COLUMNS[:4])
