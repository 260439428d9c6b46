"""`cute_kernels.prepare_patch_weight`: against the normalisation and convolution that it takes over, in FP64."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import PatchWeight, prepare_patch_weight

MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)


def conv_weight(n: int = 16, patch: int = 14, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, patch, patch, generator=torch.Generator().manual_seed(seed)) * 0.05


def pixels(size: int = 42, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def convolved(images: torch.Tensor, weight: torch.Tensor, mean=MEAN, std=STD) -> torch.Tensor:
    """What processor and convolution make of uint8 images, in FP64."""
    mean, std = (torch.tensor(value, dtype=torch.float64)[:, None, None] for value in (mean, std))
    maps = torch.nn.functional.conv2d((images.double() / 255 - mean) / std, weight.double(), stride=weight.shape[-1])
    return maps.flatten(2).transpose(1, 2)


def embedded(images: torch.Tensor, prepared: PatchWeight) -> torch.Tensor:
    return reference.patch_embed_images(
        images, prepared.raw, prepared.scale, prepared.offset, None, prepared.patch, torch.float32
    ).double()


@pytest.mark.parametrize(
    ("precision", "error"), [("int8", 1.2e-2), ("bf16", 3e-3), ("fp16", 4e-4)]
)
def test_the_normalisation_is_folded_in(precision, error):
    images, weight = pixels(), conv_weight()
    expected = convolved(images, weight)
    got = embedded(images, prepare_patch_weight(weight, precision=precision, mean=MEAN, std=STD))
    assert (got - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_an_image_of_the_mean_gives_nothing_but_rounding(precision):
    """What is left is FP32's: a rounding error of the weight meets only the distance from the mean."""
    weight = conv_weight(patch=16)
    images = torch.full((1, 3, 16, 16), 51, dtype=torch.uint8)
    got = embedded(images, prepare_patch_weight(weight, precision=precision, mean=0.2, std=0.5))
    assert got.abs().max() < 1e-5


def test_mean_and_std_of_numpy_are_numbers():
    weight = conv_weight()
    expected = prepare_patch_weight(weight, mean=0.25, std=(0.5, 0.25, 0.5))
    got = prepare_patch_weight(weight, mean=np.float32(0.25), std=list(np.array([0.5, 0.25, 0.5], np.float32)))
    assert torch.equal(got.offset, expected.offset) and (got.mean, got.std) == (expected.mean, expected.std)
    std = [0.5, 0.25, 0.5]
    for value in (np.array(std), torch.tensor(std), torch.tensor(std).view(1, 3, 1, 1), [torch.tensor(x) for x in std]):
        got = prepare_patch_weight(weight, mean=torch.tensor(0.25), std=value)
        assert torch.equal(got.offset, expected.offset) and (got.mean, got.std) == (expected.mean, expected.std)
        assert all(type(number) is float for number in got.mean + got.std)


def test_normalisation_of_pixels_that_are_not_divided():
    """What processors for pixels of 0 to 255 do, a mean of 100 and no deviation, in units of 0 to 1."""
    weight, images = conv_weight(), pixels()
    got = embedded(images, prepare_patch_weight(weight, precision="bf16", mean=100 / 255, std=1 / 255))
    maps = torch.nn.functional.conv2d(images.double() - 100, weight.double(), stride=14)
    expected = maps.flatten(2).transpose(1, 2)
    assert float((got - expected).norm() / expected.norm()) < 3e-3


def test_integers_are_the_nearest_of_each_feature():
    weight = conv_weight()
    prepared = prepare_patch_weight(weight, precision="int8", mean=MEAN, std=STD)
    integers = prepared.raw.long()
    assert integers.abs().amax(1).eq(127).all()
    per_pixel = torch.tensor(STD, dtype=torch.float64).repeat_interleave(14 * 14) * 255
    folded = weight.double().flatten(1) / per_pixel
    assert ((integers * prepared.scale.double()[:, None] - folded).abs() <= prepared.scale.double()[:, None] / 2).all()


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_orders_of_a_linear_weight(precision):
    weight = conv_weight()
    of_conv = prepare_patch_weight(weight, precision=precision, mean=MEAN, std=STD)
    flat = prepare_patch_weight(weight.flatten(1), precision=precision, mean=MEAN, std=STD)
    naflex = weight.permute(0, 2, 3, 1).reshape(16, -1)
    other = prepare_patch_weight(naflex, precision=precision, order="hwc", mean=list(MEAN), std=list(STD))
    for prepared in (flat, other):
        for name, buffer in of_conv.named_buffers():
            assert torch.equal(getattr(prepared, name), buffer), name
    assert (of_conv.order, other.order, other.patch, other.features) == ("chw", "hwc", 14, 16)


def test_the_weight_for_normalised_pixels_is_the_weight_rounded():
    weight = conv_weight()
    assert torch.equal(prepare_patch_weight(weight, precision="bf16").normalised, weight.flatten(1).bfloat16())
    assert prepare_patch_weight(weight).normalised is None


def test_zero_features_stay_zero():
    weight = conv_weight()
    weight[3] = 0
    prepared = prepare_patch_weight(weight)
    assert prepared.scale[3] == 1 and not prepared.raw[3].any() and prepared.offset[3] == 0


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_casts_of_a_model_leave_it_alone(precision):
    prepared = prepare_patch_weight(conv_weight(), precision=precision)
    before = {name: buffer.clone() for name, buffer in prepared.named_buffers()}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), prepared)
    for cast in (model.bfloat16, model.half, model.double, lambda: model.to(torch.float16)):
        cast()
        assert all(torch.equal(buffer, before[name]) for name, buffer in prepared.named_buffers())
        assert all(buffer.dtype == before[name].dtype for name, buffer in prepared.named_buffers())
    assert prepared.to("meta").raw.device.type == "meta"


def test_it_travels():
    prepared = prepare_patch_weight(conv_weight(), precision="int8", mean=MEAN, std=STD)
    copies = [pickle.loads(pickle.dumps(prepared))]
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    other = prepare_patch_weight(conv_weight(seed=9), precision="int8")
    other.load_state_dict(torch.load(file, weights_only=True))
    for copy in (*copies, other):
        assert all(torch.equal(a, b) for a, b in zip(copy.buffers(), prepared.buffers(), strict=True))
        assert (copy.mean, copy.std, copy.patch, copy.order) == (MEAN, STD, 14, "chw")
    with pytest.raises(ValueError, match="state has precision 'int8', this PatchWeight has 'bf16'"):
        prepare_patch_weight(conv_weight(), precision="bf16").set_extra_state(prepared.get_extra_state())


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_safetensors_hold_it(precision, tmp_path):
    """Alone and in a model, read into a weight of other numbers; and what earlier states have, a dictionary."""
    prepared = prepare_patch_weight(conv_weight(), precision=precision, mean=MEAN, std=STD)
    other = prepare_patch_weight(conv_weight(seed=9), precision=precision)
    safetensors.torch.save_file(prepared.state_dict(), tmp_path / "weight.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "weight.safetensors"))
    assert other.state_dict().keys() == prepared.state_dict().keys()
    assert all(torch.equal(other.state_dict()[name], value) for name, value in prepared.state_dict().items())
    assert (other.mean, other.std) == (prepared.mean, prepared.std) == (MEAN, STD)
    model = torch.nn.ModuleDict({"patch": prepared, "head": torch.nn.Linear(4, 4)})
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    again = torch.nn.ModuleDict({
        "patch": prepare_patch_weight(conv_weight(seed=9), precision=precision), "head": torch.nn.Linear(4, 4)
    })  # fmt: skip
    safetensors.torch.load_model(again, str(tmp_path / "model.safetensors"))
    assert torch.equal(again["patch"].raw, prepared.raw) and again["patch"].mean == MEAN
    before = {"schema": 1, "precision": precision, "order": "chw", "patch": 14, "channels": 3, "mean": MEAN, "std": STD}
    again["patch"].load_state_dict(prepared.state_dict() | {"_extra_state": before})


def test_moving_it_moves_the_object_itself():
    prepared = prepare_patch_weight(conv_weight())
    assert prepared.to("meta") is prepared and prepared.raw.is_meta


OTHER_STATES = {
    "another precision": lambda: prepare_patch_weight(conv_weight(seed=9), precision="bf16").state_dict(),
    "another patch": lambda: prepare_patch_weight(conv_weight(patch=16), precision="int8").state_dict(),
    "other features": lambda: prepare_patch_weight(conv_weight(n=24), precision="int8").state_dict(),
    "another type": lambda: state_of() | {"raw": torch.zeros(16, 588)},
    "a part": lambda: {name: value for name, value in state_of().items() if name != "scale"},
    "no extra state": lambda: {name: value for name, value in state_of().items() if name != "_extra_state"},
    "another schema": lambda: state_of() | {"_extra_state": {"schema": 99}},
    "no state": lambda: state_of() | {"_extra_state": torch.zeros(3, dtype=torch.uint8)},
    "floats": lambda: state_of() | {"_extra_state": torch.rand(3)},
    "a list": lambda: state_of() | {"_extra_state": torch.tensor(list(b"[1]"), dtype=torch.uint8)},
}


def state_of() -> dict:
    return prepare_patch_weight(conv_weight(seed=9), precision="int8").state_dict()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", OTHER_STATES)
def test_a_state_that_does_not_fit_changes_nothing(name, strict):
    """Also where the program catches the error; inside of a model too."""
    prepared = prepare_patch_weight(conv_weight(), precision="int8", mean=MEAN, std=STD)
    model = torch.nn.ModuleDict({"patch": prepared})
    before = {name: buffer.clone() for name, buffer in prepared.named_buffers()}
    state = {f"patch.{key}": value for key, value in OTHER_STATES[name]().items()}
    with pytest.raises((ValueError, RuntimeError), match="precision|schema|stays as it is|state of a"):
        model.load_state_dict(state, strict=strict)
    assert all(torch.equal(buffer, before[name]) for name, buffer in prepared.named_buffers())
    assert (prepared.mean, prepared.std) == (MEAN, STD)


def test_a_model_s_state_without_the_weight():
    model = torch.nn.ModuleDict({"patch": prepare_patch_weight(conv_weight(), precision="int8")})
    missing = model.load_state_dict({}, strict=False).missing_keys
    assert sorted(missing) == ["patch._extra_state", "patch.offset", "patch.raw", "patch.scale"]
    model.load_state_dict(model.state_dict(), assign=True)


def test_fp16_takes_a_feature_that_hardly_counts():
    weight = conv_weight()
    weight[3] *= 1e-6
    weight[4] = 0
    prepared = prepare_patch_weight(weight, precision="fp16")
    lost = prepared.raw.double() * 127.5 - weight.flatten(1)
    assert lost.norm() < 1e-3 * weight.norm()


def with_nan() -> torch.Tensor:
    weight = conv_weight()
    weight[1, 2, 3, 4] = torch.nan
    return weight


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight": [1.0]}, TypeError, "weight is list: must be torch.Tensor"),
        ({"weight": torch.nested.nested_tensor([torch.ones(12)])}, TypeError, "weight is a nested tensor: must be"),
        ({"weight": torch.zeros(8, 12, dtype=torch.int8)}, TypeError, "weight has dtype torch.int8"),
        ({"weight": torch.zeros(8, 12).to(torch.float8_e4m3fn)}, TypeError, "weight has dtype torch.float8_e4m3fn"),
        ({"weight": torch.zeros(8, 3, 4, 5)}, ValueError, "weight has shape [8, 3, 4, 5]"),
        ({"weight": torch.zeros(8, 3, 4)}, ValueError, "weight has shape [8, 3, 4]"),
        ({"weight": torch.zeros(8, 49)}, ValueError, "weight has shape [8, 49]"),
        ({"weight": torch.zeros(12, 3, 4, 4)}, ValueError, "weight has N = 12: must be multiples of 8"),
        ({"weight": with_nan()}, ValueError, "weight has NaN or infinity"),
        ({"precision": "fp8"}, ValueError, "precision = 'fp8': must be one of 'int8', 'bf16', 'fp16'"),
        ({"precision": "fp8"}, ValueError, "models.nn.PatchConv2d, FP8 rows by cute_kernels.patch_embed"),
        ({"weight": torch.zeros(8, 3, 4, 4, device="meta")}, TypeError, "weight is on the meta device"),
        ({"order": "cwh"}, ValueError, "order = 'cwh': must be one of 'chw', 'hwc'"),
        ({"order": "hwc"}, ValueError, "order = 'hwc' with a weight of shape [16, 3, 14, 14]: must be 'chw'"),
        ({"mean": (0.5, 0.5)}, ValueError, "mean has 2 numbers: must be one, or 3, one per channel"),
        ({"mean": "0.5"}, TypeError, "mean is str"),
        ({"mean": np.True_}, TypeError, "must be a number"),
        ({"mean": (0.5, "a", 0.5)}, TypeError, "mean has an element of type str"),
        ({"std": (0.5, 0.0, 0.5)}, ValueError, "std = [0.5, 0.0, 0.5]: must be greater than 0"),
        ({"std": float("nan")}, ValueError, "std = [nan, nan, nan]: must be finite numbers"),
        ({"mean": 127.5}, ValueError, "mean = 127.5: must be of pixels scaled to 0..1, from -1 to 2"),
        ({"mean": (0.5, 1e300, 0.5)}, ValueError, "mean = 1e+300: must be of pixels scaled to 0..1"),
        ({"std": 58.4}, ValueError, "std = 58.4: must be of pixels scaled to 0..1, from 0.001 to 10"),
        ({"std": 1e-40}, ValueError, "std = 1e-40: must be of pixels scaled to 0..1"),
        ({"mean": torch.tensor([0.5, 0.5])}, ValueError, "mean has 2 numbers: must be one, or 3"),
        ({"mean": torch.tensor(True)}, TypeError, "mean is bool"),
        ({"std": torch.zeros(3, device="meta")}, TypeError, "std is a tensor without values"),
        ({"channels": 3.0}, TypeError, "channels is float: must be int"),
        ({"channels": 0}, ValueError, "channels = 0: must be at least 1"),
        ({"weight": torch.full((8, 12), 1e-45)}, ValueError, "a feature whose scale is no normal FP32 number"),
        ({"weight": torch.full((8, 12), 1e6), "precision": "fp16"}, ValueError, "beyond the range of torch.float16"),
        ({"weight": conv_weight() * 1e-4, "precision": "fp16"}, ValueError, "numbers too small for torch.float16"),
    ],
)
def test_bad_arguments(arguments, error, message):
    call = {"weight": conv_weight()} | arguments
    with pytest.raises(error) as raised:
        prepare_patch_weight(**call)
    assert message in str(raised.value)
