"""What the package and its commands import: torch takes a second, and only what needs it waits for it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import cute_kernels
from tests.processes import run_python


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def imported(stderr: str) -> set[str]:
    """Top-level modules in what ``-X importtime`` writes."""
    lines = [line for line in stderr.splitlines() if line.startswith("import time:")]
    return {line.split("|")[2].strip().split(".")[0] for line in lines}


def test_a_missing_script_is_reported_without_torch() -> None:
    run = python("-X", "importtime", "-m", "cute_kernels", "emulate", "no such file.py")
    assert run.returncode == 2 and run.stderr.endswith("cute-kernels: error: no file no such file.py\n")
    assert "cute_kernels" in imported(run.stderr)
    assert not {"torch", "cutlass", "PIL"} & imported(run.stderr)


def test_commands_that_need_no_torch_do_without() -> None:
    program = """
import sys
from cute_kernels.commands.cli import main
for arguments in (["--help"], ["compare", "--help"], ["plan"], ["cache"]):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    print("---", status, "torch" in sys.modules)
"""
    run = python("-c", program)
    printed, ends = re.split(r"^--- .*\n", run.stdout, flags=re.MULTILINE), re.findall("^--- (.*)", run.stdout, re.M)
    assert ends == ["0 False"] * 4 and all(printed[:4]), run.stderr


def test_public_names_bring_torch() -> None:
    program = """
import sys
import cute_kernels
assert "torch" not in sys.modules
assert set(cute_kernels.__all__) <= set(dir(cute_kernels))
assert cute_kernels.Sm100PatchEmbedConfig().stages and "torch" not in sys.modules
assert not hasattr(cute_kernels, "convolution") and "torch" not in sys.modules
from cute_kernels import *
import torch
assert all(callable(function) for function in (clear_cache, frozen_constants, gemm, patch_embed, tune_gemm))
assert cute_kernels.gemm is gemm and gemm.__module__ == "cute_kernels.operations.gemm"
torch.ops.cute_kernels.gemm, torch.ops.cute_kernels.patch_embed
"""
    run = python("-c", program)
    assert (run.returncode, run.stderr) == (0, "")


def test_with_torch_the_operators_are_there_from_the_import_on() -> None:
    program = "import torch, cute_kernels; print(torch.ops.cute_kernels.gemm, torch.ops.cute_kernels.patch_embed)"
    run = run_python("-c", program)
    assert (run.returncode, run.stdout) == (0, "cute_kernels.gemm cute_kernels.patch_embed\n")


def test_torch_compile_traces_a_name_that_has_not_been_asked_for() -> None:
    program = """
import cute_kernels
import torch
a = torch.randn(16, 64).bfloat16()
compiled = torch.compile(lambda x: cute_kernels.gemm(x, a) * 2, fullgraph=True, backend="eager")
assert torch.equal(compiled(a), cute_kernels.gemm(a, a) * 2)
"""
    run = run_python("-c", program)
    assert run.returncode == 0, run.stderr


def test_no_program_text_is_executed() -> None:
    """All that runs can be read where it stands."""
    package = Path(cute_kernels.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")
    }
    assert not found
