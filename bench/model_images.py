"""The models of time for kernels over images, and for the choice between designs: part of `python -m bench.model`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import archive
from bench.configs import parse_first
from cute_kernels.config import (
    PatchEmbedImagesProblem,
    Sm90ImagesConfig,
)
from cute_kernels.plan import ARCHS, make_plan, predict

# --- images on an H200 -----------------------------------------------------------------------------------------------

RECORDED = tuple(
    archive.recorded(f"2026-11-22-h200/images-{name}.json")
    for name in ("few", "chain", "gathered", "b32-tiles", "gathered-last")
)
"""Launches of the kernel that multiplies int8; no fit has any of them."""

FEW_IMAGES = 128
"""Up to which the time in a CUDA graph is the launch's, and not that of a burst, which has the gaps between them."""


@dataclass(frozen=True)
class TimedImages:
    """A configuration of a kernel over images on an H200.

    Attributes:
        what: patches and layout of the images.
        images: how many.
        default: whether the configuration is what the problem gets.
        measured, modelled: microseconds.
    """

    what: str
    images: int
    default: bool
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


def check_images() -> list[TimedImages]:
    """Every recorded launch of the kernel that reads int8 images, beside the model."""
    return [timed for path in RECORDED for timed in _timed(path)]


def _timed(path: Path) -> Iterator[TimedImages]:
    for entry in json.loads(archive.read_text(path))["cases"]:
        case = entry["case"]
        grid = case["side"] // case["patch"]
        problem = PatchEmbedImagesProblem(
            case["images"], 3, case["side"], case["side"], case["patch"], case["n"], table_rows=grid * grid,
            channels_last=case["channels_last"],
        )  # fmt: skip
        for peer in entry["peers"]:
            if peer["reason"] or not peer["name"].startswith("cute_kernels") or not peer["detail"].startswith("source"):
                continue
            settings = peer["detail"].replace(", ", ",").replace(" ", "=").replace("True", "true")
            config = parse_first(settings.replace("False", "false"), (Sm90ImagesConfig,))
            prediction = predict(make_plan(problem, config, "sm_90a", sm_count=ARCHS["sm_90a"].sm_count))
            bursts = [1e3 * run["ms"] for run in peer["runs"] if run["mode"] == "burst"]
            graph = (peer["cost"] or {}).get("graph")
            time = graph if graph and case["images"] <= FEW_IMAGES else statistics.median(bursts)
            what = f"patches of {case['patch']}" + (", channels last" if case["channels_last"] else "")
            yield TimedImages(
                what, case["images"], peer["name"] == "cute_kernels", time, prediction.microseconds
            )


def images_table(checked: list[TimedImages]) -> str:
    """Markdown: default configurations, and a line about all of them."""
    lines = ["| images | | measured, us | model, us | error |", "|---|---|---|---|---|"]
    defaults = {(c.what, c.images): c for c in checked if c.default}
    lines += [
        f"| {c.images:,} | {c.what} | {c.measured:,.1f} | {c.modelled:,.1f} | {c.error:+.1%} |"
        for c in sorted(defaults.values(), key=lambda c: (c.what, c.images))
    ]
    errors = np.abs([c.error for c in checked])
    lines.append(
        f"\nAll {len(errors)} timed configurations: error {np.median(errors):.1%} in the median, {errors.max():.1%} at "
        "the most."
    )
    lines.append(f"\n{picks(checked)}")
    return "\n".join(lines)


def picks(checked: list[TimedImages]) -> str:
    """How the configuration that the model puts first did, where several of few images were timed in one run."""
    several: dict[int, list[TimedImages]] = {}
    for timed in checked:
        if timed.images <= FEW_IMAGES:
            several.setdefault(timed.images, []).append(timed)
    longer = {
        images: min(all_, key=lambda c: c.modelled).measured / min(c.measured for c in all_) - 1
        for images, all_ in sorted(several.items())
    }
    counts = {len(all_) for all_ in several.values()}
    return (
        f"Of the {'/'.join(map(str, sorted(counts)))} configurations timed at {', '.join(map(str, longer))} images the "
        f"one that the model puts first took {', '.join(f'{share:.1%}' for share in longer.values())} longer than the "
        "fastest."
    )
