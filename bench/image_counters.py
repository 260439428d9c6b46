"""What the SM100 kernel over images does per tile, in units that its kernel over rows is counted in, too."""

from __future__ import annotations

from dataclasses import replace

from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.emulator import Options
from cute_kernels.operations import registry
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import ARCHS, make_plan
from cute_kernels.plan.images_sm100 import Sm100ImagesPlan

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)

CONFIGS = {
    "the default": ("int8", None),
    "weight in shared memory": ("int8", Sm100ImagesConfig(weight="smem", tile_patches=14, tile_images=16, cta_group=2)),
    "single CTAs": ("int8", Sm100ImagesConfig(cta_group=1, tile_patches=14, tile_images=8)),
}
"""By what they differ from the default at 4736 images of 224 x 224, 768 features: precision and tunables, None for the
default. """

COLUMNS = (
    "TMA fill", "UMMA operand reads", "global loads, 128 B lines", "staging writes + TMA reads", "sum",
    "of them bank conflicts", "TMEM loads", "L2 bytes read",
)  # fmt: skip

TILE_COLUMNS = 256
"""Patches of the tile of 256 x 256 x 768 per pair that the kernel over rows has."""


def per_tile(
    config: Sm100ImagesConfig | None, images: int, height: int = 224, precision: str = "int8"
) -> dict[str, float]:
    """Counts of `COLUMNS` per CTA and 256 patches of 768 pixels, averaged over a launch on one pair.

    192 images of 224 x 224 are what one of 24 pairs has of 4736; what is done once per launch (the weight) or once per
    row of patches (the table) counts as often as it does there.
    """
    headline = replace(HEADLINE, precision=precision)
    config = config or make_plan(headline, None, "sm_100a").config
    features = 2 * Sm100ImagesPlan(headline, config, ARCHS["sm_100a"], 2).features
    rows = height // HEADLINE.patch * HEADLINE.grid_width
    problem = replace(headline, batch=images, height=height, n=features, table_rows=rows)
    plan = make_plan(problem, config, "sm_100a", sm_count=2)
    report = emulated.launch(plan, registry.random_operands(plan), Options(counters=True, detectors=False))
    total = report.units.total
    values = [
        total("wavefronts", "tma.load"),
        total("operand_wavefronts", "mma"),
        total("lines", "ld.global"),
        total("wavefronts", "stmatrix") + total("wavefronts", "tma.store"),
    ]
    values += [sum(values), total("bank_conflicts"), total("bytes", "tmem.ld") / 128, total("l2_bytes_read")]
    tiles = plan.tiles * plan.feature_groups * plan.ctas * plan.columns / TILE_COLUMNS
    return {name: value / tiles for name, value in zip(COLUMNS, values, strict=True)}


def table(images: int = 192) -> str:
    """Markdown, a row for each of `CONFIGS`."""
    lines = [f"| `patch_embed_images` | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, (precision, config) in CONFIGS.items():
        counts = per_tile(config, images, precision=precision)
        lines.append(f"| {' | '.join((name, *(f'{value:,.0f}' for value in counts.values())))} |")
    return "\n".join(lines)
