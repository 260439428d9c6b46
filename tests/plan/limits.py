"""Every limit that the plans know: what is legal at the limit, and what is refused one unit beyond.

The numbers are those of the CUDA C++ programming guide (technical specifications per compute capability), of the PTX
ISA, and of arithmetic that the comments give. Nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedProblem,
    Sm90GemmConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.plan import ARCHS, PLANNERS
from cute_kernels.plan.layer_norm import LayerNormScaleProblem, plan_layer_norm_scale
from cute_kernels.plan.patchify import PatchifyProblem, plan_patchify

MakePlan = Callable[[], Any]

SMEM_BYTES = 232_448
"""227 KiB: maximum shared memory per thread block of compute capabilities 9.0 and 10.0 (programming guide)."""

TMA_ROWS = 2_147_483_392
"""2^31 - 256: TMA coordinates are signed 32-bit (PTX ISA, cp.async.bulk.tensor), and a tile of 256 rows begins before
the end of the tensor."""

TMA_BYTES = 2_147_483_520
"""2^31 - 128: the same for a K block of 128 elements of one byte."""

TMA_GEMM = 2_147_482_624
"""2^31 - 1024: the same for the largest cluster of the dense GEMM, 2 x 512 rows."""


@dataclass(frozen=True)
class Limit:
    """One limit: a plan that reaches it, one that is a unit beyond, and what the refusal says."""

    what: str
    at: MakePlan
    beyond: MakePlan
    message: str


def _plan(problem: Any, arch: str, config: Any, sm_count: int | None, hardware: dict[str, int]) -> Any:
    """As `make_plan`, on hardware with other limits."""
    planner = next(planner for planner in PLANNERS.values() if planner.problem is type(problem))
    planner.check(problem)
    limits = replace(ARCHS[arch], **hardware)
    return planner.plan(problem, config, limits, limits.sm_count if sm_count is None else sm_count)


def smem(nbytes: int) -> dict[str, int]:
    """Hardware with so many bytes of shared memory for a CTA."""
    return {"sm_smem_bytes": nbytes + CTA_SMEM_BYTES}


def embed(arch: str, config: Any = None, *, sm_count: int | None = None, hardware: Any = (), **sizes: Any) -> MakePlan:
    """A patch embed of 4736 images of 196 positions, or of other sizes."""
    problem = PatchEmbedProblem(**{"m": 928_256, "n": 768, "k": 768, "table_rows": 196} | sizes)
    return partial(_plan, problem, arch, config, sm_count, dict(hardware))


def gemm(arch: str, config: Any = None, *, sm_count: int | None = None, hardware: Any = (), **sizes: Any) -> MakePlan:
    """A dense GEMM of 4096^3, or of other sizes."""
    problem = GemmProblem(**{"m": 4096, "n": 4096, "k": 4096} | sizes)
    return partial(_plan, problem, arch, config, sm_count, dict(hardware))


def patchify(**sizes: Any) -> MakePlan:
    """Four images of 224 x 224 in patches of 16, or others."""
    problem = {"batch": 4, "channels": 3, "height": 224, "width": 224, "patch": 16} | sizes
    return partial(lambda: plan_patchify(PatchifyProblem(**problem), ARCHS["sm_90a"]))


def layer_norm(**sizes: Any) -> MakePlan:
    """The pass over rows behind a LayerNorm: 280 of 6912 pixels, or others."""
    problem = {"m": 280, "k": 6912} | sizes
    return partial(lambda: plan_layer_norm_scale(LayerNormScaleProblem(**problem), ARCHS["sm_90a"]))


E90, E100, G90, G100 = Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, Sm90GemmConfig, Sm100GemmConfig
SMALL90 = E90(tile_rows=16, warpgroups=1, stages=2, stage_blocks=1, cluster=1)
STREAMED90 = E90(tile_rows=64, stages=2, stage_blocks=1, cluster=1, weight="streamed")


def shared_memory() -> Iterator[Limit]:
    """Barriers 1,024 B, stages, store buffers; to the byte on hardware that has exactly so much."""
    for what, make, config, need, fit in (
        # x: 128 rows, weight: half of 256 rows, of 128 B each: 32,768 a stage. Staging: 128 rows x 256 x 2 B.
        ("embed sm_100a", partial(embed, "sm_100a"), E100(stages=4), 1_024 + 4 * 32_768 + 65_536, 3),
        # x: 128 rows x 2 blocks of 128 B. Staging: 128 rows x 128 B of two warpgroups.
        ("embed sm_90a", partial(embed, "sm_90a"), E90(stages=6), 1_024 + 6 * 32_768 + 32_768, 5),
        # a: 128 rows, b: half of 128 rows. Staging: 4 warps x 2 x 32 rows of 128 B.
        ("gemm sm_100a", partial(gemm, "sm_100a"), G100(stages=8), 1_024 + 8 * 24_576 + 32_768, 7),
        # a: 128 rows, b: 256 rows. Staging: 8 warps x 2 x 16 rows of 128 B.
        ("gemm sm_90a", partial(gemm, "sm_90a"), G90(stages=4), 1_024 + 4 * 49_152 + 32_768, 3),
    ):
        yield Limit(
            f"{what}: shared memory to the byte",
            make(config, hardware=smem(need)),
            make(config, hardware=smem(need - 1)),
            f"stages = {config.stages}:? .*{need:,} B of shared memory, the limit is {need - 1:,} B; .*value: {fit}$",
        )
    # 56 stages of 4,096 B, 2,048 B of staging and the barriers are all of the 232,448 B.
    exact = replace(SMALL90, stages=56, stage_blocks=2)
    refused = f"236,544 B of shared memory, the limit is {SMEM_BYTES:,} B; nearest legal value: 56"
    yield Limit("embed sm_90a: all of it", embed("sm_90a", exact), embed("sm_90a", replace(exact, stages=57)), refused)
    for tile_n, most in ((128, 8), (256, 5)):  # 1,024 + 8 x 24,576 + 32,768 = 1,024 + 5 x 32,768 + 65,536 = 230,400
        at, beyond = (embed("sm_100a", E100(tile_n=tile_n, stages=most + more)) for more in (0, 1))
        yield Limit(f"embed sm_100a: tile_n={tile_n}", at, beyond, f"limit is {SMEM_BYTES:,} B; .*value: {most}$")
    # Room for two stages, and for one byte less, where three were asked for.
    two = 1_024 + 2 * 32_768 + 32_768
    yield Limit(
        "embed sm_90a: two stages",
        embed("sm_90a", E90(stages=2), hardware=smem(two)),
        embed("sm_90a", E90(stages=3), hardware=smem(two)),
        r"^stages = 3: .*nearest legal value: 2$",
    )
    yield Limit(
        "embed sm_90a: a smaller stage",
        embed("sm_90a", E90(stages=2), hardware=smem(two)),
        embed("sm_90a", E90(stages=3), hardware=smem(two - 1)),
        r"^stage_blocks = 2: .*two stages have to fit; nearest legal value: 1$",
    )
    two = 1_024 + 2 * 49_152 + 32_768
    yield Limit(
        "gemm sm_90a: two stages",
        gemm("sm_90a", G90(stages=2), hardware=smem(two)),
        gemm("sm_90a", G90(stages=3), hardware=smem(two)),
        r"^stages = 3: .*nearest legal value: 2$",
    )
    yield Limit(
        "gemm sm_90a: fewer store buffers",
        gemm("sm_90a", G90(stages=2), hardware=smem(two)),
        gemm("sm_90a", G90(stages=3), hardware=smem(two - 1)),
        r"^store_stages = 2: .*two stages have to fit; nearest legal value: 1$",
    )
    narrow = G90(64, 64, 2, 1, store_stages=1)
    yield Limit(
        "gemm sm_90a: slices finish the rows of whole warps",
        gemm("sm_90a", replace(narrow, split_k=4)),
        gemm("sm_90a", replace(narrow, split_k=8)),
        "^split_k = 8: .*of the 4 consumer warps; nearest legal value: 4$",
    )
    yield Limit(
        "gemm sm_90a: registers of one warpgroup",
        gemm("sm_90a", replace(narrow, tile_n=176)),
        gemm("sm_90a", replace(narrow, tile_n=192)),
        "^tile_n = 192: .*limit is 128; nearest legal value: 176$",
    )
    transposed = replace(narrow, transposed=True)
    yield Limit(
        "gemm sm_90a: transposed outputs",
        gemm("sm_90a", transposed, residual="float16"),
        gemm("sm_90a", transposed, out_dtype="float32"),
        "^transposed = True:? .*out_dtype is float32.*nearest legal value: False$",
    )
    yield Limit(
        "gemm sm_90a: transposed residuals",
        gemm("sm_90a", replace(transposed, tile_n=144)),
        gemm("sm_90a", transposed, residual="float32"),
        "^transposed = True:? .*residual is float32.*nearest legal value: False$",
    )
    many = G90(256, 96, 2, 1, store_stages=6)
    yield Limit(
        "gemm sm_90a: barriers of a residual",
        gemm("sm_90a", many, out_dtype="float32", residual="float32"),
        gemm("sm_90a", replace(many, tile_m=128, tile_n=112, pingpong=True, store_stages=14), residual="bfloat16"),
        "^store_stages = 14: .*a residual .*nearest legal value: 7$",
    )
    # Partial sums of three slices are 2 warps x 3 x 16 rows x 64 columns x 4 B = 24,576 B, beside the barriers, stages
    # of 24,576 B and 16,384 B of staging.
    split = G90(128, 64, 7, 1, store_stages=1, split_k=4)
    yield Limit(
        "gemm sm_90a: partial sums",
        gemm("sm_90a", split),
        gemm("sm_90a", replace(split, stages=8)),
        r"^stages = 8: .*238,592 B of shared memory.*nearest legal value: 7$",
    )
    at, beyond = (patchify(channels=1, height=1, patch=1, width=width) for width in (SMEM_BYTES, SMEM_BYTES + 1))
    yield Limit("patchify: shared memory to the byte", at, beyond, f"{SMEM_BYTES + 1:,} B of .*value: {SMEM_BYTES}$")
    # 16 rows of 14,528 pixels of one byte are 232,448 B.
    at, beyond = (patchify(channels=1, height=16, width=width) for width in (14_528, 14_544))
    yield Limit("patchify: a row of patches", at, beyond, "232,704 B of shared memory, .* 232,448 B; .*value: 14528$")


def registers() -> Iterator[Limit]:
    """Weight fragments 16 per K block, accumulators half of the rows, 32 for addressing; setmaxnreg's 240, 232, 160."""
    for warpgroups, k, rows, limit in ((1, 12 * 128, 32, 240), (2, 12 * 128, 16, 232), (3, 6 * 128, 64, 160)):
        config = replace(SMALL90, warpgroups=warpgroups, tile_rows=rows)
        needed = k // 8 + rows // 2 + 32
        assert needed == limit
        yield Limit(
            f"embed sm_90a: registers of {warpgroups} warpgroups",
            embed("sm_90a", config, k=k),
            embed("sm_90a", replace(config, tile_rows=rows + 16), k=k),
            f"make {needed + 8}, the limit with {warpgroups} warpgroups? is {limit}; nearest legal value: {rows}$",
        )
    yield Limit(  # 13 blocks: 208 of weight + 8 + 32 = 248
        "embed sm_90a: resident weight",
        embed("sm_90a", SMALL90, k=12 * 128),
        embed("sm_90a", SMALL90, k=13 * 128 - 16),  # 208 + 8 + 32 of 240: 16 rows are the fewest
        r"^weight = 'registers':? .*make 248, the limit with 1 warpgroup is 240; nearest legal value: 'streamed'$",
    )
    # 65,536 registers for 512 threads are 128 each until setmaxnreg: 96 of accumulators and 32.
    wide = replace(STREAMED90, warpgroups=3)
    yield Limit(
        "embed sm_90a: registers at entry",
        embed("sm_90a", replace(wide, tile_rows=192)),
        embed("sm_90a", replace(wide, tile_rows=208)),
        r"^tile_rows = 208: .*limit with 512 threads is 128; nearest legal value: 192$",
    )
    at, beyond = (gemm("sm_90a", G90(256, tile_n, 2)) for tile_n in (192, 256))
    yield Limit("gemm sm_90a: registers", at, beyond, "256 registers of accumulators.*limit is 240; .*value: 192$")
    at, beyond = (gemm("sm_90a", G90(128, 80, 2, cluster_m, store_stages=1)) for cluster_m in (2, 4))
    yield Limit("gemm sm_90a: shared rows of b", at, beyond, "^tile_n = 80: .*whole swizzle atoms.*value: 96$")
    at, beyond = (gemm("sm_90a", G90(128, 256, 2, 1, store_stages=1, split_k=split)) for split in (2, 4))
    yield Limit("gemm sm_90a: sums of a split", at, beyond, "beside 128 registers.*more than two slices spill.*: 2$")


def tensor_memory() -> Iterator[Limit]:
    """512 columns (PTX ISA, tensor memory addressing), two accumulators of 1 or 2 MMA tiles."""
    level_7, level_8 = G100(block_m=256, stages=4), G100()
    at, beyond = (gemm("sm_100a", replace(level_7, tile_n=tile_n, stages=2)) for tile_n in (128, 256))
    yield Limit("gemm sm_100a: TMEM", at, beyond, "2 accumulators of 2 x 256 columns exceed 512 TMEM .*value: 128$")
    for config, columns in ((level_7, 512), (level_8, 256)):
        yield Limit(
            f"gemm sm_100a: {columns} columns",
            gemm("sm_100a", config, hardware={"tmem_columns": columns}),
            gemm("sm_100a", config, hardware={"tmem_columns": columns - 1}),
            f"exceed {columns - 1} TMEM columns",
        )


def sizes() -> Iterator[Limit]:
    """Coordinates and row pitches of TMA, 32-bit indices, the device."""
    for arch in ("sm_100a", "sm_90a"):
        for name, at, beyond, rule in (
            ("m", 1, 0, f"allow 1 to {TMA_ROWS}; nearest legal value: 1$"),
            ("m", TMA_ROWS, TMA_ROWS + 1, f"allow 1 to {TMA_ROWS}; nearest legal value: {TMA_ROWS}$"),
            ("n", 8, 0, f"allow 1 to {TMA_ROWS}; nearest legal value: 8$"),
            ("n", TMA_ROWS, TMA_ROWS + 1, f"allow 1 to {TMA_ROWS}; nearest legal value: {TMA_ROWS}$"),
            ("n", 776, 777, "an output row must be a multiple of 16 bytes.*nearest legal value: 784$"),
            ("k", 16, 0, f"allow 1 to {TMA_BYTES}; nearest legal value: 16$"),
            ("k", TMA_BYTES, TMA_BYTES + 1, f"allow 1 to {TMA_BYTES}; nearest legal value: {TMA_BYTES}$"),
            ("k", 784, 785, "a row must be a multiple of 16 bytes.*nearest legal value: 800$"),
            ("table_rows", 0, -1, "nearest legal value: 0$"),
        ):
            facts = {"m": 16, "n": 16, "k": 16, "table_rows": 0}
            yield Limit(
                f"embed {arch}: {name} = {beyond}",
                embed(arch, **facts | {name: at}),
                embed(arch, **facts | {name: beyond}),
                f"^{name} = {beyond}: .*{rule}",
            )
        for name in ("m", "n", "k", "batches"):
            for at, beyond, nearest in ((8 if name == "k" else 1, 0, 1), (TMA_GEMM, TMA_GEMM + 1, TMA_GEMM)):
                yield Limit(
                    f"gemm {arch}: {name} = {beyond}",
                    gemm(arch, **{"m": 8, "n": 8, "k": 8, "batches": 1, name: at}),
                    gemm(arch, **{"m": 8, "n": 8, "k": 8, "batches": 1, name: beyond}),
                    f"^{name} = {beyond}: .*allow 1 to {TMA_GEMM}; nearest legal value: {nearest}$",
                )
        for dtype, step in (("bfloat16", 8), ("float16", 8), ("float32", 4)):
            at, beyond = (gemm(arch, k=k, in_dtype=dtype) for k in (3 * step, 3 * step + 1))
            rule = f"^k = {3 * step + 1}:? .*multiples of 16 bytes.*: {4 * step}$"
            yield Limit(f"gemm {arch}: rows of {dtype}", at, beyond, rule)
        # 255 x 128 and 128 x 128 in 32 bits, and K in 16-byte rows.
        for dtype, most in (("uint8", 65_792), ("int8", 131_056)):
            config = STREAMED90 if arch == "sm_90a" else None
            at, beyond = (embed(arch, config, in_dtype=dtype, k=k) for k in (most, most + 16))
            refused = f"^k = {most + 16}:? .*sums of products of {dtype}.*leave 32 bits; nearest legal value: {most}$"
            yield Limit(f"embed {arch}: sums of {dtype}", at, beyond, refused)
        yield Limit(
            f"embed {arch}: nothing is left in memory of a scale per row and feature",
            embed(arch, row_scale=True, scale_source="pointer"),
            embed(arch, row_scale=True, feature_scale=True, scale_source="pointer"),
            "^scale_source = 'pointer':? .*rows and features have factors.*nearest legal value: 'value'$",
        )
        yield Limit(
            f"embed {arch}: an index needs a table",
            embed(arch, table_rows=1, table_index=True),
            embed(arch, table_rows=0, table_index=True),
            "^table_index = True:? .*no table to index; nearest legal value: False$",
        )
    yield from narrow_products()
    yield from table()
    yield from tile_numbers()
    yield from devices()
    yield Limit(
        "patchify: CTAs of a grid",  # 2^31 - 1 along x (programming guide)
        patchify(batch=2**31 - 1, height=16), patchify(batch=2**31, height=16), "batch = 2147483648:? .*: 2147483647$",
    )  # fmt: skip
    yield from layer_norms()
    for name in ("batch", "channels", "patch"):
        yield Limit(f"patchify: {name}", patchify(**{name: 1}), patchify(**{name: 0}), f"^{name} = 0: .*value: 1$")
    for name in ("height", "width"):
        at, beyond = patchify(**{name: 16}), patchify(**{name: 17})
        yield Limit(f"patchify: {name}", at, beyond, f"^{name} = 17: .*whole patches of 16.*value: 16$")


def layer_norms() -> Iterator[Limit]:
    """Rows of whole vectors, whose sums fit 32 bits."""
    for title, name, at, beyond in (
        ("rows", "m", 1, 0),
        ("rows of a grid", "m", 2**31 - 1, 2**31),
        ("a vector", "k", 16, 8),
        ("whole vectors", "k", 16, 24),
        ("sums", "k", 65_792, 65_808),
    ):
        message = f"^{name} = {beyond}: .*value: {at}$"
        yield Limit(f"layer norm: {title}", layer_norm(**{name: at}), layer_norm(**{name: beyond}), message)


def narrow_products() -> Iterator[Limit]:
    """The dense GEMM of 8 bits: K of integers, what only 8 bits have, and types without a kernel."""
    fp8 = partial(gemm, "sm_90a", in_dtype="float8_e4m3fn")
    for dtype, most in (("uint8", 65_792), ("int8", 131_056)):
        at, beyond = (gemm("sm_90a", in_dtype=dtype, k=k) for k in (most, most + 16))
        refused = f"^k = {most + 16}:? .*sums of products of {dtype}.*leave 32 bits; nearest legal value: {most}$"
        yield Limit(f"gemm: sums of {dtype}", at, beyond, refused)
    at, beyond = (gemm("sm_90a", out_dtype=dtype, out_scale_source="pointer") for dtype in ("float8_e4m3fn", "float16"))
    refused = "^out_scale_source = 'pointer':? .*an output of float16 has no scale; nearest legal value: 'value'$"
    yield Limit("gemm: scale of an output", at, beyond, refused)
    yield Limit(
        "gemm: nothing is left in memory of a scale per row and column",
        fp8(row_scale=True, scale_source="pointer"),
        fp8(row_scale=True, column_scale=True, scale_source="pointer"),
        "^scale_source = 'pointer':? .*no number for the whole call; nearest legal value: 'value'$",
    )
    at, beyond = (fp8(G90(tile_n=tile_n, store_stages=1), out_dtype="float8_e4m3fn") for tile_n in (96, 80))
    yield Limit("gemm: rows of a buffer", at, beyond, "^tile_n = 80: .*have 32 bytes, 32 columns of fl.*value: 96$")
    at, beyond = (gemm(arch, out_dtype="float8_e4m3fn") for arch in ("sm_89", "sm_86"))
    refused = "^out_dtype = 'float8_e4m3fn':? .*sm_86 has no conversion to E4M3.*nearest legal value: 'bfloat16'$"
    yield Limit("gemm: conversion to E4M3", at, beyond, refused)
    at, beyond = (gemm(arch, in_dtype="float8_e4m3fn") for arch in ("sm_89", "sm_90"))
    refused = "^in_dtype = 'float8_e4m3fn':? .*E4M3 on sm_89 and sm_120, not on sm_90; nearest legal value: 'bfloat16'$"
    yield Limit("gemm: E4M3 by mma.sync", at, beyond, refused)


def table() -> Iterator[Limit]:
    """Fewer than 2^31 elements: 128 columns by 2^24 rows are just as many. SM100 pads rows to blocks of 32."""
    narrow = replace(SMALL90, warpgroups=2, order="flat")
    for arch, config, unit in (("sm_90a", narrow, 1), ("sm_100a", E100(tile_n=128), 32)):
        for index in (False, True):
            most = 2**24 - unit - index  # with an index, one row more holds NaN
            at, beyond = (
                embed(arch, config, m=rows, n=128, table_rows=rows, table_index=index) for rows in (most, most + 1)
            )
            what = f"embed {arch}: table{' with an index' if index else ''}"
            nearest = (2**31 - 1) // 128 // 32 * 32 - index
            yield Limit(what, at, beyond, f"^table_rows = {most + 1}:? .*indexed with 32 bits.*value: {nearest}$")


def tile_numbers() -> Iterator[Limit]:
    """Tiles and clusters together below 2^31: 2^31 - 2 = 2 x 3^2 x 7 x 11 x 31 x 151 x 331 tiles and one cluster."""
    batches, down, across = 9 * 11 * 151 * 331, 2 * 7, 31
    for arch, config, rows, columns in (
        ("sm_100a", G100(), 256, 128),
        ("sm_90a", G90(), 256, 256),
    ):
        facts = {"m": down * rows, "n": across * columns, "k": 8, "batches": batches}
        at, beyond = (gemm(arch, config, sm_count=sm_count, **facts) for sm_count in (2, 4))
        refused = f"^m = {down * rows}:? .*there are {2**31 - 2} tiles; nearest legal value: {down * rows // 2}$"
        yield Limit(f"gemm {arch}: tile numbers", at, beyond, refused)


def devices() -> Iterator[Limit]:
    """A cluster needs as many multiprocessors as it has CTAs, and at most 8 of them (programming guide)."""
    for what, make, config, ctas in (
        ("embed sm_100a", partial(embed, "sm_100a"), E100(), 2),
        ("embed sm_90a, alone", partial(embed, "sm_90a"), replace(SMALL90), 1),
        ("embed sm_90a", partial(embed, "sm_90a"), E90(), 2),
        ("gemm sm_100a", partial(gemm, "sm_100a"), G100(), 2),
        ("gemm sm_100a, 4 x 2", partial(gemm, "sm_100a"), G100(cluster_m=4, cluster_n=2), 8),
        ("gemm sm_90a", partial(gemm, "sm_90a"), G90(), 2),
        ("gemm sm_90a, 2 x 4", partial(gemm, "sm_90a"), G90(128, 64, 4, 2, store_stages=1, split_k=4), 8),
        ("gemm sm_90a, chosen", partial(gemm, "sm_90a"), None, 1),
    ):
        at, beyond = (make(config, sm_count=sm_count) for sm_count in (ctas, ctas - 1))
        yield Limit(f"{what}: multiprocessors", at, beyond, f"^sm_count = {ctas - 1}:? .*nearest legal value: {ctas}$")
    small = G90(128, 64, 4, 4, 2, store_stages=1)
    at, beyond = gemm("sm_90a", small), gemm("sm_90a", replace(small, cluster_n=4))
    yield Limit("gemm sm_90a: CTAs of a cluster", at, beyond, "^cluster_n = 4: .*exceed the 8 of a cluster.*value: 2$")
    at, beyond = (gemm("sm_90a", replace(small, cluster_n=1, split_k=split)) for split in (2, 4))
    yield Limit("gemm sm_90a: slices of a cluster", at, beyond, "^split_k = 4: .*exceed the 8 of a cluster.*value: 2$")
    one = replace(small, cluster_m=1, cluster_n=1, split_k=4)
    at, beyond = (gemm("sm_90a", one, k=k) for k in (3 * 64 + 8, 3 * 64))  # a block is 64 elements of 16 bits
    yield Limit("gemm sm_90a: slices of K", at, beyond, "^split_k = 4: .*k = 192 has 3; nearest legal value: 2$")
    at, beyond = (gemm("sm_90a", replace(one, split_k=split, pingpong=True)) for split in (1, 2))
    yield Limit("gemm sm_90a: slices in turn", at, beyond, "^split_k = 2: .*do not split K.*value: 1$")


def orders() -> Iterator[Limit]:
    """Rows of a tile of SM90's patch embed."""
    shared = E90(128, tile_positions=16, order="position")
    for what, at, beyond, message in (
        ("an index", {"order": "flat"}, {"order": "position"}, "own table row; nearest legal value: 'flat'$"),
        ("positions", {"tile_positions": 16}, {"m": 15 * 64, "table_rows": 15}, "order has 15 positions; .*: 1$"),
        ("flat", {"order": "flat", "tile_positions": 1}, {"order": "flat"}, "rows of a tile are consecutive ones"),
        ("whole images", {"m": 196 * 64}, {"m": 196 * 64 + 1}, "whole images of 196 positions, m = 12545; .*'flat'$"),
    ):
        problem = {"table_index": True} if what == "an index" else {}
        base = replace(shared, tile_positions=1) if what == "an index" else shared
        made = []
        for change in (at, beyond):
            sizes = {name: value for name, value in change.items() if name in ("m", "table_rows")}
            config = replace(base, **{name: value for name, value in change.items() if name not in sizes})
            made.append(embed("sm_90a", config, **problem, **sizes))
        yield Limit(f"embed sm_90a: {what}", *made, message)
    at, beyond = (embed("sm_90a", replace(shared, tile_rows=96, tile_positions=count)) for count in (6, 3))
    yield Limit("embed sm_90a: shared positions", at, beyond, "^tile_positions = 3: .*each of 2 CTAs.*value: 1$")


def limits() -> list[Limit]:
    """All of them."""
    return [*shared_memory(), *registers(), *tensor_memory(), *sizes(), *orders()]
