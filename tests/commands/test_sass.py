"""``cute-kernels sass``: what it says of kernels, compared with their bytes and with NVIDIA's other tool."""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.config import GemmProblem
from cute_kernels.emulator.programs import capture
from cute_kernels.explore.sass.listing import Instruction, kernels
from cute_kernels.explore.sweep_program import run_once
from cute_kernels.operations import compile
from cute_kernels.plan import make_plan

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "bias_add.py"
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")


def artifact(arch: str) -> compile.Artifact:
    return compile.compile_plan(make_plan(GemmProblem(64, 64, 128, 1), arch=arch), emulated=True)


@functools.cache
def listing(arch: str) -> tuple[Instruction, ...]:
    """Machine code of its kernel."""
    (code,) = kernels(compile.disassemble(artifact(arch).cubin, "-hex", "-gp")).values()
    return tuple(code)


def text_section(cubin: bytes, kernel: str) -> bytes:
    """The instructions of a kernel, found as the ELF format says."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, nbytes in headers:
        at = strings + name
        if cubin[at : cubin.index(b"\0", at)] == f".text.{kernel}".encode():
            return cubin[offset : offset + nbytes]
    raise AssertionError(f"no section of {kernel}")


@pytest.mark.parametrize("arch", ARCHS)
def test_words_of_the_listing_are_those_of_the_cubin(arch: str) -> None:
    """Stall, scoreboards and addresses, from the bytes themselves."""
    made, code = artifact(arch), listing(arch)
    words = struct.unpack(f"<{2 * len(code)}Q", text_section(made.cubin, made.kernel_name)[: 16 * len(code)])
    expected = [
        (16 * number, word >> 41 & 15, *(None if field == 7 else field for field in (word >> 46 & 7, word >> 49 & 7)))
        for number, word in enumerate(words[1::2])
    ]
    assert [(each.address, each.stall, each.written, each.read) for each in code] == expected
    masks = [sum(1 << number for number in each.awaits) for each in code]
    assert masks == [word >> 52 & 63 for word in words[1::2]]


@pytest.mark.parametrize("arch", ARCHS)
def test_opcodes_are_those_that_cuobjdump_prints(arch: str, tmp_path: Path) -> None:
    made, path = artifact(arch), tmp_path / "k.cubin"
    path.write_bytes(made.cubin)
    report = subprocess.run([compile.cuobjdump(), "-sass", path], capture_output=True, text=True, check=True).stdout
    expected = re.findall(r"/\*[0-9a-f]{4}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)", report)
    assert [each.opcode for each in listing(arch)] == expected


ANCHORS = {
    "cp.async.bulk.tensor.2d.shared": "UTMALDG", "cp.async.bulk.tensor.3d.shared": "UTMALDG",
    "cp.async.bulk.tensor.3d.global": "UTMASTG", "cp.async.cg": "LDGSTS", "mma.sync": "HMMA", "ldmatrix": "LDSM",
    "wgmma.mma_async": "HGMMA", "tcgen05.mma": "UTCHMMA", "tcgen05.ld": "LDTM", "fence.proxy.async": "MEMBAR",
    "bar.sync": "BAR", "st.shared": "STS", "ld.shared": "LDS", "st.global": "STG", "mbarrier.init": "SYNCS",
}  # fmt: skip
"""Beginning of a PTX instruction -> opcode of one that it is made of."""


@pytest.mark.parametrize("arch", ARCHS)
def test_instructions_name_the_line_of_ptx_that_they_were_made_of(arch: str) -> None:
    texts, seen = artifact(arch).ptx.splitlines(), Counter()
    of_line: dict[int, set[str]] = {}
    for each in listing(arch):
        of_line.setdefault(each.ptx_line, set()).add(each.name)
    for number, names in of_line.items():
        text = re.sub(r"^@!?%\w+\s+", "", texts[number - 1].strip())
        anchor = next((begin for begin in ANCHORS if text.startswith(begin)), None)
        if anchor is not None:
            assert ANCHORS[anchor] in names, (text, names)
            seen[anchor] += 1
    assert len(seen) >= 4, seen


def test_the_kernels_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example has two loops, and fences what it wrote once in each pass of the second."""
    output = tmp_path / "sass.json"
    assert main(["sass", str(PROGRAM), "--arch", "sm_90a", "--ptx", "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    (kernel,) = json.loads(output.read_text())["kernels"]
    source = PROGRAM.read_text().splitlines()
    fence = 1 + next(number for number, line in enumerate(source) if "fence_proxy" in line)
    loops = [number for number, line in enumerate(source, 1) if "cutlass.range(tiles" in line]
    assert kernel["name"] == "add_bias"
    assert sum(each["instructions"] for each in kernel["lines"]) == kernel["instructions"]
    assert [each["depth"] for each in kernel["loops"]] == [1, 1]
    assert loops[0] < kernel["loops"][0]["line"] < loops[1] < kernel["loops"][1]["line"]
    (barrier,) = (each for each in kernel["findings"] if each["kind"] == "membar")
    assert (barrier["line"], barrier["loop"], barrier["instruction"]) == (fence, 2, "MEMBAR.ALL.CTA")
    assert barrier["ptx"].startswith("fence.proxy.async")
    assert f"bias_add.py:{fence}" in printed and "MEMBAR.ALL.CTA  <- MEMBAR.ALL.CTA" in printed
    assert "the result is right" not in printed  # that the program prints


SPILLING = '''
import sys
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def many(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(64, cutlass.Float32)
    for i in cutlass.range(64, unroll_full=True):
        values[i] = x[i, thread]
    cute.arch.sync_threads()
    for i in cutlass.range(64, unroll_full=True):
        y[i, thread] = values[i] * values[63 - i]

@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    many(x, y).launch(grid=(1, 1, 1), block=(1024, 1, 1), min_blocks_per_mp=int(sys.argv[1]))

x = torch.rand(64, 1024, device="cuda")
y = torch.empty_like(x)
cute.compile(launch, from_dlpack(x), from_dlpack(y))(from_dlpack(x), from_dlpack(y))
'''


@pytest.mark.parametrize("ctas", [1, 2])
def test_spills(ctas: int, tmp_path: Path) -> None:
    """64 values of a thread fit into 64 registers, and not into 32, which two CTAs of 1024 threads leave it."""
    program, output, binary = tmp_path / "spill.py", tmp_path / "out.json", tmp_path / "kernels.fatbin"
    program.write_text(SPILLING)
    with capture("sm_80") as session:
        run_once(str(program), [str(ctas)], io.StringIO())
    (launch,) = (each.launch for each in session.launches)
    stack = compile.resource_usage(launch.machine_code, launch.kernel_name).stack_bytes
    assert bool(stack) == (ctas == 2)
    binary.write_bytes(launch.machine_code)
    listing = subprocess.run([compile.cuobjdump(), "-sass", binary], capture_output=True, text=True, check=True).stdout
    assert main(["sass", str(program), "--arch", "sm_80", "--arguments", str(ctas), "--json", str(output)]) == 0
    (kernel,) = json.loads(output.read_text())["kernels"]
    spilled = [each["instruction"].split()[0] for each in kernel["findings"] if each["kind"] == "spill"]
    assert spilled == re.findall(r"STL[.\w]*|LDL[.\w]*", listing) and bool(spilled) == bool(stack)


def test_a_kernel_at_fault_is_read_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "outside.py"
    program.write_text(SPILLING.replace("x[i, thread]", "x[i + 64, thread]"))
    assert main(["sass", str(program), "--arch", "sm_80", "--arguments", "1"]) == 3
    captured = capsys.readouterr()
    assert "machine code of many" in captured.out
    assert "cute-kernels: launch 1" in captured.err and "failed in the emulator" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm", "--arguments", "x"], "--arguments are for a program"),
        ([str(PROGRAM), "--set", "stages=2"], "--set is for this package's kernels"),
        (["no/such.py"], "no file no/such.py"),
        (["gemm", "--json", "no/such/folder/k.json"], "no folder"),
        (["gemm", "--arch", "sm_80", "--set", "stages=77"], "stages"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_program_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise ValueError('not today')\n")
    assert main(["sass", str(program)]) == 1
    assert "not today" in capsys.readouterr().err
    program.write_text("")
    assert main(["sass", str(program)]) == 1
    assert "launched no kernel" in capsys.readouterr().err


def test_without_the_tool_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compile.extras, "require", lambda *_: None)
    assert main(["sass", "gemm", "--arch", "sm_80", "--m", "64", "--n", "64", "--k", "128"]) == 2
    error = capsys.readouterr().err
    assert "nvidia-cuda-nvdisasm" in error and "pip install 'cute-kernels[emulator]'" in error
