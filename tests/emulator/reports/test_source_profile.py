"""Counts by source line: closed forms of PTX with known lines, and a CuTe DSL program whose lines add up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.commands import cli
from cute_kernels.emulator import Options
from cute_kernels.emulator.isa.ptx.source_lines import SourcePlace, own_places
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.reports.source_profile import Profile, profiles
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

PROGRAM = Path(__file__).parents[3] / "docs" / "examples" / "bias_add.py"
HEAD = '.file 1 "/a/kernel.py"\n.file 2 "/b/kernel.py"\n'
BODY = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d1, [p0];
    .loc 1 5 1
    shl.b32 %r3, %r1, 3; add.u32 %r4, %r2, %r3;
    .loc 1 6 1
    st.shared.u32 [%r4], %r1;
    .loc 2 6 1
    st.shared.u32 [%r4+4], %r1;
    .loc 1 7 9
    st.shared.u32 [%r4+512], %r1;
    .loc 1 20 0
    mov.u32 %r5, 0;
    .loc 1 9 3
    // begin inline asm
    {
    .loc 1 10 3
    bar.sync 0;
    .loc 1 11 3
    ld.shared.u32 %r6, [%r2];
    }
    // end inline asm
    .loc 1 12 1, function_name $L__info, inlined_at 1 30 2
    mul.wide.u32 %d2, %r1, 16; add.s64 %d2, %d1, %d2; st.global.u32 [%d2], %r6;
    .loc 1 13 1
    ret;"""


def profile_of(text: str, **shape: tuple[int, int, int]) -> Profile:
    report = launch(text, aligned(np.zeros(1024, np.int32)), options=Options(counters=True, detectors=False), **shape)
    (profile,) = profiles([(text, "k", report.units)])
    return profile


def test_each_line_has_what_it_did() -> None:
    text = module(BODY, parameters=1, head=HEAD)
    profile = profile_of(text, grid=(3, 1, 1), block=(64, 1, 1))
    assert (profile.launches, profile.ctas, profile.activities) == (
        1, 3, {"warp 0": "global store", "warp 1": "global store"},
    )  # fmt: skip
    warps = 6
    found = {
        place and (place.path, place.line): {column: count for column, count in line.counts.items() if count}
        for place, line in profile.lines.items()
    }
    # Lanes at 8 bytes from each other: 32 words lie in 16 banks, which takes 2 wavefronts where 1 is the least. The
    # three stores differ in nothing but their line, and the emulator performs them at once.
    store = {"instructions": warps, "shared_wavefronts": 2 * warps, "excess_wavefronts": warps, "bank_conflicts": warps}
    assert found == {
        None: {"instructions": 4 * warps},  # before the first .loc, and the line of the kernel as a whole
        ("/a/kernel.py", 5): {"instructions": 2 * warps},
        ("/a/kernel.py", 6): store,
        ("/b/kernel.py", 6): store,
        ("/a/kernel.py", 7): store,
        ("/a/kernel.py", 9): {"instructions": 2 * warps, "shared_wavefronts": warps},
        ("/a/kernel.py", 12): {
            "instructions": 3 * warps, "global_sectors": 16 * warps, "global_bytes": 128 * warps,
        },
        ("/a/kernel.py", 13): {"instructions": warps},
    }  # fmt: skip
    assert profile.lines[SourcePlace("/a/kernel.py", 9)].units["wait.bar"] == {"times": 3}  # one warp of each CTA
    table = profile.table()
    hot = {place and place.line for place, line in profile.lines.items() if table.hot(line.counts)}
    assert hot == {None, 5, 6, 7, 9, 12}  # 13 has 1 of 16 instructions


def test_two_launches_of_a_kernel_are_one_profile() -> None:
    text = module(BODY, parameters=1, head=HEAD)
    options = Options(counters=True, detectors=False)
    units = [
        launch(text, aligned(np.zeros(1024, np.int32)), grid=(ctas, 1, 1), options=options).units for ctas in (1, 2)
    ]
    both, other = profiles([(text, "k", units[0]), (text + "\n", "k", units[0]), (text, "k", units[1])])
    assert (both.launches, both.ctas, other.launches, other.ctas) == (2, 3, 1, 1)
    assert both.total == Counter({column: 3 * count for column, count in other.total.items()})


def test_texts_without_columns_have_lines() -> None:
    body = "\n.loc 1 4 0\nmov.u32 %r1, 0;\n.loc 1 0 0\nmov.u32 %r2, 0;\nret;\n"
    text = module(body, parameters=0, head='.file 1 "/a/kernel.cu"')
    places = dict(zip(text.splitlines(), own_places(text)))
    assert places["mov.u32 %r1, 0;"] == SourcePlace("/a/kernel.cu", 4) and places["mov.u32 %r2, 0;"] is None


def test_this_packages_caller_of_the_compiler_is_no_source() -> None:
    body = ".loc 2 89 23\nmov.u32 %r1, 0;\n.loc 1 4 1\nmov.u32 %r2, 0;\nret;\n"
    text = module(body, parameters=0, head='.file 1 "/a/kernel.py"\n.file 2 "/a/cute_kernels/dsl/programs.py"')
    places = dict(zip(text.splitlines(), own_places(text)))
    assert places["mov.u32 %r1, 0;"] is None and places["mov.u32 %r2, 0;"] == SourcePlace("/a/kernel.py", 4)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, list]:
    """What the command prints and writes, and the trace's events, for a program that is not this package's."""
    folder = tmp_path_factory.mktemp("profile")
    output, trace = folder / "profile.json", folder / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *items, **_: printed.append(" ".join(map(str, items))))
        arguments = ["--profile", "--profile-json", str(output), "--trace", str(trace), "--roles", "add_bias:load=4"]
        assert cli.main(["emulate", "--arch", "sm_90a", *arguments, str(PROGRAM)]) == 0
    return "\n".join(printed), json.loads(output.read_text()), json.loads(trace.read_text())["traceEvents"]


def test_lines_of_a_program_add_up(profiled: tuple[str, dict, list]) -> None:
    """The reference is a run without any of it: instructions of `Report`, and what the kernel has to move."""
    (kernel,) = profiled[1]["kernels"]
    with capture("sm_90a", Options(counters=True)) as session:
        assert run_program(str(PROGRAM), [], session, pytest.fail) == 0
    reports = [each.report for each in session.launches]
    lines = kernel["lines"]
    assert kernel["launches"] == len(reports) == 2
    for column, count in kernel["total"].items():
        assert sum(line[column] for line in lines) == count, column
    assert kernel["total"]["instructions"] == sum(report.warp_instructions for report in reports)
    units: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for kind, metrics in line["units"].items():
            units.update({(kind, metric): count for metric, count in metrics.items()})
    expected: Counter[tuple[str, str]] = Counter()
    for report in reports:
        for _, kind, metric, count in report.units.rows():
            expected[kind, metric] += count
    assert +units == +expected
    # Two launches read and write 112 x 32 floats by TMA, and each of 7 x 4 warps reads 32 floats of the bias.
    assert kernel["total"]["global_bytes"] == 2 * (2 * 112 * 32 * 4 + 7 * 4 * 128)
    assert kernel["total"]["global_sectors"] * 32 == kernel["total"]["global_bytes"]  # all of it whole sectors, once


def test_lines_of_a_program_are_the_ones_that_do_it(profiled: tuple[str, dict, list]) -> None:
    source = PROGRAM.read_text().splitlines()
    by_text = {line["text"]: line for line in profiled[1]["kernels"][0]["lines"] if line["line"]}
    for text, line in by_text.items():
        assert source[line["line"] - 1].strip() == text and Path(line["file"]).name == PROGRAM.name

    def only(kind: str) -> str:
        (text,) = [text for text, line in by_text.items() if any(each.startswith(kind) for each in line["units"])]
        return text

    assert only("tma.load").startswith("cute.copy(load,")
    assert only("tma.store").startswith("cute.copy(store,")
    assert only("st.shared") == only("ld.global") == "sy[row, column] = sx[row, column, stage] + bias[column]"
    # Inline assembly of several lines, whose own line numbers LLVM counts on: two launches, 7 tiles, 4 warps or 1.
    waits = {text.split(",")[0]: line for text, line in by_text.items() if text.startswith("cute.arch.mbarrier_wait")}
    assert set(waits) == {"cute.arch.mbarrier_wait(empty + stage", "cute.arch.mbarrier_wait(full + stage"}
    assert set(waits["cute.arch.mbarrier_wait(full + stage"]["by_role"]) == {f"warp {n}" for n in range(4)}
    assert set(waits["cute.arch.mbarrier_wait(empty + stage"]["by_role"]) == {"load"}


def test_the_table_stands_beside_the_source(profiled: tuple[str, dict, list]) -> None:
    out, document, _ = profiled
    (kernel,) = document["kernels"]
    rows = out[out.index("profile of ") :].splitlines()
    assert rows[0] == "profile of add_bias: 2 launches, 4 CTAs" and kernel["name"] == "add_bias"
    busiest = max((line for line in kernel["lines"] if line["line"]), key=lambda line: line["instructions"])
    (row,) = [row for row in rows if row.endswith(busiest["text"])]
    total = kernel["total"]
    assert row.split()[:5] == [
        ">", f"{100 * busiest['instructions'] / total['instructions']:.1f}", f"{busiest['instructions']:,}",
        f"{busiest['shared_wavefronts']:,}", f"{busiest['global_sectors']:,}",
    ]  # fmt: skip
    assert rows[-1].split() == [
        "100.0", *(f"{count:,}" for count in total.values() if count), "total",
    ]  # fmt: skip


def test_a_timeline_names_roles(profiled: tuple[str, dict, list]) -> None:
    names = {e["args"]["name"] for e in profiled[2] if e["name"] == "thread_name" and e["pid"] == 1}
    assert {"warp 0 TMA store", "warp 1 compute", "warp 2 compute", "warp 3 compute", "warp 4 load"} <= names
