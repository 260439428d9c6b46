"""Training through converted layers: gradients beside float64, and which calls the operations compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.models.nn.layer_norm import LayerNormEngine
from cute_kernels.operations import gemm as gemm_operation
from cute_kernels.operations import patch_embed as rows_operation
from cute_kernels.operations import patch_embed_images as images_operation
from tests.models.nn.embedding import Embedding, embedding

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operations that were executed."""
    names: list[str] = []
    operations = gemm_operation.GEMM, rows_operation.PATCH_EMBED, images_operation.PATCH_EMBED_IMAGES
    for operation in operations:
        execute = operation.execute
        note: Callable = lambda a, run=execute, name=operation.name: names.append(name) or run(a)  # noqa: E731
        monkeypatch.setattr(operation, "execute", note)
    return names


def module(dtype: torch.dtype = torch.bfloat16, precision: str = "bf16") -> Embedding:
    torch.manual_seed(0)
    layer, positions = torch.nn.Conv2d(3, 32, 8, stride=8), torch.nn.Parameter(torch.randn(1, 4, 32))
    embed = embedding(layer, pos_embed=positions, precision=precision, mean=MEAN, std=STD)
    return embed.to(dtype)


def images(raw: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return pixels if raw else normalised(pixels)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def check_gradients(embed: torch.nn.Module, out: torch.Tensor, pixels: torch.Tensor, tolerance: float = 1e-2) -> None:
    """Those of the parameters that train, after a backward pass, beside the plain convolution in float64."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    out.backward(direction)
    exact = {name: p.detach().double().requires_grad_() for name, p in embed.named_parameters()}
    values = torch.nn.functional.conv2d(pixels.double(), exact["weight"], exact["bias"], stride=8)
    (values.flatten(2).transpose(1, 2) + exact["pos_embed"]).backward(direction.double())
    for name, parameter in embed.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad:
            expected = exact[name].grad
            assert (parameter.grad.double() - expected).norm() < tolerance * expected.norm(), name


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "normalised"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operation_trains(dtype: torch.dtype, raw: bool, computed: list[str]) -> None:
    embed = module(dtype, "auto")
    check_gradients(embed, embed(images(raw)), images())
    assert computed == ["patch_embed_images"]


def test_autocast_trains_float32_parameters_and_nothing_else_rounds_them(computed: list[str]) -> None:
    embed = module(torch.float32)
    check_gradients(embed, embed(images()), images(), 1e-5)
    assert not computed
    embed.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = embed(images())
    check_gradients(embed, out, images())
    assert computed == ["patch_embed_images"]


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_positions_alone_train(precision: str, computed: list[str]) -> None:
    embed, pixels = module(precision=precision), images(raw=precision == "int8")
    embed.weight.requires_grad_(False)
    embed.bias.requires_grad_(False)
    check_gradients(embed, embed(pixels), images())
    assert computed == ["patch_embed" if precision == "fp8" else "patch_embed_images"]


@pytest.mark.parametrize("trained", [(), ("weight", "bias", "pos_embed")], ids=["frozen", "trained"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_gradients_of_the_input(reentrant: bool, trained: tuple, computed: list[str]) -> None:
    """Both passes are the operation's, and the second gives the numbers of the first; where it is not reentrant, it
    ends as soon as everything is noted for backward, before the hook."""
    embed, pixels = module(), images().bfloat16().requires_grad_()
    for name, parameter in embed.named_parameters():
        parameter.requires_grad_(name in trained)
    seen: list[torch.Tensor] = []
    embed.register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
    check_gradients(embed, checkpoint(embed, pixels, use_reentrant=reentrant), images())
    assert pixels.grad.abs().sum() > 0 and torch.equal(seen[0], seen[-1])
    assert computed == ["patch_embed_images"] * 2 and len(seen) == 1 + reentrant


def test_compiled_whole_as_one_graph(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose guards, evaluated in every call, have no table of arguments among them."""
    monkeypatch.setattr(images_operation.PATCH_EMBED_IMAGES, "call", lambda *_: pytest.fail("the table was looked at"))
    embed = module()
    compiled = torch.compile(embed, fullgraph=True, backend="aot_eager")
    check_gradients(embed, compiled(images().bfloat16()), images())
    assert computed == ["patch_embed_images"]
    torch.compiler.reset()


def test_rows_of_a_linear_layer_train(computed: list[str]) -> None:
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(192, 32).bfloat16(), torch.randn(2, 5, 192).bfloat16()
    twin = copy.deepcopy(layer).double()
    convert_layer(layer, PatchOptions(precision="bf16"))
    layer(rows).square().sum().backward()
    twin(rows.double()).square().sum().backward()
    assert computed == ["gemm"]
    for mine, exact in zip(layer.parameters(), twin.parameters(), strict=True):
        assert (mine.grad - exact.grad).norm() < 1e-2 * exact.grad.norm()


@pytest.mark.parametrize("view", [lambda out: out, lambda out: out.flatten(2).transpose(1, 2)], ids=["as is", "rows"])
def test_a_result_is_written_to_in_place(view: Callable, computed: list[str]) -> None:
    """As timm's NaFlexEmbeds adds positions."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 32, 8, stride=8)
    twin = copy.deepcopy(layer)
    convert_layer(layer.bfloat16(), PatchOptions())
    for embed, pixels in ((layer, images().bfloat16()), (twin, images())):
        view(embed(pixels)).mul_(2).square().sum().backward()
    assert computed == ["patch_embed_images"]
    assert (layer.weight.grad - twin.weight.grad).norm() < 2e-2 * twin.weight.grad.norm()


def test_nothing_is_prepared_for_a_weight_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a GPU would wait for in every step."""
    embed = module()
    monkeypatch.setattr(PatchEngine, "made_from", lambda *_: pytest.fail("a weight was prepared"))
    optimiser = torch.optim.SGD(embed.parameters(), lr=0.1)
    before = embed(images())
    before.square().mean().backward()
    optimiser.step()
    assert not torch.equal(embed(images()), before)


def test_an_fp8_feature_does_not_depend_on_the_others() -> None:
    """One a hundred thousand times as large, beside which the others would be rounded away."""
    embed, pixels = module(torch.float32, "fp8"), images()
    with torch.no_grad():
        before = embed(pixels)
        embed.weight[3] *= 1e5
        after = embed(pixels)
        embed.weight[4] = 0
        zero = embed(pixels)
    others = [feature for feature in range(32) if feature != 3]
    assert torch.equal(after[..., others], before[..., others]) and not torch.equal(after[..., 3], before[..., 3])
    assert torch.equal(zero[..., 4], (embed.bias[4] + embed.pos_embed[0, :, 4]).bfloat16().float().expand(3, 4))


def test_a_bias_that_is_folded_into_what_the_kernel_reads() -> None:
    """Of rows of integers it is summed with an offset, for each pass anew; behind a norm nothing leads back to it."""
    layer, rows = torch.nn.Linear(192, 32), torch.randint(0, 256, (5, 192), dtype=torch.uint8)
    layer.weight.requires_grad_(False)
    convert_layer(layer, PatchOptions(precision="int8"))
    for _ in range(2):
        layer(rows).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 10.0))
    engine, weight = LayerNormEngine(PatchOptions(precision="int8")), layer.weight.detach()
    assert engine.takes_over(None, rows, lambda: (weight, None, torch.ones(192)))
    assert not engine.takes_over(None, rows, lambda: (weight, None, torch.ones(192, requires_grad=True)))
