"""`cute_kernels.dsl`: the one module that relies on the insides of CuTe DSL."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cute_kernels

PACKAGE = Path(cute_kernels.__file__).parent
INTERNALS = ("cutlass.base_dsl", "cutlass.cutlass_dsl", "cutlass._mlir")
#: Attributes of compiled functions, engines and DSL objects that CuTe DSL does not document.
PRIVATE = {
    "__ptx__", "__cubin__", "_FakeTensor", "_Tensor", "_get_dsl", "_has_cuda_result", "capi_func", "dump_to_object",
    "execution_args", "load_module", "raw_register_runtime", "envar", "get_shared_libs",
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


def test_one_module_relies_on_the_insides_of_cute_dsl() -> None:
    found = {
        str(path.relative_to(PACKAGE)): sorted(set(internals(ast.parse(path.read_text()))))
        for path in PACKAGE.rglob("*.py")
    }
    in_dsl = found.pop("dsl.py")
    assert {"cutlass.cutlass_dsl", "cutlass.base_dsl.compiler", "_FakeTensor", "capi_func"} <= set(in_dsl)
    assert {path: names for path, names in found.items() if names} == {}


def test_it_brings_neither_cute_dsl_nor_the_rest_of_the_package() -> None:
    program = """
import sys
import cute_kernels
before = set(sys.modules)
import cute_kernels.dsl
own = {name for name in set(sys.modules) - before if name.startswith("cute_kernels")}
assert own == {"cute_kernels.dsl"}, own
assert not any(name.split(".")[0] in ("cutlass", "torch", "numpy") for name in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
