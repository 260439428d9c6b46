"""Whole programs in the emulator: what the program sees of torch and of the device, and what its kernels may touch."""

import copy
import dataclasses
import gc
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.cute.typing import AddressSpace

from cute_kernels.commands import cli
from cute_kernels.common.chips import CHIPS
from cute_kernels.emulator import IllegalAccess, Options
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError, UnsupportedOperation
from cute_kernels.emulator.programs import capture, host
from cute_kernels.emulator.programs.device.cuda_device import CudaDevice
from cute_kernels.emulator.programs.streams import Streams
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing import assert_matches
from tests.emulator import scale_program

PROGRAM = str(Path(scale_program.__file__))
FACTS = dataclasses.replace(CHIPS["sm_90"], product="test device", gpcs=(7,))


@pytest.fixture
def device():
    mode = CudaDevice(FACTS, Streams())
    with mode.active():
        yield mode


def launch(x: torch.Tensor, y: torch.Tensor, factor: float, count: int) -> None:
    """Compiles and runs y = factor * x + 1 through CuTe DSL's own host code."""
    tensors = [from_dlpack(t).mark_layout_dynamic() for t in (x, y)]
    scale_program.host(*tensors, cutlass.Float32(factor), cutlass.Int32(count), current_stream())


def current_stream() -> cuda.CUstream:
    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


NEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(25_000, device="cuda"),
    "of a parameter": lambda x: torch.empty(25_000, device="cuda", requires_grad=True),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((250, 100), (1, 250), device="cuda"),
    "empty_permuted": lambda x: torch.empty_permuted((250, 100), (1, 0), device="cuda"),
    "new_empty": lambda x: x.new_empty(25_000),
    "new_empty_strided": lambda x: x.new_empty_strided((25_000,), (1,)),
    "of bytes": lambda x: torch.empty(100_000, device="cuda", dtype=torch.float8_e8m0fnu).view(torch.uint8),
}


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_new_device_memory_is_zero(device: CudaDevice, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whatever the host held there: tensors of the same size that are gone."""
    for _ in range(4):
        x = torch.full((25_000,), 7.0, device="cuda")
        made = make(x)
        assert not made.detach().any()
        made.detach().fill_(9)
        del x, made


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_new_device_memory_may_be_what_shows_in_results(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A sum into memory that nobody has cleared is NaN; what is cleared is as ever."""
    with capture("sm_90a", new_byte=255):
        x = torch.ones(25_000, device="cuda")
        made = make(x).detach()
        assert (made.contiguous().flatten().view(torch.uint8) == 255).all() and (torch.zeros_like(x) == 0).all()
        if made.is_floating_point():
            assert made.add_(1).isnan().all()
    for byte in (-1, 256, True, 1.0):
        with pytest.raises(ValueError, match="new_byte .*: must be an int from 0"), capture("sm_90a", new_byte=byte):
            pass


def test_tensors_on_the_device_lie_far_from_each_other(device: CudaDevice) -> None:
    """An access beyond one is no access of another, wherever the host's allocator places them."""
    sizes = (64, 64, 512, 4096, 1 << 20, 64) * 3
    tensors = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in sizes]
    places = sorted((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
    assert all(address % 512 == 0 for address, _ in places)
    assert all(after - (before + size) >= 256 << 10 for (before, size), (after, _) in zip(places, places[1:]))


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, name", [("sm_90a", "H200"), ("sm_100a", "B200"), ("sm_80", "A100")])
def test_command_runs_a_program(capsys, arch: str, name: str) -> None:
    assert cli.main(["emulate", "--arch", arch, PROGRAM, "--count", "130"]) == 0
    out = capsys.readouterr().out
    assert f"PASS on {name} (emulated)" in out
    assert "grid 3x1x1, block 64x1x1" in out and "emulated: 1 launch in" in out
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != f"{name} (emulated)"


def test_command_asks_for_a_script_and_not_for_its_arguments(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["emulate"])
    assert "the following arguments are required: SCRIPT\n" in capsys.readouterr().err


def test_command_reports_what_the_program_finds(capsys) -> None:
    assert cli.main(["emulate", PROGRAM, "--wrong"]) == 1
    assert "not close" in capsys.readouterr().err
    assert cli.main(["emulate", "--quiet", PROGRAM, "--count", "64", "--overrun", "64"]) == 3
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[0].startswith("error[out-of-bounds]: a load of 4 bytes of global") and "CPU tensor" not in captured.err
    assert re.fullmatch(r"  --> \S*scale_program\.py:\d+   \S.*   cluster \d, CTA \d, warp \d, PTX line \d+", lines[1])
    assert lines[2].startswith("  help: compare the index with the shape")
    assert re.fullmatch(r"  kernel: \w*scale\w*, launch 1", lines[3])
    replay = f"  replay: cute-kernels emulate --arch sm_100a {PROGRAM} --count 64 --overrun 64"
    assert lines[4:] == [replay] and captured.out == ""
    assert cli.main(["emulate", PROGRAM, "--count", "64", "--overrun", "64"]) == 3
    summary = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"emulated: 0 launches complete in 0\.0 s; launch 1, kernel scale failed", summary)
    assert cli.main(["emulate", "--quiet", "--traceback", PROGRAM, "--count", "64", "--overrun", "64"]) == 3
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error and "in main" in error
    assert "error[out-of-bounds]" in error
    assert cli.main(["emulate", "no such file.py"]) == 2
    with pytest.raises(SystemExit) as status:
        cli.main(["emulate", PROGRAM, "--unknown"])
    assert status.value.code == 2


def test_command_knows_tensors_that_no_gpu_could_access(capsys) -> None:
    assert cli.main(["emulate", "--quiet", PROGRAM, "--count", "100", "--on-cpu"]) == 3
    error = capsys.readouterr().err
    sentence = "a store of 4 bytes of global memory is in a CPU tensor float32 (100,), which a GPU cannot access"
    assert f"error[host-memory]: {sentence}\n" in error
    assert "help: give the kernel a 'cuda' tensor" in error and "index" not in error


def test_a_freed_tensor_is_named_by_its_type_and_shape_and_by_where_it_was_made() -> None:
    with capture("sm_90a"):
        y = torch.zeros(64, device="cuda")
        x, line = torch.ones(64, device="cuda"), inspect.currentframe().f_lineno
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(x, y, 1.0, 64)
        graph.replay()
        assert y.tolist() == [2.0] * 64
        del x
        with pytest.raises(IllegalAccess) as info:
            graph.replay()
    found = diagnose(info.value)
    assert found.kind == "freed-memory" and "a CUDA graph" in found.help
    where = f"float32 (64,), made at {os.path.relpath(__file__)}:{line},"
    assert found.sentence == f"a load of 4 bytes of global memory is in a tensor {where} that has been freed"


def test_the_traceback_of_assert_matches_ends_where_it_was_called(capsys, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\nfrom cute_kernels.testing import assert_matches\n"
        "assert_matches(torch.ones(2), torch.zeros(2), name='sums')\n"
    )
    assert cli.main(["emulate", "--quiet", str(script)]) == 1
    error = capsys.readouterr().err
    assert "compare.py" not in error and "_differences" not in error
    assert 'program.py", line 3' in error and "2 of 2 elements of sums" in error
    for error, expected, tolerance in (
        (AssertionError, torch.zeros(2), 0), (TypeError, 3, 0), (TypeError, torch.zeros(2), "1"),
        (ValueError, torch.zeros(2), -1),
    ):  # fmt: skip
        with pytest.raises(error) as info:
            assert_matches(torch.ones(2), expected, absolute=tolerance)
        assert [entry.name for entry in info.traceback.filter(info)] == [
            "test_the_traceback_of_assert_matches_ends_where_it_was_called"
        ]


@pytest.mark.parametrize("kind", ["sparse", "mkldnn"])
def test_tensors_without_an_address_do_not_hide_what_is_wrong_with_a_kernel(kind: str) -> None:
    bystander = getattr(torch.ones(4, 4), f"to_{kind}")()
    with pytest.raises(RuntimeError):
        bystander.untyped_storage()
    with capture("sm_90a"):
        x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
        with pytest.raises(IllegalAccess, match="outside every registered region"):
            launch(x, y, 1.0, 65)
        with pytest.raises(IllegalAccess, match=r"the address is in a CPU tensor float32 \(64,\)"):
            launch(x.cpu(), y, 1.0, 64)


def test_launches_run_at_once_with_the_session_s_options() -> None:
    with capture("sm_90a", Options(seed=3)) as session:
        x = torch.arange(96, device="cuda", dtype=torch.float32)
        y = torch.zeros(96, device="cuda")
        launch(x, y, 4.0, 96)
        assert y.tolist() == [4.0 * i + 1 for i in range(96)]
        (done,) = session.launches
        assert done.launch.grid == (2, 1, 1) and ".target sm_90a" in done.launch.ptx
        assert done.report.warp_instructions > 4
    with pytest.raises(ValueError, match="sm_75.*sm_80, .*sm_90a, .*sm_100a"), capture("sm_75"):
        pass


def test_only_live_device_memory_is_accessible() -> None:
    with capture("sm_90a"):
        x = torch.ones(64, device="cuda")
        y = torch.zeros(64, device="cuda")
        launch(x, y, 1.0, 64)
        with pytest.raises(IllegalAccess, match="outside every registered region"):
            launch(x, y, 1.0, 65)
        with pytest.raises(IllegalAccess, match="outside every registered region"):
            launch(torch.ones(64), y, 1.0, 64)


def test_graphs_hold_launches() -> None:
    with capture("sm_90a") as session:
        x = torch.ones(64, device="cuda")
        y = torch.zeros(64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(x, y, 2.0, 64)
        assert not session.launches and y.sum() == 0
        x.fill_(5)
        graph.replay()
        assert y.tolist() == [11.0] * 64
        with pytest.raises(RuntimeError, match="must be a new one, or one after reset"), torch.cuda.graph(graph):
            pass
        graph.reset()
        with torch.cuda.graph(graph):
            launch(x, y, 3.0, 64)
        graph.replay()
        assert y.tolist() == [16.0] * 64 and len(session.launches) == 2


def test_benchmark_runs_once_and_gives_no_time() -> None:
    from cutlass import testing

    with capture("sm_90a") as session:
        x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
        time = testing.benchmark(
            lambda *arguments: launch(*arguments),
            kernel_arguments=testing.JitArguments(x, y, 2.0, 64),
            iterations=50,
        )
        assert np.isnan(time) and len(session.launches) == 1


def test_tensors_for_functions_that_were_compiled_for_fake_tensors() -> None:
    """Extents of both widths, static and dynamic, at every call; TVM-FFI, which this usually needs, is not there."""
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    with capture("sm_90a"):
        shapes = [(cute.sym_int(),), (cute.sym_int64(),)]
        fakes = [make_fake_compact_tensor(cutlass.Float32, shape) for shape in shapes]
        arguments = (*fakes, cutlass.Float32(1), cutlass.Int32(1), make_fake_stream())
        compiled = cute.compile(scale_program.host, *arguments, options="--enable-tvm-ffi")
        for count in (64, 100):
            x, y = torch.arange(count, dtype=torch.float32, device="cuda"), torch.zeros(count, device="cuda")
            compiled(x, y, 3.0, count, cuda.CUstream(0))
            assert y.tolist() == [3.0 * i + 1 for i in range(count)]
        with pytest.raises(ValueError, match="must be FakeTensor"):
            compiled(x.reshape(4, 25), y, 3.0, count, cuda.CUstream(0))


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_moves_copy_and_stays_do_not(device) -> None:
    host = torch.arange(6.0)
    there = host.cuda()
    host[0] = 99
    assert there.is_cuda and there.device == torch.device("cuda:0") and there[0] == 0
    assert there.cuda() is not host and there.cuda().data_ptr() == there.data_ptr()
    back = there.cpu()
    there[1] = 77
    assert back[1] == 1 and not back.is_cuda and back.device.type == "cpu" and type(back) is torch.Tensor
    assert there.to("cuda", torch.float16).dtype is torch.float16 and there.to(torch.float16).is_cuda
    assert there.to(back).device.type == "cpu" and back.to(there).is_cuda
    assert there.to(device="cpu", dtype=torch.int32).tolist() == [0, 77, 2, 3, 4, 5]


def test_what_is_computed_on_the_device_stays_there(device) -> None:
    x = torch.ones(4, 4, device="cuda")
    for y in (x + 1, x.T, x[1], x.view(-1), torch.zeros_like(x), x.to(torch.int8), torch.cat([x, x]), x.clone()):
        assert type(y) is torch.Tensor and y.is_cuda, y
    assert not torch.zeros_like(x, device="cpu").is_cuda and not torch.ones(2).is_cuda
    a, b = torch.ones(8, device="cuda").split(4)
    a[0] = 5
    assert a.is_cuda and b.tolist() == [1] * 4
    assert torch.randn(3, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda").is_cuda
    with torch.device("cuda"):
        assert torch.empty(3).is_cuda


def test_the_random_numbers_of_the_device_can_be_drawn_again(device) -> None:
    def drawn() -> list[float]:
        return torch.randn(3, device="cuda").tolist()

    torch.cuda.manual_seed(7)
    first = drawn()
    state = torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        second = drawn()
    assert drawn() == second != first
    torch.cuda.set_rng_state(state)
    assert drawn() == second
    torch.cuda.manual_seed_all(7)
    assert drawn() == first
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    assert drawn() == second and torch.cuda.initial_seed() == 7


def test_products_in_another_type(device) -> None:
    a = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
    exact = (a.double() @ a.double()).float()
    torch.testing.assert_close(torch.mm(a, a, out_dtype=torch.float32), exact)
    torch.testing.assert_close(torch.bmm(a[None], a[None], out_dtype=torch.float32)[0], exact)
    torch.testing.assert_close(torch.addmm(exact, a, a, out_dtype=torch.float32, beta=2), 3 * exact)
    total = torch.baddbmm(exact[None], a[None], a[None], out_dtype=torch.float32)
    torch.testing.assert_close(total[0], 2 * exact)
    assert total.is_cuda and torch.mm(a, a).dtype is torch.bfloat16


class Doubled(torch.autograd.Function):
    """2 * x, whose backward says where it ran and what it was given."""

    seen: list[bool] = []

    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        made = torch.empty_like(saved)
        Doubled.seen += [gradient.is_cuda, saved.is_cuda, made.is_cuda]
        return made.copy_(2 * gradient)


@pytest.mark.parametrize("how", ["backward", "grad", "torch.autograd.backward"])
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_backward_runs_where_forward_did(device, place: str, how: str) -> None:
    """Saved outputs, and gradients that torch itself computed, come from its C++ code as plain tensors."""
    Doubled.seen = []
    x = torch.arange(6.0, device=place, requires_grad=True)
    loss = (Doubled.apply(x) * torch.arange(6.0, device=place)).sum()
    if how == "grad":
        (gradient,) = torch.autograd.grad(loss, x)
    else:
        loss.backward() if how == "backward" else torch.autograd.backward([loss])
        gradient = x.grad
    assert Doubled.seen == [place == "cuda"] * 3
    assert gradient.is_cuda == (place == "cuda") and gradient.tolist() == [2.0 * i for i in range(6)]
    if place == "cuda":
        assert any(start <= gradient.data_ptr() < start + nbytes for start, nbytes in device.regions())
    if how != "grad":
        x.grad.zero_()
        assert x.grad.tolist() == [0.0] * 6, "what is written to a gradient stays"


def test_what_is_written_to_a_gradient_that_torch_computed_stays(device) -> None:
    """The gradient's storage is copied where it is not aligned as device memory, which most of these are not."""
    for _ in range(16):
        x = torch.ones(5, device="cuda", requires_grad=True)
        (x * x).sum().backward()
        assert x.grad.is_cuda and x.grad.data_ptr() % 512 == 0 and x.grad.tolist() == [2.0] * 5
        x.grad.zero_()
        assert x.grad.tolist() == [0.0] * 5


def test_autograd_is_torch_s_own_again_afterwards() -> None:
    names = ("apply", "apply_boxed")
    nodes = torch.autograd.function.BackwardCFunction
    before = [getattr(nodes, name, None) for name in names], torch.autograd._engine_run_backward
    with CudaDevice(FACTS, Streams()).active():
        pass
    assert before == ([getattr(nodes, name, None) for name in names], torch.autograd._engine_run_backward)


def define_operator(name: str):
    """An operator with a kernel for CUDA alone, and autograd."""

    @torch.library.custom_op(f"test_capturing::{name}", mutates_args=(), device_types="cuda")
    def halve(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        made = torch.empty_like(x)
        assert made.is_cuda
        return made.copy_(x / 2)

    halve.register_autograd(lambda ctx, gradient: gradient / 2)
    return halve


EARLY = define_operator("early")


@pytest.mark.parametrize("when", ["before", "inside"])
def test_operators_for_cuda_alone(monkeypatch, when: str) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp")  # torch sets it at the first call, and this takes it back
    with CudaDevice(FACTS, Streams()).active():
        operator = EARLY if when == "before" else define_operator("inside")
        x = torch.arange(4.0, device="cuda", requires_grad=True)
        for call in (operator, getattr(torch.ops.test_capturing, operator._name)):
            y = call(x)
            assert y.is_cuda and y.tolist() == [0.0, 0.5, 1.0, 1.5]
        y.sum().backward()
        assert x.grad.tolist() == [0.5] * 4
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            operator(torch.arange(4.0))
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        operator(torch.arange(4.0))


def test_device_properties() -> None:
    from cuda.bindings import runtime

    with capture("sm_90a") as session:
        status, found = runtime.cudaGetDeviceProperties(0)
        count = runtime.cudaDeviceProp
        assert status == runtime.cudaError_t.cudaSuccess and isinstance(found, count)
        facts = torch.cuda.get_device_properties(0)
        assert bytes(found.name).rstrip(b"\0").decode() == facts.name and (found.major, found.minor) == (9, 0)
        assert found.multiProcessorCount == facts.multi_processor_count == session.chip.sm_count
        assert (found.sharedMemPerBlockOptin, found.sharedMemPerMultiprocessor) == (227 << 10, 228 << 10)
        assert found.totalGlobalMem == facts.total_memory and found.warpSize == 32 and found.clusterLaunch == 1
        assert (found.maxThreadsPerMultiProcessor, found.maxBlocksPerMultiProcessor) == (2048, 32)
        assert (list(found.maxThreadsDim), list(found.maxGridSize)) == ([1024, 1024, 64], [2**31 - 1, 65535, 65535])


def test_a_smaller_chip_answers_with_its_own_limits() -> None:
    from cuda.bindings import driver, runtime

    with capture("sm_86"):
        found = runtime.cudaGetDeviceProperties(0)[1]
        assert (found.major, found.minor, found.multiProcessorCount, found.clusterLaunch) == (8, 6, 82, 0)
        assert (found.sharedMemPerBlockOptin, found.sharedMemPerMultiprocessor) == (99 << 10, 100 << 10)
        assert (found.maxThreadsPerMultiProcessor, found.maxBlocksPerMultiProcessor) == (1536, 16)
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor == 1536
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR
        assert driver.cuDeviceGetAttribute(attribute, driver.CUdevice(0))[1] == 16


def test_device_attributes() -> None:
    """Under both names; those that are properties, too, agree with these."""
    from cuda.bindings import driver, runtime

    names = {"MultiProcessorCount": 148, "MaxBlockDimZ": 64, "KernelExecTimeout": 0, "Integrated": 0, "WarpSize": 32}
    with capture("sm_100a"):
        _, device = driver.cuDeviceGet(0)
        _, properties = runtime.cudaGetDeviceProperties(0)
        for name, value in names.items():
            which = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
            assert runtime.cudaDeviceGetAttribute(which, 0) == (runtime.cudaError_t.cudaSuccess, value)
            known = driver.CUdevice_attribute(which.value)
            assert driver.cuDeviceGetAttribute(known, device) == (driver.CUresult.CUDA_SUCCESS, value)
        for member in (m for m in dir(properties) if not m.startswith("_")):
            which = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{member[0].upper()}{member[1:]}", None)
            if which is not None and (value := getattr(properties, member)):
                assert runtime.cudaDeviceGetAttribute(which, 0)[1] == value, member
        with pytest.raises(EmulatorError, match="cudaDevAttrGPUDirectRDMASupported"):
            runtime.cudaDeviceGetAttribute(runtime.cudaDeviceAttr.cudaDevAttrGPUDirectRDMASupported, 0)


def test_there_is_no_second_device() -> None:
    from cuda.bindings import driver, runtime

    which = runtime.cudaDeviceAttr.cudaDevAttrWarpSize
    with capture("sm_90a"):
        for call in (lambda: runtime.cudaGetDeviceProperties(5), lambda: runtime.cudaDeviceGetAttribute(which, 1)):
            assert call() == (runtime.cudaError_t.cudaErrorInvalidDevice, None)
        assert runtime.cudaSetDevice(1) == (runtime.cudaError_t.cudaErrorInvalidDevice,)
        assert driver.cuDeviceGet(1) == (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        x = torch.ones(2)
        for call in (
            *(lambda device=device: torch.ones(2, device=device) for device in ("cuda:1", 1, torch.device("cuda", 1))),
            lambda: x.cuda(1), lambda: x.to("cuda:1"), lambda: x.to(1), lambda: torch.cuda.set_device(1),
            lambda: torch.cuda.get_device_properties(1), lambda: torch.cuda.get_device_name("cuda:1"),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:1"):
                call()
        assert x.cuda(0).is_cuda and x.cuda(device="cuda").is_cuda and x.to("cuda:0").is_cuda


def define_for(name: str, *kinds: str | None):
    """An operator whose function for each of these device types says by a factor which it is."""
    factors = {None: 5.0, "cpu": 2.0, "cuda": 3.0}

    def function(kind: str | None):
        def scaled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            assert kind is None or x.device.type == kind == torch.empty_like(x).device.type
            out.copy_(x * factors[kind])
            return torch.empty(x.shape, device=x.device).copy_(x * factors[kind])

        return scaled

    first, *others = kinds
    made = torch.library.custom_op(
        f"test_capturing::{name}", function(first), mutates_args=("out",), device_types=first
    )
    for kind in others:
        made.register_kernel(kind, function(kind))
    made.register_fake(lambda x, out: torch.empty_like(x))
    return made


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize(
    ("kinds", "host", "device"),
    [((None,), 5.0, 5.0), (("cpu", "cuda"), 2.0, 3.0), (("cuda", "cpu"), 2.0, 3.0), (("cpu",), 2.0, None)],
    ids=str,
)
def test_operators_get_the_function_of_the_device(kinds, host, device, when: str) -> None:
    name = f"of_{when}_{'_'.join(map(str, kinds))}".lower()
    operator = define_for(name, *kinds) if when == "before" else None
    with CudaDevice(FACTS, Streams()).active():
        operator = operator or define_for(name, *kinds)
        for call in (operator, getattr(torch.ops.test_capturing, name)):
            here, there = torch.arange(4.0), torch.arange(4.0, device="cuda")
            out = torch.zeros(4)
            assert call(here, out).tolist() == out.tolist() == [host * x for x in range(4)]
            if device is None:
                with pytest.raises(NotImplementedError, match="'CUDA' backend.* only available for .*CPU"):
                    call(there, torch.zeros(4, device="cuda"))
                continue
            out = torch.zeros(4, device="cuda")
            result = call(there, out)
            assert result.is_cuda and result.tolist() == out.tolist() == [device * x for x in range(4)]
    assert operator(torch.ones(1), out := torch.zeros(1)).tolist() == out.tolist() == [host]


LIBRARY = torch.library.Library("test_capturing", "FRAGMENT")


def define_under(key: str, name: str):
    """An operator whose function is registered for a dispatch key, and notes the devices that it sees."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.device.type, torch.ones(1, device=x.device).device.type, torch.ones(1, device="cuda").is_cuda))
        return x * torch.full(x.shape, 3.0, device=x.device)

    if key in ("default", "cuda"):
        torch.library.impl(f"test_capturing::{name}", key, function)
    else:
        LIBRARY.impl(name, function, key)
    return getattr(torch.ops.test_capturing, name), seen


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize(
    "key", ["default", "cuda", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", ""]
)
def test_operators_see_the_device_whatever_key_they_are_registered_for(key: str, when: str) -> None:
    name = f"under_{key or 'none'}_{when}"
    known = define_under(key, name) if when == "before" else None
    with CudaDevice(FACTS, Streams()).active():
        operator, seen = known or define_under(key, name)
        x = torch.arange(3.0, device="cuda", requires_grad="Implicit" in key or not key)
        for call in (operator, operator.default):
            y = call(x)
            assert y.is_cuda and y.tolist() == [0.0, 3.0, 6.0]
        if x.requires_grad:
            y.sum().backward()
            assert x.grad.is_cuda and x.grad.tolist() == [3.0] * 3
        with torch.inference_mode():
            assert call(torch.ones(1, device="cuda")).tolist() == [3.0]
        assert seen == [("cuda", "cuda", True)] * 3
        if key.lower() != "cuda":
            assert not operator(torch.ones(1)).is_cuda
            assert seen[3:] == [("cpu", "cpu", True)]


def define_maker(name: str, kinds: str | tuple[str, ...] | None):
    """An operator without tensor arguments, which makes a tensor on a device."""

    @torch.library.custom_op(f"test_capturing::{name}", mutates_args=(), device_types=kinds)
    def made(count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(float(count), device=device)

    return made


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("kinds", ["cuda", ("cpu", "cuda"), None], ids=str)
def test_operators_without_tensors(kinds, when: str) -> None:
    name = f"made_{when}_{kinds if isinstance(kinds, (str, type(None))) else 'both'}".lower()
    known = define_maker(name, kinds) if when == "before" else None
    with CudaDevice(FACTS, Streams()).active():
        operator = known or define_maker(name, kinds)
        for call in (operator, getattr(torch.ops.test_capturing, name)):
            for device in ("cuda", "cuda:0", torch.device("cuda")):
                for made in (call(3, device), call(3, device=device), call(count=3, device=device)):
                    assert made.is_cuda and made.tolist() == [0.0, 1.0, 2.0]
        if kinds != "cuda":
            assert not operator(3, "cpu").is_cuda


def test_operators_make_tensors_on_the_device_of_their_own_accord() -> None:
    @torch.library.custom_op("test_capturing::moved", mutates_args=())
    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.cuda() + torch.ones(1, device="cuda")

    @torch.library.custom_op("test_capturing::constant", mutates_args=())
    def constant(count: int) -> torch.Tensor:
        return torch.ones(count, device="cuda")

    with CudaDevice(FACTS, Streams()).active():
        with torch.profiler.record_function("operators of C++ without tensors"):
            results = moved(torch.ones(2)), constant(2) * 2
        for made in results:
            assert made.is_cuda and made.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("options", [{}, {"backend": "eager"}, {"backend": "aot_eager", "fullgraph": True}], ids=str)
def test_compiled_functions_run_as_they_are(options) -> None:
    before = torch.compile
    with capture("sm_90a"):
        x = torch.arange(4.0, device="cuda")
        for function in (torch.compile(lambda a: a * 2 + 1, **options), torch.compile(**options)(lambda a: a * 2 + 1)):
            assert function(x).is_cuda and function(x).tolist() == [1.0, 3.0, 5.0, 7.0]
        model = torch.nn.Linear(4, 2, device="cuda")
        expected = model(x)
        model.compile(**options)
        assert torch.equal(torch.compile(model, **options)(x), expected) and torch.equal(model(x), expected)
        with pytest.raises(UnsupportedOperation, match="a function would be called with a graph"):
            torch.compile(model, backend=lambda graph, inputs: graph)
        for compile in (torch.compile, lambda model, backend: model.compile(backend=backend)):
            with pytest.raises(RuntimeError, match="Invalid backend: 'inducter'"):
                compile(model, backend="inducter")
    assert torch.compile is before


def test_functions_compiled_before_run_as_they_are_inside() -> None:
    """With the back end as a witness, which is asked outside alone."""
    asked = []

    def back_end(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        asked.append(graph)
        return graph.forward

    function = torch.compile(lambda a: a * 2 + 1, backend=back_end)
    model = torch.nn.Linear(4, 2)
    model.compile(backend=back_end)
    plain = torch.compile(lambda a: a * 3)  # by inductor, which knows no "cuda" here
    with capture("sm_90a"):
        x = torch.arange(4.0, device="cuda")
        assert function(x).is_cuda and function(x).tolist() == [1.0, 3.0, 5.0, 7.0]
        assert plain(x).tolist() == [0.0, 3.0, 6.0, 9.0]
        assert model(torch.ones(4)).shape == (2,)
    assert not asked
    assert function(torch.ones(2)).tolist() == [3.0, 3.0] and len(asked) == 1


def test_device_memory_is_aligned_and_forgotten_with_its_tensor(device) -> None:
    tensors = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (1, 100, 1000, 33)]
    views = [t[:1] for t in tensors]
    assert all(t.data_ptr() % 512 == 0 for t in tensors)
    assert {(t.data_ptr(), t.numel()) for t in tensors} <= set(device.regions())
    addresses = {t.data_ptr() for t in tensors}
    del tensors
    gc.collect()
    assert addresses <= {address for address, _ in device.regions()}, "views keep their storage alive"
    del views
    gc.collect()
    assert not addresses & {address for address, _ in device.regions()}


def test_dlpack_says_where_a_tensor_is(device) -> None:
    x = torch.arange(4.0, device="cuda")
    assert x.__dlpack_device__() == (2, 0) and torch.ones(2).__dlpack_device__()[0] == 1
    assert from_dlpack(x).memspace == AddressSpace.gmem and from_dlpack(torch.ones(2)).memspace != AddressSpace.gmem


def test_shapes_are_those_of_torch(device) -> None:
    x = torch.zeros(4, 3, 2, device="cuda")
    assert type(x.shape) is type(x.size()) is torch.Size and x.shape[1:].numel() == 6
    assert all(type(each) is torch.Tensor for each in x.split(2))


def test_deep_copies_are_on_the_device_and_share_what_their_originals_share(device) -> None:
    x = torch.arange(8.0, device="cuda")
    x.label = "weights"
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    same, view, again, copied = copy.deepcopy([x, x[2:], x, parameter])
    assert same is again and same is not x and same.label == "weights" and copied.requires_grad and copied.is_cuda
    same[2] = 77
    assert x[2] == 2 and view[0] == 77 and view.is_cuda and same.data_ptr() in dict(device.regions())
    memo: dict = {}
    copy.deepcopy([x, x[2:], parameter], memo)
    alive = {id(each) for each in gc.get_objects()}
    # No id can be another tensor's later.
    assert all(key in alive for key, value in memo.items() if isinstance(value, torch.Tensor))
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(parameter * 2)


def test_classes_can_be_derived_from() -> None:
    with capture("sm_90a"):

        class Graph(torch.cuda.CUDAGraph):
            def __init__(self, name: str) -> None:
                self.name = name

        x, y, graph = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda"), Graph("own")
        with torch.cuda.graph(graph):
            launch(x, y, 2.0, 64)
        graph.replay()
        assert y.tolist() == [3.0] * 64 and graph.name == "own" and isinstance(graph, torch.cuda.CUDAGraph)


def test_fake_tensors_have_no_memory_that_kernels_could_touch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with capture("sm_90a") as session:
        x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
        with FakeTensorMode():
            fake = torch.empty(8, device="cuda")
        launch(x, y, 2.0, 64)
        assert y.tolist() == [3.0] * 64 and fake.shape == (8,) and 0 not in dict(session.device.regions())


def test_queries(device) -> None:
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.device_count() == 1
    assert torch.version.cuda == "13.0"
    assert torch.cuda.get_device_properties(0).multi_processor_count == 7
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().synchronize()


def test_tuning_runs_every_configuration_once_and_takes_the_first_that_works() -> None:
    from cutlass import testing

    with capture("sm_90a") as session:
        x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")

        def configured(x: torch.Tensor, y: torch.Tensor, factor: float) -> Callable[[], None]:
            if factor < 2:
                raise ValueError("this configuration cannot be implemented")
            return lambda: launch(x, y, factor, 64)

        arguments = testing.JitArguments(x, y)
        best = testing.tune(configured, params_dict={"factor": [1.0, 2.0, 3.0]}, kernel_arguments=arguments)
        assert best == {"factor": 2.0} and len(session.launches) == 2


def test_the_profiler_of_a_program_that_profiles_the_gpu_alone() -> None:
    with capture("sm_90a"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], record_shapes=True) as profile:
            torch.ones(64, device="cuda").sum()
        assert "sum" in profile.key_averages().table(sort_by="cuda_time_total")


def test_a_launch_of_what_the_program_compiled_itself() -> None:
    ptx = """.version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p0, .param .u32 p1) {
        .reg .b64 %d; .reg .b32 %r; ld.param.u64 %d, [p0]; ld.param.u32 %r, [p1]; st.global.u32 [%d], %r; ret; }"""
    x = torch.zeros(1, dtype=torch.int32)
    parameters = (x.data_ptr().to_bytes(8, "little"), (7).to_bytes(4, "little"))
    one = (1, 1, 1)
    with pytest.raises(EmulatorError, match="not emulated, or outside capture"):
        host.submit(CapturedLaunch("k", one, one, one, 0, parameters, ptx))
    with capture("sm_90a") as session:
        x = x.cuda()
        launched = CapturedLaunch("k", one, one, one, 0, (x.data_ptr().to_bytes(8, "little"), parameters[1]), ptx)
        host.submit(launched)
        with pytest.raises(ValueError, match=r"parameters of \(8,\) bytes; kernel k declares \(8, 4\)"):
            host.submit(dataclasses.replace(launched, params=launched.params[:1]))
    assert x.item() == 7 and [each.launch for each in session.launches] == [launched]


@pytest.mark.parametrize(
    ("arch", "most"), [("sm_80", 163), ("sm_86", 99), ("sm_87", 163), ("sm_90", 227), ("sm_110a", 227), ("sm_121a", 99)]
)
def test_shared_memory_of_an_architecture(arch: str, most: int) -> None:
    """KiB of a CTA, as the CUDA programming guide has them: devices say so, and launches with more are refused."""
    one, ptx = (1, 1, 1), f".version 9.0\n.target {arch}\n.address_size 64\n.visible .entry k()\n{{\nret;\n}}\n"
    with capture(arch):
        assert torch.cuda.get_device_properties(0).shared_memory_per_block_optin == most << 10
        host.submit(CapturedLaunch("k", one, one, one, most << 10, (), ptx))
        with pytest.raises(EmulatorError, match=f"of which a CTA on {arch} has {most << 10} at most"):
            host.submit(CapturedLaunch("k", one, one, one, (most << 10) + 16, (), ptx))
