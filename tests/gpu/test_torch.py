"""`patch_embed` as a citizen of torch: compilation, graphs, streams, slices, threads, devices."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from cute_kernels import gemm, patch_embed
from cute_kernels.operations.compile import compile_plan
from tests.gpu.harness import Call, check_against_fp64, random_call, run_poisoned
from tests.gpu.patch_embed_configs import AT_HAND


def embed(call: Call, **options) -> torch.Tensor:
    return patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=call.scale, **options)


def test_operator_contract():
    """torch's own checks, but for test_schema, which compares tensors with an `allclose` that FP8 does not have."""
    call = random_call(3, 7, 72, 48)
    torch.library.opcheck(
        torch.ops.cute_kernels.patch_embed.default,
        (call.x, call.weight, call.bias, call.pos_embed, None, None, None, 0.1, 1.0, "auto"),
        test_utils=("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
    )


def test_arguments_are_not_written_and_not_aliased():
    """What test_schema would check: the schema promises neither mutation nor aliasing."""
    call = random_call(3, 7, 72, 48)
    tensors = (call.x, call.weight, call.bias, call.pos_embed)
    before = [t.clone() for t in tensors]
    out = embed(call)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
        assert tensor.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def test_negated_views():
    """The sign of such a view is in no byte of it; the first call and the next ones."""
    a, b = (torch.randn(rows, 64, device="cuda").bfloat16() for rows in (16, 8))
    for _ in range(3):
        assert torch.equal(gemm(torch._neg_view(a), b), gemm(-a, b))


@pytest.mark.gpu_only("torch.compile")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic, record_property):
    scale = torch.tensor(0.05, device="cuda")

    def step(x, weight, bias, pos_embed):
        return patch_embed(x, weight, bias, pos_embed, scale_a=scale) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for images in (4, 9):
        call = random_call(images, 21, 264, 144, seed=images)
        out = compiled(call.x, call.weight, call.bias, call.pos_embed) / 2
        check_against_fp64(Call(call.x, call.weight, call.bias, call.pos_embed, 0.05), out, "f32", record_property)


def test_cuda_graph_replays_on_new_data(record_property):
    call = random_call(50, 21, 768, 768)
    embed(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = embed(call)
    for seed in (1, 2):
        fresh = random_call(50, 21, 768, 768, seed=seed)
        for old, new in ((call.x, fresh.x), (call.weight, fresh.weight), (call.bias, fresh.bias)):
            old.copy_(new)
        call.pos_embed.copy_(fresh.pos_embed)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check_against_fp64(fresh, out, "f32", record_property)


@pytest.mark.gpu_only("two streams at once")
def test_runs_on_the_current_stream(record_property):
    """The input is produced late on a side stream: a launch on any other stream would read zeros."""
    call = random_call(50, 21, 768, 768)
    embed(call)
    busy = torch.randn(4096, 4096, device="cuda") * 1e-3
    late = torch.zeros_like(call.x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            busy = busy @ busy
        late.copy_(call.x)
        out = patch_embed(late, call.weight, call.bias, call.pos_embed, scale_a=call.scale)
    stream.synchronize()
    check_against_fp64(call, out, "f32", record_property)


def test_nothing_synchronises():
    call = random_call(5, 21, 768, 768, scale="pointer")
    embed(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = embed(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, embed(call))


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("k", [768, 600, 588])
def test_slices_with_a_storage_offset(k, offset, record_property):
    """Rows of a larger tensor: with K = 600 and 588 the slice begins at an address that TMA cannot take."""
    whole = random_call(12, 20, 136, k)
    call = Call(whole.x[offset:-2], whole.weight[8 * offset : 8 * offset + 72], whole.bias[5:77],
                whole.pos_embed[:, 3:75], whole.scale)  # fmt: skip
    check_against_fp64(call, embed(call), "f32", record_property)


def test_inference_mode_and_two_dimensions(record_property):
    call = random_call(9, 20, 136, 256)
    with torch.inference_mode():
        flat = patch_embed(call.x.view(-1, 256), call.weight, call.bias, call.pos_embed, scale_a=call.scale)
    check_against_fp64(call, flat, "f32", record_property)


@pytest.mark.gpu_only("streams of several threads")
def test_threads_compile_and_launch_at_once(record_property):
    """Eight threads, four kernels that nobody has compiled, each thread on its own stream."""
    call = random_call(70, 11, 264, 256)
    configs = AT_HAND.threads * 2
    outputs: list[torch.Tensor | Exception] = [RuntimeError("thread did not finish")] * len(configs)
    start = threading.Barrier(len(configs))

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(20):
                    out = embed(call, config=configs[index])
                torch.cuda.current_stream().synchronize()
            outputs[index] = out
        except Exception as error:
            outputs[index] = error

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outputs:
        if isinstance(out, Exception):
            raise out
        check_against_fp64(call, out, "f32", record_property)
        assert torch.equal(out, outputs[0])


def test_one_kernel_serves_all_batches():
    small, large = random_call(64, 4, 264, 256), random_call(1000, 9, 264, 256)
    config = dataclasses.replace(AT_HAND.base, stages=5)
    plans = [run_poisoned(call, config)[1] for call in (small, large)]
    assert compile_plan(plans[0]) is compile_plan(plans[1])


@pytest.mark.two_gpus
def test_a_device_that_is_not_current(record_property):
    """The kernel runs where the tensors are, and the current device stays what it was."""
    first = random_call(9, 20, 264, 256)
    second = Call(*(t.to("cuda:1") for t in (first.x, first.weight, first.bias, first.pos_embed)), first.scale)
    assert torch.cuda.current_device() == 0
    expected = embed(first)
    for _ in range(3):
        out = embed(second)
        assert out.device == torch.device("cuda:1")
        assert torch.equal(out.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0
    check_against_fp64(first, embed(first), "f32", record_property)
