"""PTX and CUDA C++ files as programs: what they launch, and with which arguments, is described beside them.

The description is the only argument of the program: a JSON file, ::

    {"arrays": {"x": {"dtype": "float32", "shape": [4, 32], "fill": "random"}},
     "launches": [{"kernel": "scale", "grid": 4, "block": 32, "arguments": ["x", 2.5]}]}

or ``FILE.py:FUNCTION`` (without a function: ``launches``), a function whose launches are such objects, with tensors on
"cuda" for arrays. A generator goes on when a launch is complete, and can look at what that left.
"""

import contextlib
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from cute_kernels.common.chips import DEFAULT_ARCH, chip_of
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.launch.arguments import extents, pack_arguments, require_type
from cute_kernels.emulator.machine.state.gmem import GlobalMemory

SUFFIXES = (".ptx", ".cu")
_KEYS = {"kernel", "grid", "block", "cluster", "dynamic_smem", "cooperative", "arguments"}
_ARRAY_KEYS = {"dtype", "shape", "fill", "seed"}


class DescriptionError(ValueError):
    """Launches are described with values that cannot be used."""


def read(path: str | Path, arch: str) -> str:
    """PTX text of a .ptx file, or what the first nvcc of the PATH makes of a .cu file.

    nvcc itself adds the options in the environment variable NVCC_APPEND_FLAGS. Raises ValueError: another suffix; a .cu
    file where nvcc is not installed, which it does not compile, or whose name nvcc would have a shell execute; OSError:
    the file cannot be read."""
    path = Path(path)
    if path.suffix == ".ptx":
        return path.read_text(errors="replace")
    if path.suffix != ".cu":
        raise ValueError(f"{path} ends with {path.suffix or 'no suffix'}: must be one of {', '.join(SUFFIXES)}")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ValueError(f"{path}: there is no nvcc, which compiles it, on the PATH; a .ptx file needs no compiler")
    if forbidden := sorted(set(str(path)) & set('$`"\\\n')):
        raise ValueError(f"file {str(path)!r}: nvcc gives names to a shell, and must not get {' '.join(forbidden)}")
    name = str(path) if path.is_absolute() else f".{os.sep}{path}"  # a dash would begin an option
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernels.ptx")
        command = [nvcc, "-ptx", "-lineinfo", f"-arch={arch}", "-o", str(ptx), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(
                f"{nvcc} does not compile {path} (NVCC_APPEND_FLAGS adds options, such as -D, -I, -std):\n"
                f"{done.stderr.strip()}"
            )
        return ptx.read_text(errors="replace")


def arch_of(path: str | Path) -> str:
    """The chip of a .ptx file's target, and of any other program the default."""
    if Path(path).suffix == ".ptx":
        with contextlib.suppress(OSError):  # which whoever runs it reports
            if found := re.search(r"^\s*\.target\s+(\w+)", Path(path).read_text(errors="replace"), re.MULTILINE):
                return chip_of(found[1]).name
    return DEFAULT_ARCH


def captured(ptx: str, description: Mapping[str, object]) -> CapturedLaunch:
    """The launch of a kernel of a PTX text. ``ptx``: text; ``description``: ``kernel`` (may be left out where there is
    one), ``grid`` and ``block``, ``cluster``, ``dynamic_smem`` (bytes) and ``cooperative``, and ``arguments``: as
    `cute_kernels.emulator.run` takes them, and tensors on "cuda". Raises TypeError, ValueError: a key that is not
    known, grid or block left out, arguments that do not fit the kernel; UnsupportedPTX: the text cannot be parsed, or
    has no such kernel."""
    if not isinstance(description, Mapping):
        raise TypeError(f"a launch is described by a {type(description).__name__}: must be a dict")
    if unknown := sorted(set(description) - _KEYS):
        raise ValueError(f"{unknown[0]!r} of a launch is not known; known are {', '.join(sorted(_KEYS))}")
    for name in ("grid", "block"):
        if name not in description:
            raise ValueError(f"a launch is described without {name!r}")
    require_type("cooperative", description.get("cooperative", False), bool, "a bool")
    require_type("dynamic_smem", description.get("dynamic_smem", 0), int, "a number of bytes")
    kernels = parse(ptx).kernels
    name = description.get("kernel") or (next(iter(kernels)) if len(kernels) == 1 else None)
    if name not in kernels:
        raise UnsupportedPTX(f"the PTX has no kernel {name!r}; it has {', '.join(kernels) or 'none'}")
    arguments = [np.uint64(each.data_ptr()) if hasattr(each, "data_ptr") else each for each in
                 description.get("arguments", ())]  # fmt: skip
    return CapturedLaunch(
        kernel_name=name,
        **{key: extents(key, description.get(key, 1)) for key in ("grid", "block", "cluster")},
        dynamic_smem=description.get("dynamic_smem", 0),
        params=tuple(pack_arguments(kernels[name], arguments, GlobalMemory())),
        ptx=ptx,
        cooperative=description.get("cooperative", False),
    )


def program(
    script: str, arguments: Sequence[str], arch: str, launch: Callable[[CapturedLaunch], object]
) -> Callable[[], None]:
    """The program that a PTX or CUDA file is, with what it launches. Raises ValueError: no description, or one that
    cannot be used; see `read`; OSError: a file cannot be read."""
    if len(arguments) != 1:
        options = [each for each in arguments if each.startswith("--")]
        before = f"; {' '.join(options)} has to stand before {script}" if options else ""
        needed = f"{script} needs one argument: a JSON file or FILE.py:FUNCTION that describes its launches"
        raise ValueError(needed + before)
    ptx, described = read(script, arch), _descriptions(arguments[0])

    def run() -> None:
        for number, described_launch in enumerate(described(), start=1):
            with _described(f"{arguments[0]}, launch {number}"):
                launch(captured(ptx, described_launch))

    return run


@contextlib.contextmanager
def _described(where: str) -> Iterator[None]:
    """Errors inside are those of a description."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise DescriptionError(f"{where}: {error}") from None


def _descriptions(name: str) -> Callable[[], Iterable[Mapping[str, object]]]:
    path, _, function = name.partition(".py:") if ".py:" in name else (name, "", "")
    if function or Path(name).suffix == ".py":
        file = f"{path}.py" if function else name
        found = runpy.run_path(file).get(function or "launches")
        if not callable(found):
            raise ValueError(f"{file} has no function {function or 'launches'!r}")
        return found
    try:
        described = json.loads(Path(name).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from None
    if not isinstance(described, dict) or not isinstance(described.get("launches"), list):
        raise ValueError(f"{name}: must be an object with a list 'launches'")
    launches, arrays = described["launches"], described.get("arrays", {})
    if not all(isinstance(each, dict) and isinstance(each.get("arguments", []), list) for each in launches):
        raise ValueError(f"{name}: each of 'launches' must be an object, and its 'arguments' a list")
    if not isinstance(arrays, dict) or not all(isinstance(each, dict) for each in arrays.values()):
        raise ValueError(f"{name}: 'arrays' must be an object, and each array in it, too")
    return lambda: _of_json(name, described)


def _of_json(name: str, described: dict[str, object]) -> Iterable[Mapping[str, object]]:
    with _described(name):
        arrays = {array: _array(array, facts) for array, facts in described.get("arrays", {}).items()}
    for number, launch in enumerate(described["launches"], start=1):
        with _described(f"{name}, launch {number}"):
            given = [_argument(each, arrays) for each in launch.get("arguments", [])]
        yield {**launch, "arguments": given}


def _argument(given: object, arrays: Mapping[str, object]) -> object:
    if not isinstance(given, str):
        return given
    if given not in arrays:
        raise ValueError(f"the argument {given!r} is none of the arrays: {', '.join(arrays) or 'there are none'}")
    return arrays[given]


def _array(name: str, facts: Mapping[str, object]) -> object:
    """A tensor on "cuda": of zeros, of a number, of given numbers, of 0, 1, 2, .. or of random numbers. Raises
    ValueError: a key or value that cannot be used; MemoryError: there is not so much memory."""
    import torch

    if unknown := sorted(set(facts) - _ARRAY_KEYS):
        raise ValueError(f"{unknown[0]!r} of array {name} is not known; known are {', '.join(sorted(_ARRAY_KEYS))}")
    dtype = getattr(torch, str(facts.get("dtype", "float32")), None)
    shape, fill = facts.get("shape", []), facts.get("fill", 0)
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape {shape!r} of array {name}: must be a list of extents")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {str(facts.get('dtype'))!r} of array {name} is none of torch")
    count = math.prod(shape)
    if isinstance(fill, list) and len(fill) != count:
        raise ValueError(f"fill of array {name} has {len(fill)} numbers: must be {count} for shape {shape}")
    if fill == "random":
        values = torch.from_numpy(np.random.default_rng(facts.get("seed", 0)).standard_normal(count))
        values = values if dtype.is_floating_point else (values * 100).to(torch.int64)
    elif fill == "arange":
        values = torch.arange(count)
    elif isinstance(fill, list):
        values = torch.tensor(fill)
    elif isinstance(fill, (int, float)):
        values = torch.full((count,), fill)
    else:
        raise ValueError(f"fill {fill!r} of array {name}: must be a number, a list, 'random' or 'arange'")
    return values.reshape(shape).to(dtype).to("cuda")
