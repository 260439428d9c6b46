"""`patch_embed` refuses arguments that it cannot take, before anything compiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, patch_embed
from cute_kernels.operations import scales
from tests.operations.test_patch_embed import FP8, make_call, nested, operator_arguments

BASE = dict(zip(("x", "weight", "bias", "pos_embed"), make_call(n=16, k=32), strict=True))
BAD_ARGUMENTS = [
    ({"x": [1.0]}, TypeError, "x is list: must be torch.Tensor"),
    ({"x": None}, TypeError, "x is NoneType"),
    ({"bias": 0.0}, TypeError, "bias is float"),
    ({"x": torch.zeros(2, 3, 32)}, TypeError, "x has dtype torch.float32: must be one of torch.float8_e4m3"),
    ({"weight": torch.zeros(16, 32).to(torch.float8_e5m2)}, TypeError, "weight has dtype torch.float8_e5m2"),
    ({"bias": torch.zeros(16, dtype=torch.float64)}, TypeError, "bias has dtype torch.float64: must be one of torch"),
    ({"pos_embed": torch.zeros(3, 16, dtype=torch.int32)}, TypeError, "pos_embed has dtype torch.int32"),
    ({"x": torch.zeros(32).to(FP8)}, ValueError, r"x has shape \[32\]: must be \[B, S, K\] or \[B \* S, K\]"),
    ({"x": torch.zeros(1, 2, 3, 32).to(FP8)}, ValueError, r"x has shape \[1, 2, 3, 32\]"),
    ({"x": torch.zeros(2, 3, 0).to(FP8)}, ValueError, r"x has shape \[2, 3, 0\]: the last extent must be at least 1"),
    ({"weight": torch.zeros(0, 32).to(FP8)}, ValueError, r"weight has shape \[0, 32\]: every extent must be"),
    ({"x": torch.zeros(2, 3, 0).to(FP8)}, ValueError, r"x has shape \[2, 3, 0\]"),
    ({"x": torch.zeros(2, 3, 48).to(FP8)}, ValueError, "x has K = 48 and weight has K = 32"),
    ({"x": torch.zeros(2, 32, 3).to(FP8).mT}, ValueError, r"x has strides \[96, 1, 3\].*x.contiguous\(\)"),
    ({"x": torch.zeros(2, 3, 64).to(FP8)[..., :32]}, ValueError, r"x has strides \[192, 64, 1\]"),
    ({"x": torch.zeros(2, 4, 32).to(FP8)}, ValueError, "pos_embed has S = 3 and x has S = 4"),
    ({"x": torch.zeros(7, 32).to(FP8)}, ValueError, "x has 7 rows: must be a multiple of pos_embed's S = 3"),
    ({"weight": torch.zeros(16).to(FP8)}, ValueError, r"weight has shape \[16\]: must be \[N, K\]"),
    ({"weight": torch.zeros(32, 16).to(FP8).mT}, ValueError, "weight has strides"),
    ({"weight": torch.zeros(12, 32).to(FP8)}, ValueError, "weight has N = 12: must be multiples of 8, nearest 8 or"),
    ({"bias": torch.zeros(15)}, ValueError, r"bias has shape \[15\]: must be \[N\] = \[16\]"),
    ({"bias": torch.zeros(1, 16)}, ValueError, r"bias has shape \[1, 16\]"),
    ({"pos_embed": torch.zeros(3, 8)}, ValueError, r"pos_embed has shape \[3, 8\]: must be \[S, N\] with N = 16"),
    ({"pos_embed": torch.zeros(0, 16)}, ValueError, r"pos_embed has shape \[0, 16\]"),
    ({"pos_embed": torch.zeros(1, 3, 16)}, ValueError, r"pos_embed has shape \[1, 3, 16\]"),
    ({"bias": torch.zeros(16, device="meta")}, ValueError, "bias is on meta and x is on cpu"),
    ({"scale_b": torch.ones(1, device="meta")}, ValueError, "scale_b is on meta and x is on cpu"),
    ({"scale_a": float("nan")}, ValueError, "scale_a = nan: must be finite and greater than 0"),
    ({"scale_a": 0.0}, ValueError, "scale_a = 0.0"),
    ({"scale_b": -1}, ValueError, "scale_b = -1"),
    ({"scale_b": float("inf")}, ValueError, "scale_b = inf"),
    ({"scale_a": 1e-30, "scale_b": 1e-30}, ValueError, r"scale_a \* scale_b = 1e-30 \* 1e-30 is 0.0 in FP32"),
    ({"scale_a": 1e300}, ValueError, r"scale_a = 1e\+300 is inf in FP32"),
    ({"scale_a": 1e300, "scale_b": 1e-300}, ValueError, r"scale_a = 1e\+300 is inf in FP32"),
    ({"scale_a": 2.0**-150, "scale_b": torch.ones(1)}, ValueError, "scale_a = 7.00.*e-46 is 0 in FP32"),
    ({"scale_b": (2 - 2**-24) * 2.0**127, "scale_a": torch.ones(1)}, ValueError, "scale_b = 3.4.*e.38 is inf in FP32"),
    ({"scale_a": 10**400}, ValueError, "scale_a is beyond FP64"),
    ({"scale_a": 10**5000}, ValueError, "scale_a is beyond FP64"),
    ({"scale_a": 1 + 0j}, TypeError, "scale_a is complex"),
    ({"scale_a": np.complex64(1)}, TypeError, "scale_a is complex64"),
    ({"scale_a": np.True_}, TypeError, "scale_a is bool"),
    ({"scale_a": np.float32("nan")}, ValueError, "scale_a = nan"),
    ({"scale_a": np.float64("inf")}, ValueError, "scale_a = inf"),
    ({"scale_b": torch.ones(1).to_sparse()}, TypeError, "scale_b has layout torch.sparse_coo: must be torch.strided"),
    ({"bias": torch.ones(16).to_sparse()}, TypeError, "bias has layout torch.sparse_coo: must be torch.strided"),
    ({"pos_embed": torch.ones(3, 16).to_sparse()}, TypeError, "pos_embed has layout torch.sparse_coo"),
    ({"weight": torch.ones(16, 32).to_sparse()}, TypeError, "weight has layout torch.sparse_coo"),
    ({"x": torch.ones(6, 32).to_sparse()}, TypeError, "x has layout torch.sparse_coo"),
    ({"x": nested(6, 32)}, TypeError, "x is a nested tensor"),
    ({"bias": nested(16)}, TypeError, "bias is a nested tensor: must be a torch.Tensor of one shape"),
    ({"scale_a": nested(6, 1)}, TypeError, "scale_a is a nested tensor: must be a number, an FP32 tensor"),
    ({"scale_a": "1"}, TypeError, "scale_a is str"),
    ({"scale_a": True}, TypeError, "scale_a is bool"),
    ({"scale_a": torch.ones(1, dtype=torch.float64)}, TypeError, "scale_a has dtype torch.float64"),
    ({"scale_a": torch.ones(5, 1)}, ValueError, r"scale_a has shape \[5, 1\]: must be .* one element or .*= \[6, 1\]"),
    ({"scale_a": torch.ones(6)}, ValueError, r"scale_a has shape \[6\]: must be a tensor of one element or"),
    ({"scale_a": torch.ones(1, 6)}, ValueError, r"scale_a has shape \[1, 6\]: must be a tensor of one element or"),
    ({"scale_a": torch.ones(3, 2, 1)}, ValueError, r"scale_a has shape \[3, 2, 1\]: must be .* = \[2, 3, 1\]"),
    ({"scale_b": torch.ones(16, 1)}, ValueError, r"scale_b has shape \[16, 1\]: must be .* or \[1, N\] = \[1, 16\]"),
    ({"scale_b": torch.ones(1, 8)}, ValueError, r"scale_b has shape \[1, 8\]: must be .* or \[1, N\] = \[1, 16\]"),
    ({"scale_b": torch.ones(1, 16).half()}, TypeError, "scale_b has dtype torch.float16: must be torch.float32"),
    ({"scale_a": torch.ones(6, 1).bfloat16()}, TypeError, "scale_a has dtype torch.bfloat16: must be torch.float32"),
    ({"scale_a": torch.ones(6, 1, device="meta")}, ValueError, "scale_a is on meta and x is on cpu"),
    ({"scale_a": float("nan"), "scale_b": torch.ones(1, 16)}, ValueError, "scale_a = nan: must be finite"),
    ({"scale_a": torch.ones(0)}, ValueError, r"scale_a has shape \[0\]"),
    ({"out_dtype": torch.float16}, ValueError, "out_dtype = torch.float16: must be torch.bfloat16"),
    ({"out_dtype": None}, ValueError, "out_dtype = None"),
    ({"config": {"stages": 4}}, TypeError, "config is dict: must be cute_kernels.Sm100PatchEmbedConfig"),
    ({"config": Sm100PatchEmbedConfig(epilogue="f64")}, ValueError, "f64"),
    ({"config": Sm100PatchEmbedConfig(stages=9)}, ValueError, "stages = 9:? .* nearest legal value: 5"),
    ({"config": Sm100PatchEmbedConfig(tile_n=64)}, ValueError, "tile_n = 64:? .* nearest legal value: 128"),
    ({"config": Sm90PatchEmbedConfig(warpgroups=5)}, ValueError, "warpgroups = 5:? .* nearest legal value: 3"),
    ({"backend": None}, ValueError, "backend = None: must be one of 'auto', 'emulator', 'reference'"),
    ({"backend": "cuda"}, ValueError, "backend = 'cuda': must be one of 'auto', 'emulator', 'reference'"),
]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize(("bad", "error", "message"), BAD_ARGUMENTS, ids=[m[:50] for _, _, m in BAD_ARGUMENTS])
def test_bad_arguments_raise_before_any_compilation(nothing_compiles, backend, bad, error, message):
    patch_embed(**BASE, backend="reference")
    with pytest.raises(error, match=message):
        patch_embed(**({**BASE, "backend": backend} | bad))


def test_direct_operator_calls_are_checked_too():
    arguments = list(operator_arguments())
    arguments[1] = arguments[1][:, ::2]
    with pytest.raises(ValueError, match="weight has strides"):
        torch.ops.cute_kernels.patch_embed(*arguments)


def test_public_names():
    assert set(cute_kernels.__all__) <= set(dir(cute_kernels))
    assert cute_kernels.patch_embed is patch_embed


def test_a_lazily_negated_scale_has_its_sign():
    """The kernel reads the scale from memory, where a negation that torch only remembers has not happened."""
    negated = torch.tensor([1.0 - 0.5j], dtype=torch.complex64).conj().imag
    assert negated.is_neg() and float(negated) == 0.5
    for other in (None, 1.0):
        combined = scales.combine_scales(negated, other)
        assert not combined.is_neg() and float(combined) == 0.5
        combined = scales.combine_scales(other, negated)
        assert not combined.is_neg() and float(combined) == 0.5


def test_all_that_is_wrong_is_said_at_once():
    x, weight = torch.zeros(2, 3, 40), torch.zeros(12, 32, dtype=torch.int8)
    factors = {"scale_a": torch.ones(1).double(), "scale_b": torch.ones(9)}
    with pytest.raises(TypeError) as error:
        patch_embed(x, weight, torch.zeros(5), torch.zeros(7, 16), **factors)
    for part in (
        "x has dtype torch.float32: must be", "x has K = 40 and weight has K = 32", "weight has N = 12",
        "bias has shape [5]", "pos_embed has shape [7, 16]", "pos_embed has S = 7", "scale_a has dtype torch.float64",
        "scale_b has shape [9]",
    ):  # fmt: skip
        assert part in str(error.value)
