"""What the device relies on of torch's insides, by name: each is there, and is what is expected of it.

A new version of torch that lacks one is told here first, and not by a program that goes wrong.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from cute_kernels.common.chips import CHIPS
from cute_kernels.emulator.programs.device import building, cuda_device, operators, torch_names
from cute_kernels.emulator.programs.streams import Streams

INCLUDE = Path(torch.__file__).parent / "include"
FOLDER = Path(building.__file__).parent
VIRTUAL = {
    "c10/util/Exception.h": ("process",),
    "c10/core/Allocator.h": ("allocate", "raw_deleter", "copy_data"),
    "c10/core/CachingDeviceAllocator.h": (
        "initialized", "emptyCache", "recordStream", "getDeviceStats", "resetAccumulatedStats", "resetPeakStats",
    ),
    "c10/core/GeneratorImpl.h": (
        "set_current_seed", "current_seed", "seed", "set_offset", "get_offset", "set_state", "get_state", "clone_impl",
    ),
    "c10/core/impl/DeviceGuardImplInterface.h": (
        "type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "getStream", "getDefaultStream",
        "getNewStream", "getStreamFromGlobalPool", "exchangeStream", "deviceCount", "record", "block", "queryEvent",
        "destroyEvent", "queryStream", "synchronizeStream", "synchronizeEvent", "synchronizeDevice",
        "elapsedTime",
    ),
    "ATen/detail/AcceleratorHooksInterface.h": (
        "init", "isBuilt", "isAvailable", "hasPrimaryContext", "deviceCount", "getCurrentDevice", "setCurrentDevice",
        "exchangeDevice", "maybeExchangeDevice", "getDefaultGenerator", "getNewGenerator", "isPinnedPtr",
        "getPinnedMemoryAllocator", "getDeviceFromPtr",
    ),
    "ATen/detail/CUDAHooksInterface.h": (
        "hasCUDA", "getNumGPUs", "current_device", "deviceSynchronize", "getCUDADeviceAllocator",
    ),
}  # fmt: skip
"""Functions of torch's interfaces that the device has its own of."""
OF_CUDA = (
    "Stream", "Event", "ExternalStream", "CUDAGraph", "_initialized", "_cached_device_count", "_exchange_device",
    "_maybe_exchange_device", "default_generators", "get_device_properties", "mem_get_info", "_queued_calls",
    "_lazy_seed_tracker", "_is_in_bad_fork", "_cudart", "MemPool",
)  # fmt: skip
"""Names of ``torch.cuda`` that are replaced while a program runs."""


@pytest.mark.parametrize("header", VIRTUAL)
def test_virtual_interfaces(header: str) -> None:
    text = (INCLUDE / header).read_text()
    for name in VIRTUAL[header]:
        assert re.search(rf"virtual\s[^;{{]*?\b{name}\(", text), name


def test_every_function_that_is_overridden_is_named_here() -> None:
    own = "".join((FOLDER / name).read_text() for name in ("memory.h", "hooks.h", "operators.h"))
    overridden = set(re.findall(r"(\w+)\([^;{]*\) (?:const )?(?:noexcept )?override", own))
    assert overridden == {name for names in VIRTUAL.values() for name in names}


@pytest.fixture
def device() -> cuda_device.CudaDevice:
    cuda_device.install()
    return cuda_device.CudaDevice(CHIPS["sm_90a"], Streams())


def test_functions_of_torch_s_c_that_are_given(device: cuda_device.CudaDevice) -> None:
    """Each is one that torch.cuda calls: none is left over, and none has another name by now."""
    folder = Path(torch.__file__).parent
    text = "".join(path.read_text() for path in (folder / "cuda").rglob("*.py"))
    text += "".join((folder / part).read_text() for part in ("accelerator/__init__.py", "backends/cuda/__init__.py"))
    text += "".join(path.read_text() for path in (folder / "_dynamo").rglob("*.py"))
    for part in ("_inductor/runtime/triton_heuristics.py", "_inductor/cudagraph_trees.py"):
        text += (folder / part).read_text()
    missing = [name for name in torch_names.of_c(device) if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_names_of_torch_cuda(device: cuda_device.CudaDevice) -> None:
    replaced = {name for module, name, _ in torch_names.names(device) if module is torch.cuda}
    types = {name for name in replaced if name.endswith("Tensor")}
    assert {"FloatTensor", "HalfTensor", "BoolTensor"} <= types and all(hasattr(torch, name) for name in types)
    replaced -= types
    assert replaced | {"CUDAGraph"} == set(OF_CUDA) and all(hasattr(torch.cuda, name) for name in OF_CUDA)
    assert all(hasattr(torch.cuda.graphs, name) for name in ("_cuda_isCurrentStreamCapturing", "_graph_pool_handle"))
    assert hasattr(torch.cuda.graph, "default_capture_stream") and hasattr(torch.cuda.nvtx, "_nvtx")
    assert {"stream_id", "device_index", "device_type"} <= set(dir(torch.Stream))
    assert "device" in inspect.signature(torch.UntypedStorage.__new__).parameters  # the one of this package
    assert torch._C._dispatch_keys and torch.library._impls is not None


def test_operators_of_aten(device: cuda_device.CudaDevice) -> None:
    """Those that are called or replaced by name."""
    text = (FOLDER / "operators.h").read_text()
    called = {*re.findall(r'"aten::(\w+)"', text)} - {"", "_foreach", "_fused"}
    called |= {name.partition(".")[0] for name, _ in operators.kernels()}
    assert sorted(name for name in called if not hasattr(torch.ops.aten, name)) == []


def test_the_device_is_gone_when_no_program_runs() -> None:
    import contextlib

    device = cuda_device.CudaDevice(CHIPS["sm_90a"], Streams())
    names = ["_cuda_getDeviceCount", "_cuda_memoryStats"]
    before = [hasattr(torch._C, name) for name in names]
    with contextlib.suppress(StopIteration), device.active():
        x = torch.ones(3, device="cuda")
        assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert [hasattr(torch._C, name) for name in names] == before
    if not before[0]:
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA"):
            torch.ones(3, device="cuda")
        assert torch.accelerator.device_count() == 0
    assert (x + 1).cpu().tolist() == [2.0] * 3, "what is left of the program can be read"
