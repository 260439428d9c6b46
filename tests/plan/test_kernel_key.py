"""The key of a compiled kernel: every field of every problem and configuration is in it, or does not reach the code.

Where a changed field leaves the key as it is, both kernels are compiled and their PTX compared. All such fields are
changed at once, in one kernel, of some bases by day; `make nightly` compares each by itself as well.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.operations.compile import compile_uncached
from cute_kernels.plan import PLANNERS, Plan, make_plan
from tests.nightly import NIGHTLY, by_day

PATCHES = PatchEmbedProblem(m=14 * 37, n=264, k=144, table_rows=14)
OTHER_PATCHES = {
    "m": 14 * 41, "n": 520, "k": 160, "table_rows": 7, "scale_source": "pointer", "table_index": True,
    "row_scale": True, "feature_scale": True, "in_dtype": "uint8", "out_dtype": None,
}  # fmt: skip
PRODUCT = GemmProblem(m=300, n=200, k=256)
OTHER_PRODUCT = {
    "m": 500, "n": 328, "k": 512, "batches": 3, "in_dtype": "float16", "out_dtype": "float32", "bias": True,
    "activation": "silu", "scale_source": None, "row_scale": None, "column_scale": None, "residual": "bfloat16",
    "with_scale": True, "bias_dtype": "float16", "out_scale_source": None,
}  # fmt: skip
NARROW = dataclasses.replace(PRODUCT, in_dtype="float8_e4m3fn", out_dtype="float8_e4m3fn")
OTHER_NARROW = OTHER_PRODUCT | {
    "in_dtype": "uint8", "scale_source": "pointer", "row_scale": True, "column_scale": True,
    "out_scale_source": "pointer",
}  # fmt: skip
PATCHES_80 = dataclasses.replace(PATCHES, in_dtype="bfloat16")
PRODUCT_80 = dataclasses.replace(PRODUCT, in_dtype="float32")
SMALL_80 = {"tile_m": 64, "tile_n": 64, "warps_m": 2, "warps_n": 2, "row_bytes": 64, "stages": 3, "resident_ctas": 1}
OTHER_80 = {
    "tile_m": 128, "tile_n": 128, "warps_m": 4, "warps_n": None, "row_bytes": 128, "stages": 4, "resident_ctas": 2,
}  # fmt: skip
BASES = {
    "patch_embed, sm100": (PATCHES, Sm100PatchEmbedConfig(tile_n=128, stages=3, order="flat"), OTHER_PATCHES, {
        "tile_n": 256, "stages": 4, "epilogue_warps": 4, "tmem_load_width": 16, "epilogue": "bf16x2", "cta_group": 1,
        "table": "row_major", "store_buffers": 2, "stagger_clocks": 0, "snake": False, "order": "position",
        "tile_positions": None,
    }),
    "patch_embed, sm100, position": (
        PATCHES, Sm100PatchEmbedConfig(tile_n=128, order="position", tile_positions=1),
        OTHER_PATCHES | {"table_index": None}, {"tile_positions": 2, "table": None},
    ),
    "patch_embed, sm100, weight on chip, position": (
        PATCHES,
        Sm100ResidentConfig(
            weight="tmem", order="position", tile_rows=64, tile_positions=2, cta_group=1, accumulators=2,
            mma_columns=64, tmem_load_width=16, stages=5, stage_blocks=1,
        ),
        OTHER_PATCHES | {"table_index": None},
        {
            "weight": "smem", "tile_rows": 128, "tile_positions": 4, "cta_group": 2, "accumulators": 1,
            "mma_columns": 32, "tmem_load_width": 32, "stages": 6, "stage_blocks": 2, "epilogue": "bf16x2",
        },
    ),
    "patch_embed, sm100, weight on chip, flat": (
        PATCHES,
        Sm100ResidentConfig(
            weight="smem", order="flat", tile_rows=32, tile_positions=1, cta_group=1, accumulators=2, mma_columns=32,
            tmem_load_width=16, stages=5,
        ),
        OTHER_PATCHES,
        {"order": "position"},
    ),
    "patch_embed, sm90, position": (
        PATCHES, Sm90PatchEmbedConfig(tile_rows=32, stages=4, stage_blocks=1, cluster=1, order="position"),
        OTHER_PATCHES | {"table_index": None}, {
            "tile_rows": 64, "warpgroups": 1, "stages": 3, "stage_blocks": 2, "cluster": 2, "weight": "streamed",
            "order": "flat", "pingpong": False, "epilogue": "bf16x2", "tile_positions": 2,
        },
    ),
    "patch_embed, sm90, flat": (
        PATCHES, Sm90PatchEmbedConfig(tile_rows=32, stages=4, stage_blocks=1, cluster=1, order="flat"),
        OTHER_PATCHES, {},
    ),
    "patch_embed_images, sm90": (
        PatchEmbedImagesProblem(6, 3, 64, 96, 16, 264, table_rows=1),
        Sm90ImagesConfig(
            source="strips", tile_patches=6, tile_images=8, warpgroups=2, cluster=1, stages=3, stage_blocks=1,
            weight="registers",
        ),
        {
            "batch": 9, "channels": 1, "height": 96, "width": 192, "patch": None, "n": 520, "table_rows": 24,
            "in_dtype": None, "channels_last": None, "precision": None, "out_dtype": None,
        },
        {
            "source": None, "tile_patches": 4, "tile_images": 16, "warpgroups": 1, "cluster": 2, "stages": 4,
            "stage_blocks": 2, "pingpong": False, "order": "image", "weight": "streamed",
        },
    ),
    "patch_embed_images, sm90, repacked": (
        PatchEmbedImagesProblem(6, 1, 56, 224, 14, 264, table_rows=1),
        Sm90ImagesConfig(
            source="repack", tile_patches=16, tile_images=2, warpgroups=1, cluster=1, stages=3, stage_blocks=2,
            weight="registers", raw_stages=2,
        ),
        {"batch": 9, "height": 70, "width": 448, "n": 520},
        {"raw_stages": 3},
    ),
    "patch_embed_images, sm90, channels last": (
        PatchEmbedImagesProblem(6, 3, 64, 96, 16, 264, channels_last=True),
        Sm90ImagesConfig(
            source="gather", tile_patches=6, tile_images=8, warpgroups=1, cluster=1, stages=3, stage_blocks=1,
            weight="streamed",
        ),
        {"channels": 4, "channels_last": None, "patch": None, "batch": 9, "height": 96, "width": 192, "n": 520},
        {},
    ),
    "patch_embed_images, sm100": (
        PatchEmbedImagesProblem(6, 1, 64, 96, 16, 264, table_rows=1),
        Sm100ImagesConfig(
            source="strips", tile_patches=6, tile_images=16, cta_group=1, weight="tmem", accumulators=1,
            mma_columns=64, stages=4, stage_blocks=1,
        ),
        {
            "batch": 9, "channels": 2, "height": 96, "width": 192, "patch": None, "n": 520, "table_rows": 24,
            "in_dtype": None, "channels_last": None, "precision": None, "out_dtype": None,
        },
        {
            "source": None, "tile_patches": 5, "tile_images": 24, "cta_group": 2, "weight": "smem", "accumulators": 2,
            "mma_columns": 32, "tmem_load_width": 32, "stages": 5, "stage_blocks": 2, "order": "image",
        },
    ),
    "patch_embed_images, sm90, gather": (
        PatchEmbedImagesProblem(6, 3, 64, 128, 32, 264, "bfloat16", precision="bf16", table_rows=1),
        Sm90GatherConfig(2, 1, 64, 1, 128, 1, stages=2, store_stages=1),
        {
            "batch": 9, "channels": 1, "height": 96, "width": 192, "patch": 16, "n": 520, "table_rows": 8,
            "in_dtype": None, "channels_last": None, "precision": None, "out_dtype": "float16",
        },
        {
            "tile_patches": 4, "tile_rows": 2, "tile_images": 128, "row_patches": 2, "tile_n": 64, "cluster": 2,
            "stages": 3, "store_stages": 2, "pingpong": True, "order": "row",
        },
    ),
    "gemm, sm100": (PRODUCT, Sm100GemmConfig(stages=3), OTHER_PRODUCT, {
        "block_m": 256, "tile_n": 256, "stages": 4, "store_stages": 1, "group_m": 4, "cluster_m": 4,
        "cluster_n": 2, "accumulators": 1,
    }),
    "gemm, sm90": (
        PRODUCT, Sm90GemmConfig(tile_m=128, tile_n=128, stages=3, cluster_m=1, store_stages=1), OTHER_PRODUCT, {
            "tile_m": 256, "tile_n": 64, "stages": 4, "cluster_m": 2, "cluster_n": 2, "pingpong": True,
            "store_stages": 2, "group_m": 4, "split_k": 2, "transposed": None,
        },
    ),
    "gemm, sm90, transposed": (
        PRODUCT, Sm90GemmConfig(tile_m=128, tile_n=128, stages=3, cluster_m=1, store_stages=1, transposed=True),
        OTHER_PRODUCT | {"out_dtype": "float16"}, {"transposed": False},
    ),
    "gemm of 8 bits, sm90": (
        NARROW, Sm90GemmConfig(tile_m=128, tile_n=128, stages=3, cluster_m=1, store_stages=1), OTHER_NARROW, {},
    ),
    "gemm of 8 bits, sm100": (NARROW, Sm100GemmConfig(stages=3, store_stages=1), OTHER_NARROW, {}),
    "gemm of 8 bits, sm80": (
        dataclasses.replace(PRODUCT, in_dtype="int8"), Sm80GemmConfig(**SMALL_80),
        OTHER_NARROW | {"out_dtype": "float16", "out_scale_source": None}, {},
    ),
    "patch_embed, sm80": (
        PATCHES_80, Sm80PatchEmbedConfig(**SMALL_80), OTHER_PATCHES,
        OTHER_80 | {"epilogue": "bf16x2"},
    ),
    "patch_embed_images, sm80": (
        PatchEmbedImagesProblem(6, 3, 64, 96, 16, 264, table_rows=1), Sm80ImagesConfig(**SMALL_80 | {"tile_n": 128}), {
            "batch": 9, "channels": 1, "height": 96, "width": 192, "patch": 32, "n": 520, "table_rows": 24,
            "in_dtype": None, "channels_last": None, "precision": None, "out_dtype": "float16",
        },
        OTHER_80 | {"tile_n": 256, "tile_images": 1, "teams": 2},
    ),
    "gemm, sm80": (
        PRODUCT_80, Sm80GemmConfig(**SMALL_80), OTHER_PRODUCT | {"in_dtype": "bfloat16"},
        OTHER_80 | {"group_m": 4, "rounding": "truncate"},
    ),
    "gemm, sm80, split": (
        PRODUCT_80, Sm80GemmConfig(**SMALL_80 | {"row_bytes": 128}, split_k=2), OTHER_PRODUCT, {"split_k": 4},
    ),
}  # fmt: skip
"""Problem and configuration, and another value of every field; None where there is no other legal one here."""
DAILY = (
    "patch_embed, sm90, position", "patch_embed, sm100, weight on chip, flat",
    "patch_embed_images, sm90, channels last", "gemm, sm90", "gemm of 8 bits, sm90",
)  # fmt: skip
"""Those whose kernels `make test` compiles to compare their PTX."""


def variants(name: str) -> tuple[Plan, dict[str, Plan]]:
    """The plan of a base, and one with another value of each field and of the number of multiprocessors."""
    problem, config, problems, configs = BASES[name]
    found = {
        field: make_plan(dataclasses.replace(problem, **{field: value}), config)
        for field, value in problems.items()
        if value is not None
    }
    found |= {
        field: make_plan(problem, dataclasses.replace(config, **{field: value}))
        for field, value in configs.items()
        if value is not None
    }
    # Sizes of which consequences may be compiled in: another number of K blocks, a table higher than a tile.
    further = {"k": 3 * problem.k} if isinstance(problem, (PatchEmbedProblem, GemmProblem)) else {}
    further |= {"table_rows": 74} if isinstance(problem, PatchEmbedProblem) else {}
    for field, value in further.items():
        found[f"{field}, further"] = make_plan(dataclasses.replace(problem, **{field: value}), config)
    return make_plan(problem, config), found | {"sm_count": make_plan(problem, config, sm_count=8)}


@functools.cache
def ptx(plan: Plan) -> str:
    """Of a kernel that was compiled for this very plan."""
    return compile_uncached(plan).ptx


def test_there_is_another_value_of_every_field():
    """A new field needs one here."""
    for planner in PLANNERS.values():
        for kind in (planner.problem, *planner.kinds):
            fields = {field.name for field in dataclasses.fields(kind)}
            listed: set[str] = set()
            for problem, config, problems, configs in BASES.values():
                listed |= set(problems) if kind is type(problem) else set()
                listed |= set(configs) if kind is type(config) else set()
            assert fields <= listed, f"{kind.__name__}: {', '.join(fields - listed)}"


def fields_of_the_same_key(plan: Plan, changed: dict[str, Plan]) -> list[str]:
    return [field for field, other in changed.items() if other.kernel_key == plan.kernel_key]


@pytest.mark.parametrize("name", BASES)
def test_all_but_sizes_of_launches_is_in_the_key(name):
    """Of launch arguments the key has what the plan says, so that sizes cost no compilation."""
    plan, changed = variants(name)
    named = {field.partition(",")[0] for field in fields_of_the_same_key(plan, changed)}
    sizes_of_launches = {f.name for f in dataclasses.fields(plan.problem) if f.metadata.get("launch_argument")}
    assert sizes_of_launches - {"table_rows"} <= named - {"sm_count"} <= sizes_of_launches and "sm_count" in named


@pytest.mark.parametrize("name", by_day(BASES, DAILY))
def test_what_is_not_in_the_key_does_not_reach_the_code(name):
    plan, changed = variants(name)
    same = fields_of_the_same_key(plan, changed)
    sizes = {}
    for field in same:
        size = field.partition(",")[0]
        if size != "sm_count":
            sizes[size] = getattr(changed[field].problem, size)
    if {"m", "table_rows"} <= set(sizes):
        sizes["m"] = 11 * sizes["table_rows"]
    together = make_plan(dataclasses.replace(plan.problem, **sizes), plan.config, sm_count=8)
    assert together.kernel_key == plan.kernel_key
    assert ptx(together) == ptx(plan)
    if NIGHTLY:
        for field in same:
            assert ptx(changed[field]) == ptx(plan), field


def test_a_replaced_constant_of_a_plan_is_in_the_key():
    """Tests replace them to break kernels on purpose."""
    plan = make_plan(PRODUCT, Sm100GemmConfig())
    assert dataclasses.replace(plan, barrier_bytes=2048).kernel_key != plan.kernel_key
    assert dataclasses.replace(plan, barrier_bytes=1024).kernel_key == plan.kernel_key


@pytest.mark.parametrize("facts", [
    {"column_scale": True}, {"bias": True}, {"bias": True, "bias_dtype": "bfloat16"},
], ids=["column_scale", "bias", "BF16 bias"])  # fmt: skip
def test_how_many_columns_a_load_brings_is_in_the_key(facts):
    """N of whole vectors shares a kernel, any other N has one of its own, whose loads are of fewer columns.

    Threads of SM90's load single columns, for all of a tile's warps.
    """
    most = 8 if "bias_dtype" in facts else 4
    assert len({make_plan(GemmProblem(64, n, 64, **facts), Sm90GemmConfig()).kernel_key for n in (8, 4, 6, 5)}) == 1
    for config in (Sm100GemmConfig(), Sm80GemmConfig()):
        keys = {n: make_plan(GemmProblem(64, n, 64, **facts), config).kernel_key for n in (8, 32, 4, 12, 2, 6, 1, 5)}
        assert keys[8] == keys[32] and keys[4] == keys[12] and keys[2] == keys[6] and keys[1] == keys[5]
        assert len(set(keys.values())) == (4 if most == 8 else 3)
