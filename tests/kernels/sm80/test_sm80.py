"""The kernels of ``mma.sync`` in the emulator: bit for bit against the torch reference, on every architecture."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedImagesProblem, Sm80GemmConfig, Sm80ImagesConfig, Sm80PatchEmbedConfig
from cute_kernels.emulator import EmulatorError, Options, Report
from cute_kernels.kernels.sm80.load import key_of_row
from cute_kernels.kernels.sm80.patch_load import _place
from cute_kernels.operations import reference
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import Plan, make_plan
from cute_kernels.plan.registry import MMA_SYNC
from cute_kernels.plan.sm80 import FP8_ARCHS
from tests.emulator.cases import check
from tests.emulator.checking.mutation.targets import TARGETS
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import columns, make_gemm_case
from tests.emulator.mma_sync_inputs import SMALL, make_image_case, make_rows_case
from tests.nightly import by_day, drawn, examples, nightly

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ANY_ORDER = Options(completion="random", interleave="random", seed=3)
TILES = {
    "64 x 64": SMALL | {"stages": 3},
    "64 x 64, 128 bytes": SMALL | {"row_bytes": 128, "stages": 2},
    "32 x 128, 1 x 4 warps": {"tile_m": 32, "tile_n": 128, "warps_m": 1, "warps_n": 4, "row_bytes": 128, "stages": 2},
    "128 x 128, 8 warps": {"warps_m": 4, "row_bytes": 128, "stages": 3},
    "128 x 256": {"tile_n": 256, "warps_n": 4, "stages": 3},
    "128 x 256, two stages": {"tile_n": 256, "warps_n": 4, "row_bytes": 128, "stages": 2},
    "256 x 128": {"tile_m": 256, "warps_m": 4, "stages": 3},
    "128 x 192": {"tile_n": 192, "warps_m": 4, "stages": 3},
}  # fmt: skip
DAILY = {"64 x 64": BF16, "64 x 64, 128 bytes": FP32, "32 x 128, 1 x 4 warps": BF16}


def on_every_chip(
    types: Iterable[str], but_not: Collection[tuple[str, str]] = (), by_day_on: dict[str, str] | None = None
) -> Any:
    """Parameters ``dtype`` and ``arch``: all pairs; by day as many as show each type and each architecture once, or
    those that are given."""
    types = list(types)
    pairs = [pair for pair in itertools.product(types, MMA_SYNC) if pair not in but_not]
    daily = set((by_day_on or {}).items())
    for i in range(0 if daily else max(len(types), len(MMA_SYNC))):
        later = (pair for pair in pairs if pair[0] == types[i % len(types)])
        daily.add(next(pair for pair in later if MMA_SYNC.index(pair[1]) >= i % len(MMA_SYNC)))
    cases = [pytest.param(*pair, marks=() if pair in daily else nightly, id=" ".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("dtype", "arch"), cases)


def check_count(plan: Plan, report: Report) -> None:
    """The launch line has every mma.sync: 16 rows, 8 columns and 32 bytes of K each, of whole tiles."""
    c = plan.config
    assert report.mma_instructions == plan.tiles * c.tile_m * c.tile_n * plan.k_blocks * c.row_bytes // (16 * 8 * 32)


# --- the dense GEMM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in DAILY.items() else nightly, id=f"{name}, {dtype}")
        for name, dtype in itertools.product(TILES, (BF16, FP32))
    ],
)
def test_every_tile_is_bit_exact(name: str, dtype: torch.dtype) -> None:
    """Rows, columns and K end inside a tile; one CTA takes all tiles, and copies the next one's blocks under each."""
    config = Sm80GemmConfig(**TILES[name])
    k = 200 if dtype is BF16 else 84
    sizes = {"m": config.tile_m + 9, "n": config.tile_n // 2 + 9, "k": k}
    case = make_gemm_case(**sizes, in_dtype=dtype, out_dtype=dtype, config=config, sm_count=1, seed=1)
    assert case.plan.overlaps and case.plan.tiles > case.plan.clusters == config.resident_ctas
    check(case, ANY_ORDER)


@pytest.mark.parametrize("arch", by_day(dict.fromkeys(MMA_SYNC), ("sm_86", "sm_120")))
def test_what_the_plan_chooses(arch: str) -> None:
    """For each architecture, whose kernels are compiled for it."""
    case = make_gemm_case(m=40, n=72, k=72, in_dtype=FP16, out_dtype=FP32, activation="silu", arch=arch)
    assert f".target {arch}" in compile_plan(case.plan, emulated=True).ptx
    check(case, ANY_ORDER)


PRODUCTS = {f"{x} to {y}": (x, y) for x, y in itertools.product((BF16, FP16, FP32), repeat=2)}
PRODUCTS_BY_DAY = [f"{x} to {y}" for x, y in ((BF16, BF16), (FP16, FP32), (FP32, FP32), (BF16, FP32), (FP32, FP16))]
"""Each type that is read and each that is written; its code is made by one function for all."""


@on_every_chip(PRODUCTS, by_day_on=dict(zip(PRODUCTS_BY_DAY, MMA_SYNC)))
@settings(max_examples=examples(2, 20), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 150),
    n=columns(150),
    k=st.integers(1, 30).map(lambda i: 8 * i),
    batches=st.integers(1, 2),
    bias=drawn([True], [True, False]),
    tile=drawn(["64 x 64, 128 bytes"], list(DAILY)),
    sm_count=st.sampled_from([1, 2, 100]),
    seed=st.integers(0, 2**20),
)
def test_any_product(dtype: str, arch: str, tile: str, seed: int, **facts: Any) -> None:
    config, types = Sm80GemmConfig(**TILES[tile]), PRODUCTS[dtype]
    case = make_gemm_case(in_dtype=types[0], out_dtype=types[1], config=config, arch=arch, seed=seed, **facts)
    report = check(case, Options(seed=seed, completion="random", interleave="random"))
    check_count(case.plan, report)


SLICED = {"BF16": (BF16, BF16), "TF32": (FP32, FP32), "int8": (torch.int8, FP16)}


@on_every_chip(SLICED, by_day_on={"BF16": "sm_86", "TF32": "sm_90", "int8": "sm_80"})
@settings(max_examples=examples(2, 20), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 70),
    n=columns(140),
    pieces=st.integers(4 * 8, 12 * 8),
    batches=st.integers(1, 2),
    split=drawn([4], [2, 4, 8]),
    sm_count=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 2**20),
)
def test_slices_of_k(dtype: str, arch: str, pieces: int, split: int, seed: int, **facts: Any) -> None:
    """Their sums are added in the order of the reference whoever arrives last, and counters are 0 again."""
    types = SLICED[dtype]
    k = max(pieces, 8 * split) * 16 // types[0].itemsize
    config = Sm80GemmConfig(32, 64, row_bytes=128, stages=2, split_k=split)
    case = make_gemm_case(k=k, in_dtype=types[0], out_dtype=types[1], config=config, arch=arch, seed=seed, **facts)
    check_count(case.plan, check(case, Options(seed=seed, completion="random", interleave="random")))
    assert len(case.tensors.arrivals) == case.plan.tiles // split and not case.tensors.arrivals.any()


WEAKER = ("relaxed.gpu", "release.gpu", "acquire.gpu", "acq_rel.cta", "no barrier")


@pytest.mark.parametrize("weaker", by_day(WEAKER, ("release.gpu", "no barrier")))
def test_slices_that_are_added_too_early_are_reported(weaker: str) -> None:
    """The sums of other CTAs are read behind an acquire, which all of their threads' stores come before."""
    target = TARGETS["gemm-sm80-split"]
    before, atom, behind = target.ptx.partition("atom.acq_rel.gpu")
    if weaker == "no barrier":
        before, _, rest = before.rpartition("bar.sync")
        ptx = before + rest.partition(";")[2] + atom + behind
    else:
        ptx = f"{before}atom.{weaker}{behind}"
    case = target.case()
    with pytest.raises(EmulatorError, match="a load of .* which the store of .* nothing orders the two"):
        emulate(case.plan, case.tensors, Options(), artifact=dataclasses.replace(target.artifact, ptx=ptx))


@pytest.mark.parametrize(
    ("arch", "instruction"), [("sm_86", False), ("sm_90", True), pytest.param("sm_120", True, marks=nightly)]
)
def test_tf32_is_rounded_to_nearest_as_everywhere(arch: str, instruction: bool) -> None:
    """Ties to even, over the largest number to infinity, NaN of any payload; the reference has the same bits.

    From sm_90 on there is an instruction for it, and fragments are rounded.
    """
    config = Sm80GemmConfig(**SMALL)
    case = make_gemm_case(m=40, n=40, k=40, in_dtype=FP32, out_dtype=FP32, config=config, bias=False, arch=arch)
    assert ("cvt.rn.tf32.f32" in compile_plan(case.plan, emulated=True).ptx) == instruction
    a = torch.zeros(1, 40, 40)
    bits = [0x3F801000, 0x3F803000, 0xBF801000, 0x3F800FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x00000FFF, 0xFFFFFFFF]
    a[0, : len(bits), 0] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(FP32)
    b = torch.zeros(1, 40, 40)
    b[0, 0, 0], b[0, 1, 0] = 1.0, 1 + 2**-11 + 2**-20  # rounded up
    emulate(case.plan, case.tensors.replace(a=a, b=b), ANY_ORDER)
    expected = reference.gemm(a, b)
    torch.testing.assert_close(case.tensors.out, expected, rtol=0, atol=0, equal_nan=True)
    assert case.tensors.out[0, : len(bits), 0].isnan().tolist() == [False] * 6 + [True, False, True]


@pytest.mark.parametrize(
    ("rounding", "arch"),
    [
        ("truncate", "sm_80"), ("nearest_a", "sm_90"),
        pytest.param("truncate", "sm_90", marks=nightly), pytest.param("nearest_a", "sm_80", marks=nightly),
    ],
)  # fmt: skip
def test_other_roundings_cut_what_they_do_not_round(rounding: str, arch: str) -> None:
    config = Sm80GemmConfig(**SMALL, rounding=rounding)
    case = make_gemm_case(m=40, n=40, k=40, in_dtype=FP32, out_dtype=FP32, config=config, bias=False, arch=arch)
    a, b = (tensor.view(torch.int32).bitwise_and(~0x1FFF).view(FP32) for tensor in (case.tensors.a, case.tensors.b))
    assert not torch.equal(a, case.tensors.a)
    emulate(case.plan, case.tensors, ANY_ORDER)
    assert torch.equal(case.tensors.out, reference.gemm(case.tensors.a if rounding == "nearest_a" else a, b))


# --- the patch embed of rows -----------------------------------------------------------------------------------------


def rows_case(dtype: str, **facts: Any) -> None:
    check(make_rows_case(dtype, **facts), ANY_ORDER)


ROWS = ("uint8", "int8", "float8_e4m3fn", "bfloat16", "float16")
WITHOUT_FP8 = [("float8_e4m3fn", arch) for arch in MMA_SYNC if arch not in FP8_ARCHS]


@on_every_chip(ROWS, but_not=WITHOUT_FP8)
@settings(max_examples=examples(2, 20), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=drawn(range(2, 150), range(1, 150)),
    n=st.integers(1, 18).map(lambda i: 8 * i),
    k=st.integers(1, 24).map(lambda i: 16 * i),
    sm_count=st.sampled_from([1, 100]),
    seed=st.integers(0, 2**20),
)
def test_any_rows(dtype: str, arch: str, **facts: Any) -> None:
    """With all that an epilogue may have; factors of a single row are in memory instead, and have other kernels."""
    case = make_rows_case(dtype, arch=arch, **facts)
    check_count(case.plan, check(case, ANY_ORDER))


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": None, "pos_embed": None, "pos_index": None, "scale_a": None, "scale_b": 0.37},
        {"pos_embed": None, "pos_index": None, "scale_b": None},
        {"pos_index": None, "scale_a": torch.tensor([0.25]), "scale_b": None},
        {"config": Sm80PatchEmbedConfig(**SMALL, epilogue="bf16x2"), "scale_a": 0.5},
    ],
    ids=["a number", "factors of rows", "in memory", "bf16x2"],
)
def test_epilogues_of_rows(changes: dict[str, Any]) -> None:
    rows_case("int8", **changes)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sums_of_bf16_where_there_is_an_instruction_and_where_not(arch: str) -> None:
    config = Sm80PatchEmbedConfig(**SMALL, epilogue="bf16x2")
    rows_case("bfloat16", arch=arch, config=config, scale_a=None, pos_index=None)


# --- the patch embed of images ---------------------------------------------------------------------------------------


def images_case(precision: str, **facts: Any) -> Plan:
    case = make_image_case(precision, **facts)
    check(case, ANY_ORDER)
    return case.plan


def images_plan(precision: str = "int8", arch: str = "sm_80", batch: int = 8, **config: Any) -> Any:
    problem = PatchEmbedImagesProblem(
        batch, 3, 16, 256, 16, 256, "uint8" if precision.startswith("int") else "bfloat16", precision=precision,
        table_rows=16,
    )  # fmt: skip
    return make_plan(problem, Sm80ImagesConfig(**config), arch)


@pytest.mark.parametrize("config", [{}, {"row_bytes": 128, "stages": 3}, {"warps_m": 4}, SMALL], ids=str)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_eight_lanes_copy_whole_sectors_to_different_banks(precision: str, config: dict[str, int]) -> None:
    """A memory request of 16 bytes a lane is one of eight lanes: 32 bytes of each image that they read, not half of it.

    In shared memory their pieces lie in eight different groups of banks, as do those of eight rows of an ``ldmatrix``.
    """
    plan = images_plan(precision, **config)
    bytes_of_row, seen = 16 * plan.pieces, set()

    def bank(row: int, piece: int) -> int:
        return (row * plan.chunks + (piece ^ key_of_row(row, plan.chunks))) % 8

    for first in range(0, plan.threads, 8):
        lanes = [_place(plan, thread) for thread in range(first, first + 8)]
        seen.update((int(local), int(part), int(piece)) for local, part, piece in lanes)
        read = [
            (local % 8, (local // 8 * bytes_of_row + int(piece) * 16) // 32, int(part)) for local, part, piece in lanes
        ]
        assert sorted(Counter(read).values()) == [2] * 4
        assert len({bank(local, int(piece)) for local, _, piece in lanes}) == 8
        for piece in range(plan.chunks):
            assert len({bank(row, piece) for row in range(first, first + 8)}) == 8
    assert len(seen) == plan.threads


@pytest.mark.parametrize(
    ("precision", "row_bytes"),
    [("int8", 64), ("bf16", 128), pytest.param("int8", 128, marks=nightly), pytest.param("bf16", 64, marks=nightly)],
)
def test_no_bank_has_two_of_a_request(precision: str, row_bytes: int) -> None:
    """Copies, fragments, and what is added at the end, counted."""
    config = Sm80ImagesConfig(**SMALL | {"row_bytes": row_bytes, "stages": 3})
    case = make_image_case(precision, config=config, grid=(1, 8), n=64, batch=8)
    assert case.plan.copies_table
    report = check(case, Options(counters=True))
    for kind in ("cp.async.shared", "ldmatrix.shared", "ld.shared"):
        assert report.units.total("requests", kind) > 0 and report.units.total("bank_conflicts", kind) == 0


def test_the_table_is_copied_where_there_is_room_and_time() -> None:
    """99 KB hold it beside three stages of 64 bytes, and not beside four; copies need as many blocks as stages."""
    wide = {"tile_n": 256, "warps_n": 4}
    assert images_plan(**wide).copies_table
    assert images_plan(arch="sm_86", **wide, stages=3).copies_table
    assert not images_plan(arch="sm_86", **wide, stages=4).copies_table
    assert not images_plan(tile_images=1).copies_table
    assert images_plan("int8", "sm_90", tile_n=64, row_bytes=128, stages=6).copies_table
    assert not images_plan("int8", "sm_90", tile_n=64, row_bytes=128, stages=7).copies_table
    plan = images_plan(**wide)
    assert plan.smem_bytes == 4 * (128 + 256) * 64 + (16 + 1) * 256 * 4
    assert images_plan("bf16", **wide).smem_bytes == plan.smem_bytes - 256 * 4


def test_two_teams_of_a_cta_share_a_weight_that_stays() -> None:
    """All of its tiles have the same features, so CTAs are as many for all; chosen where 256 features of it fit."""
    problem = PatchEmbedImagesProblem(512, 3, 224, 224, 16, 768, "uint8", precision="int8", table_rows=196)
    plan = make_plan(problem, arch="sm_90", sm_count=131)
    assert plan.config.teams == 2 and (plan.n_tiles, plan.clusters) == (3, 129)
    assert [region.nbytes for region in plan.smem] == [256 * 768, 4 * 64 * 64, 4 * 64 * 64]
    assert make_plan(dataclasses.replace(problem, batch=64), arch="sm_90").config.teams == 1
    assert all(make_plan(problem, arch=arch).config.teams == 1 for arch in MMA_SYNC if arch != "sm_90")
    one = make_plan(problem, Sm80ImagesConfig(64, 256, 1, 4, teams=2), "sm_90", sm_count=2)
    assert one.clusters == one.n_tiles == 3


ONE = Sm80ImagesConfig(**SMALL, tile_images=1)
EIGHT = Sm80ImagesConfig(**SMALL)
WIDE = Sm80ImagesConfig(**SMALL | {"tile_n": 128})
THREE_WIDE = Sm80ImagesConfig(tile_n=192, warps_m=4, stages=3)


TEAMS = dataclasses.replace(EIGHT, teams=2)


IMAGES = {
    "int8, two teams": ("int8", TEAMS, {"sm_count": 3, "n": 136, "batch": 17}),
    "int8, two teams of one tile": ("int8", dataclasses.replace(TEAMS, stages=4), {"batch": 2, "channels": 1}),
    "int8, two teams of 128": ("int8", dataclasses.replace(WIDE, teams=2, tile_images=1), {"sm_count": 1, "batch": 3}),
    "BF16, two teams": ("bf16", TEAMS, {"sm_count": 1, "grid": (1, 3)}),
    "int8, one CTA": ("int8", EIGHT, {"sm_count": 1}),
    "int8, 192 columns": ("int8", THREE_WIDE, {"sm_count": 1, "n": 200, "batch": 5}),
    "int8 to FP32": ("int8", ONE, {"batch": 3, "pos": False, "out_dtype": FP32}),
    "int8, two CTAs": (
        "int8", dataclasses.replace(EIGHT, row_bytes=128, stages=3, resident_ctas=2), {"channels": 4}
    ),
    "int8, 4 x 2 warps": ("int8", dataclasses.replace(EIGHT, warps_m=4, tile_m=128, row_bytes=128, stages=2), {}),
    "BF16": ("bf16", EIGHT, {"grid": (1, 3)}),
    "BF16, 128 bytes": ("bf16", dataclasses.replace(ONE, row_bytes=128, stages=2), {"batch": 2, "pos": False}),
    "FP16 to FP16": ("fp16", ONE, {"batch": 1, "out_dtype": FP16}),
    "int8, patch 32": ("int8", ONE, {"batch": 2, "patch": 32}),
    "BF16, patch 32": ("bf16", ONE, {"batch": 2, "patch": 32, "grid": (2, 1), "channels": 1}),
    "FP16, patch 32, 128 bytes": (
        "fp16", dataclasses.replace(ONE, row_bytes=128, stages=2), {"batch": 1, "patch": 32, "channels": 1}
    ),
}  # fmt: skip
BY_DAY = ("int8, two teams", "int8, two CTAs", "int8 to FP32", "FP16 to FP16", "int8, patch 32")


@pytest.mark.parametrize("name", by_day(IMAGES, BY_DAY))
def test_images(name: str) -> None:
    precision, config, changes = IMAGES[name]
    images_case(precision, config=config, **changes)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [("int8", {"patch": 14}), ("fp16", {"patch": 14, "grid": (1, 2), "batch": 2}), ("int8", {"channels_last": True})],
    ids=str,
)
def test_rows_of_other_lengths_and_channels_last_take_a_pass_in_front(precision: str, changes: dict[str, Any]) -> None:
    plan = images_case(precision, **changes)
    assert [kernel.operation for kernel in plan.launches] == ["patchify", "patch_embed"]
    assert "griddepcontrol" not in compile_plan(plan.launches[0], emulated=True).ptx  # exists from sm_90 on


@on_every_chip(["int8", "bf16", "fp16"])
@settings(max_examples=examples(2, 20), suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 20),
    grid=drawn([(1, 2), (2, 3), (3, 2), (3, 3)], itertools.product(range(1, 4), repeat=2)),
    n=st.integers(1, 12).map(lambda i: 8 * i),
    channels=drawn([2], [1, 2, 3, 4]),
    together=drawn([8], [1, 8]),
    bias=drawn([True], [True, False]),
    pos=drawn([True], [True, False]),
    sm_count=st.sampled_from([1, 100]),
    seed=st.integers(0, 2**20),
)
def test_any_images(dtype: str, arch: str, together: int, **facts: Any) -> None:
    case = make_image_case(dtype, arch=arch, config=dataclasses.replace(WIDE, tile_images=together), **facts)
    check_count(case.plan, check(case, ANY_ORDER))


# --- what detectors see of them --------------------------------------------------------------------------------------


WATCHED = ("gemm-sm80", "gemm-sm80-tf32", "rows-sm80", "images-sm80", "images-sm80-teams")


@pytest.mark.parametrize("opcode", ["cp.async.wait_group", "cp.async.commit_group", "bar.sync"])
@pytest.mark.parametrize("name", by_day(WATCHED, ("gemm-sm80-tf32", "images-sm80-teams")))
def test_each_missing_wait_and_barrier_is_named(name: str, opcode: str) -> None:
    """The copy, and what may read before it is done; of the first barrier, bytes that nobody has written."""
    target = TARGETS[name]
    ptx = target.artifact.ptx
    places = [match.span() for match in re.finditer(rf"\b{re.escape(opcode)}\b[^;]*;", ptx)]
    assert len(places) >= 3
    for number, (start, end) in enumerate(places):
        case, artifact = target.case(), dataclasses.replace(target.artifact, ptx=ptx[:start] + ptx[end:])
        with pytest.raises(EmulatorError) as caught:
            emulate(case.plan, case.tensors, Options(), artifact=artifact)
        words = str(caught.value)
        if opcode == "bar.sync" and number == 0 and not name.endswith("teams"):  # which copy the weight in turn
            assert re.search(r"uninitialised shared memory.* a barrier or a wait is missing at .*`ldmatrix", words)
        elif name.endswith("tf32") and opcode == "bar.sync":
            assert re.search(r"which the (cp.async|store) of .* nothing orders the two.*`ldmatrix", words)
        else:
            assert re.search(r"which the cp.async of .* nothing orders the two.*`(ldmatrix|@rounded ld.shared)", words)
