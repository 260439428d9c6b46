"""Converted convolutions with positions: against the modules that they were, and against the contracts bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, availability, convert_layer
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import prepare_patch_weight
from tests.models.nn.embedding import embedding

MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)
PRECISIONS = ("bf16", "fp16", "int8", "fp8")
#: Relative to the plain module, of random uint8 images and weights.
ERRORS = {"bf16": 3e-3, "fp16": 4e-4, "int8": 1e-2, "fp8": 7e-2}


def convolution(patch: int = 16, features: int = 24, bias: bool = True, seed: int = 0) -> torch.nn.Conv2d:
    torch.manual_seed(seed)
    return torch.nn.Conv2d(3, features, patch, patch, bias=bias)


def positions(rows: int = 3, columns: int = 3, features: int = 24) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows * columns, features, generator=torch.Generator().manual_seed(5)) * 0.3)


def uint8_images(height: int = 48, width: int = 48, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=generator)


def normalise(images: torch.Tensor, mean=MEAN, std=STD) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (mean, std))
    return (images.float() / 255 - mean) / std


def plain(images: torch.Tensor, module: torch.nn.Conv2d, pos: torch.Tensor | None = None) -> torch.Tensor:
    out = module(images.to(module.weight.dtype)).flatten(2).transpose(1, 2)
    return (out if pos is None else out + pos).detach()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_uint8_images(precision, patch):
    module, pos, images = convolution(patch), positions(), uint8_images(3 * patch, 3 * patch)
    ours = embedding(module, pos_embed=pos, precision=precision, mean=MEAN, std=STD)
    with torch.no_grad():
        got = ours(images)
    assert got.dtype == torch.float32 and got.shape == (2, 9, 24)
    assert error(got, plain(normalise(images), module, pos)) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalised_images(precision, dtype):
    module, pos, images = convolution().to(dtype), positions(), normalise(uint8_images())
    ours = embedding(module, pos_embed=pos, precision=precision, mean=MEAN, std=STD)
    with torch.no_grad():
        got = ours(images.to(dtype))
    assert got.dtype == dtype
    allowed = ERRORS[precision] + (4e-3 if dtype == torch.bfloat16 else 0)  # of one rounding of the result, at least
    assert error(got, plain(images, copy.deepcopy(module).float(), pos)) < allowed


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
def test_the_bits_are_the_contracts(precision):
    module, pos, images = convolution().to(torch.bfloat16), positions(), uint8_images()
    weight = prepare_patch_weight(module.weight, precision=precision, mean=MEAN, std=STD)
    ours = embedding(module, pos_embed=pos, precision=precision, mean=MEAN, std=STD)
    shifted = module.bias.detach().float() + weight.offset
    expected = reference.patch_embed_images(
        images, weight.raw, weight.scale, shifted, pos.detach(), 16, torch.bfloat16
    )
    with torch.no_grad():
        assert torch.equal(ours(images), expected)


def test_fp8_is_patch_embed_of_rows_with_a_fixed_scale():
    module, pos, images = convolution(), positions(), uint8_images().float() / 127.5 - 1
    ours = embedding(module, pos_embed=pos, precision="fp8")
    weight_scale = module.weight.detach().flatten(1).abs().amax(1, keepdim=True) / 448
    values = (module.weight.detach().flatten(1) / weight_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = torch.nn.functional.unfold(images, 16, stride=16).transpose(1, 2)
    rows = (rows * 448).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = reference.patch_embed_f32(
        rows.reshape(-1, 768), values, module.bias.detach(), pos.detach(), weight_scale.T / 448, None
    )
    with torch.no_grad():
        got = ours(images)
        assert torch.equal(ours(images[:1]), got[:1])  # whatever else is in the batch
    assert error(got, expected.view(2, 9, 24)) < 2e-4  # but for the scale's FP32 rounding


def test_a_checkpoint_loads_both_ways():
    module, other = convolution(), convolution(seed=1)
    ours = embedding(copy.deepcopy(module), precision="int8")
    assert list(ours.state_dict()) == list(module.state_dict())
    images = uint8_images()
    with torch.no_grad():
        before = ours(images)
        ours.load_state_dict(other.state_dict())
        expected = embedding(other, precision="int8")(images)
        assert torch.equal(ours(images), expected) and not torch.equal(before, expected)
    module.load_state_dict(ours.state_dict())
    assert torch.equal(module.weight, other.weight)


def test_parameters_are_the_replaced_modules():
    module, pos = convolution(), positions()
    ours = embedding(module, pos_embed=pos)
    assert {id(p) for p in ours.parameters()} == {id(module.weight), id(module.bias), id(pos)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_write_to_the_weight_is_seen(precision):
    module, images = convolution(), uint8_images()
    ours = embedding(module, precision=precision)
    with torch.no_grad():
        ours(images)
        module.weight.mul_(-1)
        module.bias.mul_(-1)
        expected = plain(normalise(images, (0.5,) * 3, (0.5,) * 3), module)
        assert error(ours(images), expected) < ERRORS[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_the_plain_modules(precision):
    """Gradients and a step of an optimiser are those of the convolution, and inference follows the step."""
    module, pos, images = convolution(), positions(), uint8_images()
    twin, twin_pos = copy.deepcopy(module), torch.nn.Parameter(pos.detach().clone())
    ours = embedding(module, pos_embed=pos, precision=precision, mean=MEAN, std=STD)
    with torch.no_grad():
        ours(images)
    optimiser = torch.optim.SGD([*ours.parameters()], lr=0.1)
    twin_optimiser = torch.optim.SGD([*twin.parameters(), twin_pos], lr=0.1)
    ours(images).square().mean().backward()
    expected = twin(normalise(images)).flatten(2).transpose(1, 2) + twin_pos
    expected.square().mean().backward()
    assert torch.allclose(module.weight.grad, twin.weight.grad) and torch.allclose(pos.grad, twin_pos.grad)
    optimiser.step()
    twin_optimiser.step()
    with torch.no_grad():
        assert error(ours(images), plain(normalise(images), twin, twin_pos)) < ERRORS[precision]


def test_gradients_reach_images():
    images = normalise(uint8_images()).requires_grad_()
    ours = embedding(convolution().requires_grad_(False), mean=MEAN, std=STD)
    ours(images).sum().backward()
    assert images.grad.abs().sum() > 0


def test_frozen_parameters_need_no_no_grad():
    module, images = convolution().requires_grad_(False), uint8_images()
    ours = embedding(module, precision="int8")
    with torch.no_grad():
        expected = ours(images)
    assert torch.equal(ours(images), expected)


def test_eval_mode_with_gradients_is_told():
    ours = embedding(convolution()).eval()
    with pytest.warns(UserWarning, match="torch.no_grad"):
        ours(uint8_images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.train()(uint8_images())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_casting_the_module_leaves_what_the_kernel_reads_alone(precision):
    """An int8 weight made from float32 stays that one when the parameters become bfloat16."""
    module, images = convolution(), uint8_images()
    ours = embedding(module, precision=precision)
    with torch.no_grad():
        before = ours(images)
        module.bias.data = module.bias.data.bfloat16().float()
        before = ours(images)
        prepared = ours.engine.prepared("images", ours.weight)
        ours.to(torch.bfloat16)
        assert ours.weight.dtype == torch.bfloat16
        after = ours.engine.prepared("images", ours.weight)
        tensors = ("values",) if precision == "fp8" else ("raw", "normalised")
        for name in tensors:
            old, new = getattr(prepared, name), getattr(after, name)
            assert (old is None and new is None) or (old.dtype == new.dtype and torch.equal(old.float(), new.float()))
        assert torch.equal(ours(images), before.to(torch.bfloat16))


def test_a_weight_of_before_the_cast_is_not_taken_for_the_weight_after_a_write():
    module, images = convolution(), uint8_images()
    ours = embedding(module, precision="int8")
    with torch.no_grad():
        ours(images)
        module.weight.mul_(-1)
        ours.to(torch.bfloat16)
        fresh = embedding(module, precision="int8")
        assert torch.equal(ours(images), fresh(images))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(again):
    ours = embedding(convolution(), pos_embed=positions(), precision="int8", mean=MEAN, std=STD)
    images = uint8_images(64, 48)
    with torch.no_grad():
        expected = ours(images)
        other = again(ours)
        assert torch.equal(other(images), expected)
        other.weight.zero_()
        assert torch.equal(ours(images), expected)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_positions_follow_the_image(mode):
    module, pos, images = convolution(), positions(), uint8_images(64, 80)
    ours = embedding(module, pos_embed=pos[None].detach(), precision="fp16", interpolation=mode)
    image = pos.detach().view(1, 3, 3, 24).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, size=(4, 5), mode=mode).flatten(2).transpose(1, 2)
    with torch.no_grad():
        got = ours(images)
        assert error(got, plain(normalise(images, (0.5,) * 3, (0.5,) * 3), module, resized)) < ERRORS["fp16"]
        assert torch.equal(ours(images), got) and ours.positions.misses == 1


def test_pixels_beyond_the_last_patch_are_left_out():
    module, images = convolution(), uint8_images(55, 50)
    ours = embedding(module, precision="fp16", mean=MEAN, std=STD)
    with torch.no_grad():
        assert error(ours(images), plain(normalise(images), module)) < ERRORS["fp16"]


@pytest.mark.parametrize("backend", ["auto", "emulator"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_empty_batch_of_images(precision, backend):
    ours = embedding(convolution(), pos_embed=positions(), precision=precision, backend=backend)
    with torch.no_grad():
        assert ours(uint8_images(batch=0)).shape == (0, 9, 24)


def test_an_empty_batch():
    ours = convert_layer(torch.nn.Linear(768, 24), PatchOptions()).requires_grad_(False)
    assert ours(torch.zeros(0, 7, 768)).shape == (0, 7, 24)


@torch.no_grad()
def test_the_kernel_of_images_in_the_emulator():
    """The bits of the reference, also in a float32 module, whose results the kernel writes in bfloat16."""
    module, pos, images = convolution(), positions(2, 2), uint8_images(32, 32, batch=1)
    ours, same = (
        embedding(module, pos_embed=pos, precision="int8", backend=backend)
        for backend in ("emulator", "reference")
    )
    got = ours(images)
    assert got.dtype == torch.float32 and torch.equal(got, same(images))
    assert error(got, plain(normalise(images, (0.5,) * 3, (0.5,) * 3), module, pos)) < ERRORS["int8"]


@torch.no_grad()
def test_without_a_kernel_of_images_patches_are_multiplied_as_rows():
    module, pos, images = convolution(14), positions(2, 2), uint8_images(28, 30, batch=1)
    ours = embedding(module, pos_embed=pos, backend="emulator", mean=MEAN, std=STD)
    expected = plain(normalise(images), module, pos)
    assert 1e-5 < error(ours(images), expected) < ERRORS["bf16"]
    assert torch.equal(ours(normalise(images)), ours(images))


@torch.no_grad()
def test_no_kernel_that_rounds_to_bfloat16_on_the_way():
    """Rows of patches of 14 have a kernel that writes bfloat16 alone; a float16 model keeps float16's precision."""
    module, images = convolution(14).half(), normalise(uint8_images(28, 28, batch=1)).half()
    ours = embedding(module, precision="fp16", backend="emulator", mean=MEAN, std=STD)
    got = ours(images)
    assert got.dtype == torch.float16
    assert 1e-5 < error(got.float(), plain(images.float(), module.float())) < ERRORS["fp16"]


def test_whether_there_is_a_kernel_is_planned_once(monkeypatch):
    """A module asks in every call, and planning takes milliseconds: the second call of a size plans nothing for it."""
    planned = []
    real = availability.plan.make_plan

    def counted(*given, **more):
        planned.append(given)
        return real(*given, **more)

    monkeypatch.setattr(availability.plan, "make_plan", counted)
    availability._has_kernel.cache_clear()
    for sizes in ((1, 16), (2, 16), (1, 32)):
        image = torch.randint(0, 256, (sizes[0], 3, sizes[1], 16), dtype=torch.uint8)
        found = {availability.images_out_dtype(image, 16, 24, "int8", torch.bfloat16, "emulator") for _ in range(3)}
        assert found == {torch.bfloat16}
    assert len(planned) == 3
    wide = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    assert {availability.images_out_dtype(wide, 16, 23, "int8", torch.bfloat16, "emulator") for _ in range(2)} == {None}
    assert len(planned) == 4


@torch.no_grad()
def test_integers_without_a_kernel_are_the_plain_module_and_it_says_so():
    module, images = convolution(14), uint8_images(14, 5544, batch=1)
    ours = embedding(module, precision="int8", backend="emulator", mean=MEAN, std=STD)
    with pytest.warns(UserWarning, match="no kernel takes images"):
        assert error(ours(images), plain(normalise(images), module)) < 1e-6


@pytest.mark.parametrize("number", range(2))
def test_compiled(number):
    """Also where others were compiled before, whatever the order: nothing is left of them."""
    dynamo = torch._dynamo.utils
    assert not dynamo.counters["frames"]
    ours = embedding(convolution(), pos_embed=positions(), precision="int8").requires_grad_(False)
    images = uint8_images(64, 64)
    expected = ours(images)
    compiled = torch.compile(ours, backend="eager")
    assert torch.equal(compiled(images), expected)
    ours.weight.mul_(-1)
    assert torch.equal(compiled(images), ours(images)) and not torch.equal(ours(images), expected)
    assert dynamo.counters["frames"]["total"] > 0


@pytest.mark.parametrize("strict", [False, True])
def test_tracing_takes_the_plain_module(strict):
    module = convolution().requires_grad_(False)
    ours = embedding(module)
    images = normalise(uint8_images(), (0.5,) * 3, (0.5,) * 3)
    exported = torch.export.export(ours, (images,), strict=strict).module()
    assert torch.allclose(exported(images), plain(images, module), atol=1e-5)
