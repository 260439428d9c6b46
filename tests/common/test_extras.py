"""Without its optional dependencies the package launches and refers, and says what is missing for everything else.

Packages are made absent by an importer in front of all others, in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cute_kernels
from cute_kernels.common import extras

ROOT = Path(cute_kernels.__file__).parents[1]

BLOCK = """
import importlib.abc, sys, warnings
absent = {modules}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch without NumPy says so once
from cute_kernels.commands.cli import main
"""
OPTIONAL = sorted({module for modules in extras.EXTRAS.values() for module in modules})


def without(modules: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process in which these modules cannot be imported."""
    text = BLOCK.format(modules=set(modules)) + program
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": "off"}  # what is compiled here is compiled without them
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_table_is_that_of_the_package_s_metadata() -> None:
    """Read from the source: the metadata of an editable installation is as old as the installation."""
    text = (ROOT / "pyproject.toml").read_text()

    def names(extra: str) -> set[str]:
        (entries,) = re.findall(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        found = set()
        for entry in re.findall(r'"([^"]+)"', entries):
            nested = re.fullmatch(r"cute-kernels\[(.+)\]", entry)
            found |= set().union(*map(names, nested[1].split(","))) if nested else {re.split(r"[<>=]", entry)[0]}
        return found

    for extra, modules in extras.EXTRAS.items():
        assert names(extra) - {"nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"} == set(modules.values())
    assert "nvidia-cuda-cuobjdump" in names("emulator")
    base = set(re.findall(r'"([a-z0-9-]+)', re.findall(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[0]))
    assert base == {"nvidia-cutlass-dsl", "cuda-bindings", "torch"}


def test_reference_and_compilation_need_no_extra() -> None:
    """Integers in E4M3 and BF16 have exact products and sums, which the outputs must equal."""
    program = """
import torch
import cute_kernels
from cute_kernels.operations.compile import compile_plan, host_arguments
from cute_kernels.config import GemmProblem, PatchEmbedProblem
from cute_kernels.plan import make_plan
from cute_kernels.operations.runtime import gpu

generator = torch.Generator().manual_seed(5)
a, b = (torch.randint(-2, 3, shape, generator=generator) for shape in ((32, 64), (48, 64)))
product = (a @ b.T)
assert product.abs().max() <= 256
found = cute_kernels.gemm(a.bfloat16(), b.bfloat16())
assert found.dtype == torch.bfloat16 and torch.equal(found.long(), product)
x, weight = (t.to(torch.float8_e4m3fn) for t in (a.reshape(2, 16, 64), b))
found = cute_kernels.patch_embed(x, weight, torch.ones(48), scale_a=0.5, scale_b=4.0)
assert torch.equal(found.reshape(32, 48).long(), 2 * product + 1)
for arch, problem in (("sm_90a", GemmProblem(64, 64, 64)), ("sm_100a", PatchEmbedProblem(64, 64, 64, 4))):
    assert ".entry " + (artifact := compile_plan(make_plan(problem, arch=arch))).kernel_name in artifact.ptx
assert not any(name in sys.modules for name in ("numpy", "PIL", "cute_kernels.emulator"))
print("reached the end")
"""
    run = without(OPTIONAL, program)
    assert (run.returncode, run.stdout) == (0, "reached the end\n"), run.stderr


def test_commands_that_need_no_extra() -> None:
    program = """
for arguments in (["plan"], ["plan", "gemm"], ["cache"], ["doctor"], ["--help"]):
    print("---", *arguments, flush=True)
    print("---", main(arguments), flush=True)
"""
    run = without(OPTIONAL, program)
    assert (run.returncode, run.stderr) == (0, "")
    _, *parts = re.split(r"^--- (.*)\n", run.stdout, flags=re.MULTILINE)
    assert parts[0::4] == ["plan", "plan gemm", "cache", "doctor", "--help"]
    plan, gemm, cache, doctor, usage = parts[1::4]
    assert "SMEM total" in plan and "SMEM total" in gemm and "cache" in cache
    assert "extra emulator" in doctor and "needs the extra emulator" in " ".join(usage.split())
    assert parts[2:10:4] == ["0", "0"]


def test_commands_name_the_one_package_that_is_missing() -> None:
    """The emulator's come first: with them the command line imports it, and they cannot be made absent any more."""
    program = """
from cute_kernels.common import extras
for module in extras.EXTRAS["demo"]:
    absent.clear()
    absent.add(module)
    commands = [["bench", "a_model"]] if module in ("numpy", "PIL", "skimage") else []
    if module in extras.EXTRAS["emulator"]:
        programs = [[name, "--arch", "sm_90a", "no.py", "--option", "-x"] for name in ("emulate", "check", "mutate")]
        commands += [*programs, ["compare", "default", "stages=4"]]
    for arguments in commands:
        print(main(arguments), module, arguments[0], flush=True)
"""
    run = without([], program)
    errors = run.stderr.splitlines()
    done = run.stdout.splitlines()
    expected = 3 + 4 * len(extras.EXTRAS["emulator"])
    assert run.returncode == 0 and len(done) == len(errors) == expected
    for line, error in zip(done, errors, strict=True):
        status, module, name = line.split()
        extra = "demo" if name == "bench" else "emulator"
        needs = rf"needs {extras.EXTRAS[extra][module]}: pip install 'cute-kernels\[{extra}\]'"
        assert status == "2" and re.fullmatch(rf"cute-kernels: error: the command {name}\b.* {needs}", error)


def test_functions_name_the_one_package_that_is_missing() -> None:
    """One process for all, which is without NumPy while it imports torch."""
    program = """
import torch
import cute_kernels
from cute_kernels.common import extras

def said(module, call):
    absent.clear()
    absent.add(module)
    try:
        call()
    except extras.MissingExtra as error:
        print(error)

x, weight = (torch.ones(16, 64).to(torch.float8_e4m3fn) for _ in range(2))
for module in extras.EXTRAS["emulator"]:
    said(module, lambda: cute_kernels.patch_embed(x, weight, backend="emulator"))
    said(module, lambda: cute_kernels.gemm(x.bfloat16(), weight.bfloat16(), backend="emulator"))
"""
    run = without(["numpy"], program)
    needs = [("the emulator", "numpy", "emulator")] * 2 + [("the emulator", "ml-dtypes", "emulator")] * 2
    texts = [f"{user} needs {name}: pip install 'cute-kernels[{extra}]'" for user, name, extra in needs]
    assert (run.returncode, run.stdout.splitlines()) == (0, texts), run.stderr


def test_resources_name_the_tool_that_reads_them(tmp_path: Path) -> None:
    """The tool is found in the folder that NVIDIA's wheels share, which other wheels may have made."""
    folder = tmp_path / "site" / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    found = f"import importlib.util, types\nfolder = [{str(folder.parents[1])!r}]\n"
    found += "spec = types.SimpleNamespace(submodule_search_locations=folder)\nreal = importlib.util.find_spec\n"
    found += "importlib.util.find_spec = lambda name, *rest: spec if name == 'nvidia' else real(name, *rest)\n"
    run = without([], found + "sys.exit(main(['compare', 'default', 'stages=4']))\n")
    text = "the resources of a kernel need nvidia-cuda-cuobjdump: pip install 'cute-kernels[emulator]'"
    assert (run.returncode, run.stderr) == (2, f"cute-kernels: error: {text}\n")
