"""The models of time: fits and checks them, and writes the tables of docs/model.md.

    python -m bench.model    # the fit of B200's costs, the validation of both models, modelled times of SM100's designs

B200: the variants of the patch embed whose times the notes of the CUDA original give, by the work that plans of this
package counted when they had all of its stores. The fit is non-negative least squares on relative errors; "unseen" is
what the model says of a variant that was left out of the fit, with those that do the same work by the counts.

H200: the models of patches and of the GEMM, beside launches of shapes that their fits (`bench.choices`) have not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import pearsonr, spearmanr

from bench import archive, choices, choices_fit, choices_images
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.plan import b200, gemm_sm90, make_plan, patches_sm90, predict

HEADLINE = PatchEmbedProblem(4736 * 196, 768, 768, 196)

@dataclass(frozen=True)
class Variant:
    """A variant of the CUDA original: its time in the notes, and the work of its busiest CTA.

    Attributes:
        name: the step or experiment, as docs/experiments.md has it.
        milliseconds: at the headline size.
        work: as plans of this package counted it that had such stores and tables.
    """

    name: str
    milliseconds: float
    work: b200.TileWork


def _work(columns: int, operand_bytes: int, lines: int, waits: int, partial_lines: int = 0) -> b200.TileWork:
    """Work of a tile of so many columns: all 256 x 768 of the headline's in half as many tiles as of 128."""
    return b200.TileWork(
        tiles=147 * 256 // columns, mma_clocks=12.0 * columns, operand_bytes=operand_bytes, lines=lines, waits=waits,
        columns=columns, memory_bytes=2_139_592_704, partial_lines=partial_lines
    )


_DIRECT_16, _DIRECT_32 = _work(256, 196_608, 6_144, 16, 2_048), _work(256, 196_608, 6_144, 8, 2_048)
"""Rows of the table read where they stand, threads' own stores; loads of 16 and of 32 columns of tensor memory."""
_STAGED, _STAGED_128 = _work(256, 196_608, 5_632, 8), _work(128, 147_456, 2_816, 4)
"""Padded staging, coalesced stores."""
_LAST = _work(256, 196_608, 3_072, 8)
"""TMA stores, a blocked table."""
VARIANTS = (
    Variant("single CTAs, 128 columns", 1.050, _work(128, 196_608, 3_072, 8, 1_024)),
    Variant("pairs, 128 columns", 0.920, _work(128, 147_456, 3_072, 8, 1_024)),
    Variant("pairs, 256 columns", 0.764, _DIRECT_16),
    Variant("loads of 32 columns (F8)", 0.764, _DIRECT_32),
    Variant("every warp polls (F7)", 0.743, _DIRECT_32),
    Variant("5 epilogue warps", 0.722, _DIRECT_32),
    Variant("5 stages (F6)", 0.715, _DIRECT_32),
    Variant("4 stages (F6)", 0.700, _DIRECT_32),
    Variant("padded staging, coalesced stores", 0.630, _STAGED),
    Variant("table loaded one step ahead (F10)", 0.630, _STAGED),
    Variant("two loads of 16 columns in flight (F1)", 0.664, _STAGED),
    Variant("128 columns, 4 stages (F12)", 0.763, _STAGED_128),
    Variant("128 columns, 5 stages (F12)", 0.765, _STAGED_128),
    Variant("128 columns, 6 stages (F12)", 0.702, _STAGED_128),
    Variant("blocked table (F13)", 0.579, _work(256, 196_608, 3_584, 8)),
    Variant("swizzled staging, TMA stores (F24)", 0.532, _LAST),
    Variant("warps 50 clocks apart (F31)", 0.531, _LAST),
    Variant("warps 80 clocks apart (F31)", 0.530, _LAST),
    Variant("warps 200 clocks apart (F31)", 0.532, _LAST),
    Variant("loads of 16 columns (F32)", 0.586, _work(256, 196_608, 3_072, 16)),
    Variant("two loads of 16 columns in flight (F34)", 0.531, _LAST),
)
"""Those whose work can be counted, but for one thing: in the first four of the notes one warp polls and wakes the
others by bar.sync, which no field says. Of F1 and the staged steps the notes' last time (8-fold unrolling) is taken."""


# --- B200 ------------------------------------------------------------------------------------------------------------


def fit(variants: Sequence[Variant]) -> b200.UnitClocks:
    """Costs that make the sum of relative errors' squares least, none of them negative."""
    clocks = np.array([_clocks_of_a_tile(variant) for variant in variants])
    rows = np.array([b200.amounts(variant.work) for variant in variants], dtype=float)
    costs, _ = nnls(rows / clocks[:, None], np.ones(len(variants)))
    names = [cost for _, cost in b200.PARTS.values()]
    return b200.UnitClocks(**{name: float(f"{cost:.3g}") for name, cost in zip(names, costs, strict=True)})


def _clocks_of_a_tile(variant: Variant) -> float:
    launch = 1e3 * variant.milliseconds - b200.LAUNCH_MICROSECONDS
    return launch * b200.CLOCKS_PER_MICROSECOND / variant.work.tiles


@dataclass(frozen=True)
class Checked:
    """A variant beside what the model says of it.

    Attributes:
        fitted: milliseconds by the costs in use.
        unseen: by costs that were fitted without it and without those that do the same work.
    """

    variant: Variant
    fitted: float
    unseen: float

    @property
    def error(self) -> float:
        return self.unseen / self.variant.milliseconds - 1


def check(variants: Sequence[Variant] = VARIANTS) -> list[Checked]:
    """Every variant, with a fit from which it was left out, and with it all that do the same work by the counts."""
    result = []
    for variant in variants:
        others = fit([other for other in variants if other.work != variant.work])
        fitted, unseen = (b200.predict(variant.work, costs).microseconds / 1e3 for costs in (b200.FITTED, others))
        result.append(Checked(variant, fitted, unseen))
    return result


def correlations(checked: Sequence[Checked]) -> tuple[float, float]:
    """Of the unseen times with the notes' times: Pearson's and of ranks, Spearman's."""
    times = [entry.variant.milliseconds for entry in checked]
    unseen = [entry.unseen for entry in checked]
    return float(pearsonr(unseen, times)[0]), float(spearmanr(unseen, times)[0])


# --- SM90 on an H200 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A sustained launch of a drawn shape: configuration, by what its modelled clocks are divided, microseconds, the
    model's."""

    config: Any
    scale: float
    time: float
    predicted: float


def launches(shapes: Iterable[choices_fit.Timed], clocks_per_microsecond: float) -> list[list[Launch]]:
    """Of each shape, of every candidate."""
    return [
        [Launch(config, predicted * clocks_per_microsecond / time, time, predicted)
         for config, time in shape.times["sustained"].items() for predicted in [shape.modelled(config)]]
        for shape in shapes
    ]  # fmt: skip


def check_gemm() -> tuple[list[list[Launch]], list[list[Launch]]]:
    """Launches by shape: of those that a fit has seen, and of those that none has."""
    seen: list[choices_fit.Timed] = []
    unseen: list[choices_fit.Timed] = []
    for name in ("choices*.csv", "older.csv", "after-wide*.csv", "after-narrow*.csv"):
        for shape in choices.read(archive.expand(archive.recorded(f"2026-11-29-h200/{name}"))):
            kept = name.startswith("after") or (name != "older.csv" and choices_fit.held_out(shape.problem))
            (unseen if kept else seen).append(shape)
    return launches(seen, gemm_sm90.CLOCKS_PER_MICROSECOND), launches(unseen, gemm_sm90.CLOCKS_PER_MICROSECOND)


def check_patches() -> list[list[Launch]]:
    """Launches of models of patches that no fit has seen: those that were kept out, and those drawn afterwards."""
    shapes = [s for s in choices_images.read(choices_images.RECORDED) if choices_fit.held_out(s.problem)]
    return launches([*shapes, *choices_images.read(choices_images.AFTER)], patches_sm90.CLOCKS_PER_MICROSECOND)


def ratio_errors(unseen: Iterable[Sequence[Launch]]) -> tuple[np.ndarray, np.ndarray]:
    """How far the model's ratio of two configurations' times of one shape is off, the larger over the smaller one less
    1: of pairs that differ in one field, and of all."""
    one, every = [], []
    for shape in unseen:
        fields = [vars(each.config).items() for each in shape]
        for a, b in itertools.combinations(range(len(shape)), 2):
            modelled, timed = (getattr(shape[a], name) / getattr(shape[b], name) for name in ("predicted", "time"))
            every.append(max(modelled / timed, timed / modelled) - 1)
            if type(shape[a].config) is type(shape[b].config) and len(fields[a] ^ fields[b]) == 2:
                one.append(every[-1])
    return np.array(one), np.array(every)


def ratio_text(unseen: Iterable[Sequence[Launch]]) -> str:
    """Errors of ratios within a shape."""
    one, every = ratio_errors(unseen)
    return (
        f"ratios of two configurations: {np.quantile(one, 0.9):.0%} off at the 90th percentile of {len(one):,} pairs "
        f"that differ in one field, {np.quantile(every, 0.9):.0%} of all {len(every):,}"
    )


def unseen_text(unseen: Sequence[Sequence[Launch]], long: float = math.inf) -> str:
    """Errors of a model, of shapes that were left out of the fit; ``long``: microseconds that tell two ranges apart."""
    every = [each for shape in unseen for each in shape]
    errors = np.array([abs(each.predicted / each.time - 1) for each in every])
    is_long = np.array([each.predicted >= long for each in every])
    ranges = [f"{np.quantile(errors[~is_long], 0.9):.0%}"]
    if is_long.any():
        ranges = [f"{ranges[0]} below {long} us", f"{np.quantile(errors[is_long], 0.9):.0%} from there on"]
    shapes = [[(each.time, each.predicted) for each in shape] for shape in unseen]
    ranks = [spearmanr(*zip(*shape, strict=True))[0] for shape in shapes if len(shape) > 5]
    return (
        f"{len(every):,} sustained launches of {len(unseen)} shapes that no fit has seen: error "
        f"{np.median(errors):.0%} in the median, {errors.max():.0%} at the most; at the 90th percentile "
        f"{' and '.join(ranges)}; correlation of ranks within a shape {np.median(ranks):.2f} in the median"
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def b200_table(checked: Sequence[Checked]) -> str:
    """Markdown: a row for all variants that the model gives one time."""
    groups: dict[tuple[float, float], list[Checked]] = {}
    for entry in checked:
        groups.setdefault((entry.fitted, entry.unseen), []).append(entry)
    lines = ["| variants | notes, ms | model, ms | unseen, ms | error |", "|---|---|---|---|---|"]
    for (fitted, unseen), group in groups.items():
        names = "; ".join(entry.variant.name for entry in group)
        times = _range([entry.variant.milliseconds for entry in group], "{:.3f}")
        errors = _range([entry.error for entry in group], "{:+.1%}")
        lines.append(f"| {names} | {times} | {fitted:.3f} | {unseen:.3f} | {errors} |")
    pearson, rank = correlations(checked)
    worst = max(abs(entry.error) for entry in checked)
    distinct = len({entry.fitted for entry in checked})
    lines.append(
        f"\nUnseen: correlation {pearson:.3f}, of ranks {rank:.3f}; largest error {worst:.1%}. The "
        f"{len(checked)} variants have {distinct} modelled times: designs are ranked, not settings\nof one."
    )
    return "\n".join(lines)


def _range(values: Sequence[float], form: str) -> str:
    """The least and the largest value, or the only one."""
    return " to ".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


CUBLAS_MS = 0.365
"""The FP8 product alone at the headline size, in the notes."""

DESIGNS = {
    "weight streamed, rows one after the other": Sm100PatchEmbedConfig(order="flat"),
    "weight streamed, images at positions": Sm100PatchEmbedConfig(order="position"),
    "weight in shared memory": Sm100ResidentConfig(weight="smem"),
    "weight in tensor memory": Sm100ResidentConfig(weight="tmem"),
}
"""Of the SM100 patch embed: what is left open is chosen for the problem."""


def designs_table() -> str:
    """Markdown: modelled microseconds at the headline size and what they consist of."""
    columns = ("modelled, us", *b200.PARTS)
    lines = [f"| design | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, config in DESIGNS.items():
        prediction = predict(make_plan(HEADLINE, config, "sm_100a"))
        parts = (prediction.parts.get(part, 0.0) for part in b200.PARTS)
        lines.append(f"| {name} | {' | '.join(f'{value:.0f}' for value in (prediction.microseconds, *parts))} |")
    return "\n".join(lines)


def plain_product() -> str:
    """What the model says of the streamed kernel without a table, beside what the notes time of cuBLAS."""
    plan = make_plan(dataclasses.replace(HEADLINE, table_rows=0), Sm100PatchEmbedConfig(), "sm_100a")
    return f"the product alone: {predict(plan).microseconds / 1e3:.2f} ms modelled, cuBLAS {CUBLAS_MS} ms in the notes"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    costs = fit(VARIANTS)
    print(", ".join(f"{name}={value}" for name, value in dataclasses.asdict(costs).items()), end="\n\n")
    print(b200_table(check()), end="\n\n")
    print(designs_table(), plain_product(), sep="\n\n", end="\n\n")
    patches, gemm = check_patches(), check_gemm()[1]
    print(unseen_text(patches), ratio_text(patches), sep="; ", end="\n\n")
    print(unseen_text(gemm, gemm_sm90.LONG), ratio_text(gemm), sep="; ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
