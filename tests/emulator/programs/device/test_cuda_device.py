"""The device "cuda" of emulated programs: what torch does with it, graphs with torch's operators, how it is built."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
import torch._dynamo
import torch.multiprocessing  # which tells the pickler how tensors are shared
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.capturing import Session
from cute_kernels.emulator.programs.device import building
from tests.emulator import scale_program
from tests.emulator.programs.device import operator_samples
from tests.nightly import nightly
from tests.processes import run_python


@pytest.fixture
def session() -> Iterator[Session]:
    with capture("sm_90a") as session:
        yield session


def launch(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    """y = factor * x + 1 by a kernel."""
    given = [from_dlpack(t).mark_layout_dynamic() for t in (x, y)]
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    scale_program.host(*given, cutlass.Float32(factor), cutlass.Int32(x.numel()), stream)


def samples(*arguments: str) -> list[str]:
    """Lines of `operator_samples`, in a process of its own: torch's module of samples changes settings of torch."""
    code = "import sys; from cute_kernels.commands.cli import main; sys.exit(main())"
    program = [operator_samples.__file__, *arguments]
    command = [sys.executable, "-W", "ignore", "-c", code, "emulate", "--arch", "sm_90a", "--quiet", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_operators_give_what_they_give_on_the_cpu() -> None:
    assert samples("--drawn", "60", "--seed", "0") == ["60 operators"]


@nightly
@pytest.mark.parametrize("part", range(8))
def test_all_operators_give_what_they_give_on_the_cpu(part: int) -> None:
    (line,) = samples("--part", str(part), "--of", "8")
    assert int(line.split()[0]) > 80


# --- torch ------------------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def define(name: str) -> torch.library.CustomOpDef:
    operator = torch.library.custom_op(f"test_device::{name}", scaled, mutates_args=())
    operator.register_fake(lambda x, factor: torch.empty_like(x))
    return operator


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def saved(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["x"]


SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save and load": saved,
    "dlpack": torch.from_dlpack,
    "vmap": lambda x: torch.vmap(lambda row: row * 1)(x),
    "make_fx": lambda x: make_fx(lambda v: v + 0, tracing_mode="symbolic")(x)(x),
    "a copy through pinned memory": lambda x: x.cpu().pin_memory().to("cuda", non_blocking=True),
    "nested in a module": lambda x: torch.nn.Parameter(x).data,
    "resize_": lambda x: torch.empty(0, device="cuda").resize_(x.shape).copy_(x),
    "a storage": lambda x: torch.empty(0, device="cuda").set_(x.untyped_storage()).view(x.shape),
    "out": lambda x: torch.add(x, 0, out=torch.empty_like(x)),
    "indices of the host": lambda x: x[torch.arange(len(x))],
    "a mask": lambda x: x[torch.ones(len(x), dtype=torch.bool, device="cuda")],
    "complex": lambda x: torch.complex(x, x).conj().real,
    "inference": torch.inference_mode()(lambda x: x + 0),
    "a type of tensors": lambda x: torch.cuda.FloatTensor(x.tolist()),
    "the name of a type": lambda x: x.cpu().type("torch.cuda.FloatTensor"),
    "a view in inference": torch.inference_mode()(lambda x: x.view(-1, 2).clone().view(x.shape)),
}


def test_a_tensor_for_another_process_is_refused_by_name(session: Session) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="a 'cuda' tensor .* is sent to another process: .*; send tensor.cpu()"):
        ForkingPickler.dumps(x)
    assert ForkingPickler.dumps(x.cpu()) is not None


@pytest.mark.parametrize("way", SAME)
def test_ways_that_give_the_same_tensor(session: Session, way: str) -> None:
    x = torch.randn(3, 4, device="cuda")
    made = SAME[way](x)
    assert made.is_cuda and made.device == x.device and made.dtype == x.dtype
    assert made.shape == x.shape and type(made.shape) is torch.Size
    assert torch.equal(made.cpu(), x.cpu())
    regions = dict(session.device.regions())
    assert made.untyped_storage().data_ptr() in regions, "kernels may touch it"


def test_the_default_device(session: Session) -> None:
    torch.set_default_device("cuda")
    try:
        made = [torch.tensor([1.0]), torch.arange(3), torch.randn(2), torch.nn.Linear(2, 2).weight]
        assert all(each.is_cuda for each in made) and not torch.ones(2, device="cpu").is_cuda
    finally:
        torch.set_default_device(None)


def test_fake_tensors(session: Session) -> None:
    x = torch.ones(8, device="cuda")
    for each in (x, x[1:], x.view(2, 4).T):
        fake = FakeTensorMode().from_tensor(each)
        assert (fake.device, fake.shape, fake.stride()) == (x.device, each.shape, each.stride())
        assert (fake + 1).device == x.device


def test_a_custom_operator_passes_torch_s_checks(session: Session) -> None:
    x = torch.randn(7, device="cuda")
    assert set(torch.library.opcheck(define("checked"), (x, 2.0)).values()) == {"SUCCESS"}


def test_an_exported_module(session: Session) -> None:
    module, x = Linear().cuda(), torch.randn(3, 4, device="cuda")
    exported = torch.export.export(module, (x,))
    assert torch.equal(exported.module()(x), module(x))
    assert {each.device.type for each in exported.state_dict.values()} == {"cuda"}


def test_attention_with_a_function_of_scores(session: Session) -> None:
    q, k, v = (torch.randn(1, 2, 16, 8, device="cuda") for _ in range(3))
    with pytest.warns(UserWarning, match="without torch.compile"):
        made = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + i - j)
    host = [each.cpu() for each in (q, k, v)]
    places = torch.arange(16.0)
    bias = places[:, None] - places
    expected = torch.nn.functional.scaled_dot_product_attention(*host, attn_mask=bias)
    assert made.is_cuda
    torch.testing.assert_close(made.cpu(), expected)


def test_random_numbers_are_the_device_s_own(session: Session) -> None:
    torch.manual_seed(3)
    host, first = torch.randn(4), torch.randn(4, device="cuda")
    state, of_host = torch.cuda.get_rng_state(), torch.get_rng_state()
    second = torch.randn(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), of_host), "the host's are not drawn from"
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="cuda"), second) and not torch.equal(first, second)
    own = torch.Generator("cuda").manual_seed(3)
    assert own.device.type == "cuda" and torch.equal(torch.randn(4, device="cuda", generator=own), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device="cuda", generator=torch.Generator())
    assert host.shape == (4,) and torch.cuda.initial_seed() == 3


def test_the_driver_is_not_asked_how_many_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 5)
    with capture("sm_90a"):
        assert torch.cuda.device_count() == torch.cuda.random.device_count() == 1
        torch.cuda.manual_seed_all(3)
        assert torch.cuda.initial_seed() == 3


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "an operation of both devices": (lambda x: x + torch.ones(4), "at least two devices"),
    "a product of both": (lambda x: x.view(2, 2) @ torch.ones(2, 2), "same device|two devices"),
    "a second device": (lambda x: x.to("cuda:1"), "invalid device ordinal: cuda:1"),
    "an index of one element on the host": (lambda x: x.index_select(0, torch.tensor(1)), "same device"),
    "a part of one element on the host": (lambda x: torch.cat([x, torch.ones(1)]), "same device"),
    "a bound of one element on the host": (lambda x: x.clamp(min=torch.tensor(0.0)), "same device"),
    "a result on the host": (lambda x: torch.ones(()).add_(x[0]), "same device"),
    "steps on the host": (
        lambda x: torch._fused_sgd_([x], [torch.ones(4)], [], weight_decay=0, momentum=0, lr=1, dampening=0,
                                    nesterov=False, maximize=False, is_first_step=True),
        "same device",
    ),
    "the device's generator on the host": (lambda x: torch.rand(2, generator=torch.Generator("cuda")), "'cpu' device"),
    "the same in place": (lambda x: torch.ones(2).normal_(generator=torch.Generator("cuda")), "'cpu' device"),
    "the host's generator": (lambda x: x.normal_(generator=torch.Generator()), "'cuda' device"),
    "the host's generator, without a tensor": (
        lambda x: torch.rand(2, device="cuda", generator=torch.Generator()), "'cuda' device"
    ),
    "a type of tensors, from another": (lambda x: torch.cuda.HalfTensor(x), "expected torch.cuda.HalfTensor"),
    "sparse": (lambda x: x.to_sparse(), "layout Sparse"),
    "more memory than there is": (lambda x: torch.empty(1 << 40, device="cuda"), "out of memory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(session: Session, what: str) -> None:
    function, said = REFUSED[what]
    with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=said):
        function(torch.ones(4, device="cuda"))


@cute.kernel
def add_one_kernel(x: cute.Tensor, y: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    if i < cute.size(x):
        y[i] = x[i] + 1.0


@cute.jit
def add_one(x: cute.Tensor, y: cute.Tensor):
    add_one_kernel(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.mark.parametrize("is_fake", [False, True])
def test_an_empty_tensor_is_given_to_a_compiled_function(session: Session, is_fake: bool) -> None:
    def given(t: torch.Tensor) -> object:
        return t if is_fake else from_dlpack(t).mark_layout_dynamic()

    x, empty = torch.ones(8, device="cuda"), torch.ones(0, device="cuda")
    example = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) if is_fake else given(x)
    compiled = cute.compile(add_one, example, example)
    for tensor in (x, empty):
        compiled(given(tensor), given(y := torch.zeros_like(tensor)))
        assert y.tolist() == [2.0] * tensor.numel()


def test_backward_in_a_thread_launches_there(session: Session) -> None:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            made = torch.empty_like(gradient)
            launch(gradient.contiguous(), made, 2.0)
            return made

    x = torch.ones(64, device="cuda", requires_grad=True)
    thread = threading.Thread(target=lambda: Kernel.apply(x).sum().backward())
    thread.start()
    thread.join()
    assert x.grad.tolist() == [3.0] * 64 and len(session.launches) == 1


def _in_child(queue: object) -> None:
    with capture("sm_80"):
        x = torch.arange(4.0, device="cuda", requires_grad=True)
        (x * x).sum().backward()
        queue.put((x.grad.tolist(), torch.cuda.get_device_capability()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_the_device(session: Session) -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=120) == ([0.0, 2.0, 4.0, 6.0], (8, 0))
    child.join()


def _in_child_of_the_program(queue: object, used: torch.Tensor | None) -> None:
    said, ways = [], [lambda: torch.ones(2).cuda(), lambda: torch.ones(2, device="cuda"), lambda: used + 1]
    for function in ways if used is not None else ways[:2]:
        try:
            said.append(function().tolist())
        except RuntimeError as error:
            said.append(str(error))
    queue.put((said, torch.ones(2).sum().item(), torch.cuda.is_initialized()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("uses", [True, False])
def test_a_process_that_the_program_forks(session: Session, uses: bool) -> None:
    """As torch's own: it may use CUDA if its parent has not yet."""
    context = multiprocessing.get_context("fork")
    x, queue = torch.ones(2, device="cuda") if uses else None, context.Queue()
    child = context.Process(target=_in_child_of_the_program, args=(queue, x))
    child.start()
    said, of_host, is_initialized = queue.get(timeout=120)
    child.join()
    assert of_host == 2 and is_initialized is not uses
    if uses:
        assert all("Cannot re-initialize CUDA in forked subprocess" in each for each in said[:2])
        assert "initialization error" in said[2] and (x + 1).tolist() == [2.0, 2.0]
    else:
        assert said[:2] == [[1.0, 1.0]] * 2


class OnDevice(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), index, device="cuda")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_worker_that_makes_tensors_on_the_device(session: Session) -> None:
    torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(torch.utils.data.DataLoader(OnDevice(), batch_size=2, num_workers=1, timeout=60))


def test_seeds_and_questions_before_the_device_is_used(session: Session) -> None:
    assert torch.cuda.is_available() and not torch.cuda.is_initialized() and torch.cuda.memory_allocated() == 0
    torch.cuda.manual_seed(5)
    assert torch.cuda.initial_seed() == 5 and torch.cuda.is_initialized()
    assert torch.cuda.cudart().cudaProfilerStart() == 0


def test_a_storage_of_another_size(session: Session) -> None:
    x = torch.arange(4.0, device="cuda")
    storage, before = x.untyped_storage(), torch.cuda.memory_allocated()
    storage.resize_(32)
    assert storage.nbytes() == 32 and x.tolist() == [0, 1, 2, 3] and torch.cuda.memory_allocated() == before + 16
    storage.resize_(0)
    assert storage.nbytes() == 0 and torch.cuda.memory_allocated() == before - 16
    storage.resize_(16)
    assert x.fill_(3).tolist() == [3.0] * 4
    host = torch.ones(2).untyped_storage()
    assert host.resize_(16).nbytes() == 16
    with pytest.raises(RuntimeError, match="not resizable"):
        torch.from_dlpack(x).untyped_storage().resize_(4)


def test_types_of_tensors(session: Session) -> None:
    types = torch.cuda
    assert types.FloatTensor(2, 3).shape == (2, 3) and types.LongTensor([1, 2]).dtype == torch.int64
    x = types.HalfTensor(4)
    assert isinstance(x, types.HalfTensor) and not isinstance(x, types.FloatTensor)
    assert x.type() == "torch.cuda.HalfTensor"
    assert types.HalfTensor(x).data_ptr() == x.data_ptr() and torch.ones(2).type(types.ByteTensor).dtype == torch.uint8
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        assert torch.zeros(2).is_cuda and torch.tensor([1.0]).dtype == torch.float64
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.zeros(2).is_cuda


def test_backward_after_the_program() -> None:
    with capture("sm_90a"):
        w = torch.ones(3, device="cuda", requires_grad=True)
        loss = (w * 2).sum()
    loss.backward()
    (w * 3).sum().backward()
    assert w.grad.tolist() == [5.0] * 3
    assert not torch.cuda.is_available() or torch.version.cuda is not None


def test_statistics_of_memory(session: Session) -> None:
    torch.cuda.init()  # before it torch says 0
    before = torch.cuda.memory_allocated()
    x = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == before + (4 << 20)
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + (4 << 20)
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_allocated() == before and total - free == before


def test_all_statistics_of_memory(session: Session) -> None:
    """Torch's own Python reads every key that it knows."""
    x = torch.ones(1 << 20, device="cuda")
    kibibytes = torch.cuda.memory_allocated() >> 10  # with what tests before have left
    table = torch.cuda.memory_summary()
    assert re.search(rf"Allocated memory +\| +({kibibytes} KiB|{kibibytes >> 10} MiB)", table)
    stats = torch.cuda.memory_stats()
    documented = re.findall(r'``"(\w+)\.\{all', torch.cuda.memory_stats.__doc__)
    keys = {f"{'allocation' if name == 'allocated' else name}.small_pool.peak" for name in documented}  # as it means
    assert len(keys) > 5 and keys <= set(stats)
    documented = re.findall(r'``"(num_\w+|max_split_size)"``', torch.cuda.memory_stats.__doc__)
    assert len(documented) > 3 and set(documented) <= set(stats)
    host = torch.cuda.host_memory_stats()
    assert {"allocations.current", "active_bytes.peak", "host_free_time.avg", "num_host_alloc"} <= set(host)
    (segment,) = (each for each in torch.cuda.memory_snapshot() if each["address"] == x.data_ptr())
    assert segment["total_size"] == sum(block["size"] for block in segment["blocks"]) == 4 << 20
    assert torch.cuda.get_allocator_backend() == "native"


def test_a_pool_of_memory(session: Session) -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(3, device="cuda")
    assert x.tolist() == [1.0] * 3 and pool.id != other.id and pool.snapshot() == []


def test_what_torch_keeps_of_compiled_functions_is_forgotten(session: Session) -> None:
    """Which imports what inductor has of CUDA graphs."""
    torch._dynamo.reset()
    torch.compiler.cudagraph_mark_step_begin()
    x = torch.ones(2, device="cuda")
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}):
        assert torch.compile(lambda a: a * 2 + 1, **options)(x).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("extent", [1000, 14 << 20, 20 << 20])
@pytest.mark.parametrize("others", [0, 1200])
def test_freed_memory_is_not_used_again_at_once(session: Session, extent: int, others: int) -> None:
    """So that a kernel that still uses it is told so: large memory, and when much else was freed before, too."""
    before = [torch.empty(2000 + 1024 * size, device="cuda") for size in range(others)]
    del before
    x = torch.empty(extent, device="cuda")
    address = x.data_ptr()
    del x
    assert all(torch.empty(extent, device="cuda").data_ptr() != address for _ in range(8))
    assert session.device.freed(address + 8).startswith(f"float32 ({extent},), made at ")


def test_addresses_of_freed_memory_are_given_back_at_a_limit() -> None:
    program = """
import resource, torch
from cute_kernels.emulator.programs.capturing import capture
with capture("sm_90a"):
    torch.empty(8, device="cuda")
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), -1))
    for _ in range(12):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("done")
"""
    found = run_python("-c", program)
    assert found.stdout == "done\n", found.stderr


# --- graphs -----------------------------------------------------------------------------------------------------------


def work(x: torch.Tensor, y: torch.Tensor, launches: bool) -> torch.Tensor:
    """Results, views of them, in-place and ``out=`` operators, copies, random choices of none; a launch in between."""
    made = (x * 2 + torch.arange(64.0, device=x.device)).view(8, 8)
    made[0] += 1
    torch.add(made, made.T, out=made_again) if (made_again := torch.empty_like(made)) is not None else None
    if launches:
        launch(made_again.view(-1), y, 2.0)
    else:
        y.copy_(2 * made_again.view(-1) + 1)
    parts = torch.stack(torch.split(y, 16)).cumsum(0)
    y.mul_(0.5)
    return torch.cat([parts.flatten(), y, torch.zeros(2, device=x.device)])


@pytest.mark.parametrize("launches", [False, True], ids=["operators", "operators and a launch"])
def test_a_graph_with_operators_of_torch(session: Session, launches: bool) -> None:
    x, y = torch.ones(64, device="cuda"), torch.full((64,), 5.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(x, y, launches)
    assert x.tolist() == [1.0] * 64 and y.tolist() == [5.0] * 64, "a capture runs nothing"
    assert not session.launches
    for value in (3.0, -1.0):
        x.fill_(value)
        graph.replay()
        host = torch.full((64,), 5.0)
        expected = work(torch.full((64,), value), host, launches=False)
        torch.testing.assert_close(result.cpu(), expected)
        torch.testing.assert_close(y.cpu(), host)
    assert len(session.launches) == 2 * launches


def test_a_graph_keeps_the_memory_of_its_results(session: Session) -> None:
    x, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (x + 1) * 3  # of which the sum is gone by now
    others = [torch.full((64,), 9.0, device="cuda") for _ in range(64)]
    x.fill_(2)
    graph.replay()
    assert result.tolist() == [9.0] * 64 and all(each.tolist() == [9.0] * 64 for each in others)


def test_a_graph_keeps_memory_that_only_its_launches_use(session: Session) -> None:
    x, y, graph = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = torch.empty(64, device="cuda")
        launch(x, between, 2.0)
        launch(between, y, 3.0)
        del between
    graph.replay()
    assert y.tolist() == [10.0] * 64


def test_random_numbers_of_a_graph(session: Session) -> None:
    torch.cuda.manual_seed(1)
    drawn = [torch.rand(4, device="cuda").tolist() for _ in range(2)]
    torch.cuda.manual_seed(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.rand(4, device="cuda")
    for expected in drawn:
        graph.replay()
        assert x.tolist() == expected


def test_callables_made_into_graphs(session: Session) -> None:
    module, x = Linear().cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
    expected = module(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    expected = expected.detach()  # with its graph, gradients would be of the default stream, which cannot be captured
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn(3, 4, device="cuda", requires_grad=True),))
    for _ in range(2):
        made = graphed(x)
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(torch.autograd.grad(made.sum(), x)[0], gradient)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "from the host": lambda x: x.copy_(torch.ones(4)),
}


@pytest.mark.parametrize("way", WAITS)
def test_the_host_must_not_wait_while_a_graph_is_captured(session: Session, way: str) -> None:
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        WAITS[way](x)
    assert not torch.cuda.is_current_stream_capturing() and x.tolist() == [1.0] * 4


@pytest.mark.parametrize("waits, value", [(False, 0), (False, torch.tensor(0.0)), (True, [0.0] * 4)])
def test_a_number_where_a_mask_says_is_put_without_waiting(session: Session, waits: bool, value: object) -> None:
    """torch calls masked_fill_; other values need the number of places."""
    x = torch.arange(4.0, device="cuda")
    value = torch.tensor(value[:2], device="cuda") if waits else value
    torch.cuda.set_sync_debug_mode("error")
    try:
        if waits:
            with pytest.raises(RuntimeError, match="index of a mask is a synchronizing"):
                x[x > 1] = value
        else:
            x[x > 1] = value
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == ([0, 1, 2, 3] if waits else [0, 1, 0, 0])


def test_a_mode_in_which_waits_raise(session: Session) -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = x * 2
        with pytest.raises(RuntimeError, match="item is a synchronizing CUDA operation"):
            y[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.tolist() == [2.0] * 4


# --- streams ----------------------------------------------------------------------------------------------------------


def test_backward_runs_in_the_stream_of_forward(session: Session) -> None:
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch.cuda.current_stream())
            return gradient * 2

    x, stream = torch.ones(4, device="cuda", requires_grad=True), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = Function.apply(x).sum()
    y.backward()
    assert seen == [stream] and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_behind_memory_that_was_larger_before(session: Session) -> None:
    """A place beyond a tensor is not in the freed one that had its address."""
    kept = [torch.empty(100, device="cuda") for _ in range(40)]
    addresses = {each.data_ptr() for each in kept}
    del kept
    smaller: list[torch.Tensor] = []
    while not smaller or smaller[-1].data_ptr() not in addresses:  # the memory that was freed first comes first
        smaller.append(torch.empty(64, device="cuda"))
    again = smaller[-1].data_ptr()
    assert session.device.freed(again + 4 * 80) == ""
    assert all("float32 (100,)" in session.device.freed(each + 4 * 80) for each in addresses - {again})


def test_around_memory_where_another_was_that_went_back_to_the_system() -> None:
    """A place beside a tensor is in no tensor that was freed, wherever that is, nor in one of a program before.

    In a process of its own, where the system has just one gap of about this size.
    """
    program = """
import torch
from cute_kernels.emulator.programs.capturing import capture
with capture("sm_90a") as session:
    freed = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")  # large: given back when it is freed
    begin, end = freed.data_ptr(), freed.data_ptr() + freed.nbytes
    del freed
    assert session.device.freed(begin + 1000).startswith("uint8 (536870912,)")
    for _ in range(56):  # whose addresses, of 4 GiB together with its own, stay reserved in its place
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    kept = torch.empty(510 << 20, dtype=torch.uint8, device="cuda")
    before = kept.data_ptr() - 4096
    assert begin <= before < end
    assert session.device.freed(before) == ""
    address = kept.data_ptr()
    del kept
    assert session.device.freed(address)
with capture("sm_90a") as another:
    assert not another.device.freed(address)
print("done")
"""
    found = run_python("-c", program)
    assert found.stdout == "done\n", found.stderr


def test_captures_that_cannot_be(session: Session) -> None:
    x, outer, inner = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for call in (outer.replay, outer.capture_end):
        with pytest.raises(RuntimeError, match="comes? first"):
            call()
    with torch.cuda.graph(outer):
        x.add_(1)
        with pytest.raises(RuntimeError, match="must end before another one begins"):
            inner.capture_begin()
        x.add_(10)
    assert x.tolist() == [0] * 3
    outer.replay()
    assert x.tolist() == [11] * 3


def test_streams_after_fake_tensors_without_a_program() -> None:
    """`FakeTensorMode` gives a process without a GPU a guard whose streams are all the default one."""
    with FakeTensorMode():
        torch.ones(2)
    with capture("sm_90a"), torch.cuda.stream(torch.cuda.Stream()):
        current = torch.cuda.current_stream()
        assert torch.accelerator.current_stream().stream_id == current.cuda_stream != 0


def test_classes_of_streams_can_be_derived_from(session: Session) -> None:
    stream = type("Own", (torch.cuda.Stream,), {})()
    assert isinstance(stream, torch.Stream) and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    x = torch.ones(2, device="cuda")
    x.record_stream(stream)
    with stream:
        assert (
            torch.cuda.current_stream().cuda_stream
            == stream.cuda_stream
            == torch.accelerator.current_stream().stream_id
        )
    assert type("Event", (torch.cuda.Event,), {})().query()


# --- how it is built --------------------------------------------------------------------------------------------------


def build_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(building, "_libraries", lambda: folder)
    return building.library()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        building.DeviceNotBuilt, match=r"none of c\+\+, g\+\+ and clang\+\+ is there.*apt install g\+\+"
    ):
        build_in(tmp_path, monkeypatch)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(building.DeviceNotBuilt, match=r"\$CXX, 'no-such-compiler', is not there"):
        build_in(tmp_path, monkeypatch)


def test_a_torch_that_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'no member named getStream' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        building.DeviceNotBuilt, match=r"(?s)does not compile with torch .* install one of these\n.*no mem"
    ):
        build_in(tmp_path / "libraries", monkeypatch)


def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With a compiler that copies what there is, and says so; another torch has a library of its own."""
    real, compiler = building.library(), tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{real}" "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    first = build_in(tmp_path / "libraries", monkeypatch)
    assert "compiling the device" in capsys.readouterr().err
    assert build_in(tmp_path / "libraries", monkeypatch) == first and not capsys.readouterr().err
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert build_in(tmp_path / "libraries", monkeypatch) != first
    os.truncate(first, 1000)
    monkeypatch.undo()
    monkeypatch.setenv("CXX", str(compiler))
    assert build_in(tmp_path / "libraries", monkeypatch) == first and first.stat().st_size > 1000


def test_it_is_gone_when_the_program_is() -> None:
    with contextlib.suppress(KeyError), capture("sm_90a"):
        raise KeyError
    assert torch.version.cuda or not torch.cuda.is_available()
