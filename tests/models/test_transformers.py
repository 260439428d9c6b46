"""`cute_kernels.models.transformers`: small models saved and loaded by the library, with and without it."""

from __future__ import annotations

import copy
import importlib
import io

import numpy as np
import pytest
import torch
import transformers
from skimage import data
from transformers import monkey_patching

from cute_kernels.models import transformers as integration
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import prepare_patch_weight
from tests.processes import run_python

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # mean, std of openai/clip
ERRORS = {"bf16": 5e-3, "fp16": 8e-4, "int8": 2e-2, "fp8": 8e-2}


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    integration.disable()
    assert not monkey_patching.get_patch_mapping()


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(**SMALL, image_size=64, patch_size=16)
    return saved(transformers.SiglipVisionModel(config), tmp_path_factory.mktemp("siglip"))


@pytest.fixture(scope="module")
def siglip2(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=16)
    return saved(transformers.Siglip2VisionModel(config), tmp_path_factory.mktemp("siglip2"))


def saved(model, folder):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("patch_embedding.bias"):  # which starts as zeros
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def embeddings(model: torch.nn.Module) -> torch.nn.Module:
    return next(m for m in model.modules() if hasattr(m, "patch_embedding"))


def photographs(size: int = 64) -> list[np.ndarray]:
    return [data.astronaut(), data.chelsea(), data.coffee()]


def processed(processor, **kwargs):
    return processor(images=photographs(), return_tensors="pt", **kwargs)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


RAW = {"do_rescale": False, "do_normalize": False}


@pytest.mark.parametrize("precision", ERRORS)
@torch.no_grad()
def test_siglip_from_a_checkpoint(siglip, precision):
    """Uint8 of a processor without normalisation, and normalised pixels, against the library's model."""
    processor = transformers.SiglipImageProcessorPil(size={"height": 64, "width": 64})
    plain = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    integration.enable(precision, mean=0.5, std=0.5)
    ours = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    assert list(ours.state_dict()) == list(plain.state_dict())
    normalised, raw = processed(processor)["pixel_values"], processed(processor, **RAW)["pixel_values"]
    assert raw.dtype == torch.uint8
    expected = plain(normalised)
    for pixels in (raw,) if precision.startswith("int") else (raw, normalised):
        assert error(embeddings(ours)(pixels), embeddings(plain)(normalised)) < ERRORS[precision]
        got = ours(pixels)
        assert error(got.last_hidden_state, expected.last_hidden_state) < ERRORS[precision]
        assert error(got.pooler_output, expected.pooler_output) < ERRORS[precision]


@torch.no_grad()
def test_the_bits_are_the_contracts(siglip):
    integration.enable("int8", mean=0.5, std=0.5)
    ours = transformers.SiglipVisionModel.from_pretrained(siglip, dtype=torch.bfloat16).eval()
    module = embeddings(ours)
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    weight = prepare_patch_weight(module.patch_embedding.weight, precision="int8")
    expected = reference.patch_embed_images(
        pixels, weight.raw, weight.scale, module.patch_embedding.bias.float() + weight.offset,
        module.position_embedding.weight, 16, torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(module(pixels), expected)


@torch.no_grad()
def test_another_resolution(siglip):
    plain = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    ours = integration.convert(copy.deepcopy(plain), "fp16", mean=0.5, std=0.5)
    raw = torch.randint(0, 256, (2, 3, 96, 80), dtype=torch.uint8)
    expected = plain(raw / 127.5 - 1, interpolate_pos_encoding=True).last_hidden_state
    assert error(ours(raw, interpolate_pos_encoding=True).last_hidden_state, expected) < ERRORS["fp16"]
    with pytest.raises(ValueError, match="interpolate_pos_encoding"):
        ours(raw)


@pytest.mark.parametrize("precision", ERRORS)
@torch.no_grad()
def test_naflex_from_a_checkpoint(siglip2, precision):
    """Whole towers agree where tokens are; the embedding of padding rows is the library's too, of the same pixels."""
    processor = transformers.Siglip2ImageProcessorPil(patch_size=16, max_num_patches=25)
    plain = transformers.Siglip2VisionModel.from_pretrained(siglip2).eval()
    integration.enable(precision, mean=0.5, std=0.5)
    ours = transformers.Siglip2VisionModel.from_pretrained(siglip2).eval()
    assert list(ours.state_dict()) == list(plain.state_dict())
    normalised, raw = processed(processor), processed(processor, **RAW)
    assert raw["pixel_values"].dtype == torch.uint8
    shapes, mask = normalised["spatial_shapes"], normalised["pixel_attention_mask"]
    assert (mask == 0).any() and len({tuple(shape) for shape in shapes.tolist()}) > 1
    expected = plain(normalised["pixel_values"], mask, shapes)
    for pixels in (raw,) if precision.startswith("int") else (raw, normalised):
        values = pixels["pixel_values"]
        same = values if values.is_floating_point() else values / 127.5 - 1
        assert error(embeddings(ours)(values, shapes), embeddings(plain)(same, shapes)) < ERRORS[precision]
        got = ours(values, mask, shapes)
        used = mask.bool()
        assert error(got.last_hidden_state[used], expected.last_hidden_state[used]) < ERRORS[precision]
        assert error(got.pooler_output, expected.pooler_output) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
@torch.no_grad()
def test_raw_naflex_rows_in_a_graph(siglip2, precision):
    """Raw rows that a model cast, and their positions, mean the same in a compiled graph."""
    plain = transformers.Siglip2VisionModel.from_pretrained(siglip2).eval()
    ours = integration.convert(copy.deepcopy(plain), precision, mean=0.5, std=0.5, pixels="raw")
    rows = torch.randint(0, 256, (2, 9, 768), generator=torch.Generator().manual_seed(0)).float()
    shapes = torch.tensor([[3, 3], [2, 4]])
    got = torch.compile(embeddings(ours), backend="aot_eager")(rows, shapes)
    torch.compiler.reset()
    assert torch.equal(got, embeddings(ours)(rows, shapes))
    assert error(got, embeddings(plain)(rows / 127.5 - 1, shapes)) < ERRORS[precision]


@torch.no_grad()
def test_padding_rows_get_the_first_position(siglip2):
    plain = transformers.Siglip2VisionModel.from_pretrained(siglip2).eval()
    for model in (plain, integration.convert(copy.deepcopy(plain), "fp16", mean=0.5, std=0.5)):
        module = embeddings(model)
        out = module(torch.full((1, 9, 768), 128, dtype=torch.uint8) / 127.5 - 1 if model is plain
                     else torch.full((1, 9, 768), 128, dtype=torch.uint8), torch.tensor([[2, 3]]))  # fmt: skip
        assert torch.allclose(out[0, 6:], out[0, :1].expand(3, -1), atol=1e-6)
        assert not torch.allclose(out[0, 1], out[0, 0], atol=1e-2)


VISION = {"depth": 1, "num_heads": 2, "patch_size": 14, "temporal_patch_size": 2, "in_channels": 3}
QWEN = {
    "qwen2_vl": lambda module: module.PatchEmbed(14, 2, 3, 32),
    "qwen2_5_vl": lambda module: module.Qwen2_5_VisionPatchEmbed(14, 2, 3, 32),
    "qwen3_vl": lambda module: module.Qwen3VLVisionPatchEmbed(
        transformers.Qwen3VLConfig().vision_config.__class__(hidden_size=32, patch_size=16)
    ),
    "qwen3_vl_moe": lambda module: module.Qwen3VLMoeVisionPatchEmbed(
        transformers.Qwen3VLMoeConfig().vision_config.__class__(hidden_size=32, patch_size=16)
    ),
    "qwen3_5": lambda module: module.Qwen3_5VisionPatchEmbed(
        transformers.Qwen3_5Config().vision_config.__class__(hidden_size=32, patch_size=16)
    ),
    "qwen3_5_moe": lambda module: module.Qwen3_5MoeVisionPatchEmbed(
        transformers.Qwen3_5MoeConfig().vision_config.__class__(hidden_size=32, patch_size=16)
    ),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_qwen(family, precision):
    """Rows that the processor made: built under the library's own patching, and in a model that exists."""
    integration.enable(precision, mean=0.5, std=0.5)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    plain = QWEN[family](module)
    with monkey_patching.apply_patches():
        ours = QWEN[family](module)
    assert type(ours) is not type(plain) and isinstance(ours, type(plain))
    ours.load_state_dict(plain.state_dict())
    rows = torch.rand(24, plain.proj.weight[0].numel()) * 2 - 1
    expected = plain(rows)
    got = ours(rows)
    assert got.shape == expected.shape and 1e-5 < error(got, expected) < ERRORS[precision]
    converted = integration.convert(torch.nn.Sequential(copy.deepcopy(plain)), precision, mean=0.5, std=0.5)
    assert torch.equal(converted(rows), got)
    assert ours(rows.bfloat16().float()).dtype == torch.float32
    # What trains is the library's convolution.
    with torch.enable_grad():
        assert torch.equal(ours(rows), expected)
    # Raw rows are normalised, whoever multiplies them.
    raw = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
    expected = plain(raw / 127.5 - 1)
    assert error(ours(raw), expected) < ERRORS[precision]
    with torch.enable_grad():
        torch.testing.assert_close(ours(raw), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_whole_qwen_tower():
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig().vision_config.__class__(
        depth=1, embed_dim=32, hidden_size=48, num_heads=2, patch_size=14, temporal_patch_size=2
    )
    family = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    plain = family.Qwen2VisionTransformerPretrainedModel._from_config(config).eval()
    integration.enable(models=["qwen2_vl"])
    ours = family.Qwen2VisionTransformerPretrainedModel._from_config(config).eval()
    assert type(ours.patch_embed) is not type(plain.patch_embed)
    ours.load_state_dict(plain.state_dict())
    rows, grid = torch.rand(16, 1176) * 3 - 1.5, torch.tensor([[1, 4, 4]])
    assert 0 < error(ours(rows, grid).last_hidden_state, plain(rows, grid).last_hidden_state) < ERRORS["bf16"]


def test_training_is_the_librarys(siglip):
    plain = transformers.SiglipVisionModel.from_pretrained(siglip)
    ours = integration.convert(copy.deepcopy(plain), "int8", mean=0.5, std=0.5)
    raw = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        ours(raw)
    for model, pixels in ((plain, raw / 127.5 - 1), (ours, raw)):
        model.train()(pixels).pooler_output.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters()):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), name
    with torch.no_grad():
        got, expected = ours.eval()(raw), plain.eval()(raw / 127.5 - 1)
    assert error(got.last_hidden_state, expected.last_hidden_state) < ERRORS["int8"]


@torch.no_grad()
def test_models_are_saved_copied_and_reverted(siglip):
    integration.enable("int8", mean=0.5, std=0.5)
    ours = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    raw = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    expected = ours(raw).last_hidden_state
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=False), copy.deepcopy(ours)):
        assert torch.equal(other(raw).last_hidden_state, expected)
    reverted = integration.revert(copy.deepcopy(ours))
    assert type(embeddings(reverted)).__module__.startswith("transformers.")
    plain = transformers.SiglipVisionModel.from_pretrained(siglip)
    assert error(reverted(raw / 127.5 - 1).last_hidden_state, expected) < ERRORS["int8"]
    assert type(embeddings(plain)) is type(embeddings(ours))  # still enabled


def test_disabled_again(siglip):
    integration.enable()
    integration.disable()
    integration.disable()
    model = transformers.SiglipVisionModel.from_pretrained(siglip)
    assert type(embeddings(model)).__module__ == "transformers.models.siglip.modeling_siglip"


def test_a_build_that_fails_leaves_nothing_behind():
    """The library's patching does not undo itself when a constructor raises."""
    family = importlib.import_module("transformers.models.siglip.modeling_siglip")
    original = family.SiglipVisionEmbeddings
    integration.enable()
    with pytest.raises(ZeroDivisionError):
        transformers.SiglipVisionModel._from_config(transformers.SiglipVisionConfig(**SMALL, patch_size=0))
    integration.disable()
    assert family.SiglipVisionEmbeddings is original


@torch.no_grad()
def test_an_adapter_in_place_of_the_layer_is_kept(siglip):
    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, pixels):
            return 2 * self.base(pixels)

    plain = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    ours = integration.convert(copy.deepcopy(plain))
    for model in (plain, ours):
        embeddings(model).patch_embedding = Adapted(embeddings(model).patch_embedding)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(ours(pixels).last_hidden_state, plain(pixels).last_hidden_state)


def test_hooks_on_the_layer_are_called(siglip):
    ours = integration.convert(transformers.SiglipVisionModel.from_pretrained(siglip).eval())
    seen = []
    embeddings(ours).patch_embedding.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        ours(torch.zeros(1, 3, 64, 64))
    assert seen


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
    [
        ({"precision": "int4"}, ValueError, "precision"),
        ({"models": "siglip"}, TypeError, "sequence"),
        ({"models": ["vit"]}, ValueError, "'vit'"),
        ({"precision": "bf16", "models": ["gemma4_unified"]}, ValueError, "must be 'int8'"),
        ({"mean": (0.5, 0.5)}, ValueError, "mean"),
        ({"std": 0}, ValueError, "std"),
        ({"pixels": "floats"}, ValueError, "pixels"),
        ({"backend": "cuda"}, ValueError, "backend"),
    ],
)
def test_arguments_that_enable_refuses(arguments, error_type, message):
    with pytest.raises(error_type, match=message):
        integration.enable(**arguments)
    assert not monkey_patching.get_patch_mapping()


@torch.no_grad()
def test_integers_take_the_pixels_that_a_model_cast():
    module = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    assert "qwen2_vl" in integration.enable("int8", models=["qwen2_vl"], mean=CLIP[0], std=CLIP[1])
    plain = QWEN["qwen2_vl"](module)
    with monkey_patching.apply_patches():
        ours = QWEN["qwen2_vl"](module)
    ours.load_state_dict(plain.state_dict())
    raw = torch.randint(0, 256, (24, plain.proj.weight[0].numel()), dtype=torch.uint8)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(ours(raw.to(dtype)), ours(raw))
    with pytest.raises(ValueError, match="others than whole numbers"):
        ours(raw + 0.5)


def test_somebody_elses_replacement_is_not_overwritten():
    monkey_patching.register_patch_mapping({"SiglipVisionEmbeddings": torch.nn.Identity})
    try:
        with pytest.raises(ValueError, match="registered already"):
            integration.enable()
    finally:
        monkey_patching.unregister_patch_mapping(["SiglipVisionEmbeddings"])


def test_names_are_matched_as_a_whole():
    """The library looks for keys in class names: "PatchEmbed" alone would replace dozens of other models' classes."""
    integration.enable()
    others = ("SwinPatchEmbeddings", "PatchEmbeddings", "Qwen4ExpVisionPatchEmbed", "PatchEmbedder")
    mapping = monkey_patching.get_patch_mapping()
    assert all(monkey_patching._find_replacement_class(name, mapping) is None for name in others)


def test_models_without_such_an_embedding():
    with pytest.raises(ValueError, match="Linear"):
        integration.convert(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="model is str"):
        integration.convert("google/siglip2-base-patch16-224")


@torch.no_grad()
def test_pixels_that_are_not_what_was_promised(siglip):
    model = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    raw = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="they look raw"):
        integration.convert(model)(raw.float())
    with pytest.raises(TypeError, match="normalised pixels were promised"):
        integration.convert(model, pixels="normalised")(raw)
    with pytest.raises(ValueError, match="do_rescale=False"):
        integration.convert(model, "int8", mean=0.5, std=0.5)(raw / 127.5 - 1)


def test_without_transformers_the_extra_is_named():
    program = (
        "import sys; from cute_kernels.models import transformers\n"
        "assert 'transformers' not in sys.modules, 'imported before it is used'\n"
        "sys.modules['transformers'] = None\n"
        "try: transformers.enable()\n"
        "except ModuleNotFoundError as error: assert \"cute-kernels[hf]\" in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    run = run_python("-c", program)
    assert run.returncode == 0, run.stderr


@torch.no_grad()
def test_a_model_tells_whether_it_is_converted(siglip):
    """And raw pixels are wrong without an error where it is not."""
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    expected = embeddings(before)(pixels / 127.5 - 1)
    integration.enable("int8", mean=0.5, std=0.5)
    by_constructor = transformers.SiglipVisionModel(before.config)
    for model in (before, by_constructor):
        assert not integration.is_converted(model) and "int8" not in repr(model)
    assert error(embeddings(before)(pixels), expected) > 1
    ours = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    assert integration.is_converted(ours) and "precision='int8'" in repr(ours)
    assert error(embeddings(ours)(pixels), expected) < ERRORS["int8"]
    assert not integration.is_converted(torch.nn.ModuleList([ours, before]))  # one is left to be converted
    assert not integration.is_converted(integration.revert(ours))
    with pytest.raises(ValueError, match="has no embedding of siglip"):
        integration.is_converted(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="model is str"):
        integration.is_converted("model")


@pytest.mark.parametrize("keywords", [{}, {"interpolate_pos_encoding": True}], ids=["plain", "interpolated"])
@pytest.mark.parametrize(
    ("shape", "words"),
    [((2, 64, 64, 3), r"permute\(0, 3, 1, 2\)"), ((3, 64, 64), "B, 3, H, W"), ((2, 1, 64, 64), "B, 3, H, W"),
     ((2, 3, 64, 8), "at least 16")],
    ids=["channels last", "no batch", "one channel", "too narrow"],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_images_of_a_wrong_shape_are_named(siglip, precision, shape, words, keywords) -> None:
    plain = transformers.SiglipVisionModel.from_pretrained(siglip).eval()
    model = integration.convert(plain, precision, mean=0.5, std=0.5)
    with torch.no_grad(), pytest.raises(ValueError, match=f"pixel_values has shape .*{words}"):
        model(pixel_values=torch.zeros(shape, dtype=torch.uint8), **keywords)
