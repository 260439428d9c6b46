"""LayerNorm of uint8 rows and the layer behind it as one product: weights, results in FP64, bits, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import Sm80GemmConfig, Sm90GemmConfig, Sm100GemmConfig, layer_norm_linear, prepare_layer_norm_weight
from cute_kernels.operations.patch_weight import LARGEST
from tests.nightly import daily_or_all

N, K = 24, 528
CONFIGS = (
    Sm80GemmConfig(tile_m=64, tile_n=64, stages=3),
    Sm90GemmConfig(128, 64, stages=3, cluster_m=1, store_stages=1),
    Sm100GemmConfig(tile_n=64, stages=3, store_stages=1),
)  # small tiles, whose kernels are compiled in half the time
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layers(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    given = {
        "weight": draw(N, K) * 0.02 + 0.01,
        "bias": draw(N) * 0.1,
        "norm_weight": 1 + 0.3 * draw(K),
        "norm_bias": draw(K) * 0.1,
    }
    return {name: value.to(dtype) for name, value in given.items()}


def rows_of(*shape: int) -> torch.Tensor:
    """Rows of full and of low contrast; of equal pixels the last two."""
    rows = torch.randint(0, 256, (*shape, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = rows.view(-1, K)
    flat[1::3] = flat[1::3] // 64 + 200
    flat[-2], flat[-1] = 0, 173
    return rows


def plain(rows: torch.Tensor, weight, bias=None, norm_weight=None, norm_bias=None, eps: float = 1e-5) -> torch.Tensor:
    """The two layers in FP64."""
    values = (None if each is None else each.double() for each in (norm_weight, norm_bias, weight, bias))
    norm_weight, norm_bias, weight, bias = values
    normed = torch.nn.functional.layer_norm(rows.double() / 255, (K,), norm_weight, norm_bias, eps)
    return torch.nn.functional.linear(normed, weight, bias)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_a_weight() -> None:
    """Every row sums to 0, and no number is further than a step from what it was, hardly any further than half."""
    given = layers()
    given["weight"][3] = 0.25  # equal ones only where the norm has no weight
    for norm_weight in (given["norm_weight"], None):
        prepared = prepare_layer_norm_weight(**given | {"norm_weight": norm_weight})
        integers, scale = prepared.values.long(), prepared.scale.double().t()
        assert (integers.sum(1) == 0).all() and integers.abs().max() == LARGEST
        folded = given["weight"].double() * (1 if norm_weight is None else norm_weight.double())
        moved = integers - (folded - folded.mean(1, keepdim=True)) / scale
        assert float(moved.abs().max()) < 0.6 and float((moved.abs() > 0.5 + 1e-5).double().mean()) < 0.1
        assert (integers[3] == 0).all() == (norm_weight is None)
        bias = given["bias"].double() + given["weight"].double() @ given["norm_bias"].double()
        assert torch.equal(prepared.bias, bias.float())
    assert prepared.values.dtype is torch.int8 and tuple(prepared.values.shape) == (N, K)


@pytest.mark.parametrize(("value", "rounded"), [(0.5, [1, 1, 1, 1, 0, 0, 0, 0]), (0.75, [0, 0, 1, 1, 1, 1, 1, 1])])
def test_of_equal_numbers_the_first_are_moved(value: float, rounded: list[int]) -> None:
    """Eight halves are rounded down, of which the sum has 4 too few; eight three quarters up, 2 too many."""
    weight = torch.zeros(8, 32)
    weight[:, 8:16], weight[:, 16], weight[:, 17], weight[:, 18] = value, -8 * value, 127.0, -127.0
    prepared = prepare_layer_norm_weight(weight)
    integers, scale = prepared.values, prepared.scale
    assert (scale == 1).all() and integers[5, 8:16].tolist() == rounded
    assert (integers.sum(1, dtype=torch.int64) == 0).all() and integers[5, 16:19].tolist() == [-8 * value, 127, -127]


@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_results_in_fp64(backend: str) -> None:
    """Against the two layers, and, but for FP32's roundings, against the integers as they are."""
    given, rows = layers(), rows_of(3, 7)
    prepared = prepare_layer_norm_weight(**given)
    got = layer_norm_linear(rows, prepared, out_dtype=torch.float32, backend=backend)
    expected = plain(rows, **given)
    assert got.shape == expected.shape and error(got, expected) < 1.2e-2
    flat = rows.view(-1, K).double()
    row = (flat.var(1, unbiased=False, keepdim=True) + prepared.eps).rsqrt()
    product = row * (flat @ prepared.values.double().t()) * prepared.scale.double()
    exact = product + prepared.bias.double()
    bound = 2.0**-24 * (6 * product.abs() + 3 * prepared.bias.abs() + 2 * exact.abs())
    assert ((got.view(-1, N).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_kernel_gives_the_bits_of_the_reference(number: int) -> None:
    """By day each result's type by one kernel."""
    prepared, rows, config = prepare_layer_norm_weight(**layers()), rows_of(2, 5), CONFIGS[number]
    for dtype in daily_or_all([DTYPES[number]], DTYPES):
        expected = layer_norm_linear(rows, prepared, out_dtype=dtype, backend="reference")
        assert expected.dtype is dtype
        got = layer_norm_linear(rows, prepared, out_dtype=dtype, config=config, backend="emulator")
        assert torch.equal(got, expected)


def test_the_mean_drops_out_exactly() -> None:
    """Brighter rows give the same bits; rows of equal pixels, whose variance is 0, the bias."""
    prepared, rows = prepare_layer_norm_weight(**layers()), rows_of(12) // 2
    got = layer_norm_linear(rows, prepared, out_dtype=torch.float32)
    assert torch.equal(layer_norm_linear(rows + 127, prepared, out_dtype=torch.float32), got)
    assert torch.equal(got[-2:], prepared.bias.expand(2, N))


@pytest.mark.parametrize("left_out", [("bias",), ("norm_weight", "norm_bias"), ("bias", "norm_weight", "norm_bias")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_layers_without_parameters(left_out: tuple[str, ...], dtype: torch.dtype) -> None:
    given, rows = layers(dtype=dtype) | dict.fromkeys(left_out), rows_of(9)
    prepared = prepare_layer_norm_weight(**given, eps=1e-3)
    expected = plain(rows, **given, eps=1e-3)
    assert error(layer_norm_linear(rows, prepared, out_dtype=torch.float32), expected) < 1.2e-2


def test_slices_and_no_rows() -> None:
    prepared, rows = prepare_layer_norm_weight(**layers()), rows_of(9)
    expected = layer_norm_linear(rows, prepared)
    memory = torch.zeros(9 * K + 1, dtype=torch.uint8)
    shifted = memory[1:].view(9, K).copy_(rows)
    wide = torch.cat((rows, rows), 1)[:, :K]
    for backend in ("reference", "emulator"):
        for each in (shifted, wide):
            assert torch.equal(layer_norm_linear(each, prepared, config=CONFIGS[1], backend=backend), expected)
        assert layer_norm_linear(rows[:0], prepared, backend=backend).shape == (0, N)
    assert torch.equal(layer_norm_linear(rows[4], prepared), expected[4])


def test_in_a_graph() -> None:
    prepared, rows = prepare_layer_norm_weight(**layers()), rows_of(4)
    compiled = torch.compile(lambda x: layer_norm_linear(x, prepared) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows), layer_norm_linear(rows, prepared) + 1)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"weight": None}, TypeError, "weight is NoneType"),
        ({"weight": torch.zeros(N, K, dtype=torch.int8)}, TypeError, "weight has dtype torch.int8"),
        ({"weight": torch.zeros(N, K, device="meta")}, TypeError, "tensor with values"),
        ({"weight": torch.zeros(K)}, ValueError, r"weight has shape \[528\]: must be \[N, K\]"),
        ({"weight": torch.zeros(N, 24)}, ValueError, "weight has K = 24: must be multiples of 16 up to 65792"),
        ({"weight": torch.zeros(1, 65_808)}, ValueError, "K = 65808"),
        ({"weight": torch.full((N, K), float("nan"))}, ValueError, "NaN"),
        ({"bias": torch.full((N,), float("nan"))}, ValueError, "bias or norm_bias has NaN"),
        ({"norm_bias": torch.full((K,), float("inf"))}, ValueError, "bias or norm_bias has NaN"),
        ({"bias": torch.full((N,), 1e300, dtype=torch.float64)}, ValueError, "beyond FP32"),
        ({"divisor": 1e200}, ValueError, "no normal number in FP32"),
        ({"bias": torch.zeros(K)}, ValueError, r"bias has shape \[528\]: must be \[24\]"),
        ({"norm_weight": torch.zeros(N)}, ValueError, r"norm_weight has shape \[24\]: must be \[528\]"),
        ({"norm_bias": torch.zeros(K, dtype=torch.int32)}, TypeError, "norm_bias has dtype torch.int32"),
        ({"eps": 0.0}, ValueError, "eps = 0.0: must be finite and greater than 0"),
        ({"eps": "1"}, TypeError, "eps is str"),
        ({"eps": 1e30, "divisor": 1e8}, ValueError, "is no normal number in FP32"),
        ({"divisor": float("inf")}, ValueError, "divisor = inf"),
    ],
)
def test_weights_that_are_refused(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        prepare_layer_norm_weight(**layers() | change)


@pytest.mark.parametrize(
    ("x", "change", "kind", "message"),
    [
        ([1], {}, TypeError, "x is list"),
        (torch.zeros(2, K), {}, TypeError, "x has dtype torch.float32 .* torch.uint8"),
        (torch.zeros(2, K, dtype=torch.int8), {}, TypeError, "x has dtype torch.int8"),
        (torch.zeros(2, 16, dtype=torch.uint8), {}, ValueError, r"x has shape \[2, 16\]: must be \[.., 528\]"),
        (torch.zeros(2, K, dtype=torch.uint8, device="meta"), {}, ValueError, "x is on meta and weight is on cpu"),
        (rows_of(4), {"out_dtype": torch.float8_e4m3fn}, ValueError, "out_dtype = torch.float8_e4m3fn: must be"),
        (rows_of(4), {"weight": torch.zeros(N, K)}, TypeError, "weight is Tensor: must be what prepare"),
        (rows_of(4), {"backend": "gpu"}, ValueError, "backend = 'gpu'"),
    ],
)
def test_calls_that_are_refused(x: Any, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"weight": prepare_layer_norm_weight(**layers())} | change
    with pytest.raises(kind, match=message):
        layer_norm_linear(x, **given)
