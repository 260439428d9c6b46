"""The CUDA original's experiments with the patch embed as pairs of configurations here, counted by the emulator.

    python -m bench.experiments            the table of pairs; some minutes. The whole page: bench.experiments_page

A pair differs in what the experiment changed. Counts are per CTA and 128 x 256 outputs with K = 768; instructions and
registers, which depend on the compiler, are not among them. What the original measured is in docs/experiments.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench import counter_cases as cases
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan

Verdict = Literal["yes", "in part", "no"]


def _with(config: Sm100PatchEmbedConfig, **fields: object) -> Sm100PatchEmbedConfig:
    return dataclasses.replace(config, **fields)


_DIRECT = Sm100PatchEmbedConfig(
    epilogue="bf16x2", order="flat", table="row_major", store="direct", stagger_clocks=0, tmem_load_width=32
)
"""The state at 0.700 ms: row-major BF16 table, 32 bytes per thread and store, four stages, five warps."""
_STAGED = _with(_DIRECT, store="coalesced")
"""0.633 and 0.630 ms."""
_BLOCKED = _with(_STAGED, table="blocked")
"""0.579 ms."""
_TMA = _with(_BLOCKED, store="tma")
"""0.532 ms."""
LAST = _with(_TMA, stagger_clocks=80)
"""0.530 ms."""


@dataclass(frozen=True)
class Experiment:
    """One change that the original's notes report.

    Attributes:
        name: its number in the notes, or the change itself.
        before, after: configurations that differ in the change.
        explained: whether the counts alone would have told the direction of the result, and its rough size.
        why: in words.
    """

    name: str
    before: Sm100PatchEmbedConfig
    after: Sm100PatchEmbedConfig
    explained: Verdict
    why: str


EXPERIMENTS = (
    Experiment(
        "pairs of CTAs", _with(_DIRECT, cta_group=1, stages=3, tile_n=128), _with(_DIRECT, tile_n=128), "yes",
        "a quarter less goes through shared memory for operands",
    ),
    Experiment(
        "tile N 128 -> 256", _with(_DIRECT, tile_n=128), _DIRECT, "yes",
        "the rows are loaded and read once for twice the columns",
    ),
    Experiment(
        "F8", _with(_DIRECT, tmem_load_width=16), _DIRECT, "no",
        "half as many loads and waits; the latency of a load, which no count has, decides",
    ),
    Experiment(
        "fifth epilogue warp", _with(_DIRECT, epilogue_warps=4), _DIRECT, "no",
        "the same work in five warps instead of four",
    ),
    Experiment(
        "F6", _with(_DIRECT, stages=6), _DIRECT, "no",
        "stages are buffers, not work",
    ),
    Experiment(
        "staging", _DIRECT, _STAGED, "in part",
        "stores touch a quarter of the lines, at the price of 1,024 wavefronts of staging",
    ),
    Experiment(
        "F10", _STAGED, _with(_STAGED, table_ahead=True), "yes",
        "the same work; the epilogue waits elsewhere",
    ),
    Experiment(
        "F12", _STAGED, _with(_STAGED, tile_n=128, stages=6, epilogue_warps=4), "yes",
        "half again as many operand bytes for the same outputs",
    ),
    Experiment(
        "F13", _STAGED, _BLOCKED, "yes",
        "half of the lines that table loads touch, by far the largest count of a tile",
    ),
    Experiment(
        "F17", _BLOCKED, _with(_BLOCKED, store="direct"), "in part",
        "stores touch four times the lines; everything else falls",
    ),
    Experiment(
        "F22", _with(_BLOCKED, epilogue="f32", table="interleaved"), _with(_BLOCKED, table="interleaved"), "no",
        "half of the table's bytes, which were BF16 there before",
    ),
    Experiment(
        "F24", _BLOCKED, _TMA, "yes",
        "the threads' loads and stores go; what passes through shared memory stays",
    ),
    Experiment(
        "F31", _TMA, LAST, "no",
        "contention of warps in time, of which counts know nothing",
    ),
    Experiment(
        "F32", LAST, _with(LAST, tmem_load_width=16), "in part",
        "twice the loads and waits, the only count that grows",
    ),
    Experiment(
        "F34", LAST, _with(LAST, tmem_load_width=16, tmem_loads=2), "yes", "as many waits as with 32 columns",
    ),
    Experiment(
        "interleaved stores", _TMA, _with(_TMA, store_group=2), "no", "the same stores in fewer groups",
    ),
    Experiment(
        "interleaved table (here)", _TMA, _with(_TMA, table="interleaved"), "yes",
        "less than a third of the lines of F13: most of them full",
    ),
)  # fmt: skip

PROBLEM = PatchEmbedProblem(m=256, n=256, k=768, table_rows=196)


@functools.cache
def counts(config: Sm100PatchEmbedConfig) -> dict[str, float]:
    """Per CTA and 128 x 256 outputs, without what is done once per launch."""
    found = []
    for tiles in (1, 2):
        problem = dataclasses.replace(PROBLEM, m=256 * tiles)
        plan = make_plan(problem, config, "sm_100a", sm_count=config.cta_group)
        report = emulated.launch(plan, cases.random_tensors(plan, "cpu"), Options(counters=True, detectors=False))
        total = report.units.total
        found.append({
            "TMA fill": total("wavefronts", "tma.load"),
            "operand reads": total("operand_wavefronts", "mma"),
            "table requests": total("requests", "ld.global"),
            "table lines": total("lines", "ld.global"),
            "staging": sum(total("wavefronts", kind) for kind in ("st.shared", "ld.shared", "tma.store")),
            "bank conflicts": total("bank_conflicts"),
            "global store requests": total("requests", "st.global"),
            "store lines": total("lines", "st.global"),
            "TMEM loads": total("instructions", "tmem.ld"),
            "TMEM waits": report.by_opcode["tcgen05.wait::ld.sync.aligned"],
        })
    return {name: (found[1][name] - found[0][name]) / 2 for name in found[0]}


Changes = Mapping[str, Sequence[float]]
"""Counts that the change of an experiment changes: before, after."""


def changes(experiment: Experiment) -> dict[str, list[float]]:
    """Of both configurations, counted in the emulator."""
    before, after = counts(experiment.before), counts(experiment.after)
    return {name: [before[name], after[name]] for name in before if before[name] != after[name]}


def row(experiment: Experiment, changed: Changes) -> str:
    """Of the table."""
    found = [f"{name} {before:,g} -> {after:,g}" for name, (before, after) in changed.items()]
    e = experiment
    cells = (e.name, "; ".join(found) or "none", f"{e.explained}: {e.why}")
    return f"| {' | '.join(cells)} |"


def table(counted: Mapping[str, Changes] | None = None) -> str:
    """Markdown, a row per experiment.

    Args:
        counted: `changes` by the name of the experiment; counted anew when None.
    """
    head = ("experiment", "counts that differ here", "do the counts explain it")
    rows = [row(e, changes(e) if counted is None else counted[e.name]) for e in EXPERIMENTS]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


if __name__ == "__main__":
    print(table())
