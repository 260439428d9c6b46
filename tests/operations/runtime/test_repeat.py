"""Repeated calls without a GPU: CPU tensors stand for CUDA tensors, and a recorder for the launch.

What tests/gpu/test_warm.py shows by results is shown here by what would be launched: the addresses of every operand, or
None where the call has to be made the long way.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from cute_kernels.config import Sm90GemmConfig
from cute_kernels.operations import gemm as gemm_op
from cute_kernels.operations import patch_embed as patch_embed_op
from cute_kernels.operations import patch_embed_images as images_op
from cute_kernels.operations.runtime import repeat
from cute_kernels.operations.runtime.constants import DERIVED, PEFT
from cute_kernels.operations.runtime.repeat import RepeatedCalls

FP8 = torch.float8_e4m3fn


@pytest.fixture
def launches(monkeypatch):
    """Launches by operand names; CPU tensors are taken for CUDA tensors on the default stream of a device -1."""
    seen: list[dict] = []
    # The first call after peft is imported, which tests of models do, goes the long way.
    monkeypatch.delitem(sys.modules, PEFT, raising=False)
    monkeypatch.setattr(DERIVED, "compares_on_gpu", False)

    class Recorder:
        def __init__(self, plan):
            self.plan = plan

        def with_constants(self, parameters, **constants):
            return lambda values: seen.append(constants | dict(zip(parameters, values, strict=True)))

    monkeypatch.setattr(repeat, "_HOST", None)
    monkeypatch.setattr(repeat, "gpu", types.SimpleNamespace(bound_launch=Recorder))
    for name, value in (("current_stream", 7), ("current_device", -1), ("is_capturing", False)):
        monkeypatch.setattr(repeat, f"_{name}", lambda *_, value=value: value)
    monkeypatch.setattr(repeat, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def remember(operation, values: dict) -> RepeatedCalls:
    """Repeated calls of the operation, of which one was made."""
    calls = RepeatedCalls(operation.repeated._arguments, operation.scales)
    prepared = operation.prepared(**values)
    calls.put(values, prepared.plan, prepared.operands, prepared.result())
    return calls


def run(calls: RepeatedCalls, values: dict, gradients: bool = False) -> torch.Tensor | None:
    return calls.run(tuple(values.values()), gradients)


def patches(**changes) -> dict:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 32, generator=generator).to(FP8)
    weight = torch.randn(16, 32, generator=generator).to(FP8)
    bias = torch.randn(16, generator=generator)
    pos = torch.randn(16, 16, generator=generator)
    values = {"x": x, "weight": weight, "bias": bias, "pos_embed": pos, "pos_index": None, "scale_a": 0.5}
    return values | {"scale_b": None, "backend": "auto", "config": None} | changes


def products(**changes) -> dict:
    a, b = torch.randn(5, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    values = {"a": a, "b": b, "bias": torch.randn(8), "scale_a": None, "scale_b": None, "residual": None}
    values |= {"out_scale": None, "out_dtype": None, "backend": "auto", "config": None, "allow_tf32": False}
    return values | {"activation": "none"} | changes


def narrow_products(**changes) -> dict:
    """A product of FP8 to FP8, with multipliers of rows and a residual."""
    values = products(a=torch.randn(5, 16).to(FP8), b=torch.randn(16, 16).to(FP8), bias=None, out_dtype=FP8)
    values |= {"config": Sm90GemmConfig(64, 128, pingpong=True, store_stages=1), "out_scale": 4.0}
    return values | {"scale_a": torch.rand(5, 1), "scale_b": 0.5, "residual": torch.randn(5, 16)} | changes


def test_the_launch_has_the_addresses_of_new_rows_and_of_the_same_constants(launches):
    first = patches()
    calls = remember(patch_embed_op.PATCH_EMBED, first)
    again = first | {"x": first["x"].clone(), "scale_a": 0.25}
    out = run(calls, again)
    assert out.shape == (2, 16, 16) and out.dtype == torch.bfloat16 and out.is_contiguous()
    table = patch_embed_op.PATCH_EMBED.prepared(**first).operands.table
    assert launches == [{
        "x": again["x"].data_ptr(), "weight": first["weight"].data_ptr(), "table": table.data_ptr(), "index": None,
        "out": out.data_ptr(), "scale": 0.25, "row_scale": None, "feature_scale": None, "stream": 7,
    }]  # fmt: skip


def test_an_index_and_a_scale_in_memory_are_new_in_every_launch(launches):
    index, scale = torch.zeros(2, 16, dtype=torch.int32), torch.tensor([0.5])
    first = patches(pos_index=index, scale_a=scale)
    calls = remember(patch_embed_op.PATCH_EMBED, first)
    again = first | {"pos_index": index.clone(), "scale_a": scale.clone()}
    assert run(calls, again) is not None
    assert launches[0]["index"] == again["pos_index"].data_ptr() != index.data_ptr()
    assert launches[0]["scale"] == again["scale_a"].data_ptr() != scale.data_ptr()
    assert run(calls, again | {"pos_index": index.long()}) is None
    assert run(calls, again | {"pos_index": index[:, ::2]}) is None
    assert run(calls, again | {"scale_a": scale.double()}) is None
    assert run(calls, again | {"scale_a": torch.ones(2)}) is None


@pytest.mark.parametrize("one", [None, 0.5, torch.tensor(0.5)], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("which", ["scale_a", "scale_b", "both"])
def test_row_wise_scales_are_operands_as_they_are(launches, which, one):
    vectors = {"scale_a": torch.rand(2, 16, 1), "scale_b": torch.rand(1, 16)}
    given = dict.fromkeys(vectors, one) | {name: vectors[name] for name in vectors if which in (name, "both")}
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches(**given))
    again = values | {name: scale.clone() for name, scale in given.items() if scale is vectors[name]}
    assert run(calls, again) is not None
    for name, operand in (("scale_a", "row_scale"), ("scale_b", "feature_scale")):
        present = which in (name, "both")
        assert launches[0][operand] == (again[name].data_ptr() if present else None)
    if which == "both":
        assert launches[0]["scale"] is None
    elif isinstance(one, torch.Tensor):
        assert launches[0]["scale"] == one.data_ptr()
    else:
        assert launches[0]["scale"] == (one or 1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: scale[:1],
        lambda scale: scale.view(32, 1),  # legal, and another shape than was seen
        lambda scale: scale.double(),
        lambda scale: scale.expand(2, 16, 2)[:, :, :1].contiguous().mT,
        lambda scale: torch.rand(2, 16, 2)[:, :, :1],
        lambda scale: scale.clone().requires_grad_(),
        lambda scale: slice_off_16_bytes(scale)[..., :1].as_strided((2, 16, 1), (1, 2, 1)),
        lambda scale: torch.complex(scale, -scale).conj().imag,
        lambda scale: 0.5,
        lambda scale: scale.tolist(),
        lambda scale: torch.tensor([0.5]),
    ],
    ids=range(11),
)
def test_another_row_wise_scale_goes_the_long_way(launches, change):
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches(scale_a=torch.rand(2, 16, 1)))
    assert run(calls, values, gradients=True) is not None
    assert run(calls, values | {"scale_a": change(values["scale_a"])}, gradients=True) is None and len(launches) == 1


def test_a_copied_row_wise_scale_is_not_remembered(launches):
    assert not remember(patch_embed_op.PATCH_EMBED, patches(scale_a=torch.rand(2, 16, 2)[:, :, :1])).calls


def slice_off_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    return memory[8 // tensor.itemsize :][: tensor.numel()].view(tensor.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v | {"x": slice_off_16_bytes(v["x"])},
        lambda v: v | {"x": v["x"].mT.contiguous().mT},
        lambda v: v | {"x": v["x"][:1]},
        lambda v: v | {"x": v["x"].float()},
        lambda v: v | {"x": [1.0]},
        lambda v: v | {"weight": v["weight"].clone()},
        lambda v: v | {"bias": None},
        lambda v: v | {"pos_index": [0]},
        lambda v: v | {"config": "fast"},
        lambda v: v | {"scale_b": 2.0},
        lambda v: v["bias"].add_(1) is None or v,
        lambda v: v["pos_embed"].t_() is None or v,
        lambda v: setattr(v["bias"], "data", torch.zeros(16)) or v,
        # The same memory, shape and version.
        lambda v: setattr(v["pos_embed"], "data", torch.as_strided(v["pos_embed"].detach(), (16, 16), (1, 16))) or v,
        lambda v: v["bias"].requires_grad_() is None or v,
        lambda v: DERIVED.clear() or v,
    ],
    ids=range(16),
)
@pytest.mark.parametrize("guards", [True, False], ids=["guards", "one by one"])
def test_what_changed_goes_the_long_way(launches, monkeypatch, change, guards):
    if not guards:
        monkeypatch.setattr(repeat, "_TENSOR_GUARDS", None)
    values = patches()
    calls = remember(patch_embed_op.PATCH_EMBED, values)
    assert run(calls, values, gradients=True) is not None
    assert run(calls, change(values), gradients=True) is None and len(launches) == 1


def test_tensors_are_compared_in_one_call_or_one_by_one(launches):
    """The check of torch.compile's guards says no of equal tensors where the thread's dispatch state is another."""
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches())
    (call,) = calls.calls.values()
    x, *constants = (values[name] for name in ("x", "weight", "bias", "pos_embed"))
    same = call.same
    assert same(x, *constants) and same(x.clone(), *constants)
    assert not same(x[:1], *constants) and not same(x.view(torch.float8_e5m2), *constants)
    with torch.inference_mode():
        assert not same(x, *constants)
        assert run(calls, values) is not None and run(calls, values | {"x": x[:1]}) is None
    assert len(launches) == 1


def test_illegal_numbers_are_refused(launches):
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches())
    with pytest.raises(ValueError, match="scale_a = -1.0"):
        run(calls, values | {"scale_a": -1.0})
    assert not launches


def test_dead_constants_are_forgotten(launches):
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches())
    assert run(calls, values) is not None and len(calls.calls) == len(calls.recent) == 1
    del values["bias"]
    assert not calls.calls and not calls.recent


def test_a_replaced_call_dies_with_its_constants(launches):
    """A weight that changes in place gets another call; the one before it, found last, must not outlive the weight.

    A new weight may have the address and the version of the old one before its change.
    """
    values = patches()
    calls = remember(patch_embed_op.PATCH_EMBED, values)
    assert run(calls, values) is not None and len(calls.recent) == 1
    values["weight"].zero_()
    assert run(calls, values) is None
    prepared = patch_embed_op.PATCH_EMBED.prepared(**values)
    calls.put(values, prepared.plan, prepared.operands, prepared.result())
    assert len(calls.calls) == len(calls.recent) == 1
    del values, prepared
    launches.clear()
    assert not calls.calls and not calls.recent


def test_calls_that_share_a_weight_take_turns(launches):
    """The last call with a weight is tried first; another bias, shape, scale or type of rows is not taken for it."""
    first = patches()
    second = first | {"x": first["x"][:1].clone(), "bias": None, "scale_a": torch.tensor(0.5)}
    calls = remember(patch_embed_op.PATCH_EMBED, first)
    prepared = patch_embed_op.PATCH_EMBED.prepared(**second)
    calls.put(second, prepared.plan, prepared.operands, prepared.result())
    for values in (first, second, second, first):
        out = run(calls, values)
        assert out.shape == (*values["x"].shape[:2], 16)
        assert launches[-1]["x"] == values["x"].data_ptr()
        assert launches[-1]["scale"] == (0.5 if values is first else second["scale_a"].data_ptr())
    assert launches[0]["table"] == launches[3]["table"] != launches[1]["table"]
    for change in ({"x": first["x"].view(torch.float8_e5m2)}, {"x": [1.0]}, {"config": "fast"}, {"scale_a": None}):
        assert run(calls, first | change) is None


def test_another_stream_or_device_is_not_taken_for_the_last_one(launches):
    calls = remember(patch_embed_op.PATCH_EMBED, values := patches())
    assert run(calls, values) is not None
    for name in ("_current_stream", "_current_device"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeat, name, lambda *_: 3)
            assert run(calls, values) is None
    assert run(calls, values) is not None and len(launches) == 2


def test_a_copied_input_or_output_is_not_remembered(launches):
    values = patches()
    assert not remember(patch_embed_op.PATCH_EMBED, values | {"x": slice_off_16_bytes(values["x"])}).calls
    assert not remember(gemm_op.GEMM, products(b=torch.randn(5, 16).bfloat16(), bias=None)).calls  # rows of 10 bytes


def test_a_product_takes_both_operands_and_the_bias_of_the_moment(launches):
    first = products()
    calls = remember(gemm_op.GEMM, first)
    again = first | {"a": first["a"].clone(), "b": first["b"].clone()}
    out = run(calls, again)
    before = launches[0]
    assert all(before[name] == again[name].data_ptr() for name in ("a", "b", "bias"))
    assert out.shape == (5, 8) and before["out"] == out.data_ptr()
    other = again | {"bias": again["bias"].clone()}
    assert run(calls, other) is not None and launches[1]["bias"] == other["bias"].data_ptr()
    for bias in (other["bias"].bfloat16(), other["bias"].repeat(2)[::2]):
        assert run(calls, other | {"bias": bias}) is None


def test_a_narrow_product_takes_multipliers_and_residual_of_the_moment(launches):
    """One number for rows or for columns is part of the call's; an output has a number, too, or memory of its own."""
    first = narrow_products()
    calls = remember(gemm_op.GEMM, first)
    again = first | {"scale_a": torch.rand(5, 1), "scale_b": 0.25, "residual": torch.randn(5, 16), "out_scale": 8.0}
    out = run(calls, again)
    assert (out.shape, out.dtype) == ((5, 16), FP8)
    launch = launches[0]
    assert (launch["row_scale"], launch["residual"]) == (again["scale_a"].data_ptr(), again["residual"].data_ptr())
    assert (launch["scale"], launch["out_scale"], launch["column_scale"]) == (0.25, 8.0, None)
    in_memory = {"out_scale": torch.tensor([0.5])}
    for change in (in_memory, {"residual": None}, {"scale_a": 0.5}, {"scale_b": torch.rand(1, 16)}):
        assert run(calls, first | change) is None
    for number in (-1.0, 1e-42):
        with pytest.raises(ValueError, match="^out_scale"):
            run(calls, first | {"out_scale": number})
    calls = remember(gemm_op.GEMM, first | in_memory)
    again |= {"out_scale": torch.tensor(2.0)}
    assert run(calls, first | in_memory) is not None and run(calls, again) is None  # of another shape
    assert run(calls, again | {"out_scale": again["out_scale"].view(1)}) is not None
    addresses = [launch["out_scale"] for launch in launches[1:]]
    assert addresses == [in_memory["out_scale"].data_ptr(), again["out_scale"].data_ptr()]


def test_a_wide_product_takes_the_number_of_the_moment_and_none_is_another_call(launches):
    first = products(scale_a=0.5)
    calls = remember(gemm_op.GEMM, first)
    assert run(calls, first | {"scale_a": 0.25}) is not None and launches[0]["scale"] == 0.25
    assert run(calls, first | {"scale_a": None}) is None and run(calls, first | {"scale_b": 2.0}) is None
    calls = remember(gemm_op.GEMM, products())
    assert run(calls, first) is None


@pytest.mark.parametrize(
    "change",
    [
        {"out_dtype": torch.float32}, {"allow_tf32": True}, {"activation": "silu"}, {"bias": None},
        {"b": torch.zeros(16, 16).bfloat16()}, {"b": torch.zeros(8, 16).half()}, {"b": 1}, {"allow_tf32": 0},
        {"b": torch.zeros(8, 16).bfloat16().to_sparse()}, {"b": torch._neg_view(torch.zeros(8, 16).bfloat16())},
        {"a": torch.nested.nested_tensor([torch.zeros(2, 16), torch.zeros(3, 16)]).bfloat16()},
        {"b": torch.zeros(8, 16, device="meta").bfloat16()},
    ],  # fmt: skip
)
@pytest.mark.parametrize("first", [True, False], ids=["the last one", "found by its key"])
def test_another_product_goes_the_long_way(launches, change, first):
    values = products()
    calls = remember(gemm_op.GEMM, values)
    if first:
        assert run(calls, values) is not None
    assert run(calls, values | change) is None and len(launches) == first


def test_calls_with_factors_of_other_shapes_stand_beside_each_other(launches):
    """A number for all, for every row and for every feature are three calls, none of which takes another's place."""
    first = patches(scale_a=torch.tensor(0.5), scale_b=torch.tensor(0.5))
    every = [first | change for change in ({}, {"scale_a": torch.rand(2, 16, 1)}, {"scale_b": torch.rand(1, 16)})]
    calls = RepeatedCalls(patch_embed_op.PATCH_EMBED.repeated._arguments, patch_embed_op.PATCH_EMBED.scales)
    for values in every:
        prepared = patch_embed_op.PATCH_EMBED.prepared(**values)
        calls.put(values, prepared.plan, prepared.operands, prepared.result())
    for values in (*every, *every):
        assert run(calls, values) is not None
        for name, operand in (("scale_a", "row_scale"), ("scale_b", "feature_scale")):
            vector = values[name].numel() > 1
            assert launches[-1][operand] == (values[name].data_ptr() if vector else None)


def test_the_last_calls_with_tensors_that_come_and_go_are_not_kept_for_ever(launches, monkeypatch):
    monkeypatch.setattr(repeat, "_CAPACITY", 4)
    calls = remember(gemm_op.GEMM, values := products())
    for _ in range(20):
        kept = [values["b"]]  # alive, so that the next has another identity
        values = values | {"b": values["b"].clone()}
        assert run(calls, values) is not None and len(calls.recent) <= 4
        kept.clear()


def test_a_call_is_found_by_equal_words_and_numbers_whatever_object_holds_them(launches):
    """The dispatcher makes a new string, and a new integer above 256, for every call."""
    first = products(activation="silu")
    calls = remember(gemm_op.GEMM, first)
    assert run(calls, first | {"activation": "".join(["si", "lu"])}) is not None
    assert run(calls, first | {"activation": "gelu_tanh"}) is None
    assert run(calls, first | {"activation": ["silu"]}) is None


def pictures(**changes) -> dict:
    """Of patches that no kernel reads out of images."""
    images = torch.randint(0, 256, (2, 3, 28, 42), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (16, 588), dtype=torch.int8)
    values = {"images": images, "weight": weight, "weight_scale": torch.rand(16)}
    values |= {"weight_offset": torch.rand(16), "bias": None, "pos_embed": torch.rand(6, 16), "patch": 14}
    return values | {"out_dtype": torch.bfloat16, "backend": "auto", "config": None} | changes


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_two_kernels_in_turn_hand_over_memory_of_the_call(launches, layout):
    first = pictures()
    first["images"] = first["images"].contiguous(memory_format=layout)
    calls = remember(images_op.PATCH_EMBED_IMAGES, first)
    # Alive during the call, so that none of its memory can be that of the call.
    kept = images_op.PATCH_EMBED_IMAGES.prepared(**first).operands
    out = run(calls, again := first | {"images": first["images"].clone()})
    assert out.shape == (2, 6, 16) and out.is_contiguous()
    assert len(launches) == 2 and launches[0] == launches[1]  # each takes what its kernel knows
    assert launches[0]["images"] == again["images"].data_ptr() and launches[0]["out"] == out.data_ptr()
    assert launches[0]["weight"] == kept.weight.data_ptr() != first["weight"].data_ptr()
    assert launches[0]["table"] == kept.table.data_ptr() and launches[0]["x"] not in (0, kept.x.data_ptr())
    other = torch.channels_last if layout is torch.contiguous_format else torch.contiguous_format
    assert run(calls, first | {"images": first["images"].contiguous(memory_format=other)}) is None
    assert run(calls, first | {"images": first["images"][..., :14]}) is None and len(launches) == 2


def test_memory_between_kernels_is_not_kept(launches):
    calls = remember(images_op.PATCH_EMBED_IMAGES, values := pictures())
    (call,) = calls.calls.values()
    assert not any(tensor.shape == (12, 608) for tensor in call.kept)
    assert call.made[0](()).shape == (12, 608) and call.made[0](()).dtype is torch.uint8
    assert run(calls, values) is not None


def test_nothing_is_taken_or_remembered_while_a_graph_is_captured(launches, monkeypatch):
    """The memory of a graph is that of its own pool, and its launches are those of the capture."""
    values = products()
    calls = remember(gemm_op.GEMM, values)
    with monkeypatch.context() as capture:
        capture.setattr(repeat, "_is_capturing", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert run(calls, values) is None and not launches
        assert not remember(gemm_op.GEMM, products()).calls
    assert run(calls, values) is not None and len(launches) == 1
