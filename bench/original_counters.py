"""The CUDA original's profile on a B200 against the emulator's counts for the same design, instruction by instruction.

The original's notes have a profile by Nsight Compute of two of its states, at [928256, 768] x [768, 768]^T: 21,756
tiles of 128 x 256 per CTA on 148 SMs. Both are configurations of the SM100 kernel here, which has its rows, its table
and its stores. Every count is a number for each tile and one for the launch, so that a small problem is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import counter_cases as cases
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan

SECTOR_BYTES = 32
CTA_TILES, CTAS = 21_756, 148
"""10,878 tiles of 256 x 256 for pairs of CTAs; the multiprocessors of a B200."""

_ROWS = {"epilogue": "bf16x2", "order": "flat", "table": "row_major", "stagger_clocks": 0}
CONFIGS = {
    "staging": Sm100PatchEmbedConfig(**_ROWS, store="coalesced"),
    "st.global.v8": Sm100PatchEmbedConfig(**_ROWS, store="direct"),
}
"""The two profiled states, 0.633 and 0.700 ms in the notes, as configurations of the kernel here."""


def _total(metric: str, *kinds: str) -> Callable[[Any], int]:
    return lambda units: sum(units.total(metric, kind) for kind in kinds)


def _excess(units: Any) -> int:
    """Sectors of loads beyond those that their bytes would fill."""
    return units.total("sectors", "ld.global") - units.total("bytes", "ld.global") // SECTOR_BYTES


COUNTS: dict[str, Callable[[Any], int]] = {
    "shared store instructions": _total("requests", "st.shared"),
    "shared load instructions": _total("requests", "ld.shared"),
    "shared wavefronts": _total("wavefronts", "ld.shared", "st.shared"),
    "global store instructions": _total("requests", "st.global"),
    "excess sectors of global loads": _excess,
}
"""What the profile names, from the emulator's unit counts."""


@dataclass(frozen=True)
class Profiled:
    """One number of the profile.

    Attributes:
        variant, count: of `CONFIGS` and `COUNTS`.
        total: as the notes have it.
        digits: significant digits of it; 0: all.
    """

    variant: str
    count: str
    total: int
    digits: int = 0

    @property
    def per_tile(self) -> int:
        """Per CTA and tile; what is left belongs to the launch, or to the rounding of the notes."""
        return round(self.total / CTA_TILES) if self.digits else self.total // CTA_TILES

    @property
    def per_launch(self) -> int:
        return self.total - self.per_tile * CTA_TILES


PROFILE = (
    Profiled("staging", "shared store instructions", 2_784_916),
    Profiled("staging", "shared load instructions", 3_481_626),
    Profiled("staging", "shared wavefronts", 22_279_698),
    Profiled("staging", "global store instructions", 3_480_960),
    Profiled("staging", "excess sectors of global loads", 44_560_000, digits=4),
    Profiled("st.global.v8", "shared store instructions", 148),
    Profiled("st.global.v8", "shared load instructions", 666),
    Profiled("st.global.v8", "shared wavefronts", 1_554),
    Profiled("st.global.v8", "global store instructions", 1_392_384),
    Profiled("st.global.v8", "excess sectors of global loads", 44_560_000, digits=4),
)
"""Of the audit and the experiment log."""


def counted(config: Sm100PatchEmbedConfig, tiles: int) -> dict[str, int]:
    """`COUNTS` of one pair of CTAs that works on so many tiles of 256 x 256, of one K block."""
    plan = make_plan(PatchEmbedProblem(256 * tiles, 256, 128, 196), config, "sm_100a", sm_count=2)
    tensors = cases.random_tensors(plan, "cpu")
    units = emulated.launch(plan, tensors, Options(counters=True, detectors=False)).units
    return {name: count(units) for name, count in COUNTS.items()}


def per_tile_and_cta(config: Sm100PatchEmbedConfig) -> dict[str, tuple[float, float]]:
    """Of each count: per CTA and tile, and what a CTA adds once per launch."""
    one, two = counted(config, 1), counted(config, 2)
    return {name: ((two[name] - one[name]) / 2, (2 * one[name] - two[name]) / 2) for name in COUNTS}


def table() -> str:
    """Markdown: the profile beside the emulator's counts."""
    found = {name: per_tile_and_cta(config) for name, config in CONFIGS.items()}
    lines = [
        "| state | count | profile | per CTA tile there | here | left over per CTA there | here |",
        "|---" * 7 + "|",
    ]
    for row in PROFILE:
        tile, cta = found[row.variant][row.count]
        total = f"{row.total / 1e6:.2f} million" if row.digits else f"{row.total:,}"
        left = "rounded" if row.digits else f"{row.per_launch / CTAS:g}"
        lines.append(
            f"| {row.variant} | {row.count} | {total} | {row.per_tile:,} | {tile:,g} | {left} | {cta:g} |"
        )
    return "\n".join(lines)
