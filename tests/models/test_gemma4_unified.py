"""Gemma 4 Unified's vision embedder: its first LayerNorm and linear layer by the kernels, all else by the library."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers

from cute_kernels.models import transformers as integration
from cute_kernels.operations.layer_norm import layer_norm_linear, prepare_layer_norm_weight
from tests.models.test_families import error
from tests.nightly import crossed

LIBRARY = transformers.models.gemma4_unified
K = 12 * 12 * 3


def config(patch: int = 4) -> Any:
    vision = LIBRARY.configuration_gemma4_unified.Gemma4UnifiedVisionConfig(
        patch_size=patch, mm_embed_dim=64, mm_posemb_size=32, output_proj_dims=64
    )
    text = LIBRARY.configuration_gemma4_unified.Gemma4UnifiedTextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    return LIBRARY.configuration_gemma4_unified.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config=None
    )


def embedder(patch: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    whole = config(patch)
    kind = LIBRARY.modeling_gemma4_unified.Gemma4UnifiedVisionEmbedder
    module = kind(whole.vision_config, whole.text_config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def inputs(k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions of two images of 9 and 12 patches."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (2, 12, k), dtype=torch.uint8, generator=generator)
    ids = torch.randint(0, 32, (2, 12, 2), generator=generator)
    rows[0, 9:], ids[0, 9:] = 0, -1
    return rows, ids


@torch.no_grad()
def run(module: torch.nn.Module, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = module(rows, ids)
    return torch.cat((out.last_hidden_state, out.pooler_output), -1)


MOST = {"int8": 1.5e-2}


@pytest.mark.parametrize(("precision", "dtype"), crossed(MOST, [torch.float32, torch.bfloat16, torch.float16]))
def test_an_embedder(precision: str, dtype: torch.dtype) -> None:
    plain, (rows, ids) = embedder().to(dtype), inputs()
    expected = run(copy.deepcopy(plain).double(), rows / 255.0, ids)
    library = run(plain, rows / 255, ids)
    ours = integration.convert(torch.nn.ModuleList([copy.deepcopy(plain)]), precision)
    assert integration.is_converted(ours) and list(ours[0].state_dict()) == list(plain.state_dict())
    got = run(ours[0], rows, ids)
    assert got.dtype is dtype and error(got, expected) < MOST[precision] + 1.1 * error(library, expected)
    emulated = integration.convert(copy.deepcopy(plain), precision, backend="emulator")
    assert torch.equal(run(emulated, rows, ids), got)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert integration.is_converted(again) and torch.equal(run(again[0], rows, ids), got)
    with torch.no_grad():
        assert torch.equal(torch.cat(ours[0](rows, ids, return_dict=False), -1), got)
    with pytest.raises(ValueError, match="do_rescale=False"):
        run(ours[0], rows / 255, ids)
    assert torch.equal(run(integration.revert(ours)[0], rows / 255, ids), library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_behind_the_layer_is_the_librarys(dtype: torch.dtype) -> None:
    """The library's embedder without its first two layers gives the same bits from what the product gave."""

    class Nothing(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    plain, (rows, ids) = embedder().to(dtype), inputs()
    got = run(integration.convert(copy.deepcopy(plain), "int8"), rows, ids)
    norm, layer = plain.patch_ln1, plain.patch_dense
    prepared = prepare_layer_norm_weight(layer.weight, layer.bias, norm.weight, norm.bias, eps=norm.eps)
    embedded = layer_norm_linear(rows, prepared, out_dtype=dtype)
    plain.patch_ln1, plain.patch_dense = torch.nn.Identity(), Nothing(8, 8).to(dtype)
    assert torch.equal(run(plain, embedded, ids), got)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int8, torch.float32])
@torch.no_grad()
def test_positions_of_any_type_that_the_library_takes(dtype: torch.dtype) -> None:
    plain, (rows, ids) = embedder(), inputs()
    ours, ids = integration.convert(copy.deepcopy(plain), "int8"), ids.clamp(min=0)
    got = ours(rows, ids.to(dtype), False).last_hidden_state
    assert torch.equal(got, ours(rows, ids).last_hidden_state)
    assert error(got, plain(rows / 255, ids.to(dtype), False).last_hidden_state) < MOST["int8"]


def test_what_the_kernels_read_follows_each_parameter() -> None:
    ours, (rows, ids) = integration.convert(embedder(), "int8"), inputs()
    before = run(ours, rows, ids)
    for parameter in (ours.patch_ln1.weight, ours.patch_ln1.bias, ours.patch_dense.weight, ours.patch_dense.bias):
        with torch.no_grad():
            parameter.mul_(1.5)
        fresh = integration.convert(integration.revert(copy.deepcopy(ours)), "int8")
        after = run(ours, rows, ids)
        assert not torch.equal(after, before) and torch.equal(after, run(fresh, rows, ids))
        before = after


def test_what_the_kernels_read_is_moved_and_not_cast() -> None:
    """Made from float32, it is not made anew from what bfloat16 has left of it, unless that changes."""
    ours, (rows, ids) = integration.convert(embedder(), "int8"), inputs()
    made_of_bfloat16 = integration.convert(embedder().bfloat16(), "int8")
    run(ours, rows, ids)
    half = ours.bfloat16()
    embedded = [module.engine.normed(rows, *module.engine_parameters(), 1e-5) for module in (half, made_of_bfloat16)]
    assert not torch.equal(*embedded)
    with torch.no_grad():
        half.patch_ln1.bias.add_(0)
    assert torch.equal(half.engine.normed(rows, *half.engine_parameters(), 1e-5), embedded[1])


def test_the_plain_module_runs() -> None:
    """With gradients, with a layer of somebody else's, and for patches whose pixels are no whole vectors."""
    plain, (rows, ids) = embedder(), inputs()
    ours = integration.convert(copy.deepcopy(plain), "int8")
    expected = plain(rows / 255, ids).pooler_output
    got = ours.train()(rows, ids).pooler_output
    assert torch.equal(got, expected) and got.requires_grad
    ours.eval().patch_ln1.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="patch_ln1 has hooks"):
        assert torch.equal(run(ours, rows, ids), run(plain, rows / 255, ids))
    plain, (rows, ids) = embedder(2), inputs(108)
    ours = integration.convert(copy.deepcopy(plain), "int8")
    with pytest.warns(UserWarning, match="over 108 pixels, of which kernels take multiples of 16"):
        assert torch.equal(run(ours, rows, ids), run(plain, rows / 255, ids))


@pytest.mark.parametrize("eps", [0.0, 1e-60, -1e-5, float("nan"), float("inf")])
def test_eps_that_no_kernel_adds(eps: float) -> None:
    plain, (rows, ids) = embedder(), inputs()
    plain.patch_ln1.eps = eps
    ours = integration.convert(copy.deepcopy(plain), "int8")
    with pytest.warns(UserWarning, match="the LayerNorm has eps = .*The plain torch module runs"):
        got = run(ours, rows, ids)
    assert torch.equal(got.isnan(), (expected := run(plain, rows / 255, ids)).isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_through_a_whole_model() -> None:
    """Enabled before the model is built, and compiled."""
    rows, ids = inputs()
    kind = LIBRARY.modeling_gemma4_unified.Gemma4UnifiedModel
    assert "gemma4_unified" not in integration.enable() and "gemma4_unified" in integration.enable("int8")
    try:
        torch.manual_seed(0)
        ours = kind._from_config(config()).eval()
        assert integration.is_converted(ours)
    finally:
        integration.disable()
    plain = integration.revert(copy.deepcopy(ours))
    with torch.no_grad():
        expected, got, compiled = (
            torch.cat(features(pixels, ids).pooler_output)
            for features, pixels in (
                (plain.get_image_features, rows / 255),
                (ours.get_image_features, rows),
                (_compiled(ours), rows),
            )
        )
    assert got.shape[0] == 21 and 0 < error(got, expected) < 1.5e-2 and torch.equal(compiled, got)


def _compiled(model: torch.nn.Module) -> Any:
    torch.compiler.reset()
    model = copy.deepcopy(model)
    model.embed_vision = torch.compile(model.embed_vision, backend="aot_eager", fullgraph=True)
    return model.get_image_features


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "precision = 'bf16' for 'gemma4_unified', .*: must be 'int8'"),
        ({"precision": "auto"}, "precision = 'auto'"),
        ({"precision": "int8", "mean": 0.5, "std": 0.5}, "of gemma4_unified, which normalises pixels of 0 to 1 itself"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    module = embedder()
    with pytest.raises(ValueError, match=message):
        integration.convert(module, **options)
    assert not integration.is_converted(module)
    with pytest.raises(ValueError, match="precision = 'fp8' for 'gemma4_unified'"):
        integration.enable("fp8", models=["gemma4_unified"])
