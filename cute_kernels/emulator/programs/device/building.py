"""Compiles the device for the torch that is installed, when a program first needs it, and loads it."""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

import torch

from cute_kernels.common import files
from cute_kernels.dsl import kernel_cache
from cute_kernels.emulator.core import build

FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-g0", "-shared", "-fPIC", "-fvisibility=hidden")  # headers of torch 2.12 need C++20
_WHAT = 'the device "cuda" of emulated programs'
_KNOWN = "2.11 to 2.14"


class GpuInUse(RuntimeError):
    """This process has begun to use a GPU, whose place the emulated device would take."""


class DeviceNotBuilt(build.CoreNotBuilt):
    """There is no device for this torch, and none can be made."""


@functools.cache
def load() -> None:
    """Makes "cuda" a kind of device of torch in this process, for good.

    In a build of torch for CUDA it takes the place of all GPUs. Raises DeviceNotBuilt: it is not compiled, and cannot
    be; says what to install; GpuInUse: a build for CUDA has begun to use a GPU."""
    is_for_cuda = torch.version.cuda is not None
    if is_for_cuda and torch.cuda.is_initialized():
        raise GpuInUse(
            "torch has begun to use a GPU in this process, which cannot have an emulated device, too: emulate in a "
            'process of its own, e.g. with CUDA_VISIBLE_DEVICES=""'
        )
    path = library()
    # Autograd starts threads for the devices that there are when a program first calls it. There is none yet, so that
    # backward functions run in the thread that calls it, where launches are intercepted, and a process may fork.
    if is_for_cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing asks the driver
    torch.ones(1, requires_grad=True).sum().backward()
    torch.ops.load_library(str(path))
    if is_for_cuda:
        torch.ops.cute_device.take_over()


def library() -> Path:
    """The library for this torch, compiled if there is none that can be used. Raises DeviceNotBuilt."""
    path = _libraries() / f"torch-{torch.__version__}-{_digest()}" / "device.so"
    try:
        path.parent.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return build.kept(path, _compiler, _compile)
    except OSError as error:
        raise DeviceNotBuilt(f"{_WHAT} is not compiled ({path}), and cannot be: {error}") from error


def _libraries() -> Path:
    """Beside the sources where they are this user's; else with compiled kernels."""
    if os.access(FOLDER, os.W_OK):
        return FOLDER / "build"
    cache = kernel_cache.directory()
    return (cache or Path(tempfile.gettempdir(), f"cute-kernels-{os.geteuid()}")) / "device"


def _digest() -> str:
    found = hashlib.sha256(repr((_FLAGS, torch.version.git_version, torch._C._GLIBCXX_USE_CXX11_ABI)).encode())
    for source in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


def _compiler() -> list[str]:
    advice = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    try:
        return build.compiler_of("C++", "CXX", ("c++", "g++", "clang++"), _WHAT, advice)
    except build.CoreNotBuilt as error:
        raise DeviceNotBuilt(str(error)) from None


def _compile(compiler: list[str], path: Path) -> None:
    files.complain(f"compiling {_WHAT} for torch {torch.__version__}, once: 10 to 60 seconds")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    root = Path(torch.__file__).parent
    includes = [f"-isystem{root / each}" for each in ("include", "include/torch/csrc/api/include")]
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        result = Path(temporary, "device.so")
        source, linked = str(FOLDER / "device.cpp"), ("-lc10", "-ltorch_cpu", "-ltorch_python", "-o", str(result))
        try:
            build.run([*compiler, *_FLAGS, abi, *includes, source, f"-L{root / 'lib'}", *linked], result, _WHAT)
        except build.CoreNotBuilt as error:
            advice = f"with torch {torch.__version__}; it is known to with torch {_KNOWN}: install one of these"
            raise DeviceNotBuilt(f"{_WHAT} does not compile {advice}\n{error}") from None
        build.put(result, path)
