"""What stands in place of a layer that a replaced forward reads, against the library's model with the same in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer, revert_layer
from cute_kernels.models.nn.calls import reaches_class
from cute_kernels.models.nn.layers import is_converted

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
BF16 = 1e-2  # of the norm, of a tower by the kernel


def siglip() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL, image_size=64)).eval()


def naflex() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SMALL, num_patches=16)).eval()


def qwen() -> torch.nn.Module:
    torch.manual_seed(0)
    config = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
    vision = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(**config)
    return transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(vision).eval()


@torch.no_grad()
def result(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    if any("Siglip2" in type(module).__name__ for module in inner.modules()):
        pixels = torch.rand(2, 16, 768, generator=generator) * 2 - 1
        mask = torch.ones(2, 16, dtype=torch.int64)
        named = {"pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4], [2, 3]])}
        return model(pixel_values=pixels, **named).last_hidden_state
    if any("Qwen2" in type(module).__name__ for module in inner.modules()):
        pixels = torch.rand(16, 3 * 2 * 14 * 14, generator=generator) * 2 - 1
        return inner.patch_embed(pixels)
    return model(pixel_values=torch.rand(2, 3, 64, 64, generator=generator) * 2 - 1).last_hidden_state


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def embedding(model: torch.nn.Module) -> torch.nn.Module:
    return next(m for m in model.modules() if hasattr(m, "patch_embedding"))


def lora(*targets: str, **keywords) -> Callable[[torch.nn.Module], torch.nn.Module]:
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=list(targets), init_lora_weights=False, **keywords)

    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(2)
        return peft.get_peft_model(model, config).eval()

    return adapt


def saved_apart(model: torch.nn.Module) -> torch.nn.Module:
    """PEFT trains a copy of the layer: other numbers in it."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["patch_embedding", "position_embedding"])
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(3)
    return model


class Doubled(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def doubled_positions(model: torch.nn.Module) -> torch.nn.Module:
    embedding(model).position_embedding.__class__ = Doubled
    return model


def hooked(where: str, *, before: bool) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        (module,) = (module for name, module in model.named_modules() if name.endswith(where))
        if before and where == "position_embedding":
            module.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),))
        elif before:
            module.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        else:
            module.register_forward_hook(lambda module, given, out: out * 2)
        return model

    return adapt


class Scaled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 3 * weight


def parametrised(where: str) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        (module,) = (module for name, module in model.named_modules() if name.endswith(where))
        parametrize.register_parametrization(module, "weight", Scaled())
        return model

    return adapt


def other_ids(model: torch.nn.Module) -> torch.nn.Module:
    embedding(model).position_ids = torch.arange(15, -1, -1)[None]
    return model


def written_ids(model: torch.nn.Module) -> torch.nn.Module:
    embedding(model).position_ids.copy_(torch.arange(15, -1, -1)[None].clone())
    return model


def spectral(model: torch.nn.Module) -> torch.nn.Module:
    parametrizations.spectral_norm(embedding(model).patch_embedding)
    return model


def weight_norm(model: torch.nn.Module) -> torch.nn.Module:
    """The older one, a hook that makes the weight before every call."""
    layer = embedding(model).patch_embedding
    torch.nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(3)
    return model


def renormalised(model: torch.nn.Module) -> torch.nn.Module:
    embedding(model).position_embedding.max_norm = 0.01
    return model


def overlapping(model: torch.nn.Module) -> torch.nn.Module:
    layer = embedding(model).patch_embedding
    layer.stride, layer.dilation = (16, 16), (1, 1)
    layer.padding, layer.padding_mode = (8, 8), "zeros"
    layer.stride = (20, 20)
    return model


class Noted(ModelHook):
    """accelerate's hook that changes nothing, and one that doubles what the embedding gives."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def post_forward(self, module: torch.nn.Module, output: object) -> object:
        return output * self.factor if hasattr(module, "patch_embedding") and output.dim() == 3 else output


def with_hooks(factor: float) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        for module in model.modules():
            add_hook_to_module(module, Noted(factor))
        return model

    return adapt


def offloaded(model: torch.nn.Module) -> torch.nn.Module:
    """Weights of the embedding wait on "meta", and come when a module is called."""
    accelerate.cpu_offload(embedding(model), execution_device="cpu", offload_buffers=True)
    return model


ADAPTATIONS = {
    "LoRA on the layer": (siglip, lora("patch_embedding")),
    "LoRA on the positions": (siglip, lora("position_embedding")),
    "LoRA on both": (siglip, lora("patch_embedding", "position_embedding")),
    "LoRA with DoRA": (siglip, lora("patch_embedding", use_dora=True)),
    "a copy of PEFT's": (siglip, saved_apart),
    "LoRA on NaFlex": (naflex, lora("patch_embedding")),
    "LoRA on Qwen": (qwen, lora("proj")),
    "a subclass of the positions": (siglip, doubled_positions),
    "a hook on the layer": (siglip, hooked("patch_embedding", before=False)),
    "a hook before the layer": (siglip, hooked("patch_embedding", before=True)),
    "a hook on the positions": (siglip, hooked("position_embedding", before=False)),
    "a hook before the positions": (siglip, hooked("position_embedding", before=True)),
    "a hook on NaFlex's layer": (naflex, hooked("patch_embedding", before=False)),
    "a hook that NaFlex does not call": (naflex, hooked("position_embedding", before=False)),
    "a hook on Qwen's layer": (qwen, hooked("patch_embed.proj", before=True)),
    "a parametrised layer": (siglip, parametrised("patch_embedding")),
    "parametrised positions": (siglip, parametrised("position_embedding")),
    "parametrised NaFlex": (naflex, parametrised("position_embedding")),
    "positions in another order": (siglip, other_ids),
    "positions whose order was written": (siglip, written_ids),
    "spectral norm": (siglip, spectral),
    "weight norm": (siglip, weight_norm),
    "positions with a largest norm": (siglip, renormalised),
    "patches that are no tiling": (siglip, overlapping),
    "accelerate's hooks": (siglip, with_hooks(1.0)),
    "a hook of accelerate's that doubles": (siglip, with_hooks(2.0)),
    "accelerate's hooks on NaFlex": (naflex, with_hooks(2.0)),
    "offloaded weights": (siglip, offloaded),
}


@pytest.mark.parametrize("first", ["adapted", "converted"])
@pytest.mark.parametrize("what", ADAPTATIONS)
@pytest.mark.filterwarnings("ignore:.*")
def test_what_stands_in_place_is_called(what: str, first: str) -> None:
    make, adapt = ADAPTATIONS[what]
    expected = result(adapt(make()))
    if first == "adapted":
        ours = integration.convert(adapt(make()))
    else:
        ours = integration.convert(make())
        result(ours)  # what was prepared before the change
        ours = adapt(ours)
    assert integration.is_converted(ours)
    assert error(result(ours), expected) < BF16
    plain = result(make())
    if what not in ("accelerate's hooks", "a hook that NaFlex does not call", "offloaded weights"):
        assert error(plain, expected) > 2 * BF16  # what stands there matters


def test_uint8_through_accelerates_hooks_is_normalised() -> None:
    library, ours = siglip(), integration.convert(with_hooks(1.0)(siglip()), "int8", mean=0.5, std=0.5)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad(), pytest.warns(UserWarning, match="forward of its own, and is called"):
        got = ours(pixel_values=images).last_hidden_state
        expected = library(pixel_values=images / 127.5 - 1).last_hidden_state
    assert error(got, expected) < 2e-2


def test_hooks_that_were_taken_off_leave_the_kernel() -> None:
    """accelerate leaves bound methods in the modules, of the class of then."""
    model = with_hooks(1.0)(siglip())
    remove_hook_from_module(model, recurse=True)
    assert isinstance(vars(embedding(model))["forward"], MethodType)
    ours = integration.convert(model)
    library, got = result(siglip()), result(ours)
    assert 0 < error(got, library) < BF16
    hooked = with_hooks(1.0)(integration.convert(siglip()))
    remove_hook_from_module(hooked, recurse=True)
    assert integration.is_converted(hooked) and torch.equal(result(hooked), got)
    assert torch.equal(result(integration.revert(ours)), library)
    assert not integration.is_converted(ours)
    with_both = with_hooks(1.0)(siglip())
    assert torch.equal(result(integration.revert(integration.convert(with_both))), library)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_converted_model_reach_the_kernel(again) -> None:
    ours = integration.convert(siglip())
    other = again(ours)
    assert integration.is_converted(other) and torch.equal(result(other), result(ours))


def test_a_forward_of_the_instance_is_refused() -> None:
    model = siglip()
    embeddings = embedding(model)
    embeddings.forward = lambda pixel_values, **_: type(embeddings).forward(embeddings, pixel_values)
    with pytest.raises(ValueError, match="siglip embedding is SiglipVisionEmbeddings with a forward of its own"):
        integration.convert(model)
    assert not integration.is_converted(model)
    ours = integration.convert(siglip())
    embedding(ours).forward = lambda pixel_values, **_: pixel_values
    assert not integration.is_converted(ours)
    layer = torch.nn.Conv2d(3, 16, 16, stride=16)
    layer.forward = lambda images: images
    with pytest.raises(ValueError, match="Conv2d with a forward of its own"):
        convert_layer(layer, PatchOptions())


def test_a_method_of_the_instance_is_called() -> None:
    model = integration.convert(siglip())
    embeddings = embedding(model)
    other = torch.rand(1, 16, 64)
    embeddings.interpolate_pos_encoding = lambda *_: other
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad(), pytest.warns(UserWarning, match="interpolate_pos_encoding of its own, and is called"):
        got = embeddings(images, interpolate_pos_encoding=True)
        rows = embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
    assert error(got, rows + other) < 1e-6


def test_hooks_of_all_modules_are_called() -> None:
    model, seen = integration.convert(siglip()), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        result(model)
    finally:
        handle.remove()
    assert torch.nn.Conv2d in seen and torch.nn.Embedding in seen


# --- layers ----------------------------------------------------------------------------------------------------------


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = torch.nn.Conv2d(3, 16, 16, stride=16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images)


IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.parametrize("dora", [False, True])
@torch.no_grad()
def test_an_adapter_around_a_converted_convolution(dora: bool) -> None:
    adapt = lora("proj", use_dora=dora)
    expected = adapt(Tower())(IMAGES)
    converted = Tower()
    convert_layer(converted.proj, PatchOptions())
    with pytest.warns(UserWarning, match="raw pixels reach it as they are"):
        adapted = adapt(converted)
    assert is_converted(adapted.base_model.model.proj.base_layer)
    assert type(adapted.base_model.model.proj.lora_A["default"]) is torch.nn.Conv2d
    assert error(adapted(IMAGES), expected) < BF16
    assert error(adapted.merge_and_unload()(IMAGES), expected) < BF16


def test_a_linear_layer_made_by_an_adapter() -> None:
    layer = convert_layer(torch.nn.Linear(768, 16), PatchOptions())
    with pytest.warns(UserWarning, match="converted Linear's class is made as a plain Linear"):
        made = type(layer)(8, 4, bias=False)
    assert type(made) is torch.nn.Linear and made.weight.shape == (4, 8)
    again = copy.deepcopy(layer)
    assert is_converted(again) and torch.equal(again.weight, layer.weight)


@torch.no_grad()
def test_accelerates_hooks_on_a_layer_stay() -> None:
    expected = Tower().proj(IMAGES)
    layer = Tower().proj
    add_hook_to_module(layer, ModelHook())
    convert_layer(layer, PatchOptions())
    assert is_converted(layer) and reaches_class(layer)
    assert 0 < error(layer(IMAGES), expected) < BF16


@torch.no_grad()
def test_a_converted_layer_that_is_parametrised() -> None:
    """Its class is another one then, which PyTorch derives from the layer's."""
    layer, plain = Tower().proj, Tower().proj
    convert_layer(layer, PatchOptions())
    layer(IMAGES)  # what was prepared before the change
    for module in (layer, plain):
        parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    assert is_converted(layer) and 0 < error(layer(IMAGES), plain(IMAGES)) < BF16
    convert_layer(layer, PatchOptions(precision="fp16"))
    assert 0 < error(layer(IMAGES), plain(IMAGES)) < 1e-3
    with pytest.raises(TypeError, match="ParametrizedPatchConv2d: must be .*: remove what was put around it"):
        revert_layer(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert revert_layer(layer) and not is_converted(layer) and torch.equal(layer(IMAGES), plain(IMAGES))


def test_a_converted_layer_with_a_forward_of_the_instance() -> None:
    layer = convert_layer(Tower().proj, PatchOptions())
    layer.forward = lambda images: images
    assert not is_converted(layer)
    with pytest.raises(ValueError, match="PatchConv2d with a forward of its own"):
        convert_layer(layer, PatchOptions(precision="fp16"))


def test_another_convolution_is_refused() -> None:
    class Standardised(torch.nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean(), bias)

    with pytest.raises(TypeError, match="Standardised, which convolves in another way"):
        convert_layer(Standardised(3, 16, 16, stride=16), PatchOptions())


# --- reentrant checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["layer", "transformers"])
@pytest.mark.filterwarnings("ignore:A patch embedding in eval mode")
def test_both_passes_of_a_checkpoint_are_the_same_module(kind: str, training: bool) -> None:
    """The second pass, which gradients need, is the plain module; what it gives, the first one gives, too."""
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    if kind == "transformers":
        plain = embedding(siglip())
        ours = embedding(integration.convert(siglip(), "fp8", mean=0.5, std=0.5))
    else:
        layer = torch.nn.Conv2d(3, 16, 16, stride=16)
        plain = copy.deepcopy(layer)
        ours = convert_layer(layer, PatchOptions(precision="fp8", mean=0.5, std=0.5))
    ours.train(training)
    expected = plain(images)
    another = torch.zeros((), requires_grad=True)  # so that autograd recomputes for images without gradients

    def run(images: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return ours(images) + zero

    for given in (images, images.clone().requires_grad_()):
        out = checkpoint(run, given, another, use_reentrant=True)
        assert torch.equal(out, expected)
        out.square().sum().backward()
    with torch.no_grad():
        assert not torch.equal(ours(images), expected)  # the kernel, without a checkpoint


# --- what to write ---------------------------------------------------------------------------------------------------


def test_other_arguments_are_answered_with_what_to_write() -> None:
    layer = torch.nn.Conv2d(3, 16, 16, stride=16)
    with pytest.raises(TypeError, match=r"no argument precision: write .*PatchOptions\(precision='int8'\)\)"):
        convert_layer(layer, precision="int8")
    with pytest.raises(TypeError, match="options is NoneType: must be PatchOptions"):
        convert_layer(layer)


def test_a_method_of_an_instance_of_naflex_is_called() -> None:
    plain, ours = naflex(), integration.convert(naflex())
    other = torch.rand(2, 16, 64)
    for model in (plain, ours):
        embedding(model).resize_positional_embeddings = lambda *_, **__: other
    expected = result(plain)
    with pytest.warns(UserWarning, match="resize_positional_embeddings of its own, and is called"):
        got = result(ours)
    assert error(got, expected) < 1e-6


def test_a_method_of_a_class_of_rows_that_is_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = qwen(), integration.convert(qwen())
    kind = type(plain.patch_embed)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: 2 * forward(*given))
    expected = result(plain)
    with pytest.warns(UserWarning, match="replaced|calls other code than its library's"):
        got = result(ours)
    assert error(got, expected) < 1e-6
