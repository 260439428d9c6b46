"""Packed rows: every row names its position."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.operations import reference
from tests.gpu.harness import Call, check_against_fp64, random_call, sized_rows
from tests.gpu.patch_embed_configs import AT_HAND


def packed(rows: int, positions: int, n: int, k: int, seed: int = 0, **options) -> tuple[Call, torch.Tensor]:
    """A call of ``rows`` rows with ``positions`` positions, and an index of random positions."""
    call = random_call(1, rows, n, k, seed=seed, **options)
    pos = random_call(1, positions, n, k, seed=seed + 1).pos_embed
    index = torch.randint(0, positions, (rows,), device="cuda", dtype=torch.int32)
    return dataclasses.replace(call, x=call.x[0], pos_embed=pos), index


def expected_call(call: Call, index: torch.Tensor) -> Call:
    """The same function without an index: a table row per row."""
    return dataclasses.replace(call, pos_embed=call.pos_embed[index.long()])


@pytest.mark.parametrize("config", AT_HAND.indexed.values(), ids=AT_HAND.indexed)
@pytest.mark.parametrize(("rows", "positions"), [(1, 1), (77, 3), (1000, 196), (20_003, 1024)])
def test_every_row_gets_the_position_that_it_names(rows, positions, config, record_property):
    rows = sized_rows(rows)
    for dtype in (torch.int32, torch.int64):
        call, index = packed(rows, positions, 776, 768)
        out = patch_embed(call.x, call.weight, call.bias, call.pos_embed, pos_index=index.to(dtype),
                          scale_a=call.scale, config=config)  # fmt: skip
        assert out.shape == (rows, 776)
        epilogue = "f32" if config is None else config.epilogue
        check_against_fp64(expected_call(call, index), out, epilogue, record_property)


def test_a_batch_of_padded_rows_keeps_its_shape(record_property):
    call, index = packed(60, 11, 72, 48)
    out = patch_embed(call.x.view(5, 12, 48), call.weight, call.bias, call.pos_embed, pos_index=index.view(5, 12),
                      scale_a=call.scale)  # fmt: skip
    assert out.shape == (5, 12, 72)
    check_against_fp64(expected_call(call, index), out.view(60, 72), "f32", record_property)


@pytest.mark.parametrize("wrong", [-1, 196, 2**31 - 1, -(2**31), 2**32, -(2**63)])
def test_a_number_that_is_no_position_gives_a_row_of_nan_and_no_other(wrong):
    call, index = packed(500, 196, 264, 256, small_integers=True)
    index = index.long()
    index[123] = wrong
    arguments = (call.x, call.weight, call.bias, call.pos_embed)
    for dtype in (torch.int64, torch.int32) if abs(wrong) < 2**31 or wrong == -(2**31) else (torch.int64,):
        out = patch_embed(*arguments, pos_index=index.to(dtype), scale_a=call.scale)
        expected = reference.patch_embed_f32(*arguments, call.scale, index.to(dtype))
        assert out[123].isnan().all()
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_warm_call_reads_its_new_index(record_property):
    call, _ = packed(500, 196, 264, 256)
    for seed in range(4):
        index = torch.randint(0, 196, (500,), device="cuda", dtype=torch.int32 if seed < 3 else torch.int64)
        out = patch_embed(call.x, call.weight, call.bias, call.pos_embed, pos_index=index, scale_a=call.scale)
        check_against_fp64(expected_call(call, index), out, "f32", record_property)


def test_with_and_without_an_index_are_told_apart(record_property):
    call, index = packed(392, 196, 264, 256)
    for _ in range(2):
        plain = patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=call.scale)
        indexed = patch_embed(call.x, call.weight, call.bias, call.pos_embed, pos_index=index, scale_a=call.scale)
        every = torch.arange(392, device="cuda") % 196
        check_against_fp64(expected_call(call, every), plain.view(392, 264), "f32", record_property)
        check_against_fp64(expected_call(call, index), indexed, "f32", record_property)


@pytest.mark.gpu_only("torch.compile and a CUDA graph")
def test_an_index_compiles_and_replays(record_property):
    call, index = packed(500, 196, 264, 256)

    def step(x, index):
        return patch_embed(x, call.weight, call.bias, call.pos_embed, pos_index=index, scale_a=call.scale)

    check_against_fp64(expected_call(call, index), torch.compile(step, fullgraph=True)(call.x, index), "f32",
                       record_property)  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step(call.x, index)
    index.copy_(index.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    check_against_fp64(expected_call(call, index), out, "f32", record_property)
