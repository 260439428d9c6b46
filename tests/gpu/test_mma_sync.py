"""The kernels of ``mma.sync`` on any GPU since Ampere: integers bit for bit, floats within a bound of FP64."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import gemm, patch_embed, patch_embed_images, prepare_patch_weight
from cute_kernels.config import Sm80GemmConfig, Sm80ImagesConfig, Sm80PatchEmbedConfig
from cute_kernels.operations import reference

TILES = ({}, {"tile_m": 64, "tile_n": 64}, {"tile_m": 32, "tile_n": 128, "warps_m": 1, "warps_n": 4, "row_bytes": 128})


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(7)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gemm(tile: dict[str, int], dtype: torch.dtype, generator: torch.Generator) -> None:
    """TF32 is rounded to 11 bits first, so that the error of FP32 sums remains, which on SM90 is known to the bit."""
    a, b = (torch.randn(rows, 392, device="cuda", generator=generator).to(dtype) for rows in (333, 264))
    out = gemm(a, b, out_dtype=torch.float32, config=Sm80GemmConfig(**tile), allow_tf32=True)
    if dtype is torch.float32:
        a, b = reference.round_tf32(a), reference.round_tf32(b)
    error = (out - a.double() @ b.double().T).abs() / (a.double().abs() @ b.double().abs().T)
    assert error.max() < 1e-6
    if torch.cuda.get_device_capability() == (9, 0):
        assert torch.equal(out.cpu(), reference.gemm(a.cpu(), b.cpu(), None, torch.float32, arithmetic="sm_90a"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slices_of_k_leave_their_workspace_as_it_was(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Call after call, of several sizes by turns, and replayed from a graph beside them: always the same bits."""
    config = Sm80GemmConfig(32, 64, row_bytes=128, split_k=8)
    operands = [
        [torch.randn(rows, 1224, device="cuda", generator=generator).to(dtype) for rows in (m, n)]
        for m, n in ((16, 768), (70, 264), (1, 64))
    ]
    first = [gemm(a, b, config=config, allow_tf32=True) for a, b in operands]
    for (a, b), out in zip(operands, first, strict=True):
        whole = gemm(a, b, config=Sm80GemmConfig(64, 64), allow_tf32=True)
        torch.testing.assert_close(out, whole, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = [gemm(a, b, config=config, allow_tf32=True) for a, b in operands]
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            graph.replay()
        again = [gemm(a, b, config=config, allow_tf32=True) for a, b in operands]
        torch.cuda.synchronize()
        for out, one, other in zip(first, again, captured, strict=True):
            assert torch.equal(out, one) and torch.equal(out, other)


@pytest.mark.parametrize("tile", TILES)
def test_rows_of_integers(tile: dict[str, int], generator: torch.Generator) -> None:
    x = torch.randint(0, 256, (392, 304), device="cuda", generator=generator, dtype=torch.uint8)
    weight = torch.randint(-128, 128, (264, 304), device="cuda", generator=generator, dtype=torch.int8)
    bias, pos = (torch.randn(*shape, 264, device="cuda", generator=generator) for shape in ((), (49,)))
    out = patch_embed(x, weight, bias, pos, scale_a=0.37, config=Sm80PatchEmbedConfig(**tile))
    assert torch.equal(out, reference.patch_embed_f32(x, weight, bias, pos, 0.37).view(out.shape))


@pytest.mark.parametrize("teams", [1, 2])
@pytest.mark.parametrize("patch", [16, 32])
def test_images_of_integers(patch: int, teams: int, generator: torch.Generator) -> None:
    weight = prepare_patch_weight(torch.randn(136, 3, patch, patch) * 0.05, precision="int8").to("cuda")
    images = torch.randint(0, 256, (10, 3, 64, 96), device="cuda", generator=generator, dtype=torch.uint8)
    positions = 64 // patch * (96 // patch)
    bias, pos = (torch.randn(*shape, 136, device="cuda", generator=generator) for shape in ((), (positions,)))
    config = Sm80ImagesConfig()
    if teams == 2:
        config = Sm80ImagesConfig(64, 128, stages=2, teams=2)
        if patch == 32:
            pytest.skip("the weight does not fit shared memory")
        if torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 127 * 1024:
            pytest.skip("the weight of 128 features takes 96 KiB")
    out = patch_embed_images(images, weight, bias, pos, config=config)
    shift = bias + weight.offset
    expected = reference.patch_embed_images(images, weight.raw, weight.scale, shift, pos, patch, torch.bfloat16)
    assert torch.equal(out, expected)


def test_ties_infinities_and_nan_become_tf32_as_everywhere() -> None:
    """By the instruction that sm_90 and later have, or without it: the reference has the same bits."""
    bits = [0x3F801000, 0x3F803000, 0xBF801000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x00000FFF, 0xFFFFFFFF, 0x80001000]
    a, b = torch.zeros(40, 40), torch.zeros(40, 40)
    a[: len(bits), 0] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    b[0, 0], b[1, 0] = 1.0, 1 + 2**-11 + 2**-20
    out = gemm(a.cuda(), b.cuda(), config=Sm80GemmConfig(tile_m=64, tile_n=64), allow_tf32=True)
    torch.testing.assert_close(out.cpu(), reference.gemm(a, b), rtol=0, atol=0, equal_nan=True)
