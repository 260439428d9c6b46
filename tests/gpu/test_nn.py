"""Converted modules on a device: compiled, exported and captured; vLLM's pair; models of transformers."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.models import transformers as integration
from cute_kernels.models import vllm as vllm_plugin
from tests.models import vllm_stand_in
from tests.models.nn.embedding import embedding as positioned
from tests.models.vllm_stand_in import raw
from tests.nightly import nightly

MEAN, STD = vllm_stand_in.MEAN, vllm_stand_in.STD
SMALL = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def embedding(precision: str) -> torch.nn.Module:
    """A frozen embedding with positions and what a compiler fuses with nothing of it."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 128, 16, stride=16)
    positions = torch.nn.Parameter(torch.randn(1, 16, 128) * 0.02)
    embed = positioned(layer, pos_embed=positions, precision=precision)
    return torch.nn.Sequential(embed, torch.nn.GELU()).to("cuda", torch.bfloat16).requires_grad_(False).eval()


def images(batch: int = 4, side: int = 64) -> torch.Tensor:
    return raw((batch, 3, side, side)).cuda()


@pytest.mark.gpu_only("torch.compile")
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@torch.no_grad()
def test_a_compiled_embedding_sees_writes(precision: str) -> None:
    module, pixels = embedding(precision), images()
    compiled = torch.compile(module, fullgraph=True)
    before = compiled(pixels)
    torch.testing.assert_close(before, module(pixels), rtol=2e-2, atol=2e-2)
    module[0].weight.mul_(-1)
    torch.testing.assert_close(compiled(pixels), module(pixels), rtol=2e-2, atol=2e-2)
    assert not torch.equal(compiled(pixels), before)


@pytest.mark.gpu_only("torch.compile")
@torch.no_grad()
def test_compiled_into_cuda_graphs() -> None:
    """What ``mode="reduce-overhead"`` captures, replayed with other pixels."""
    module = embedding("int8")
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        pixels = raw((4, 3, 64, 64), seed).cuda()
        torch.testing.assert_close(compiled(pixels).clone(), module(pixels), rtol=2e-2, atol=2e-2)


AHEAD_OF_TIME = """
import sys
import torch
from cute_kernels.models.nn import kernels_in_export
from tests.gpu.test_nn import embedding, images
torch.set_grad_enabled(False)
module, pixels = embedding("int8"), images()
with kernels_in_export():
    program = torch.export.export(module, (pixels,))
package = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
run = torch._inductor.aoti_load_package(package)
torch.testing.assert_close(run(pixels), module(pixels), rtol=2e-2, atol=2e-2)
"""


@nightly
@pytest.mark.gpu_only("AOTInductor")
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """In a process of its own, which takes a minute. Of plain torch, too, torch 2.11 hangs as it probes the processor's
    vector instructions, and packages of a compiler that links libstdc++ statically end in a segmentation fault, unless
    the shared one comes first."""
    command = [sys.executable, "-c", AHEAD_OF_TIME, str(tmp_path / "model.pt2")]
    environment = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "1", "LD_PRELOAD": "libstdc++.so.6"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "still"), [("Rows", False), ("Rows", True), ("Patches", False), ("Images", False)])
@torch.no_grad()
def test_the_pair_of_vllm(kind: str, still: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalisation and the layer behind it have the reference's bits, in a CUDA graph as well."""
    names, tower_of = vllm_stand_in.vllm_names(monkeypatch, videos=0), getattr(vllm_stand_in, kind)
    raw = (lambda shape, seed=1: vllm_stand_in.still(shape[0], seed)) if still else vllm_stand_in.raw
    bits = functools.partial(vllm_stand_in.bits, one_frame=still)
    pixels = raw(tower_of.shape).cuda()
    plain = tower_of(names, torch.bfloat16).cuda()
    vllm_plugin.register("auto", still=still)
    tower = tower_of(names, torch.bfloat16).cuda()
    tower.load_state_dict(plain.state_dict())
    calls = names.norm.calls
    for seed in range(3):
        pixels.copy_(raw(tower_of.shape, seed))
        assert torch.equal(tower(pixels).cpu(), bits(tower, pixels))
    assert names.norm.calls == calls + 1
    assert 0 < error(tower(pixels), plain(pixels)) < 1.5e-2
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = tower(pixels)
    pixels.copy_(raw(tower_of.shape, 9))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), bits(tower, pixels))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_with_positions_of_two_tables(dtype: torch.dtype) -> None:
    rows, features, positions = 300, 136, 21
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (rows, 64), dtype=torch.uint8, generator=generator)
    weight = torch.randint(-127, 128, (features, 64), dtype=torch.int8, generator=generator)
    tables = torch.randn(2, positions, features, generator=generator)
    index = torch.randint(-1, positions, (rows, 2), generator=generator).to(dtype)
    sums = (x.long() @ weight.long().t()).double() * 2.0**-12
    for row, (first, second) in enumerate(index.tolist()):
        found = [tables[axis, at] for axis, at in ((0, first), (1, second)) if at >= 0]
        sums[row] += sum(found, torch.zeros(features)).double()
    given = [tensor.cuda() for tensor in (x, weight, tables, index)]
    for _ in range(2):
        got = patch_embed(given[0], given[1], None, given[2], pos_index=given[3], scale_a=2.0**-12)
        assert torch.equal(got.cpu(), sums.float().to(torch.bfloat16))


def clip(transformers) -> torch.nn.Module:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16))


def dinov2(transformers) -> torch.nn.Module:
    small = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    return transformers.Dinov2Model(transformers.Dinov2Config(**small, image_size=56))


@pytest.mark.parametrize("precision", ["auto", "int8"])
@pytest.mark.parametrize(("model", "side"), [(clip, 64), (dinov2, 56)])
@torch.no_grad()
def test_models_of_transformers(
    model: Callable[..., torch.nn.Module], side: int, precision: str, record_property
) -> None:
    """In bfloat16, from uint8 and normalised pixels, against the same model in FP32 as its library has it."""
    torch.manual_seed(0)
    plain = model(pytest.importorskip("transformers")).eval()
    pixels = images(2, side)
    mean, std = (torch.tensor(value, device="cuda")[:, None, None] for value in (MEAN, STD))
    normalised = (pixels / 255 - mean) / std
    half = copy.deepcopy(plain).to("cuda", torch.bfloat16)
    expected = plain.cuda()(pixel_values=normalised).last_hidden_state
    library = error(half(pixel_values=normalised.bfloat16()).last_hidden_state, expected)
    ours = integration.convert(half, precision, mean=MEAN, std=STD)
    given = [pixels] if precision == "int8" else [pixels, normalised.bfloat16()]
    for each in given:
        found = error(ours(pixel_values=each).last_hidden_state, expected)
        record_property(f"error over the library's, {precision}", found / library)
        assert found < (1.2 if precision == "auto" else 4) * library
