"""Configurations of the kernel over images for the tests on a GPU, by architecture, each with its channels."""

from __future__ import annotations

from cute_kernels.config import ImagesConfig, Sm90ImagesConfig, Sm100ImagesConfig

SM90: tuple[tuple[ImagesConfig, int], ...] = (
    (Sm90ImagesConfig(order="image"), 3),
    (Sm90ImagesConfig(pingpong=False), 3),
    (Sm90ImagesConfig(stage_blocks=1), 3),
    (Sm90ImagesConfig(stages=2), 3),
    (Sm90ImagesConfig(stages=2, stage_blocks=1, order="image"), 3),
    (Sm90ImagesConfig(cluster=1), 3),
    (Sm90ImagesConfig(warpgroups=1), 3),
    (Sm90ImagesConfig(warpgroups=3, tile_patches=7, tile_images=16, cluster=1, stages=3), 1),
    (Sm90ImagesConfig(tile_patches=1), 3),
    (Sm90ImagesConfig(tile_patches=9), 3),
    (Sm90ImagesConfig(tile_patches=2, tile_images=64), 3),
    (Sm90ImagesConfig(weight="streamed"), 3),
    (Sm90ImagesConfig(weight="streamed", tile_patches=16, tile_images=1, warpgroups=1, cluster=1), 3),
    (Sm90ImagesConfig(weight="streamed", tile_patches=14, tile_images=16, warpgroups=2, cluster=2), 3),
)

_PAIR = {"cta_group": 2, "tile_patches": 14, "tile_images": 16}

SM100: tuple[tuple[ImagesConfig, int], ...] = (
    (Sm100ImagesConfig(**_PAIR), 3),
    (Sm100ImagesConfig(**_PAIR, order="image"), 3),
    (Sm100ImagesConfig(**_PAIR, stage_blocks=1), 3),
    (Sm100ImagesConfig(**_PAIR, mma_columns=64), 3),
    (Sm100ImagesConfig(**_PAIR, mma_columns=224, stages=2), 3),
    (Sm100ImagesConfig(**_PAIR, weight="smem"), 3),
    (Sm100ImagesConfig(**_PAIR, weight="smem", accumulators=1, mma_columns=128, stage_blocks=1), 1),
    (Sm100ImagesConfig(cta_group=1, tile_patches=14), 3),
    (Sm100ImagesConfig(cta_group=1, tile_patches=16, tile_images=1), 3),
    (Sm100ImagesConfig(cta_group=1, tile_patches=9, weight="smem", stage_blocks=1), 2),
    (Sm100ImagesConfig(tile_patches=8, tile_images=32, tmem_load_width=32), 3),
    (Sm100ImagesConfig(tile_patches=1), 3),
    (Sm100ImagesConfig(cta_group=1, tile_patches=7), 3),
    (Sm100ImagesConfig(**_PAIR, stages=3), 3),
)

SELECTIONS = {"sm_90a": SM90, "sm_100a": SM100}
