"""The SM90 kernel in every variant, against FP64 on random data and bit for bit where sums are exact."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cute_kernels import reference
from cute_kernels.config import Sm90PatchEmbedConfig
from tests.gpu.harness import Call, check_against_fp64, random_call, run_poisoned

BASE = Sm90PatchEmbedConfig(tile_rows=64, stages=3)
CONTRACTS = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}


def exact(call: Call, epilogue: str) -> torch.Tensor:
    """The contract's own result; only for inputs whose sums are exact in any order and with 14 bits."""
    rows = call.x.view(-1, call.x.shape[-1])
    out = CONTRACTS[epilogue](rows, call.weight, call.bias, call.pos_embed, call.scale)
    return out.view(*call.x.shape[:2], -1)


def check(config: Sm90PatchEmbedConfig | None, shape: tuple[int, int, int, int], record_property, **options) -> None:
    """One shape on random data against FP64, and on small integers bit for bit."""
    epilogue = "f32" if config is None else config.epilogue
    call = random_call(*shape, **options)
    check_against_fp64(call, run_poisoned(call, config)[0], epilogue, record_property)
    call = random_call(*shape, small_integers=True, **options)
    out, _ = run_poisoned(call, config)
    expected = exact(call, epilogue)
    differ = int((out != expected).sum())
    assert differ == 0, f"{differ} of {out.numel()} elements differ from the contract"


VARIANTS = [
    Sm90PatchEmbedConfig(
        tile_rows=64,
        warpgroups=warpgroups,
        stages=3,
        stage_blocks=2 if epilogue == "f32" else 1,
        cluster=cluster,
        weight=weight,
        order=order,
        pingpong=pingpong,
        epilogue=epilogue,
    )
    for weight, order, warpgroups, cluster, pingpong, epilogue in itertools.product(
        ("registers", "streamed"), ("position", "flat"), (1, 2, 3), (1, 2), (True, False), ("f32", "bf16x2")
    )
    if warpgroups > 1 or pingpong  # one warpgroup takes no turns: both compile to the same kernel
]


def name(config: Sm90PatchEmbedConfig | None) -> str:
    if config is None:
        return "default"
    fields = dataclasses.astuple(config)
    return "-".join(map(str, fields))


@pytest.mark.parametrize("config", VARIANTS, ids=name)
def test_variant(config, record_property):
    """Whole and partial tiles in rows and features, one image, many tiles per cluster, with and without addends."""
    for index, (shape, addends) in enumerate(
        (
            ((67, 9, 1152, 768), "bias+pos"),
            ((1, 49, 776, 768), "bias+pos"),
            ((130, 31, 8, 768), "pos"),
            ((513, 16, 384, 768), "bias"),
            ((5, 7, 640, 768), ""),
        )
    ):
        check(config, shape, record_property, seed=index, addends=addends)


@pytest.mark.parametrize("order", ["position", "flat"])
@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize("k", [16, 128, 144, 256, 384, 588, 592, 640, 896])
def test_inner_extent(k, weight, order, record_property):
    """K below, at and beyond whole K blocks of 128; 588 is zero-padded to 592."""
    config = dataclasses.replace(BASE, weight=weight, order=order)
    check(config, (70, 5, 264, k), record_property, seed=k)


@pytest.mark.parametrize("k", [1024, 1536, 4096])
def test_streamed_inner_extent(k, record_property):
    """K beyond what registers hold, up to sums that need 14 bits."""
    check(dataclasses.replace(BASE, weight="streamed", tile_rows=128), (70, 5, 264, k), record_property, seed=k)


@pytest.mark.parametrize("order", ["position", "flat"])
@pytest.mark.parametrize("tile_rows", range(16, 257, 16))
def test_tile_rows(tile_rows, order, record_property):
    """Every WGMMA width, with one row more and one row less than whole tiles."""
    weight = "registers" if tile_rows <= 128 else "streamed"
    config = Sm90PatchEmbedConfig(
        tile_rows=tile_rows, warpgroups=1, stages=3, stage_blocks=1, cluster=1, weight=weight, order=order
    )
    for rows in (2 * tile_rows - 1, tile_rows + 1):
        check(config, (rows, 3, 136, 384), record_property, seed=rows)


@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize(
    ("tile_rows", "tile_positions", "cluster"),
    [(128, 16, 1), (128, 16, 2), (128, 4, 2), (96, 12, 2), (96, 3, 1), (64, 2, 2), (48, 6, 1), (16, 2, 2)],
)
def test_tiles_of_several_positions(tile_rows, tile_positions, cluster, weight, record_property):
    """Images and positions that end inside a tile and at its edge, with two and three warpgroups."""
    for warpgroups in (2, 3) if tile_rows <= 64 or weight == "streamed" else (2,):
        config = Sm90PatchEmbedConfig(
            tile_rows, warpgroups, 0, 1, cluster, weight, "position", tile_positions=tile_positions
        )  # fmt: skip
        for shape in ((8, 32, 768, 768), (13, 37, 264, 768), (70, 17, 200, 592)):
            check(config, shape, record_property, seed=tile_positions)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("stages", "stage_blocks"),
    [(2, 1), (3, 1), (5, 1), (6, 1), (7, 1), (12, 1), (16, 1), (2, 2), (3, 2), (4, 2), (6, 2), (8, 2), (3, 3), (2, 4)],
)
def test_stages(stages, stage_blocks, cluster, record_property):
    """Rings shorter and longer than one and two tiles of 6 K blocks, which moves the hand-over between warpgroups.

    With 4 blocks a stage the last one of a tile is half full.
    """
    for warpgroups, pingpong in ((2, True), (3, True), (2, False)):
        config = Sm90PatchEmbedConfig(64, warpgroups, stages, stage_blocks, cluster, pingpong=pingpong)
        check(config, (200, 12, 768, 768), record_property, seed=stages)


@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize("stage_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [128, 400, 640])
def test_stage_blocks(k, stage_blocks, weight, record_property):
    """Tiles of 1, 4 and 5 K blocks: whole stages, partial ones and a stage larger than the tile."""
    config = Sm90PatchEmbedConfig(64, 2, 2, stage_blocks, weight=weight)
    check(config, (130, 9, 384, k), record_property, seed=stage_blocks)


@pytest.mark.parametrize("scale", ["value", "pointer"])
@pytest.mark.parametrize("addends", ["", "bias", "pos", "bias+pos"])
@pytest.mark.parametrize("epilogue", ["f32", "bf16x2"])
@pytest.mark.parametrize("order", ["position", "flat"])
def test_addends_and_scale(order, epilogue, addends, scale, record_property):
    config = dataclasses.replace(BASE, order=order, epilogue=epilogue)
    check(config, (65, 13, 200, 256), record_property, addends=addends, scale=scale)


@pytest.mark.parametrize("images", [1, 2, 8, 47, 48, 65])
@pytest.mark.parametrize(
    ("n", "k", "positions"),
    [(768, 768, 196), (768, 768, 1), (1024, 768, 256), (1152, 588, 729), (1152, 768, 576), (1536, 768, 255)],
)
def test_models_with_the_default_configuration(n, k, positions, images, record_property):
    """Widths of the SigLIP and SigLIP2 family, at batches on both sides of where the default changes."""
    check(None, (images, positions, n, k), record_property, seed=images)


def test_default_configuration_at_odd_widths(record_property):
    for shape in ((3, 5, 8, 16), (1, 1, 8, 16), (300, 3, 16, 48), (9, 1000, 2056, 2064), (64, 4, 72, 400)):
        check(None, shape, record_property)


def test_more_than_two_to_the_31_output_elements(record_property):
    """Row and byte offsets beyond 32 bits; the last rows are compared, and rows on both sides of the boundary."""
    images, positions, n, k = 14_400, 196, 768, 768
    call = random_call(images, positions, n, k)
    for config in (None, dataclasses.replace(BASE, tile_rows=128, order="flat")):
        out, _ = run_poisoned(call, config)
        for first in (0, 2**31 // (positions * n) - 8, images - 16):
            part = dataclasses.replace(call, x=call.x[first : first + 16].contiguous())
            check_against_fp64(part, out[first : first + 16], "f32", record_property)
        del out


def test_results_do_not_depend_on_the_schedule():
    """Random data: tile shape, ring, clusters, turns, order, weight source and grid size change no bit."""
    call = random_call(150, 17, 1152, 768, seed=3)
    first, _ = run_poisoned(call, BASE)
    for config in (
        Sm90PatchEmbedConfig(128, 2, 6, 2, 2),
        Sm90PatchEmbedConfig(48, 3, 9, 1, 1, "registers", "flat"),
        Sm90PatchEmbedConfig(64, 1, 3, 3, 2, "registers", "flat", False),
        Sm90PatchEmbedConfig(96, 2, 3, 1, 2, "streamed", "position"),
        Sm90PatchEmbedConfig(128, 2, 3, 1, 2, "streamed", "position", tile_positions=16),
        Sm90PatchEmbedConfig(256, 1, 2, 1, 1, "streamed", "flat", False),
    ):
        for sm_count in (None, 2, 7, 66):
            out, plan = run_poisoned(call, config, sm_count=sm_count)
            assert torch.equal(out, first), f"{plan.config} on {sm_count} multiprocessors"


def test_results_repeat_under_load():
    """200 launches while another stream keeps the memory system busy: the same bits every time."""
    call = random_call(64, 50, 768, 768, seed=4)
    first, _ = run_poisoned(call, None)
    side, buffer = torch.cuda.Stream(), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for index in range(200):
        with torch.cuda.stream(side):
            buffer.fill_(index % 256)
        assert torch.equal(run_poisoned(call, None)[0], first), f"launch {index}"
