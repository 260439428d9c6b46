"""`cute_kernels.dsl`: the one folder that relies on the insides of CuTe DSL."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels.commands import cli
from cute_kernels.config import GemmProblem
from cute_kernels.dsl import compiling
from cute_kernels.emulator.programs import host
from cute_kernels.operations import compile as compile_module
from cute_kernels.plan import make_plan
from tests.nightly import by_day

PACKAGE = Path(cute_kernels.__file__).parent
INTERNALS = ("cutlass.base_dsl", "cutlass.cutlass_dsl", "cutlass._mlir")
#: Attributes of compiled functions, engines and DSL objects that CuTe DSL does not document.
PRIVATE = {
    "__ptx__", "__cubin__", "_FakeTensor", "_Tensor", "_get_dsl", "dump_to_object", "execution_args", "load_module",
    "raw_register_runtime", "envar", "get_shared_libs", "set_name_prefix",
}  # fmt: skip


def internals(tree: ast.AST) -> Iterator[str]:
    """What a module names of the insides of CuTe DSL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr in PRIVATE else []
        else:
            names = []
        for name in names:
            if name in PRIVATE or f"{name}.".startswith(tuple(f"{module}." for module in INTERNALS)):
                yield name


def test_one_folder_relies_on_the_insides_of_cute_dsl() -> None:
    found = {
        str(path.relative_to(PACKAGE)): sorted(set(internals(ast.parse(path.read_text()))))
        for path in PACKAGE.rglob("*.py")
    }
    in_dsl = {name for path, names in found.items() if path.startswith("dsl/") for name in names}
    assert {"cutlass.cutlass_dsl", "cutlass.base_dsl.compiler", "_FakeTensor", "envar"} <= in_dsl
    assert [path for path, names in found.items() if names and not path.startswith("dsl/")] == []


def test_it_brings_neither_cute_dsl_nor_the_rest_of_the_package() -> None:
    program = """
import sys
import cute_kernels
before = set(sys.modules)
from cute_kernels.dsl import compiling, host_code, linking, programs
own = {name for name in set(sys.modules) - before if name.startswith("cute_kernels")}
others = {name for name in own if not f"{name}.".startswith("cute_kernels.dsl.")}
assert "cute_kernels.dsl" in own
assert others <= {f"cute_kernels.{name}" for name in ("common", "common.forks", "common.interrupts")}, others
assert not any(name.split(".")[0] in ("cutlass", "torch", "numpy") for name in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_what_pip_allows_is_what_is_tested() -> None:
    """Read from the source: the metadata of an editable installation is as old as the installation."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    ranges = re.findall(r'"nvidia-cutlass-dsl(?:\[cu13\])?([^"]*)"', text)
    assert ranges == [f">={compiling.KERNEL_VERSIONS[0]},<={compiling.KERNEL_VERSIONS[-1]}"] * 2
    for versions in (compiling.KERNEL_VERSIONS, compiling.EMULATOR_VERSIONS):
        assert list(versions) == sorted(set(versions), key=numbers)
    assert set(compiling.KERNEL_VERSIONS) <= set(compiling.EMULATOR_VERSIONS)


@pytest.fixture
def version(monkeypatch):
    """Pretends that another version of CuTe DSL is installed, all of it or only one distribution."""
    import cutlass

    def pretend(found: str, part: str | None = None) -> None:
        if part is None:
            monkeypatch.setattr(cutlass, "__version__", found)
        real = importlib.metadata.version
        pretended = {part} if part else {f"nvidia-cutlass-dsl-libs-{name}" for name in ("base", "core", "cu12", "cu13")}
        monkeypatch.setattr(importlib.metadata, "version", lambda name: found if name in pretended else real(name))

    return pretend


PLAN = make_plan(GemmProblem(64, 64, 64), arch="sm_90a")


@pytest.mark.parametrize("found", ["4.7.1", "4.8.2", "4.10.0", "5.0.0", "4.8.0.dev0"])
def test_an_untested_version_is_refused_before_anything_is_compiled(version, monkeypatch, found: str) -> None:
    version(found)
    monkeypatch.setattr(compiling, "compile_function", lambda *_: pytest.fail("reached"))
    allowed = re.escape("4.8.0, 4.8.1: pip install 'nvidia-cutlass-dsl==4.8.1'")
    text = rf"nvidia-cutlass-dsl\) {re.escape(found)} is installed: must be one of the tested versions {allowed}"
    for emulated in (False, True):
        with pytest.raises(compiling.UnsupportedVersion, match=text):
            compile_module.compile_uncached(PLAN, emulated=emulated)


def test_tested_versions_are_accepted(version) -> None:
    for found in compiling.KERNEL_VERSIONS:
        version(found)
        compiling.require()
    for found in compiling.EMULATOR_VERSIONS:
        version(found)
        compiling.require(compiling.EMULATOR_VERSIONS)


def test_a_version_that_is_tried(version, monkeypatch) -> None:
    """It alone, and only where the environment names it."""
    monkeypatch.setenv(compiling.UNTESTED, "4.9.0")
    version("4.9.0")
    for versions in (compiling.KERNEL_VERSIONS, compiling.EMULATOR_VERSIONS):
        compiling.require(versions)
    version("4.9.1")
    with pytest.raises(compiling.UnsupportedVersion, match=r"4\.9\.1 is installed"):
        compiling.require()


@pytest.mark.parametrize("found, allowed", [("4.6.0", True), ("4.7.1", True), ("4.5.3", False), ("4.9.0", False)])
def test_the_emulator_takes_more_versions_than_the_kernels(version, found: str, allowed: bool) -> None:
    version(found)
    if allowed:
        with host.recording_runtime():
            pass
        return
    with pytest.raises(compiling.UnsupportedVersion, match=rf"{re.escape(found)} is installed: .*4\.6\.0, .*4\.8\.1"):
        with host.recording_runtime():
            pytest.fail("reached")


def test_kernels_are_named_in_every_version_that_the_emulator_takes() -> None:
    """The emulator's users import this package with versions that know a prefix alone."""
    named = []

    def before(name: str) -> None:
        named.append((name,))

    def since(name: str, *, remove_cutlass_symbol: bool = False, keep_mangled_name: bool = True) -> None:
        named.append((name, remove_cutlass_symbol, keep_mangled_name))

    for function in (before, since):
        compiling.name_kernel(types.SimpleNamespace(set_name_prefix=function), "gemm")
    assert named == [("gemm",), ("gemm", True, False)]


@pytest.mark.parametrize("part", ["base", "cu12", "cu13"])
def test_parts_of_different_versions_are_refused(version, part: str) -> None:
    name = f"nvidia-cutlass-dsl-libs-{part}"
    version("4.7.0", name)
    text = rf"{name} 4\.7\.0 is installed beside CuTe DSL .*--force-reinstall"
    with pytest.raises(compiling.UnsupportedVersion, match=text):
        compiling.require()


def test_missing_cute_dsl_is_named_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ModuleNotFoundError, match=r"CuTe DSL is not installed: pip install 'nvidia-cutlass-dsl=="):
        compile_module.compile_uncached(PLAN)


def test_another_package_of_the_same_name_is_no_cute_dsl(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", types.ModuleType("cutlass"))
    with pytest.raises(compiling.UnsupportedVersion, match="of unknown version is installed"):
        compiling.require()


def test_the_command_line_says_it_without_a_traceback(version, monkeypatch, capsys) -> None:
    version("4.7.1")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    monkeypatch.setattr(compile_module, "_CACHE", {})
    monkeypatch.setattr(compile_module, "_BUILT", {})
    assert cli.main(["compare", "gemm", "default", "stages=4"]) == 2
    assert "error: CuTe DSL (nvidia-cutlass-dsl) 4.7.1 is installed: must be one of" in capsys.readouterr().err


def test_code_and_source_lines_are_those_that_cute_dsl_makes_without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(GemmProblem(64, 64, 64), arch="sm_80")
    helped = compile_module.build(plan).ptx
    monkeypatch.setattr(compiling, "_fast_tracing", contextlib.nullcontext)
    assert compile_module.build(plan).ptx == helped and helped.count(".loc") > 100


#: Settings of CuTe DSL that are words or numbers, and another value of each: a new one needs a line here.
OTHER_VALUES = {
    "LOG_LEVEL": "10", "JIT_CACHE_MAX_ELEMS": "1", "LOC_TRACEBACKS": "5", "ARCH": "sm_80", "COMPILER_OPT": "iket",
    "COMPILER_BACKEND": "other", "KEEP": "ir,ptx,cubin", "DUMP_DIR": "dumps", "CACHE_DIR": "caches",
}  # fmt: skip
#: Settings that no class declares.
UNDECLARED = {"VERIFY_TRACE": "1", "KEEP_IR": "1", "DEBUG_LEAVES": "1"}
COMPILED = """
import hashlib, json
from cute_kernels.operations import compile
from cute_kernels.config import GemmProblem
from cute_kernels.plan import make_plan
kernel = compile.build(make_plan(GemmProblem(64, 64, 64), arch="sm_90a"))
parts = (kernel.ptx.encode(), kernel.cubin, kernel.host_object)
print(json.dumps([hashlib.sha256(part).hexdigest() for part in parts]))
"""


def other_settings() -> dict[str, str]:
    """Every environment variable that CuTe DSL reads its settings from, by its own list, with another value."""
    from cutlass.base_dsl.env_manager import EnvironmentVarManager

    found = dict(UNDECLARED)
    for setting in EnvironmentVarManager._ENV_VAR_SPEC:
        if isinstance(setting.source, str):
            usual = getattr(EnvironmentVarManager("CUTE_KERNELS_UNSET"), setting.key_name)
            found[setting.source] = OTHER_VALUES.get(setting.source, str(int(not usual)))
            assert setting.source in OTHER_VALUES or isinstance(usual, bool), f"what is another value of {setting}?"
    return found


@pytest.fixture(scope="module")
def usual() -> list[str]:
    """Digests of what this process compiles, which has none of these variables."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(COMPILED, "compiled", "exec"), {})
    return json.loads(printed.getvalue())


def compiled_with(variables: dict[str, str], folder: Path) -> list[str]:
    """Digests of what a process compiles that has these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_")}
    environment |= {"CUTE_KERNELS_CACHE_DIR": "off", "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        env=environment | variables, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("names", by_day([None, ("ENABLE_TVM_FFI",), ("ENABLE_PYIR",)], [None]))
def test_no_setting_of_cute_dsl_reaches_what_is_compiled(
    tmp_path: Path, usual: list[str], names: tuple[str, ...] | None
) -> None:
    """Or an entry of the disk cache would be what the variables of the process say that happened to make it."""
    settings = {name: value for name, value in other_settings().items() if names is None or name in names}
    assert {"ENABLE_TVM_FFI", "ENABLE_PYIR", "DEBUG", "LOC_TRACEBACKS", "LINEINFO"} <= set(settings) or names
    prefixes = ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL")
    variables = {f"{prefix}_{name}": value for prefix in prefixes for name, value in settings.items()}
    assert compiled_with(variables, tmp_path) == usual


def test_settings_are_as_before_after_a_compilation(monkeypatch) -> None:
    """What a program sets by itself, without a variable."""
    import cutlass.cutlass_dsl

    plain = compile_module.compile_uncached(PLAN)
    settings = cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar
    for name, value in {"loc_tracebacks": 5, "enable_assertions": True, "enable_tvm_ffi": True}.items():
        monkeypatch.setattr(settings, name, value)
    before = dict(vars(settings))
    changed = compile_module.compile_uncached(PLAN)
    assert (changed.ptx, changed.cubin) == (plain.ptx, plain.cubin)
    assert vars(settings) == before
