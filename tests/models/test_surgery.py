"""Models that their users changed, by code and settings of their own, against the library's, changed alike."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch

from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import kernels_in_export
from tests.models.test_what_is_known import ERRORS, FLOATS, HALF, RAW, ROWS, clip, error, holder, naflex, run, siglip


def by_hand(self: torch.nn.Module, pixel_values: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """An embedding that makes another weight of its layer's and does not call the layer."""
    layer = self.patch_embedding
    rows = torch.nn.functional.conv2d(pixel_values.to(layer.weight.dtype), 2 * layer.weight, stride=layer.stride)
    rows = rows.flatten(2).transpose(1, 2)
    if hasattr(self, "class_embedding"):
        rows = torch.cat((self.class_embedding.expand(len(rows), 1, -1), rows), 1)
    return rows + self.position_embedding(self.position_ids)


def in_a_subclass(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    own = holder(model)
    own.__class__ = type("Own", (type(own),), {"forward": by_hand, "__module__": __name__})


def in_the_class(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(holder(model)), "forward", by_hand)


def in_the_instance(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    own = holder(model)
    own.forward = lambda *given, **named: by_hand(own, *given, **named)


@pytest.mark.parametrize(("precision", "pixels"), [("bf16", "raw"), ("int8", "auto")])
@pytest.mark.parametrize("change", [in_a_subclass, in_the_class, in_the_instance])
def test_code_that_uses_the_weight_itself_gets_normalised_pixels(
    change: Callable, precision: str, pixels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = clip(), integration.convert(clip(), precision, pixels=pixels, **HALF)
    with monkeypatch.context() as patched:
        for model in (plain, ours):
            change(model, patched)
            if change is in_the_class:
                break  # of both
        expected = run(plain)
        with pytest.warns(UserWarning, match="and is given normalised pixels"):
            got = run(ours, RAW)
    assert error(got, expected) < 1e-5
    if change is in_the_class:
        assert 1e-6 < error(run(ours, RAW), run(plain)) < ERRORS[precision]  # the kernel again


@pytest.mark.parametrize("what", [{"padding_idx": 3}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_gradients_of_positions_are_what_their_embedding_says(what: dict[str, object]) -> None:
    gradients = []
    for model in (siglip(), integration.convert(siglip())):
        model.bfloat16().train()
        positions = holder(model).position_embedding
        for name, value in what.items():
            setattr(positions, name, value)
        holder(model)(FLOATS.bfloat16()).float().square().mean().backward()
        gradients.append(positions.weight.grad)
    expected, got = gradients
    assert got.layout is expected.layout
    assert error(got.to_dense(), expected.to_dense()) < 1e-6


@pytest.mark.parametrize(
    ("kind", "library", "name", "given"),
    [
        (clip, torch.nn.modules.conv, "conv2d", {}),
        (siglip, torch.nn.modules.conv, "conv2d", {}),
        (naflex, torch.nn.modules.linear, "linear", ROWS),
    ],
)
@pytest.mark.parametrize(("precision", "pixels"), [("bf16", "raw"), ("int8", "auto")])
@pytest.mark.filterwarnings("ignore:.*The plain torch module runs")
def test_a_module_of_functions_in_place_of_torchs(
    kind, library, name: str, given: dict, precision: str, pixels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a layer's name for it: functional itself stays as it is."""
    raw = torch.randint(0, 256, (2, 16, 768), dtype=torch.uint8) if given else RAW
    plain, ours = kind(), integration.convert(kind(), precision, pixels=pixels, **HALF)
    before = run(plain, raw / 127.5 - 1, **given)
    assert 1e-6 < error(run(ours, raw, **given), before) < ERRORS[precision]
    functions, function = types.SimpleNamespace(**vars(torch.nn.functional)), getattr(torch.nn.functional, name)
    setattr(functions, name, lambda *arguments: 2 * function(*arguments))
    monkeypatch.setattr(library, "F", functions)
    expected = run(plain, raw / 127.5 - 1, **given)
    assert error(expected, before) > 1e-2
    assert error(run(ours, raw, **given), expected) < 1e-5


@pytest.mark.parametrize("kind", [clip, siglip])
def test_padding_that_is_no_zeros(kind: Callable[[], torch.nn.Module]) -> None:
    """torch has it in another attribute than ``padding``."""
    smaller, results = FLOATS[..., :48, :48], []
    for model in (kind(), integration.convert(kind())):
        layer = holder(model).patch_embedding
        layer.padding_mode, layer._reversed_padding_repeated_twice = "circular", [8, 8, 8, 8]
        results.append(run(model, smaller, interpolate_pos_encoding=True))
    expected, got = results
    assert error(got, expected) < 1e-6


def test_a_padding_mode_without_padding_changes_nothing() -> None:
    expected, ours = run(clip()), integration.convert(clip())
    holder(ours).patch_embedding.padding_mode = "reflect"
    assert 1e-6 < error(run(ours), expected) < ERRORS["bf16"]


def test_a_layer_of_other_channels() -> None:
    """Of one mean for all, which is not broadcast to three channels; else the means are asked for."""
    torch.manual_seed(1)
    layer = torch.nn.Conv2d(1, 64, 16, stride=16, bias=False)
    plain, ours = clip(), integration.convert(clip(), "int8", **HALF)
    three = integration.convert(clip(), "int8", mean=[0.4, 0.5, 0.6], std=0.5)
    for model in (plain, ours, three):
        holder(model).patch_embedding = layer
    assert error(run(ours, RAW[:, :1]), run(plain, FLOATS[:, :1])) < 1e-5
    with pytest.raises(ValueError, match="mean has 3 numbers"):
        run(three, RAW[:, :1])


def of_the_embedding(model: torch.nn.Module) -> torch.nn.Module:
    return holder(model)


def of_the_layer(model: torch.nn.Module) -> torch.nn.Module:
    return holder(model).patch_embedding


@pytest.mark.parametrize(("precision", "pixels"), [("bf16", "auto"), ("bf16", "raw"), ("int8", "auto")])
@pytest.mark.parametrize("where", [of_the_embedding, of_the_layer])
@pytest.mark.parametrize("kind", [clip, siglip])
@pytest.mark.filterwarnings("ignore:.*forward of its own")
def test_a_forward_of_the_instance_gets_normalised_pixels(kind, where, precision: str, pixels: str) -> None:
    """Be it given one of its own twice, or none again: by its class's forward or not."""
    plain, ours = kind(), integration.convert(kind(), precision, pixels=pixels, **HALF)

    def answers(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
        module, found = where(model), []
        forwards = [lambda *given, **named: 2 * type(module).forward(module, *given, **named)]
        if where is of_the_layer:
            forwards.append(lambda images: torch.nn.functional.conv2d(images.float(), 3 * module.weight, stride=16))
        else:
            forwards.append(functools.partial(by_hand, module))
        for forward in 2 * forwards:
            module.forward = forward
            found.append(run(model, images))
        del module.forward
        return [*found, run(model, images)]

    for got, expected in zip(answers(ours, RAW), answers(plain, FLOATS), strict=True):
        assert error(got, expected) < ERRORS[precision]


class Beside(torch.nn.Module):
    """An adapter: beside the layer in it another one sees the pixels."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base_layer, self.beside = layer, torch.nn.Conv2d(3, 64, 16, stride=16, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.base_layer(images) + self.beside(images.to(self.weight.dtype))


def exported(model: torch.nn.Module) -> torch.nn.Module:
    with kernels_in_export(), torch.no_grad():
        return torch.export.export(model, (), {"pixel_values": RAW}).module()


@pytest.mark.parametrize("graph", [functools.partial(torch.compile, backend="eager"), exported])
@pytest.mark.parametrize(("precision", "pixels"), [("bf16", "auto"), ("bf16", "raw"), ("int8", "auto")])
def test_raw_pixels_in_front_of_an_adapter_in_a_graph(graph: Callable, precision: str, pixels: str) -> None:
    """What a graph is told of the layer's pixels is what it gets there: they were normalised in front."""
    torch.compiler.reset()
    plain, ours = clip(), integration.convert(clip(), precision, pixels=pixels, **HALF)
    for model in (plain, ours):
        holder(model).patch_embedding = Beside(holder(model).patch_embedding)
    assert error(run(graph(ours), RAW), run(plain)) < ERRORS[precision]


def test_a_layer_that_is_compiled_already_is_converted() -> None:
    model = clip()
    holder(model).patch_embedding = torch.compile(holder(model).patch_embedding, backend="eager")
    run(model)
    ours = integration.convert(model, "int8", **HALF)
    assert integration.is_converted(ours) and 1e-6 < error(run(ours, RAW), run(clip())) < ERRORS["int8"]
    integration.revert(ours)
    assert error(run(ours), run(clip())) < 1e-6 and not integration.is_converted(ours)


@pytest.mark.parametrize(("kind", "given"), [(siglip, {}), (naflex, ROWS)])
@pytest.mark.filterwarnings("ignore:.*The plain torch module runs")
def test_a_layer_that_is_called_in_a_way_of_its_own(kind: Callable, given: dict) -> None:
    pixels = torch.randn(2, 16, 768).clamp(-1, 1) if given else FLOATS
    results = []
    for model in (kind(), integration.convert(kind())):
        layer = holder(model).patch_embedding
        layer._call_impl = lambda *arguments, own=layer._call_impl: 2 * own(*arguments)
        results.append(run(model, pixels, **given))
    expected, got = results
    assert error(run(kind(), pixels, **given), expected) > 1e-2
    assert error(got, expected) < 1e-6


@pytest.mark.parametrize(("kind", "given"), [(siglip, {}), (naflex, ROWS)])
def test_positions_of_one_feature(kind: Callable, given: dict) -> None:
    """The library adds them to all features."""
    raw = torch.randint(0, 256, (2, 16, 768), dtype=torch.uint8) if given else RAW
    plain, ours = kind(), integration.convert(kind(), "int8", **HALF)
    before = run(plain, raw / 127.5 - 1, **given)
    for model in (plain, ours):
        torch.manual_seed(1)
        holder(model).position_embedding = torch.nn.Embedding(16, 1)
    expected = run(plain, raw / 127.5 - 1, **given)
    assert error(before, expected) > 1e-2
    assert 1e-6 < error(run(ours, raw, **given), expected) < ERRORS["int8"]  # by the kernel
