"""`cute-kernels doctor`: what this environment consists of, what is wrong with it, and how to mend that.

Works without a GPU and imports CuTe DSL only to see whether it can be imported.
"""

import importlib
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from cute_kernels.common import extras
from cute_kernels.dsl import compiling
from cute_kernels.dsl import kernel_cache as cache
from cute_kernels.plan import ARCHS, arch_of

Status = Literal["ok", "note", "wrong"]

DSL, DSL_VERSIONS = compiling.DISTRIBUTION, compiling.KERNEL_VERSIONS
_RUNTIME_WHEELS = {f"{DSL}-libs-cu12": 12, f"{DSL}-libs-cu13": 13}
_OLDEST_DRIVER = {12: (525, 60), 13: (580, 65)}
"""Oldest Linux driver for each CUDA major version (CUDA Toolkit release notes, minor version compatibility)."""


_EXTRA_USES = {
    "emulator": 'backend="emulator", emulate, compare',
    "demo": "bench",
    "hf": "Hugging Face checkpoints",
}
_EXTRA_PROGRAMS = {"emulator": ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")}


@dataclass(frozen=True)
class Finding:
    """One line of the report: ``remedy`` says how to mend what is ``"wrong"``."""

    subject: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as torch describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int


@dataclass(frozen=True)
class Environment:
    """Everything the findings are drawn from, so that they can be drawn from made-up ones too."""

    distributions: dict[str, str]  # version by normalised name of every installed distribution
    # normalised names that more than one installed distribution carries, e.g. after a broken upgrade
    duplicates: tuple[str, ...]
    driver: str | None  # version of NVIDIA's kernel driver, None if it is not loaded
    torch_cuda: str | None  # CUDA version that torch was built for, None for a CPU build
    gpus: tuple[Gpu, ...]  # what torch sees
    torch_error: str  # why torch sees no GPU although the driver is loaded
    dsl_error: str | None  # why CuTe DSL cannot be imported, None if it can
    compiler: str | None  # path of a C compiler, or None
    cache_directory: Path | None  # None if the cache is off, or cannot be used for the reason in ``cache_error``
    cache_error: str = ""  # which variable is wrong with the cache, and how; empty if none is


def inspect_environment() -> Environment:
    versions, duplicates = _distributions()
    gpus, torch_cuda, torch_error = _torch_gpus()
    cache_directory, cache_error = _cache_directory()
    return Environment(
        distributions=versions,
        duplicates=duplicates,
        driver=_driver_version(),
        torch_cuda=torch_cuda,
        gpus=gpus,
        torch_error=torch_error,
        dsl_error=_import_error("cutlass.cute"),
        compiler=_c_compiler(),
        cache_directory=cache_directory,
        cache_error=cache_error,
    )


def diagnose(environment: Environment) -> list[Finding]:
    """Every finding, in reading order."""
    checks: tuple[Callable[[Environment], Iterable[Finding]], ...] = (
        _check_python,
        _check_gpu,
        _check_torch,
        _check_dsl,
        _check_runtime_wheels,
        _check_bindings,
        _check_compiler,
        _check_extras,
        _check_cache,
    )
    return [finding for check in checks for finding in check(environment)]


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """The findings for people, with what mends them."""
    findings = list(findings)
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:5}  {finding.subject:{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':5}  {'':{width}}  -> {finding.remedy}")
    return lines


def _check_python(_: Environment) -> Iterable[Finding]:
    supported = sys.version_info >= (3, 10) and sys.platform == "linux"
    text = f"{platform.python_version()}, {sys.platform} {platform.machine()}"
    remedy = "" if supported else "CuTe DSL needs Linux and Python 3.10 or later"
    yield Finding("Python", "ok" if supported else "wrong", text, remedy)


def _check_gpu(e: Environment) -> Iterable[Finding]:
    if e.driver is None:
        yield Finding("driver", "note", "no NVIDIA driver: the reference and the emulator work, the kernel does not")
        return
    yield Finding("driver", "ok", e.driver)
    if not e.gpus:
        remedy = "install a torch built for CUDA (https://pytorch.org/get-started)"
        if e.torch_cuda is not None:
            remedy = "check CUDA_VISIBLE_DEVICES and nvidia-smi, and that the driver is new enough for torch's CUDA"
        yield Finding("GPU", "wrong", f"torch sees none: {e.torch_error or 'torch was built without CUDA'}", remedy)
    supported = {arch.compute_capability for arch in ARCHS.values()}
    for index, gpu in enumerate(e.gpus):
        text = (
            f"{index}: {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
            f"{gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 2**30:.0f} GiB"
        )
        if arch_of(gpu.capability) is not None:
            yield Finding("GPU", "ok", text)
        else:
            names = " or ".join(f"{major}.{minor}" for major, minor in sorted(supported))
            yield Finding("GPU", "note", f"{text}: no kernel for it, there are kernels for {names}")


def _check_torch(e: Environment) -> Iterable[Finding]:
    version = e.distributions.get("torch")
    if version is None:
        yield Finding("torch", "wrong", "not installed", "pip install torch")
    else:
        yield Finding("torch", "ok", f"{version}, built for {f'CUDA {e.torch_cuda}' if e.torch_cuda else 'CPUs'}")


def _check_dsl(e: Environment) -> Iterable[Finding]:
    version = e.distributions.get(DSL)
    install = f"pip install --force-reinstall '{DSL}=={DSL_VERSIONS[-1]}'"
    if version is None:
        yield Finding("CuTe DSL", "wrong", "not installed", install)
        return
    if e.dsl_error is not None:
        yield Finding("CuTe DSL", "wrong", f"{version} cannot be imported: {e.dsl_error}", install)
    elif version not in DSL_VERSIONS:
        yield Finding("CuTe DSL", "wrong", f"{version}; the kernels are tested with {', '.join(DSL_VERSIONS)}", install)
    else:
        yield Finding("CuTe DSL", "ok", version)
    parts = {name: v for name, v in e.distributions.items() if name.startswith(f"{DSL}-libs")}
    for name, other in sorted(parts.items()):
        if other != version:
            yield Finding("CuTe DSL", "wrong", f"{name} is {other} beside {DSL} {version}", install)
    for name in e.duplicates:
        if name.startswith(DSL):
            remedy = f"pip uninstall {name} until pip finds none, remove what is left of it, then {install}"
            yield Finding("CuTe DSL", "wrong", f"{name} is installed more than once", remedy)


def _check_runtime_wheels(e: Environment) -> Iterable[Finding]:
    """The cu12 and the cu13 wheel unpack into one folder, where the later one overwrites files of the earlier."""
    installed = {name: cuda for name, cuda in _RUNTIME_WHEELS.items() if name in e.distributions}
    everything = " ".join(_RUNTIME_WHEELS)
    if not installed:
        if DSL in e.distributions:
            remedy = f"pip install --force-reinstall '{DSL}=={DSL_VERSIONS[-1]}'"
            yield Finding("DSL runtime", "wrong", f"none of {everything} is installed", remedy)
        return
    text = ", ".join(f"{name} {e.distributions[name]}" for name in installed)
    if len(installed) > 1:
        extra = "[cu13]" if (e.torch_cuda or "12").startswith("13") else ""
        remedy = f"pip uninstall -y {everything} && pip install --force-reinstall '{DSL}{extra}=={DSL_VERSIONS[-1]}'"
        yield Finding("DSL runtime", "wrong", f"CUDA 12 and 13 are mixed: {text}", remedy)
        return
    yield Finding("DSL runtime", "ok", text)
    ((_, cuda),) = installed.items()
    if e.driver is not None and _numbers(e.driver)[:2] < _OLDEST_DRIVER[cuda]:
        oldest = ".".join(map(str, _OLDEST_DRIVER[cuda]))
        remedy = f"update the driver to {oldest} or later"
        if cuda == 13:
            remedy += f", or pip uninstall -y {everything} && pip install --force-reinstall '{DSL}=={DSL_VERSIONS[-1]}'"
        yield Finding("driver", "wrong", f"{e.driver} is too old for CUDA {cuda} of the DSL runtime", remedy)


def _check_bindings(e: Environment) -> Iterable[Finding]:
    bindings, python = e.distributions.get("cuda-bindings"), e.distributions.get("cuda-python")
    if bindings is None:
        yield Finding("cuda-bindings", "wrong", "not installed", "pip install cuda-bindings")
        return
    if python is not None and _numbers(python)[:1] != _numbers(bindings)[:1]:
        remedy = "pip install --force-reinstall cuda-python"
        yield Finding("cuda-bindings", "wrong", f"{bindings} beside cuda-python {python}", remedy)
        return
    needed, major = (_numbers(e.torch_cuda)[0] if e.torch_cuda else None), _numbers(bindings)[0]
    if e.driver is not None and e.gpus and needed is not None and major < needed:
        text, remedy = f"{bindings} is older than torch's CUDA {e.torch_cuda}", f"pip install 'cuda-bindings>={needed}'"
        yield Finding("cuda-bindings", "wrong", text, remedy)
        return
    yield Finding("cuda-bindings", "ok", bindings)


def _check_compiler(e: Environment) -> Iterable[Finding]:
    if e.compiler is None:
        text = "none: torch.compile needs one, and the emulator where its core is not compiled yet"
        yield Finding("C compiler", "note", text, "apt install gcc, or set CC")
    else:
        yield Finding("C compiler", "ok", e.compiler)


def _check_extras(e: Environment) -> Iterable[Finding]:
    for extra, use in _EXTRA_USES.items():
        needed = (*extras.EXTRAS[extra].values(), *_EXTRA_PROGRAMS.get(extra, ()))
        absent = [name for name in needed if name not in e.distributions]
        if absent:
            text = f"not installed: {', '.join(absent)}; {use} {'need it' if len(absent) == 1 else 'need them'}"
            yield Finding(f"extra {extra}", "note", text, extras.how_to_install(extra))
        else:
            yield Finding(f"extra {extra}", "ok", use)


def _check_cache(e: Environment) -> Iterable[Finding]:
    root = e.cache_directory
    if e.cache_error:
        variable = e.cache_error.split()[0]
        yield Finding("cache", "wrong", e.cache_error, f"unset {variable}, or set it to what is allowed")
        return
    if root is None:
        yield Finding("cache", "note", "off (CUTE_KERNELS_CACHE_DIR=off): every process compiles for itself")
        return
    if not root.exists():
        parent = next(p for p in root.parents if p.exists())
        if os.access(parent, os.W_OK):
            yield Finding("cache", "ok", f"{root}, not made yet")
        else:
            remedy = "set CUTE_KERNELS_CACHE_DIR to a directory that can be written"
            yield Finding("cache", "wrong", f"{root} cannot be made in {parent}", remedy)
        return
    problem = cache.directory_problem(root)
    if problem:
        remedy = f"chmod go-w {root}, or set CUTE_KERNELS_CACHE_DIR to a directory of your own"
        yield Finding("cache", "wrong", f"{root} is not used: {problem}", remedy)
        return
    number, nbytes = cache.entries(root)
    yield Finding("cache", "ok", f"{root}, {number} kernels, {nbytes / 1e6:.1f} MB")


def _distributions() -> tuple[dict[str, str], tuple[str, ...]]:
    versions: dict[str, str] = {}
    places: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        versions.setdefault(name, distribution.version)  # the first on the path is the one that is imported
        places.setdefault(name, set()).add(str(getattr(distribution, "_path", distribution.version)))
    return versions, tuple(sorted(name for name, found in places.items() if len(found) > 1))


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else "unknown"


def _torch_gpus() -> tuple[tuple[Gpu, ...], str | None, str]:
    try:
        import torch

        if not torch.cuda.is_available():
            if torch.version.cuda is None:
                return (), None, ""
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as error:
                return (), torch.version.cuda, str(error).splitlines()[0]
            return (), torch.version.cuda, "no device is visible"
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, OSError) as error:
        return (), None, str(error)
    gpus = tuple(Gpu(p.name, (p.major, p.minor), p.multi_processor_count, p.total_memory) for p in found)
    return gpus, torch.version.cuda, ""


def _cache_directory() -> tuple[Path | None, str]:
    try:
        cache.limit()
        return cache.directory(), ""
    except ValueError as error:
        return None, str(error)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken installation raises is the finding
        return f"{type(error).__name__}: {error}"
    return None


def _c_compiler() -> str | None:
    configured = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "").split()
    candidates = (*configured[:1], "cc", "gcc", "clang")
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
