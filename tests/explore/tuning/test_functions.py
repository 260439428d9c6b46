"""`tune_gemm` and its likes with a clock of the test's own: what is timed, what wins, where it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import unittest.mock
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels
from cute_kernels import (
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    tune_gemm,
    tune_patch_embed,
    tune_patch_embed_images,
)
from cute_kernels.config import Config, GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.explore.tuning import search
from cute_kernels.operations import base
from cute_kernels.operations import gemm as gemm_op
from cute_kernels.operations import patch_embed as rows_op
from cute_kernels.operations import patch_embed_images as images_op
from cute_kernels.operations.registry import OPERATIONS, operation_of
from cute_kernels.operations.runtime import devices
from cute_kernels.plan import candidate_plans, make_plan
from tests.operations.runtime.test_tuned import H200, forget

# --- what is timed ---------------------------------------------------------------------------------------------------


def test_candidates_are_timed_in_turns_and_the_median_counts():
    order, times = [], {"a": [9.0, 1.0, 1.1], "b": [1.0, 2.0, 9.0], "c": [0.5, 3.0, 3.1]}

    def timer(name):
        def run():
            order.append(name)
            return times[name].pop(0)

        return run

    assert search.interleaved({name: timer(name) for name in times}, 3) == {"a": 1.1, "b": 2.0, "c": 3.0}
    rounds = [order[i : i + 3] for i in (0, 3, 6)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len({tuple(names) for names in rounds}) > 1


@pytest.fixture
def device(root, monkeypatch):
    """An H200 whose times are those of the dictionary that this gives, by configuration; 2 to 3 ms elsewhere."""
    times: dict[Config, float] = {}
    noise = random.Random(0)

    def timers(operation, plans, inputs):
        return {plan: lambda plan=plan: times.get(plan.config, 2.0 + noise.random()) for plan in plans}

    monkeypatch.setattr(search, "timers_of", timers)
    monkeypatch.setattr(search, "input_sets", lambda operation, problem: [])
    monkeypatch.setattr(search, "choose_backend", lambda place, backend: "kernel")
    for module in (base, devices):
        monkeypatch.setattr(module, "device_facts", lambda index: (H200.arch, H200.sm_count))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: H200.name)
    return times


def planned(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> object:
    """The configuration of a call of `gemm` on the device."""
    # A fake tensor makes torch built for CUDA set up the device that it is told is there.
    with FakeTensorMode(), unittest.mock.patch.object(torch.cuda, "is_available", lambda: False):
        a, b = (torch.empty(rows, k, dtype=dtype, device="cuda") for rows in (m, n))
    others = dict.fromkeys(("bias", "scale_a", "scale_b", "residual", "out_dtype", "config", "out_scale"))
    arguments = gemm_op.GemmArguments(a, b, backend="auto", allow_tf32=True, activation="none", **others)
    return gemm_op.GEMM.plan(arguments).config


def test_the_fastest_configuration_is_what_gemm_then_takes(device, monkeypatch):
    problem = GemmProblem(3000, 500, 640)
    default = make_plan(problem, arch="sm_90a").config
    assert planned(3000, 500, 640) == default
    candidates = [plan.config for plan in candidate_plans(problem, "sm_90a")]
    fastest = candidates[7]
    assert fastest != default
    device[fastest] = 1.5
    calls = gemm_op.GEMM.repeated.calls
    monkeypatch.setitem(calls, "a call", "with the old configuration")
    assert tune_gemm(3000, 500, 640) == fastest
    assert planned(3000, 500, 640) == fastest and not calls
    forget(monkeypatch)
    assert planned(3000, 500, 640) == fastest
    assert planned(3000, 508, 640) == make_plan(GemmProblem(3000, 508, 640), arch="sm_90a").config
    assert tune_gemm(3000, 500, 640, candidates=5) in candidates[:5] + [
        plan.config for first in candidate_plans(problem, "sm_90a")[:5] for plan in gemm_op.GEMM.variants(first)
    ]


@pytest.fixture
def first_calls(device, monkeypatch):
    """Random states of the device that were put back; ``device`` is the current one, and captures nothing."""
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: f"of device {index}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: put_back.append(state))
    return put_back


def test_first_calls_take_the_faster_of_two_where_that_was_asked_for(device, first_calls, monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    first, second, third = (plan.config for plan in candidate_plans(GemmProblem(3000, 500, 640), "sm_90a")[:3])
    device.update({first: 1.5, second: 1.2, third: 1.0})
    assert planned(3000, 500, 640) == first
    with cute_kernels.tune_first_calls():
        capturing = True
        assert planned(3000, 500, 640) == first
        capturing = False
        assert planned(3000, 500, 640) == second and first_calls == ["of device 0"]
        with cute_kernels.tune_first_calls(candidates=3):  # what is tuned stays, what is not is of three
            assert planned(3000, 500, 640) == second
            assert planned(3004, 500, 640) == third
    assert planned(3000, 500, 640) == second
    assert planned(3008, 500, 640) == make_plan(GemmProblem(3008, 500, 640), arch="sm_90a").config


def test_first_calls_without_memory_take_the_choosers(device, first_calls, monkeypatch):
    def no_memory(operation, problem):
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(search, "input_sets", no_memory)
    with cute_kernels.tune_first_calls(), pytest.warns(RuntimeWarning, match="too little memory to time gemm of"):
        assert planned(3000, 500, 640) == make_plan(GemmProblem(3000, 500, 640), arch="sm_90a").config
    with pytest.raises(ValueError, match="candidates = 0"), cute_kernels.tune_first_calls(0):
        pass


ROWS = PatchEmbedProblem(8 * 196, 768, 768, table_rows=196)


def planned_rows(**changes: object) -> Config:
    """The configuration of a call of `patch_embed` on the device: 8 images of 196 positions."""
    with FakeTensorMode(), unittest.mock.patch.object(torch.cuda, "is_available", lambda: False):
        fp8 = {"dtype": torch.float8_e4m3fn, "device": "cuda"}
        arguments = {
            "x": torch.empty(8, 196, 768, **fp8), "weight": torch.empty(768, 768, **fp8), "bias": None,
            "pos_embed": torch.empty(196, 768, device="cuda"), "pos_index": None, "scale_a": 0.5, "scale_b": None,
            "backend": "auto", "config": None,
        }  # fmt: skip
        arguments |= {name: make() for name, make in changes.items()}
    return rows_op.PATCH_EMBED.plan(rows_op.PatchEmbedArguments(**arguments)).config


def test_the_fastest_configuration_is_what_patch_embed_then_takes(device, monkeypatch):
    found = [plan.config for plan in candidate_plans(ROWS, "sm_90a")]
    assert planned_rows() == found[0] == make_plan(ROWS, arch="sm_90a").config
    fastest = found[5]
    device[fastest] = 1.5
    monkeypatch.setitem(rows_op.PATCH_EMBED.repeated.calls, "a call", "with the old configuration")
    assert tune_patch_embed(8, 196, 768, 768) == fastest
    assert planned_rows() == fastest and not rows_op.PATCH_EMBED.repeated.calls
    forget(monkeypatch)
    # Where the number comes from makes no other kernel; factors of the rows do, and so do other sizes.
    assert planned_rows(scale_a=lambda: torch.empty(1, device="cuda")) == fastest
    assert planned_rows(scale_a=lambda: torch.empty(8 * 196, 1, device="cuda")) != fastest
    assert planned_rows(pos_embed=lambda: None) != fastest


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_plans_of_rows_that_are_worth_timing(arch):
    """The choice first, no plan twice, and none that rounds otherwise."""
    plans = candidate_plans(ROWS, arch)
    assert plans[0] == make_plan(ROWS, arch=arch) and len(plans) == len(set(plans)) > 20
    assert {plan.config.epilogue for plan in plans} == {"f32"}


@pytest.mark.parametrize(
    "problem",
    [
        ROWS,
        dataclasses.replace(ROWS, in_dtype="uint8", row_scale=True),
        dataclasses.replace(ROWS, in_dtype="bfloat16", feature_scale=True, table_rows=1),
        dataclasses.replace(ROWS, m=100, table_index=True, row_scale=True, feature_scale=True),
        dataclasses.replace(ROWS, table_rows=0),
    ],
)
def test_what_is_timed_is_the_problem(problem):
    first, second = search.input_sets(rows_op.PATCH_EMBED, problem, "cpu")[:2]
    for arguments in (first, second):
        rows_op.PATCH_EMBED.check(arguments)
        assert rows_op.PATCH_EMBED.tuned_problem(rows_op.PATCH_EMBED.problem(arguments)) == problem
    assert not torch.equal(first.x.view(torch.uint8), second.x.view(torch.uint8))


IMAGES = PatchEmbedImagesProblem(8, 3, 224, 224, 16, 768, table_rows=196)


def planned_images() -> Config:
    """The configuration of a call of `patch_embed_images` on the device: 8 images of 224 x 224."""
    example = images_op.PATCH_EMBED_IMAGES.example(IMAGES)
    tensors = {name: t for name, t in vars(example).items() if isinstance(t, torch.Tensor)}
    with FakeTensorMode(), unittest.mock.patch.object(torch.cuda, "is_available", lambda: False):
        fake = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in tensors.items()}
        return images_op.PATCH_EMBED_IMAGES.plan(dataclasses.replace(example, **fake)).config


def test_the_fastest_configuration_is_what_patch_embed_images_then_takes(device):
    """Of the kernel that reads the images, or of the one over rows behind a pass."""
    found = [plan.config for plan in candidate_plans(IMAGES, "sm_90a")]
    assert {type(config) for config in found} == {Sm90ImagesConfig, Sm90PatchEmbedConfig}
    assert planned_images() == found[0] == make_plan(IMAGES, arch="sm_90a").config
    fastest = next(config for config in found if isinstance(config, Sm90PatchEmbedConfig))
    device[fastest] = 1.5
    assert tune_patch_embed_images(8, 224, 224, 16, 768, candidates=len(found)) == planned_images() == fastest
    with pytest.raises(ValueError, match="height = 220:? .*whole patches of 16"):
        tune_patch_embed_images(8, 220, 224, 16, 768)
    with pytest.raises(ValueError, match="precision = 'int4': must be one of 'int8'"):
        tune_patch_embed_images(8, 224, 224, 16, 768, precision="int4")


def image_problems() -> Iterator[PatchEmbedImagesProblem]:
    for patch, precision, dtype in ((16, "int8", "uint8"), (14, "int8", "uint8"), (16, "bf16", "bfloat16"),
                                    (14, "fp16", "float32")):  # fmt: skip
        for last in (False, True)[: 1 + (precision == "int8")]:
            yield PatchEmbedImagesProblem(64, 3, 224, 224, patch, 768, dtype, last, precision)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("problem", list(image_problems()), ids=str)
def test_plans_of_images_that_are_worth_timing(problem, arch):
    """The choice first, no plan twice, each its configuration's; each rounds as the reference of the problem says."""
    plans = candidate_plans(problem, arch)
    assert plans[0] == make_plan(problem, arch=arch) and len(plans) == len(set(plans)) >= 8
    assert all(make_plan(problem, plan.config, arch) == plan for plan in plans)
    assert {getattr(plan.config, "epilogue", "f32") for plan in plans} == {"f32"}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_examples_have_their_problem(operation):
    """What is executed and timed of a problem is a call that has it; a smaller one is legal, too."""
    problem = {"gemm": GemmProblem(40, 64, 128, bias=True), "patch_embed": ROWS, "patch_embed_images": IMAGES}
    problem = next(operation.smaller(problem[operation.name]))
    arguments = operation.example(problem)
    operation.check(arguments)
    assert operation.problem(arguments) == problem and operation_of(problem) is operation
    assert make_plan(problem).operation == operation.name
    others = [dataclasses.replace(arguments, config=None), operation.example(problem)]
    assert not torch.equal(*(getattr(each, operation.rotated).view(torch.uint8) for each in others))


def test_tf32_is_tuned_by_itself(device):
    default = planned(3000, 500, 640)
    problem = GemmProblem(3000, 500, 640, in_dtype="float32", out_dtype="float32")
    fastest = candidate_plans(problem, "sm_90a")[5].config
    assert fastest not in (default, planned(3000, 500, 640, torch.float32))
    device[fastest] = 1.5
    assert tune_gemm(3000, 500, 640, dtype=torch.float32) == fastest
    assert planned(3000, 500, 640, torch.float32) == fastest and planned(3000, 500, 640) == default


def test_other_orders_of_the_fastest_tiles_are_tried(device):
    first = candidate_plans(GemmProblem(8192, 4096, 640), "sm_90a")[0]
    orders = [plan.config for plan in gemm_op.GEMM.variants(first)]
    assert [config.group_m for config in orders] == [1, 4, 8, 16]
    device[first.config], device[orders[2]] = 1.0, 0.9
    assert tune_gemm(8192, 4096, 640) == orders[2]
    assert gemm_op.GEMM.variants(make_plan(GemmProblem(128, 64, 64), arch="sm_90a")) == []


def test_a_timer_keeps_what_its_graph_reads_alive(monkeypatch):
    """A graph has addresses only: tensors that only the captured launches know must not be freed before the replay."""

    class Tensor:
        pass

    def launcher():
        tensor = Tensor()
        return weakref.ref(tensor), lambda i, stream: tensor

    monkeypatch.setattr(search, "_captured", lambda launch, count: object())
    tensor, launch = launcher()
    timer = search.replay_timer(launch, 3)
    del launch
    assert tensor() is not None
    del timer
    assert tensor() is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"m": 0}, ValueError, "m = 0"),
        ({"k": 12}, ValueError, "k = 12"),
        ({"m": 1.5}, TypeError, "m = 1.5"),
        ({"dtype": torch.float64}, ValueError, "in_dtype = 'float64'"),
        ({"dtype": "bfloat16"}, TypeError, "dtype is str"),
        ({"out_dtype": 3}, TypeError, "out_dtype is int"),
        ({"candidates": 0}, ValueError, "candidates = 0: must be at least 1"),
    ],
)
def test_refusals_come_before_anything_is_timed(device, monkeypatch, arguments, error, message):
    monkeypatch.setattr(search, "timers_of", lambda *_: pytest.fail("timed"))
    with pytest.raises(error, match=message):
        tune_gemm(**({"m": 64, "n": 64, "k": 64} | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"images": 0}, ValueError, "images = 0: must be at least 1"),
        ({"positions": 1.5}, TypeError, "positions is float"),
        ({"n": 12}, ValueError, "n = 12"),
        ({"dtype": torch.float32}, ValueError, "dtype = torch.float32: must be one of torch.float8_e4m3fn"),
        ({"dtype": "int8"}, TypeError, "dtype is str"),
        ({"table": "index_of"}, ValueError, "table = 'index_of': must be one of 'positions', 'index', 'bias', 'none'"),
        ({"candidates": 2.5}, TypeError, "candidates is float"),
    ],
)
def test_refusals_of_rows_come_before_anything_is_timed(device, monkeypatch, arguments, error, message):
    monkeypatch.setattr(search, "timers_of", lambda *_: pytest.fail("timed"))
    with pytest.raises(error, match=message):
        tune_patch_embed(**({"images": 2, "positions": 196, "n": 768, "k": 768} | arguments))


def test_without_a_gpu_there_is_nothing_to_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="there is none"):
        cute_kernels.tune_gemm(64, 64, 64)
    with pytest.raises(NotImplementedError, match="tune_patch_embed times kernels on a CUDA device, and there is none"):
        cute_kernels.tune_patch_embed(1, 196, 768, 768)
