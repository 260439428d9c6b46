"""Uses of torch.cuda that programs of others have, each judged by what a GPU gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from cute_kernels.common.chips import CHIPS
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.capturing import Session


@pytest.fixture
def session() -> Iterator[Session]:
    with capture("sm_90a") as session:
        yield session


@pytest.fixture
def group(session: Session, tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_collectives_of_one_process(group: None) -> None:
    """A build of torch without CUDA has no kernels for these, and does not look: it would crash."""
    x, y = torch.arange(4.0, device="cuda"), torch.empty(4, device="cuda")
    lists = [torch.empty(4, device="cuda")]
    distributed.all_gather(lists, x)
    distributed.all_gather_into_tensor(y, x)
    assert lists[0].tolist() == y.tolist() == [0, 1, 2, 3] and lists[0].is_cuda
    work = distributed.all_reduce(x, async_op=True)
    work.wait()
    distributed.broadcast(x, 0)
    distributed.reduce_scatter_tensor(y, 2 * x)
    distributed.all_to_all_single(x, y)
    distributed.barrier()
    assert x.tolist() == [0, 2, 4, 6]


def test_a_model_of_one_process(group: None) -> None:
    layer = torch.nn.Linear(4, 2, device="cuda")
    parallel = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[0])
    x = torch.ones(3, 4, device="cuda")
    parallel(x).sum().backward()
    assert layer.bias.grad.tolist() == [3.0, 3.0]
    assert torch.equal(torch.nn.DataParallel(layer)(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_half_precision_with_a_result_of_float32(session: Session, name: str, dtype: torch.dtype) -> None:
    function, x = getattr(torch, name), torch.randn(4, 8, device="cuda").to(dtype).requires_grad_()
    with torch.autocast("cuda", dtype):
        made = function(x, -1)
    (made * torch.arange(8.0, device="cuda")).sum().backward()
    host = x.detach().cpu().float().requires_grad_()
    expected = function(host, -1)
    (expected * torch.arange(8.0)).sum().backward()
    assert made.dtype == torch.float32 and x.grad.dtype == dtype
    torch.testing.assert_close(made.cpu(), expected)
    torch.testing.assert_close(x.grad.cpu(), host.grad.to(dtype))


@pytest.mark.parametrize("kind", [torch.Event, None], ids=["torch.Event", "torch.cuda.Event"])
def test_time_between_events(session: Session, kind: type | None) -> None:
    def event(takes_time: bool) -> torch.Event:
        return torch.cuda.Event(takes_time) if kind is None else kind("cuda", enable_timing=takes_time)

    first, second, third = event(True), event(True), event(False)
    with pytest.raises(ValueError, match="must be recorded before"):
        first.elapsed_time(second)
    first.record()
    second.record()
    third.record()
    torch.cuda.synchronize()
    assert 0 < first.elapsed_time(second) < 60_000
    with pytest.raises(ValueError, match="enable_timing=True"):
        first.elapsed_time(third)


def test_a_stream_of_torch_s_own_class(session: Session) -> None:
    stream = torch.Stream("cuda")
    assert stream.stream_id not in (0, torch.Stream("cuda").stream_id)
    with stream:
        assert torch.cuda.current_stream().cuda_stream == stream.stream_id
    low, high = torch.cuda.Stream.priority_range()
    assert low == 0 > high


@pytest.mark.parametrize("arch, gib", [("sm_80", 80), ("sm_90a", 141), ("sm_100a", 180), ("sm_120a", 32)])
def test_memory_of_a_chip(arch: str, gib: int) -> None:
    with capture(arch):
        assert torch.cuda.get_device_properties(0).total_memory == gib << 30 == CHIPS[arch].memory_bytes
        assert torch.cuda.mem_get_info()[1] == gib << 30
        torch.cuda.set_per_process_memory_fraction(1e-6)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(1e-6, rel=1e-3)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 20, device="cuda")
