"""A forward is replaced while it is the one that is known, and pixels are what was said at conversion.

Everything is compared with the library's model in the same situation.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
HALF = {"mean": 0.5, "std": 0.5}
ERRORS = {"bf16": 1e-2, "int8": 2e-2}
RAW = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
FLOATS = RAW / 127.5 - 1


def siglip() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL, image_size=64)).eval()


def naflex() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SMALL, num_patches=16)).eval()


def clip() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16)
    return transformers.CLIPVisionModel(config).eval()


def holder(model: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in model.modules() if hasattr(module, "patch_embedding"))


@torch.no_grad()
def run(model: torch.nn.Module, pixels: torch.Tensor = FLOATS, **named: object) -> torch.Tensor:
    return model(pixel_values=pixels, **named).last_hidden_state


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


# --- the forward that is known ---------------------------------------------------------------------------------------

ROWS = {
    "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64),
    "spatial_shapes": torch.tensor([[2, 8], [4, 4]]),
}
CALLS: dict[str, tuple[Callable[[], torch.nn.Module], tuple]] = {
    "siglip": (siglip, (FLOATS,)),
    "interpolated": (siglip, (torch.cat((FLOATS, FLOATS), -1),)),
    "naflex": (naflex, (torch.rand(2, 16, 768, generator=torch.Generator().manual_seed(2)) * 2 - 1,)),
}
NAMED = {"siglip": {}, "interpolated": {"interpolate_pos_encoding": True}, "naflex": ROWS}
SIGLIP = transformers.models.siglip.modeling_siglip.SiglipVisionEmbeddings
NAFLEX = transformers.models.siglip2.modeling_siglip2.Siglip2VisionEmbeddings
REPLACED = [
    ("siglip", SIGLIP, "forward"),
    ("interpolated", SIGLIP, "interpolate_pos_encoding"),
    ("interpolated", torch.nn.functional, "interpolate"),
    ("siglip", torch.nn.functional, "conv2d"),
    ("siglip", torch.nn.Conv2d, "_conv_forward"),
    ("siglip", torch.nn.Embedding, "forward"),
    ("naflex", NAFLEX, "forward"),
    ("naflex", NAFLEX, "resize_positional_embeddings"),
    ("naflex", torch.nn.Linear, "forward"),
    ("naflex", torch.nn.functional, "linear"),
]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "functools.wraps"])
@pytest.mark.parametrize("before", [False, True], ids=["after converting", "before"])
@pytest.mark.parametrize(("kind", "place", "name"), REPLACED)
@pytest.mark.filterwarnings("ignore:.*The plain torch module runs")
def test_replaced_code_of_classes_and_of_torch_is_called(kind, place, name, before, wrapped, monkeypatch) -> None:
    build, given = CALLS[kind]
    model = build()
    plain = run(model, *given, **NAMED[kind])
    ours = None if before else integration.convert(copy.deepcopy(model))
    old = vars(place)[name]
    function = getattr(place, name)

    def twice(*arguments: object, **named: object) -> object:
        return 2 * function(*arguments, **named)

    if wrapped:
        twice = functools.wraps(function)(twice)
    monkeypatch.setattr(place, name, staticmethod(twice) if isinstance(old, staticmethod) else twice)
    expected = run(model, *given, **NAMED[kind])
    ours = integration.convert(copy.deepcopy(model)) if ours is None else ours
    assert error(plain, expected) > 0.02  # it matters
    assert error(run(ours, *given, **NAMED[kind]), expected) < 1e-6


@pytest.mark.filterwarnings("ignore:.*The plain torch module runs")
@pytest.mark.parametrize("kind", [TorchFunctionMode, TorchDispatchMode])
def test_modes_see_the_operations_of_the_library(kind: type) -> None:
    seen = []

    class Mode(kind):
        def __torch_function__(self, function, types, arguments=(), named=None):
            seen.append(str(function))
            return function(*arguments, **named or {})

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            seen.append(str(function))
            return function(*arguments, **named or {})

    ours, expected = integration.convert(siglip()), run(siglip())
    with torch.no_grad(), Mode():
        got = ours(pixel_values=FLOATS).last_hidden_state
    assert error(got, expected) < 1e-6 and any("conv" in name for name in seen)
    with torch.device("cpu"):  # a mode that changes no numbers
        assert 1e-6 < error(run(ours), expected) < ERRORS["bf16"]


@torch.no_grad()
def test_a_layer_in_another_type_than_its_model() -> None:
    model = siglip()
    holder(model).patch_embedding.to(torch.bfloat16)
    ours = integration.convert(copy.deepcopy(model))
    for named in ({}, {"interpolate_pos_encoding": True}):
        pixels = FLOATS if not named else torch.cat((FLOATS, FLOATS), -1)
        expected, got = holder(model)(pixels, **named), holder(ours)(pixels, **named)
        assert got.dtype == expected.dtype == torch.float32 and error(got, expected) < ERRORS["bf16"]
    rows = naflex()
    holder(rows).patch_embedding.to(torch.bfloat16)
    given = CALLS["naflex"][1][0], ROWS["spatial_shapes"]
    expected, got = holder(rows)(*given), holder(integration.convert(copy.deepcopy(rows)))(*given)
    assert got.dtype == expected.dtype == torch.float32 and error(got, expected) < ERRORS["bf16"]


@torch.no_grad()
def test_empty_batches_and_rows_with_strides() -> None:
    for precision, pixels in (("bf16", FLOATS), ("int8", RAW)):
        got = holder(integration.convert(siglip(), precision, **HALF))(pixels[:0])
        assert got.shape == (0, 16, 64)
        layer = torch.nn.Linear(768, 16)
        ours = convert_layer(copy.deepcopy(layer), PatchOptions(precision=precision))
        wide = torch.randint(0, 256, (5, 1000), dtype=torch.uint8)
        rows = wide[:, :768] if precision == "int8" else (wide / 127.5 - 1)[:, :768]
        assert error(ours(rows), layer(wide[:, :768] / 127.5 - 1)) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@torch.no_grad()
def test_float16s_largest_numbers_stay_finite(precision: str) -> None:
    """BF16, in which kernels of these precisions give results, rounds them to 65,536."""
    layer = torch.nn.Conv2d(3, 16, 16, stride=16).half()
    positions = torch.full((4, 16), 65440.0).half()
    ours = convert_layer(copy.deepcopy(layer), PatchOptions(precision=precision))
    assert torch.isfinite(ours(RAW[:1, :, :32, :32], positions)).all()
    layer.bias.fill_(65440.0)
    ours = convert_layer(layer, PatchOptions(precision=precision))
    assert torch.isfinite(ours(RAW[:1, :, :32, :32])).all()


@torch.no_grad()
def test_an_ensemble_of_models_by_vmap() -> None:
    models = [siglip(), siglip()]
    for parameter in models[1].parameters():
        parameter.mul_(1.5)
    expected = torch.stack([run(model) for model in models])
    ours = [integration.convert(model) for model in models]
    state = torch.func.stack_module_state(ours)
    base = copy.deepcopy(ours[0]).to("meta")
    call = functools.partial(torch.func.functional_call, base, kwargs={"pixel_values": FLOATS})
    got = torch.func.vmap(lambda *state: call(state).last_hidden_state)(*state)
    assert error(got, expected) < 1e-5


# --- pixels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(holder(model), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hooked(model: torch.nn.Module) -> torch.nn.Module:
    holder(model).register_forward_pre_hook(lambda module, given: (given[0].clone(), *given[1:]))
    return model


def regional(model: torch.nn.Module) -> torch.nn.Module:
    holder(model).compile(backend="eager")
    return model


def regional_layer(model: torch.nn.Module) -> torch.nn.Module:
    holder(model).patch_embedding.compile(backend="eager")
    return model


def compiled_in_place(model: torch.nn.Module) -> torch.nn.Module:
    holder(model).patch_embedding = torch.compile(holder(model).patch_embedding, backend="eager")
    assert integration.is_converted(model)
    return model


PLACES = {
    "hooks": hooked,
    "a compiled module in the layer's place": compiled_in_place,
    "a compiled region": regional,
    "a compiled layer": regional_layer,
    "torch.compile": functools.partial(torch.compile, backend="eager"),
    "fully_shard": sharded,
}


@pytest.mark.parametrize("pixels", ["auto", "raw"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("place", PLACES)
def test_raw_pixels_through_what_stands_around_a_layer(place: str, precision: str, pixels: str, group) -> None:
    torch.compiler.reset()
    expected = run(clip())
    ours = PLACES[place](integration.convert(clip(), precision, pixels=pixels, **HALF))
    assert 1e-6 < error(run(ours, RAW), expected) < ERRORS[precision]
    if pixels == "raw":
        assert error(run(ours, RAW.float()), expected) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_raw_pixels_of_an_exported_model(precision: str) -> None:
    ours = integration.convert(clip(), precision, **HALF)
    exported = torch.export.export(ours, (), {"pixel_values": RAW}).module()
    assert error(run(exported, RAW), run(clip())) < 1e-5


@pytest.mark.parametrize("pixels", ["auto", "raw"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.filterwarnings("ignore:a layer of a converted")
def test_lora_on_the_layer(precision: str, pixels: str) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["patch_embedding"], init_lora_weights=False)
    adapted = []
    for model in (clip(), integration.convert(clip(), precision, pixels=pixels, **HALF)):
        torch.manual_seed(2)
        adapted.append(peft.get_peft_model(model, config))
    plain, ours = adapted
    for training in (True, False):
        expected = run(plain.train(training))
        is_raw = pixels == "raw" or precision == "int8"
        for given in (RAW, RAW.float() if is_raw else FLOATS):
            assert error(run(ours.train(training), given), expected) < ERRORS["bf16"]
        if is_raw:
            with pytest.raises(ValueError, match="there are others than whole numbers from 0 to 255"):
                run(ours, FLOATS)
    merged = ours.merge_and_unload()
    assert error(run(merged, RAW), expected) < ERRORS[precision]  # the layer is at its place again


def test_integers_answer_alike_in_both_modes() -> None:
    layer = convert_layer(torch.nn.Conv2d(3, 16, 16, stride=16), PatchOptions(precision="int8"))
    for training in (True, False):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match="others than whole numbers"):
                layer.train(training)(FLOATS)


@pytest.mark.parametrize("wrong", [0.5, -1.0, 256.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_pixels_that_are_not_raw(dtype: torch.dtype, wrong: float) -> None:
    ours = integration.convert(siglip(), pixels="raw", **HALF)
    given = RAW.to(dtype)
    assert torch.equal(run(ours, given), run(ours, RAW))
    given[1, 2, 3, 4] = wrong
    with pytest.raises(ValueError, match="pixels = 'raw', and there are others than whole numbers from 0 to 255"):
        run(ours, given)


@torch.no_grad()
def test_a_nan_does_not_hide_raw_pixels() -> None:
    layer = convert_layer(torch.nn.Conv2d(3, 16, 16, stride=16), PatchOptions())
    given = RAW.float()
    given[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="look raw, or have NaN"):
        layer(given)


# --- who says how pixels are normalised ------------------------------------------------------------------------------

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    siglip().save_pretrained(tmp_path)
    known = {"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": STD}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(known))
    yield tmp_path
    integration.disable()


class Wrapper(torch.nn.Module):
    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, **named: object) -> object:
        return self.tower(**named)


def test_the_processor_beside_the_checkpoint(checkpoint: Path) -> None:
    load = functools.partial(transformers.SiglipVisionModel.from_pretrained, checkpoint)
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    expected = run(load().eval(), (RAW / 255 - mean) / std)
    models = [integration.convert(load(), "int8"), integration.convert(Wrapper(load()), "int8")]
    integration.enable("int8")
    models.append(load())
    for ours in models:
        assert integration.is_converted(ours) and error(run(ours.eval(), RAW), expected) < ERRORS["int8"]


def test_a_normalisation_that_nobody_said_is_asked_for() -> None:
    for asks in ({"precision": "int8"}, {"precision": "fp8"}, {"pixels": "raw"}):
        with pytest.raises(ValueError, match="mean and std of a siglip model are not known"):
            integration.convert(siglip(), **asks)
    ours = integration.convert(siglip())
    assert error(run(ours), run(siglip())) < ERRORS["bf16"]
    with pytest.raises(ValueError, match="mean and std are not known"):
        run(ours, RAW)


@pytest.mark.parametrize("asks", [{"precision": "int8"}, {"precision": "fp8"}, {"pixels": "raw"}])
def test_a_model_that_is_built_without_a_processor_asks_for_it(asks: dict[str, str]) -> None:
    """Not with an error: a processor may be loaded after its model."""
    config = siglip().config
    integration.enable(**asks)
    with pytest.warns(UserWarning, match=r"mean and std of siglip are not known.*raw_processor\(processor, model\)"):
        transformers.AutoModel.from_config(config)
    integration.enable(**asks, **HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.AutoModel.from_config(config)


# --- processors of raw pixels ----------------------------------------------------------------------------------------


def test_processors_of_raw_pixels() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    processor = transformers.CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    model = clip()
    expected = run(model, processor(images=[image], return_tensors="pt")["pixel_values"])
    ours = integration.convert(copy.deepcopy(model), "int8", processor=processor)
    for raw in (integration.raw_processor(processor), integration.raw_processor(processor, ours)):
        for again in (raw, pickle.loads(pickle.dumps(raw))):
            pixels = again(images=[image], return_tensors="pt")["pixel_values"]
            assert pixels.dtype == torch.uint8 and error(run(ours, pixels), expected) < ERRORS["int8"]
    assert error(run(integration.convert(model, "int8", processor=raw), pixels), expected) < ERRORS["int8"]
    assert processor(images=[image], return_tensors="pt")["pixel_values"].dtype == torch.float32
    with pytest.raises(TypeError, match="processor is int"):
        integration.raw_processor(3)
    with pytest.raises(ValueError, match="without a converted embedding"):
        integration.raw_processor(processor, clip())


@torch.no_grad()
def test_qwens_processor_by_pil() -> None:
    """It has raw pixels as float32, which a model that expects raw pixels takes as well."""
    family = transformers.models.qwen2_5_vl
    sizes = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
    config = family.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        **sizes, fullatt_block_indexes=[0], window_size=56
    )
    torch.manual_seed(0)
    model = family.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=112 * 112)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8))
    plain = processor(images=[image], return_tensors="pt")
    expected = model(plain["pixel_values"], plain["image_grid_thw"]).last_hidden_state
    ours = integration.convert(model, "bf16", processor=processor)
    raw = processor(images=[image], return_tensors="pt", do_rescale=False, do_normalize=False)
    with pytest.raises(ValueError, match="look raw"):
        ours(raw["pixel_values"], raw["image_grid_thw"])
    uint8 = integration.raw_processor(processor, ours)(images=[image], return_tensors="pt")
    assert uint8["pixel_values"].dtype == torch.uint8
    for given in (uint8, raw):
        got = ours(given["pixel_values"], given["image_grid_thw"]).last_hidden_state
        assert error(got, expected) < ERRORS["bf16"]
