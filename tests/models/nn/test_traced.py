"""Converted modules in graphs: one operator under `torch.compile` without breaks, and in `torch.export` on request."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer, kernels_in_export
from tests.models.nn.embedding import embedding
from tests.processes import run_python

OPERATOR = "cute_kernels.embed_patches.default"


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Positioned(torch.nn.Module):
    """A tower's beginning, whose layer takes the positions, of another grid than the images'."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.proj = torch.nn.Conv2d(3, 24, 16, stride=16)
        self.pos_embed = torch.nn.Parameter(torch.randn(1, 4, 24))
        convert_layer(self.proj, PatchOptions(precision=precision))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images, self.pos_embed).flatten(2).transpose(1, 2) * 2


def siglip(precision: str) -> torch.nn.Module:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**small, image_size=64, patch_size=16)
    return integration.convert(transformers.SiglipVisionModel(config).eval(), precision, mean=0.5, std=0.5).embeddings


def qwen(precision: str) -> torch.nn.Module:
    module = transformers.models.qwen2_vl.modeling_qwen2_vl.PatchEmbed(14, 2, 3, 32)
    return integration.convert(torch.nn.Sequential(module), precision, mean=0.5, std=0.5)


MODULES: dict[str, tuple[Callable[[str], torch.nn.Module], tuple[int, ...]]] = {
    "a layer that keeps positions": (
        lambda precision: embedding(
            torch.nn.Conv2d(3, 24, 16, stride=16),
            pos_embed=torch.nn.Parameter(torch.randn(1, 16, 24)),
            precision=precision,
        ),
        (2, 3, 64, 64),
    ),
    "a layer with positions": (Positioned, (2, 3, 64, 80)),
    "a linear layer": (
        lambda precision: convert_layer(torch.nn.Linear(768, 24), PatchOptions(precision=precision)),
        (2, 9, 768),
    ),
    "transformers, with positions": (siglip, (2, 3, 64, 64)),
    "transformers, rows": (qwen, (8, 1176)),
}


def build(kind: str, precision: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = MODULES[kind]
    return make(precision).eval(), torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("kind", MODULES)
@torch.no_grad()
def test_compiled_without_breaks(kind: str, precision: str) -> None:
    module, pixels = build(kind, precision)
    expected = module(pixels)
    targets = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    assert torch.equal(compiled(pixels), expected)
    assert targets.count("cute_kernels.embed_patches") == 1
    for parameter in module.parameters():  # what was made from them is made anew
        parameter.mul_(-1)
    changed = compiled(pixels)
    assert torch.equal(changed, module(pixels)) and not torch.equal(changed, expected)


def check_graphs_of_plain_torch(module: torch.nn.Module, pixels: torch.Tensor) -> None:
    """Graphs of plain torch hold none of this package's operators; where operations give no numbers, a shape comes."""
    expected = module(pixels)
    traced, symbolic = torch.jit.trace(module, pixels, check_trace=False), make_fx(module)(pixels)
    assert "embed_patches" not in f"{traced.inlined_graph}{symbolic.code}"
    for graph in (traced, symbolic, torch.export.export(module, (pixels,)).module()):
        got = graph(pixels)
        assert got.shape == expected.shape and 0 < (got - expected).norm() / expected.norm() < 4e-2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (pixels, mode.from_tensor(pixels)):
            got = module(given)
            assert isinstance(got, FakeTensor) and got.shape == expected.shape
    assert torch.equal(module(pixels), expected)


@pytest.mark.parametrize("kind", MODULES)
@torch.no_grad()
def test_graphs_of_plain_torch(kind: str) -> None:
    check_graphs_of_plain_torch(*build(kind, "int8"))


@torch.no_grad()
def test_positions_of_another_order_in_a_graph() -> None:
    module, pixels = build("transformers, with positions", "int8")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    first = compiled(pixels)
    module.position_ids.copy_(torch.arange(15, -1, -1)[None])
    with pytest.warns(UserWarning, match="position_ids are not the positions in their order"):
        expected = module(pixels)
    got = compiled(pixels)
    assert not torch.equal(got, first) and (got - expected).norm() / expected.norm() < 2e-2


@torch.no_grad()
def test_a_graph_of_integers_without_a_kernel_is_plain() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 24, 4, stride=4)
    images = torch.randint(0, 256, (1, 3, 4, 24000), dtype=torch.uint8)  # a row of patches exceeds shared memory
    expected = layer(images / 127.5 - 1)
    convert_layer(layer, PatchOptions(precision="int8", backend="emulator"))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="no kernel takes images"):
        got = compiled(images)
    assert torch.allclose(got, expected, atol=1e-5)


def test_what_is_compiled_trains() -> None:
    layer = torch.nn.Conv2d(3, 24, 16, stride=16)
    plain = copy.deepcopy(layer)
    convert_layer(layer, PatchOptions(precision="int8"))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(images).square().sum().backward()
    plain(images / 127.5 - 1).square().sum().backward()
    assert torch.allclose(layer.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", MODULES)
@torch.no_grad()
def test_export_that_keeps_the_operator(kind: str, strict: bool) -> None:
    module, pixels = build(kind, "int8")
    expected = module(pixels)
    module.requires_grad_(False)
    with kernels_in_export():
        program = torch.export.export(module, (pixels,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(OPERATOR) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(pixels), expected)
    plain = torch.export.export(module, (pixels,), strict=strict)
    assert OPERATOR not in [str(node.target) for node in plain.graph.nodes]


def test_an_exported_program_in_another_process(tmp_path) -> None:
    module, pixels = build("a layer that keeps positions", "int8")
    module.requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=64)
    with kernels_in_export():
        program = torch.export.export(module, (pixels,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "program.pt2")
    pixels = torch.cat([pixels, pixels])
    torch.save((pixels, module(pixels)), tmp_path / "call.pt")
    run = run_python(
        "-c",
        "import sys, torch, cute_kernels, cute_kernels.models.nn\n"
        "pixels, expected = torch.load(sys.argv[1] + '/call.pt')\n"
        "got = torch.export.load(sys.argv[1] + '/program.pt2').module()(pixels)\n"
        "assert torch.equal(got, expected)",
        str(tmp_path),
    )
    assert run.returncode == 0, run.stderr
