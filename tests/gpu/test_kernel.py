"""The patch embed in every variant, against FP64 on random data and bit for bit where sums are exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations import reference
from tests.gpu.harness import Call, check_against_fp64, random_call, run_poisoned, sized
from tests.gpu.patch_embed_configs import AT_HAND, Case, name

CONTRACTS = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}


def exact(call: Call, epilogue: str) -> torch.Tensor:
    """The contract's own result; only for inputs whose sums are exact in any order and with 14 bits."""
    rows = call.x.view(-1, call.x.shape[-1])
    out = CONTRACTS[epilogue](rows, call.weight, call.bias, call.pos_embed, call.scale)
    return out.view(*call.x.shape[:2], -1)


def check(config: PatchEmbedConfig | None, shape: tuple[int, int, int, int], record_property, **options) -> None:
    """One shape on random data against FP64, and on small integers bit for bit."""
    epilogue = "f32" if config is None else config.epilogue
    shape = sized(*shape)
    call = random_call(*shape, **options)
    check_against_fp64(call, run_poisoned(call, config)[0], epilogue, record_property)
    call = random_call(*shape, small_integers=True, **options)
    out, _ = run_poisoned(call, config)
    expected = exact(call, epilogue)
    differ = int((out != expected).sum())
    assert differ == 0, f"{differ} of {out.numel()} elements differ from the contract"


def run_all(cases: tuple[Case, ...], record_property) -> None:
    for case in cases:
        check(case.config, case.shape, record_property, seed=case.seed)


@pytest.mark.parametrize("config", AT_HAND.variants, ids=name)
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


@pytest.mark.parametrize("config", AT_HAND.inner_extent, ids=name)
@pytest.mark.parametrize("k", [16, 128, 144, 256, 384, 588, 592, 640, 896])
def test_inner_extent(k, config, record_property):
    """K below, at and beyond whole K blocks of 128; 588 is zero-padded to 592."""
    check(config, (70, 5, 264, k), record_property, seed=k)


@pytest.mark.parametrize("k", [1024, 1536, 4096])
def test_long_inner_extent(k, record_property):
    """K beyond what registers hold, up to sums that need 14 bits."""
    check(AT_HAND.long_inner_extent, (70, 5, 264, k), record_property, seed=k)


@pytest.mark.parametrize("cases", AT_HAND.tile_edges.values(), ids=AT_HAND.tile_edges)
def test_tile_edges(cases, record_property):
    """One row more and one row less than whole tiles."""
    run_all(cases, record_property)


@pytest.mark.parametrize("cases", AT_HAND.positions.values(), ids=AT_HAND.positions)
def test_positions(cases, record_property):
    """Images and positions that end inside a tile and at its edge."""
    run_all(cases, record_property)


@pytest.mark.parametrize("cases", AT_HAND.rings.values(), ids=AT_HAND.rings)
def test_rings(cases, record_property):
    """Rings of stages shorter and longer than one and two tiles."""
    run_all(cases, record_property)


@pytest.mark.parametrize("cases", AT_HAND.stage_shapes.values(), ids=AT_HAND.stage_shapes)
def test_stage_shapes(cases, record_property):
    """Tiles of 1, 4 and 5 K blocks."""
    run_all(cases, record_property)


@pytest.mark.parametrize("scale", ["value", "pointer"])
@pytest.mark.parametrize("addends", ["", "bias", "pos", "bias+pos"])
@pytest.mark.parametrize("epilogue", ["f32", "bf16x2"])
@pytest.mark.parametrize("config", AT_HAND.addends, ids=name)
def test_addends_and_scale(config, epilogue, addends, scale, record_property):
    config = dataclasses.replace(config, epilogue=epilogue)
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


@pytest.mark.gpu_only("takes 25 GB")
def test_more_than_two_to_the_31_output_elements(record_property):
    """Row and byte offsets beyond 32 bits; the last rows are compared, and rows on both sides of the boundary."""
    images, positions, n, k = 14_400, 196, 768, 768
    call = random_call(images, positions, n, k)
    for config in (None, AT_HAND.alternative):
        out, _ = run_poisoned(call, config)
        for first in (0, 2**31 // (positions * n) - 8, images - 16):
            part = dataclasses.replace(call, x=call.x[first : first + 16].contiguous())
            check_against_fp64(part, out[first : first + 16], "f32", record_property)
        del out


def test_results_do_not_depend_on_the_schedule():
    """Random data: tile shape, ring, clusters, turns, order, weight source and grid size change no bit."""
    call = random_call(*sized(150, 17, 1152, 768), seed=3)
    first, _ = run_poisoned(call, AT_HAND.base)
    for config in AT_HAND.schedules:
        for sm_count in (None, 2, 7, 66):
            out, plan = run_poisoned(call, config, sm_count=sm_count)
            assert torch.equal(out, first), f"{plan.config} on {sm_count} multiprocessors"


@pytest.mark.gpu_only("two streams at once")
def test_results_repeat_under_load():
    """200 launches while another stream keeps the memory system busy: the same bits every time."""
    call = random_call(64, 50, 768, 768, seed=4)
    first, _ = run_poisoned(call, None)
    side, buffer = torch.cuda.Stream(), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for index in range(200):
        with torch.cuda.stream(side):
            buffer.fill_(index % 256)
        assert torch.equal(run_poisoned(call, None)[0], first), f"launch {index}"
