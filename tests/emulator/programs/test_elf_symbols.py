"""Object files whose outside functions get addresses, linked by CuTe DSL's engine."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import cutlass.cute.export
import pytest

from cute_kernels.emulator.core.build import compiler
from cute_kernels.emulator.programs import elf_symbols

SOURCE = """
extern int outside(int), strlen_like(const char *);
static int inside(int x) { return 2 * x; }
int defined(int x) { return 3 * x; }
int sum(int x) { return outside(x) + inside(x) + defined(x) + strlen_like("four"); }
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("elf")
    (folder / "source.c").write_text(SOURCE)
    subprocess.run([*compiler(), "-O0", "-fPIC", "-c", "source.c", "-o", "object.o"], cwd=folder, check=True)
    return (folder / "object.o").read_bytes()


def test_undefined_symbols_are_called_at_their_addresses(code: bytes) -> None:
    called: list[object] = []
    outside = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: called.append(x) or 1000)
    length = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(lambda text: called.append(text) or 50)
    functions = {"outside": outside, "strlen_like": length, "defined": outside, "inside": outside, "elsewhere": outside}
    addresses = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
    linked = elf_symbols.with_functions(code, addresses)
    engine = cutlass.cute.export._BinaryExecutionEngine(linked, [], True)
    total = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(engine.lookup("sum"))
    assert total(7) == 1000 + 2 * 7 + 3 * 7 + 50  # what the object defines stays its own
    assert called == [7, b"four"]


@pytest.mark.parametrize("text", [b"", b"\x7fELF\x01\x01" + bytes(60), b"!<arch>\n" + bytes(60)])
def test_other_files_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a little-endian 64-bit ELF file"):
        elf_symbols.with_functions(text, {})


def test_other_machines_are_refused(code: bytes) -> None:
    with pytest.raises(ValueError, match=r"machine 243; allowed: x86-64 \(62\) and aarch64"):
        elf_symbols.with_functions(code[:0x12] + b"\xf3\0" + code[0x14:], {})


def test_files_without_symbols_are_refused(code: bytes) -> None:
    header = bytearray(code[:64])
    header[0x3C:0x3E] = bytes(2)  # e_shnum
    with pytest.raises(ValueError, match="without a symbol table"):
        elf_symbols.with_functions(bytes(header), {})
