"""Counts of the emulator against Nsight Compute on a GPU, and per tile of the SM100 kernel.

    python -m bench.counters emulate EMULATED.json       anywhere; seconds
    python -m bench.counters profile PROFILED.json       on an H100, H200 or B200 with ncu; minutes
    python -m bench.counters table EMULATED.json PROFILED.json
    python -m bench.counters design                      SM100: wavefronts per CTA and tile
    python -m bench.counters images                      SM100 over images: likewise, for as many products
    python -m bench.counters gemm                        SM100 dense GEMM: per FLOP, by configuration

`emulate --arch sm_100a` counts what a B200 is to be compared with. `profile` starts ncu on
`python -m bench.counters launch`, which runs each kernel of `bench/counter_cases.py` once.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import archive, gemm_counters, image_counters
from bench import counter_cases as cases
from bench.configs import arch_of
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.operations.runtime import emulated, gpu
from cute_kernels.plan import make_plan

Counts = dict[str, dict[str, float]]  # case -> counter -> value


@dataclass(frozen=True)
class Counter:
    """One quantity that both sides know.

    Attributes:
        name: what it is.
        emulated: its value from a `cute_kernels.emulator.Report` with units.
        metrics: Nsight Compute's names for it; the first that the installed version knows is taken.
        exact: False where PTX and SASS, or emulated and real caches, need not agree.
    """

    name: str
    emulated: Callable[[Any], float]
    metrics: tuple[str, ...]
    exact: bool = True


def _units(metric: str, *kinds: str) -> Callable[[Any], float]:
    return lambda report: sum(report.units.total(metric, kind) for kind in kinds)


def _issued(*classes: str) -> Callable[[Any], float]:
    return lambda report: sum(
        count for kinds in report.units.instructions.values() for name, count in kinds.items() if name in classes
    )


_PIPE = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_IDEAL = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_ideal"
COUNTERS = (
    Counter("warp instructions", lambda report: report.warp_instructions, ("smsp__inst_executed.sum",), exact=False),
    Counter(
        "ld.shared instructions", _issued("ld.shared"),
        ("smsp__inst_executed_op_shared_ld.sum", "smsp__sass_inst_executed_op_shared_ld.sum"), exact=False,
    ),
    Counter(
        "st.shared instructions", _issued("st.shared"),
        ("smsp__inst_executed_op_shared_st.sum", "smsp__sass_inst_executed_op_shared_st.sum"), exact=False,
    ),
    Counter(
        "ld.global instructions", _issued("ld.global"),
        ("smsp__inst_executed_op_global_ld.sum", "smsp__sass_inst_executed_op_global_ld.sum"), exact=False,
    ),
    Counter("wgmma instructions", _issued("mma"), (
        "smsp__inst_executed_pipe_tensor_op_gmma.sum", "sm__inst_executed_pipe_tensor_op_gmma.sum",
    ), exact=False),
    Counter("shared wavefronts, ld", _units("wavefronts", "ld.shared", "ldmatrix.shared"), (f"{_PIPE}_op_ld.sum",)),
    Counter("shared wavefronts, st", _units("wavefronts", "st.shared", "stmatrix.shared"), (f"{_PIPE}_op_st.sum",)),
    Counter("shared wavefronts, atom", _units("wavefronts", "atom.shared"), (f"{_PIPE}_op_atom.sum",)),
    Counter("shared wavefronts", _units(
        "wavefronts", "ld.shared", "ldmatrix.shared", "st.shared", "stmatrix.shared", "atom.shared"
    ), (f"{_PIPE}.sum",), exact=False),
    Counter("shared wavefronts, ideal", _units(
        "ideal_wavefronts", "ld.shared", "ldmatrix.shared", "st.shared", "stmatrix.shared"
    ), (f"{_IDEAL}.sum",), exact=False),
    Counter("bank conflicts, ld", _units("bank_conflicts", "ld.shared", "ldmatrix.shared"), (
        f"{_CONFLICTS}_op_ld.sum",
    )),
    Counter("bank conflicts, st", _units("bank_conflicts", "st.shared", "stmatrix.shared"), (
        f"{_CONFLICTS}_op_st.sum",
    )),
    Counter("bank conflicts, atom", _units("bank_conflicts", "atom.shared"), (f"{_CONFLICTS}_op_atom.sum",)),
    *(
        Counter(f"global {what}, {op}", _units(what, f"{name}.global"), (
            f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum",
        ))
        for op, name in (("ld", "ld"), ("st", "st"), ("red", "atom"))
        for what in ("requests", "sectors")
    ),
    Counter("global lines, ld", _units("lines", "ld.global"), (
        "l1tex__data_pipe_lsu_wavefronts_mem_lg_cmd_read.sum",
        "l1tex__t_output_wavefronts_pipe_lsu_mem_global_op_ld.sum",
    ), exact=False),
    Counter("L2 bytes read", _units("l2_bytes_read", ""), (
        "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_op_read.sum",
    ), exact=False),
    Counter("L2 bytes written", _units("l2_bytes_written", ""), (
        "lts__t_sectors_srcunit_tex_op_write.sum", "lts__t_sectors_op_write.sum",
    ), exact=False),
    Counter("L2 bytes", lambda report: report.units.total("l2_bytes_read") + report.units.total("l2_bytes_written"),
            ("lts__t_bytes.sum",), exact=False),
)  # fmt: skip
_EXPLORED = ("tma", "gmma", "wavefronts_mem_shared", "wavefronts_mem_lg", "bank_conflicts")
"""Base metrics with one of these in their names are recorded as well: what a unit counts is not documented."""


# --- the emulator ----------------------------------------------------------------------------------------------------


def emulate(arch: str = "sm_90a", progress: Callable[[str], None] = print) -> Counts:
    """Counts of every case in the emulator.

    Args:
        arch: whose PTX and kernels are counted, a key of `cute_kernels.plan.ARCHS`.
        progress: called with a line for each step.
    """
    result = {case.name: _values(emulate_ptx(case, arch)) for case in cases.ptx_cases()}
    progress(f"{len(result)} PTX cases")
    for name in cases.CONFIGS[arch]:
        result[name] = emulate_kernel(arch, name)
        progress(name)
    return result


def emulate_kernel(arch: str, name: str) -> dict[str, float]:
    """Counts of our kernel in one of its configurations."""
    plan = cases.plan(arch, name)
    return _values(emulated.launch(plan, cases.random_tensors(plan, "cpu"), Options(counters=True)))


def emulate_ptx(case: cases.PtxCase, arch: str = "sm_90a") -> Any:
    """The Report of one PTX case."""
    memory = GlobalMemory()
    pointers = []
    for nbytes in (128, cases.GLOBAL_BYTES, cases.OUT_BYTES):
        store = np.zeros(nbytes + cases.ALIGNMENT, np.uint8)
        skip = -store.ctypes.data % cases.ALIGNMENT
        part = store[skip : skip + nbytes]
        memory.register_tensor(part)
        pointers.append(part)
    pointers[0][:] = case.table.view(np.uint8)
    return run(
        case.ptx(arch),
        case.name,
        grid=(cases.CTAS, 1, 1),
        block=(32 * cases.WARPS, 1, 1),
        dynamic_smem=cases.SHARED_BYTES,
        params=cases.launch_bytes(tuple(part.ctypes.data for part in pointers)),
        memory=memory,
        options=Options(counters=True, detectors=False),
    )


def _values(report: Any) -> dict[str, float]:
    return {counter.name: counter.emulated(report) for counter in COUNTERS}


# --- the GPU ---------------------------------------------------------------------------------------------------------


def launch_all() -> None:
    """Runs each case once on the current device, in order (the program that ncu profiles)."""
    from cuda.bindings import driver

    arch = arch_of(torch.cuda.get_device_capability())

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status}")
        return values[0] if values else None

    data = torch.zeros(cases.GLOBAL_BYTES, dtype=torch.uint8, device="cuda")
    out = torch.zeros(cases.OUT_BYTES, dtype=torch.uint8, device="cuda")
    for case in cases.ptx_cases():
        table = torch.from_numpy(case.table.view("int32")).cuda()
        module = call(driver.cuModuleLoadData, case.ptx(arch).encode())
        function = call(driver.cuModuleGetFunction, module, case.name.encode())
        pointers = tuple(tensor.data_ptr() for tensor in (table, data, out))
        arguments = (pointers, (ctypes.c_void_p,) * 3)
        shape = (cases.CTAS, 1, 1, 32 * cases.WARPS, 1, 1, cases.SHARED_BYTES, 0)
        call(driver.cuLaunchKernel, function, *shape, arguments, 0)
        torch.cuda.synchronize()
    for name in cases.CONFIGS[arch]:
        plan = cases.plan(arch, name)
        gpu.launch(plan, cases.random_tensors(plan, "cuda"))
        torch.cuda.synchronize()


def case_names(arch: str = "sm_90a") -> list[str]:
    """Of all cases, in the order of their launches."""
    return [case.name for case in cases.ptx_cases()] + list(cases.CONFIGS[arch])


def profile(ncu: str, arch: str, explore: bool = False) -> dict[str, Any]:
    """Runs ncu on every case, on a device of ``arch``.

    ``explore`` also records what `_EXPLORED` names, in many more passes.

    Returns:
        ``counts`` as `emulate` gives them, ``metrics`` (case -> every metric read) and ``ncu`` (its version).

    Raises:
        RuntimeError: ncu fails, or profiles other kernels than the cases.
    """
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")
    asked = [ncu, "--query-metrics", "--chips", cases.CHIPS[arch]]
    query = subprocess.run(asked, capture_output=True, text=True, check=True)
    wanted = chosen_metrics(query.stdout, explore)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"),
            *("--cache-control", "all", "--kernel-name", "regex:^(case_|patch_embed)"),
            *("--metrics", ",".join(sorted(wanted))),
            *("--log-file", str(log), sys.executable, "-m", "bench.counters", "launch"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        if done.returncode or '"ID"' not in text:
            said = "\n".join(part[-2000:] for part in (text, done.stdout, done.stderr))
            raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    metrics = parse_csv(text, arch)
    return {"ncu": version[-2] if len(version) > 1 else version[0], "counts": as_counts(metrics), "metrics": metrics}


def chosen_metrics(query: str, explore: bool = True) -> set[str]:
    """What to ask for, of the metrics that ``ncu --query-metrics`` lists: name, type, unit, description."""
    rows = [line.split() for line in query.splitlines() if "__" in line.split(" ")[0]]
    known = {row[0] for row in rows}
    wanted = {metric for counter in COUNTERS for metric in counter.metrics if metric.removesuffix(".sum") in known}
    if not explore:
        return wanted
    # Only plain counters have a sum.
    summed = [row[0] for row in rows if len(row) > 1 and row[1] == "Counter" and not row[0].startswith("pmsampling")]
    return wanted | {f"{name}.sum" for name in summed if any(part in name for part in _EXPLORED)}


def as_counts(metrics: Counts) -> Counts:
    """The values of `COUNTERS` per case, where the metrics have them."""
    return {
        case: {counter.name: value for counter in COUNTERS if (value := _first(values, counter)) is not None}
        for case, values in metrics.items()
    }


def _first(values: dict[str, float], counter: Counter) -> float | None:
    for metric in counter.metrics:
        if metric in values:
            return values[metric] * (32 if "sectors" in metric and "bytes" in counter.name else 1)
    return None


def parse_csv(text: str, arch: str = "sm_90a") -> Counts:
    """Metrics per case from ``ncu --csv --page raw``: a header, a row of units, and a row per kernel.

    Raises:
        RuntimeError: other kernels than the cases, in their order.
    """
    header, _units_row, *rows = csv.reader(text[text.index('"ID"') :].splitlines())
    rows = [row for row in rows if len(row) == len(header)]  # ncu adds lines of its own
    names = case_names(arch)
    found = [row[header.index("Kernel Name")].split("(")[0] for row in rows]
    expected = [name if name.startswith("case_") else cases.KERNEL_NAMES[arch] for name in names]
    if found != expected:
        raise RuntimeError(f"ncu profiled {len(found)} kernels, {len(expected)} expected: {found[:3]} ... {found[-3:]}")
    columns = [i for i, name in enumerate(header) if "__" in name and not name.startswith("launch__")]
    result: Counts = {}
    for name, row in zip(names, rows):
        values = {header[i]: row[i].replace(",", "") for i in columns}
        result[name] = {metric: float(value) for metric, value in values.items() if _is_number(value)}
    return result


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- tables ----------------------------------------------------------------------------------------------------------


def table(emulated: Counts, profiled: Counts) -> str:
    """Markdown: per counter the agreement over all PTX cases, every case that differs, and our kernels in full."""
    ptx = [name for name in emulated if name.startswith("case_")]
    lines = ["| counter | cases | equal | largest difference | in case |", "|---|---|---|---|---|"]
    differing = ["| case | counter | emulator | ncu | error |", "|---|---|---|---|---|"]
    kernels = list(differing)
    for counter in COUNTERS:
        pairs = {c: (emulated[c][counter.name], profiled.get(c, {}).get(counter.name)) for c in ptx}
        pairs = {case: pair for case, pair in pairs.items() if pair[1] is not None and any(pair)}
        if pairs:
            worst = max(pairs, key=lambda case: abs(pairs[case][0] - pairs[case][1]))
            equal = sum(a == b for a, b in pairs.values())
            gap = pairs[worst][0] - pairs[worst][1]
            lines.append(f"| {counter.name} | {len(pairs)} | {equal} | {gap:+g} | {f'`{worst}`' if gap else ''} |")
            if counter.exact:
                differing += [_row(case, counter.name, *pair) for case, pair in pairs.items() if pair[0] != pair[1]]
    for case in emulated:
        if case not in ptx:
            for counter in COUNTERS:
                real = profiled.get(case, {}).get(counter.name)
                if real is not None and (real or emulated[case][counter.name]):
                    kernels.append(_row(case, counter.name, emulated[case][counter.name], real))
    parts = ["\n".join(lines)] + ["\n".join(rows) for rows in (differing, kernels) if len(rows) > 2]
    return "\n\n".join(parts)


def _row(case: str, counter: str, emulated: float, real: float) -> str:
    error = f"{(emulated - real) / real:+.1%}" if real else "-"
    return f"| {case} | {counter} | {emulated:,.0f} | {real:,.0f} | {error} |"


_FLAT = Sm100PatchEmbedConfig(order="flat")
_ON_CHIP = Sm100ResidentConfig(weight="tmem", tile_rows=256, cta_group=2)
DESIGNS = {
    "position order": Sm100PatchEmbedConfig(),
    "position order, `bf16x2`": Sm100PatchEmbedConfig(epilogue="bf16x2"),
    "flat order, interleaved table": _FLAT,
    "flat order, interleaved table, `bf16x2`": dataclasses.replace(_FLAT, epilogue="bf16x2"),
    "flat order, row-major table, `bf16x2`": dataclasses.replace(_FLAT, epilogue="bf16x2", table="row_major"),
    "single CTAs, position order": Sm100PatchEmbedConfig(cta_group=1, stages=3),
    "weight in tensor memory: the default of many images": _ON_CHIP,
    "weight in tensor memory, flat order": dataclasses.replace(_ON_CHIP, order="flat", tile_positions=1),
    "weight in shared memory": dataclasses.replace(_ON_CHIP, weight="smem"),
}
"""What `design` compares, by name."""


def design(images: int = 64) -> str:
    """Markdown: 128-byte wavefronts per CTA and 256 x 256 x 768 tile of the SM100 kernel that streams the weight.

    64 images of 196 positions are 49 tiles, in which each alignment of tiles and images occurs once in flat order. A
    weight on chip moves once for these tiles; a pair that has its share of 4736 images has three times as many.
    Instructions are those of the PTX: for an element those of one thread, for a K block those of a CTA's warps.
    """
    columns = (
        *("TMA fill", "UMMA operand reads", "table loads, 128 B lines", "staging writes + reads"),
        *("of them bank conflicts", "TMEM loads", "L2 bytes read"),
        *("epilogue: instructions per element", "load and MMA warps: instructions per K block"),
    )
    lines = [f"| configuration | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, config in DESIGNS.items():
        plan = make_plan(PatchEmbedProblem(images * 196, 256, 768, 196), config, "sm_100a", sm_count=2)
        report = emulated.launch(plan, cases.random_tensors(plan, "cpu"), Options(counters=True, detectors=False))
        total, parts = report.units.total, plan.ctas * plan.tiles
        values = (
            total("wavefronts", "tma.load"),
            total("operand_wavefronts", "mma"),
            total("lines", "ld.global"),
            sum(total("wavefronts", kind) for kind in ("st.shared", "stmatrix", "tma.store", "ld.shared")),
            total("bank_conflicts"),
            total("bytes", "tmem.ld") / 128,
            total("l2_bytes_read"),
        )
        roles = report.by_role
        element = 32 * roles["epilogue"] / (plan.problem.m * plan.problem.n)
        block = (roles["load"] + roles["mma"]) / (parts * plan.k_blocks)
        row = (name, *(f"{value / parts:,.0f}" for value in values), f"{element:.2f}", f"{block:.0f}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    emulating = commands.add_parser("emulate")
    emulating.add_argument("output", type=Path)
    emulating.add_argument("--arch", choices=tuple(cases.CONFIGS), default="sm_90a", help="default: %(default)s")
    profiling = commands.add_parser("profile")
    profiling.add_argument("output", type=Path)
    profiling.add_argument("--ncu", default="ncu", help="default: %(default)s")
    profiling.add_argument("--explore", action="store_true", help="also undocumented metrics, in many more passes")
    comparing = commands.add_parser("table")
    comparing.add_argument("emulated", type=Path)
    comparing.add_argument("profiled", type=Path)
    for name in ("launch", "design", "images", "gemm"):
        commands.add_parser(name)
    arguments = parser.parse_args()
    if arguments.command == "emulate":
        arguments.output.write_text(json.dumps({"counts": emulate(arguments.arch)}, indent=1) + "\n")
    elif arguments.command == "profile":
        import torch

        arch = arch_of(torch.cuda.get_device_capability())
        arguments.output.write_text(json.dumps(profile(arguments.ncu, arch, arguments.explore), indent=1) + "\n")
    elif arguments.command == "launch":
        launch_all()
    elif arguments.command == "design":
        print(design())
    elif arguments.command == "images":
        print(image_counters.table())
    elif arguments.command == "gemm":
        print(gemm_counters.table(), gemm_counters.k_block_table(), sep="\n\n")
    else:
        emulated_counts, profiled = (
            json.loads(archive.read_text(path))["counts"] for path in (arguments.emulated, arguments.profiled)
        )
        print(table(emulated_counts, profiled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
