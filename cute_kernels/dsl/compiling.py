"""Compiles kernels by the supported versions of CuTe DSL, and has what a compilation leaves behind."""

import contextlib
import functools
import importlib.metadata
import inspect
import operator
import os
import tempfile
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

from cute_kernels.common.interrupts import deferred
from cute_kernels.dsl.allocations import Allocations, call_sites, of_module

DISTRIBUTION = "nvidia-cutlass-dsl"

KERNEL_VERSIONS = ("4.8.0", "4.8.1")
"""Versions that the kernels of this package are tested with, oldest first: ``make dsl-versions``."""

EMULATOR_VERSIONS = ("4.6.0", "4.6.1", "4.6.2", "4.6.3", "4.7.0", "4.7.1", *KERNEL_VERSIONS)
"""Versions whose programs the emulator is tested with, likewise."""

UNTESTED = "CUTE_KERNELS_DSL_UNTESTED"
"""Environment variable: one version more that is allowed, to try it."""

_ALLOCATIONS = "_cute_kernels_allocations"
_PARTS = tuple(f"{DISTRIBUTION}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))


class UnsupportedVersion(ImportError):
    """A version of CuTe DSL that is not tested, or parts of several."""


def require(versions: tuple[str, ...] = KERNEL_VERSIONS) -> None:
    """Imports CuTe DSL and checks its version: `KERNEL_VERSIONS` or `EMULATOR_VERSIONS`. An untested version might
    compile a kernel to something else. Raises ModuleNotFoundError: CuTe DSL is not installed; UnsupportedVersion: it
    has another version, or its distributions differ in theirs."""
    install = f"pip install '{DISTRIBUTION}=={KERNEL_VERSIONS[-1]}'"
    try:
        import cutlass
    except ModuleNotFoundError as error:
        if error.name != "cutlass":
            raise
        raise ModuleNotFoundError(f"CuTe DSL is not installed: {install}", name="cutlass") from error
    found = getattr(cutlass, "__version__", "of unknown version")
    if found not in (*versions, os.environ.get(UNTESTED)):
        raise UnsupportedVersion(
            f"CuTe DSL ({DISTRIBUTION}) {found} is installed: must be one of the tested versions "
            f"{', '.join(versions)}: {install}"
        )
    for name in _PARTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            part = importlib.metadata.version(name)
            if part != found:
                forced = install.replace("install", "install --force-reinstall")
                raise UnsupportedVersion(f"{name} {part} is installed beside CuTe DSL {found}: {forced}")


def name_kernel(kernel: Any, name: str) -> None:
    """Gives a kernel, a function or method decorated with ``cute.kernel``, the name that profilers and PTX show, unique
    among all kernels of the package, without what CuTe DSL would add of its own.

    Kernels are named where their modules are imported, with every version that the emulator supports. Before 4.8 there
    is no leaving out; `compile_function` then refuses the kernel anyway.
    """
    options = {"remove_cutlass_symbol": True, "keep_mangled_name": False}
    known = inspect.signature(kernel.set_name_prefix).parameters
    kernel.set_name_prefix(name, **{option: value for option, value in options.items() if option in known})


def compile_function(function: Any, arguments: tuple, arch: str, *, engine: bool = False) -> Any:
    """`cute.compile` of a function or method decorated with ``cute.jit`` for an architecture, e.g. ``"sm_90a"``, with
    neither GPU nor driver; `ptx`, `cubin`, `allocations_of` the result. Values of the arguments do not reach the
    generated code. ``engine``: CuTe DSL makes one that calls it, on a GPU or for a recorder. Raises
    ModuleNotFoundError, UnsupportedVersion: as `require`."""
    require()
    import cutlass.cute as cute
    from cutlass.cutlass_dsl import CuTeDSL

    compiler, found = CuTeDSL._get_dsl().compiler_provider, []
    lower = compiler.compile

    def compile_module(module: Any, *arguments: Any, **keywords: Any) -> Any:
        found.extend(of_module(module))
        return lower(module, *arguments, **keywords)

    noting = mock.patch.object(compiler, "compile", compile_module)
    with tempfile.TemporaryDirectory() as directory, default_settings(), _fast_tracing(), deferred(), noting:
        # Line tables cost nothing at run time and let profilers and the emulator name the DSL source line.
        options = f"--gpu-arch={arch} --generate-line-info --keep-ptx --keep-cubin --dump-dir={directory}"
        with call_sites():
            compiled = cute.compile(function, *arguments, options=options, no_jit_engine=not engine)
    setattr(compiled, _ALLOCATIONS, tuple(found))
    return compiled


_OF_INSTALLATION = ("prefix", "shared_libs")
"""CuTe DSL's settings of an installation: the prefix of their names, and where its libraries are."""


@contextlib.contextmanager
def default_settings() -> Iterator[None]:
    """CuTe DSL's settings as they are without environment variables, whatever the variables or the program say.

    What is compiled is then the same in every process, as a cache needs it, and can be called as `HostFunction` does.
    """
    import cutlass.base_dsl.dsl

    plain = cutlass.base_dsl.dsl.DSLPreprocessor
    with contextlib.ExitStack() as stack:
        for dsl in instances():
            unset = type(dsl.envar)("CUTE_KERNELS_UNSET")  # a prefix that no variable has
            for name, value in vars(unset).items():
                if name not in _OF_INSTALLATION:
                    stack.enter_context(mock.patch.object(dsl.envar, name, value))
            if type(getattr(dsl, "preprocessor", None)) not in (plain, type(None)):  # chosen when CuTe DSL is imported
                stack.enter_context(mock.patch.object(dsl, "preprocessor", plain(dsl.package_name)))
        yield


def instances() -> list[Any]:
    """Every DSL of the cutlass package that is in use, each with settings of its own."""
    import cutlass.base_dsl.dsl

    found = map(_instance, _subclasses(cutlass.base_dsl.dsl.BaseDSL))
    return list({id(dsl): dsl for dsl in found if dsl is not None}.values())


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _instance(kind: Any) -> Any:
    try:
        return kind._get_dsl()
    except (TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def _fast_tracing() -> Iterator[None]:
    """Less work for each of the thousands of operations of a kernel, with the same result: half of a compilation.

    CuTe DSL walks a function's source positions from the first on, asks of each frame whether its module is its own,
    reads the lines that unrolled loops repeat, looks for the line of numbers that are no operation, and makes a table
    of all types to look up one. Where its intermediate form PyIR is off, as `default_settings` has it, no argument has
    a variable of it to be loaded from.
    """
    import cutlass._mlir_helpers.arith as arith
    import cutlass._mlir_helpers.op as operations
    import cutlass.base_dsl.typing as typing

    faster: dict[str, Callable] = {}
    if getattr(operations, "_CO_POSITIONS", None) is not None:  # None with Python 3.10
        faster["_CO_POSITIONS"] = _source_positions
    remembering = {
        "_is_framework_stack_frame": _by_code,
        "_fast_frameinfo": _by_instruction,
        "_get_location_from_frame_info": _by_identity,
        "_pyir_auto_load_arg": _unchanged,
    }
    for name, remembered in remembering.items():
        if hasattr(operations, name):
            faster[name] = remembered(getattr(operations, name))
    numbers = typing.Numeric
    type_of = staticmethod(functools.cache(numbers.from_mlir_type))
    with (
        mock.patch.multiple(operations, **faster),
        mock.patch.object(numbers, "from_mlir_type", type_of),
        mock.patch.object(arith.ArithValue, "__init__", _without_line(arith.ArithValue.__init__)),
    ):
        yield


def _without_line(initialise: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a number, which needs its source line only where it makes a constant of an ``int``."""
    plain = getattr(initialise, "__wrapped__", initialise)

    def of_value(number: Any, value: Any, signed: bool | None = None, **place: Any) -> None:
        (initialise if isinstance(value, int) else plain)(number, value, signed, **place)

    return of_value


def _remembering(key: Callable[[Any], Hashable], keep: Callable[[Any], Any]) -> Callable[[Callable], Callable]:
    """Makes a function that is asked once for each ``key``, a number, which what ``keep`` gives keeps from another use.
    """

    def remembering(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        known: dict[Hashable, tuple[Any, Any]] = {}

        def remembered(argument: Any) -> Any:
            number = key(argument)
            if number not in known:
                known[number] = keep(argument), function(argument)
            return known[number][1]

        return remembered

    return remembering


_code = operator.attrgetter("f_code")
_by_code = _remembering(lambda frame: id(frame.f_code), _code)
_by_instruction = _remembering(lambda frame: (id(frame.f_code), frame.f_lasti), _code)
_by_identity = _remembering(id, lambda place: place)


def _unchanged(_: Callable) -> Callable[..., Any]:
    return lambda argument, **_: argument


@functools.lru_cache(maxsize=1024)
def _source_positions(code: types.CodeType) -> tuple:
    return tuple(code.co_positions())


def ptx(function: Any) -> str | None:
    """PTX of a compiled function; None if it was compiled without keeping it."""
    return function.__ptx__


def allocations_of(function: Any) -> tuple[Allocations, ...]:
    """Arrays in shared and tensor memory of the kernels of a function from `compile_function`."""
    return getattr(function, _ALLOCATIONS)


def cubin(function: Any) -> bytes:
    """Cubin of a function from `compile_function`."""
    return bytes(function.__cubin__)
