"""Warm calls: what is remembered is still right when its inputs change; first calls of processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from cute_kernels import PatchEmbedProblem, clear_cache, patch_embed
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.runtime import gpu
from cute_kernels.plan import make_plan
from tests.gpu.harness import Call, check_against_fp64, random_call
from tests.gpu.patch_embed_configs import AT_HAND


def embed(call: Call, **options) -> torch.Tensor:
    return patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=call.scale, **options)


@pytest.fixture
def long_way(monkeypatch):
    """The outcomes of asking for a remembered call: True if there was none."""
    outcomes = []
    run = PATCH_EMBED.repeated.run

    def watched(*arguments, **options):
        out = run(*arguments, **options)
        outcomes.append(out is None)
        return out

    monkeypatch.setattr(PATCH_EMBED.repeated, "run", watched)
    return outcomes


def test_a_repeated_call_is_remembered_and_reads_its_new_rows(long_way, record_property):
    call = random_call(50, 21, 768, 768)
    for seed in range(3):
        fresh = dataclasses.replace(call, x=random_call(50, 21, 768, 768, seed=seed).x)
        check_against_fp64(fresh, embed(fresh), "f32", record_property)
    assert long_way == [True, False, False]


def test_rows_that_need_a_gradient_are_refused_a_backward():
    call = random_call(50, 21, 264, 256)
    embed(call)
    embed(call)
    with pytest.raises(NotImplementedError, match="no derivative"):
        embed(dataclasses.replace(call, x=call.x.clone().requires_grad_())).sum().backward()


@pytest.mark.parametrize("name", ["weight", "bias", "pos_embed"])
@pytest.mark.parametrize("how", ["in place", "data", "another tensor", "freed and replaced"])
def test_changed_constants_are_seen(name, how, record_property):
    call = random_call(50, 21, 264, 256)
    fresh = random_call(50, 21, 264, 256, seed=1)
    embed(call)
    embed(call)
    new, old = getattr(fresh, name), getattr(call, name)
    if how == "in place":
        old.copy_(new)
    elif how == "data":
        old.data = new
    else:
        call = dataclasses.replace(call, **{name: None if name != "weight" else new})
        if how == "freed and replaced":
            del old  # the next tensor may get its address and its id
        call = dataclasses.replace(call, **{name: new.clone()})
    check_against_fp64(call, embed(call), "f32", record_property)


def test_a_transposed_constant_is_seen(record_property):
    """`t_` changes strides and neither memory nor version counter."""
    call = random_call(50, 264, 264, 256)
    embed(call)
    call.pos_embed.t_()
    check_against_fp64(call, embed(call), "f32", record_property)


def test_scales_by_value_and_by_tensor(long_way, record_property):
    """One remembered call serves every value; two tensors are multiplied on the device."""
    call = random_call(50, 21, 264, 256)
    for scale in (0.01, 0.5):
        check_against_fp64(dataclasses.replace(call, scale=scale), patch_embed(
            call.x, call.weight, call.bias, call.pos_embed, scale_a=scale * 2, scale_b=0.5
        ), "f32", record_property)  # fmt: skip
    for a, b in ((0.25, 2.0), (0.5, 0.75)):
        tensors = {"scale_a": torch.tensor([[a]], device="cuda"), "scale_b": torch.tensor(b, device="cuda")}
        out = patch_embed(call.x, call.weight, call.bias, call.pos_embed, **tensors)
        check_against_fp64(dataclasses.replace(call, scale=a * b), out, "f32", record_property)
    assert long_way == [True, False, True, False]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"x": lambda x: x.float()}, TypeError),
        ({"x": lambda x: x.transpose(0, 1)}, ValueError),
        ({"scale_a": lambda _: torch.ones(2, device="cuda")}, ValueError),
        ({"scale_a": lambda _: torch.ones(1, device="cuda", dtype=torch.float64)}, TypeError),
        ({"scale_a": lambda _: torch.ones(1)}, ValueError),
        ({"scale_a": lambda _: -1.0}, ValueError),
        ({"bias": lambda bias: bias[:8]}, ValueError),
        ({"config": lambda _: "fast"}, TypeError),
    ],
)
def test_a_warm_call_checks_its_arguments(bad, error):
    call = random_call(7, 7, 264, 256)
    arguments = {"x": call.x, "weight": call.weight, "bias": call.bias, "pos_embed": call.pos_embed, "scale_a": 0.5}
    patch_embed(**arguments)
    ((name, make),) = bad.items()
    with pytest.raises(error):
        patch_embed(**(arguments | {name: make(arguments.get(name))}))


def test_a_remembered_call_has_derivatives_when_they_are_asked_for():
    call = random_call(7, 7, 264, 256)
    embed(call)
    call.bias.requires_grad_()
    embed(call).sum().backward()
    rows = call.x.numel() // call.x.shape[-1]
    assert torch.equal(call.bias.grad, torch.full_like(call.bias, rows))


def test_a_slice_that_tma_cannot_read_takes_the_long_way(record_property):
    """Same shape, same constants, an address that is no multiple of 16 bytes."""
    call = random_call(7, 7, 264, 256)
    embed(call)
    memory = torch.empty(call.x.numel() + 8, dtype=torch.uint8, device="cuda")
    x = memory[8:].view(torch.float8_e4m3fn).view(call.x.shape)
    x.copy_(call.x)
    call = dataclasses.replace(call, x=x)
    check_against_fp64(call, embed(call), "f32", record_property)


@pytest.mark.gpu_only("several streams")
def test_another_stream_waits_for_the_table(record_property):
    """Remembered per stream: the first call on another one orders itself behind the table."""
    call = random_call(50, 21, 768, 768)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(2):
        for stream in streams:
            with torch.cuda.stream(stream):
                out = embed(call)
            stream.synchronize()
            check_against_fp64(call, out, "f32", record_property)


def test_clear_cache_forgets_warm_calls(long_way, record_property):
    """After a write that no version counter sees, `clear_cache` is the documented remedy."""
    call = random_call(50, 21, 264, 256)
    embed(call)
    call.bias.data.copy_(random_call(50, 21, 264, 256, seed=1).bias)
    clear_cache()
    check_against_fp64(call, embed(call), "f32", record_property)
    assert long_way == [True, True]


def test_dead_constants_are_forgotten():
    call = random_call(7, 7, 264, 256)
    embed(call)
    embed(call)
    weight = id(call.weight)
    assert any(weight in key for key in PATCH_EMBED.repeated.calls)
    del call
    assert not any(weight in key for key in PATCH_EMBED.repeated.calls)


FIRST_CALL = """
import json, sys
import torch
from cute_kernels import patch_embed
torch.manual_seed(0)
x, weight = (torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((4, 196, 768), (768, 768)))
bias, pos = torch.randn(768, device="cuda"), torch.randn(196, 768, device="cuda")
out = patch_embed(x, weight, bias, pos, scale_a=0.05)
torch.save(out.cpu(), sys.argv[1])
print(json.dumps(["cutlass" in sys.modules, out.float().isfinite().all().item()]))
"""


@pytest.mark.gpu_only("processes of their own")
def test_first_call_from_disk_is_the_same_without_cute_dsl(tmp_path):
    """Three processes: compile and store, load, and rebuild after damage. All results are equal bit for bit."""
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(tmp_path / "cache")}
    outputs, compiled = [], []
    for index in range(3):
        file = tmp_path / f"{index}.pt"
        command = [sys.executable, "-c", FIRST_CALL, str(file)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        imported, finite = json.loads(run.stdout.splitlines()[-1])
        assert finite
        outputs.append(torch.load(file))
        compiled.append(imported)
        (entry,) = (tmp_path / "cache").glob("*.kernel")
        if index == 1:
            content = bytearray(entry.read_bytes())
            content[len(content) // 2] ^= 1
            entry.write_bytes(bytes(content))
        if index == 2:
            assert "is rebuilt: its checksum is wrong" in run.stderr
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert compiled == [True, False, True]


@pytest.mark.gpu_only("an error of the driver")
def test_launch_errors_are_raised():
    """More clusters than a grid may have: the CUDA runtime refuses, and its reason arrives."""
    call = random_call(7, 7, 264, 256)
    plan = make_plan(PatchEmbedProblem(49, 264, 256, 7), dataclasses.replace(AT_HAND.base, stages=2))
    bound = gpu.BoundLaunch(plan, compile_plan(plan))
    bound._given.add("clusters")  # as if a call gave it
    table, out = torch.zeros(plan.table_shape, device="cuda"), torch.zeros(49, 264, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="launch of patch_embed.* failed: CUDA error"):
        bound(
            x=call.x.data_ptr(), weight=call.weight.data_ptr(), table=table.data_ptr(), out=out.data_ptr(), scale=1.0,
            clusters=2**30, stream=0,
        )  # fmt: skip
    check = random_call(7, 7, 264, 256, seed=2)
    assert embed(check).isfinite().all(), "the device is usable after a refused launch"
