"""Object files linked into this process."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.config import GemmProblem
from cute_kernels.dsl.linking import Linked, LinkError
from cute_kernels.emulator.core.build import compiler
from cute_kernels.operations import compile
from cute_kernels.plan import make_plan

SOURCE = """
extern int outside(int), strlen_like(const char *);
extern int counter;
static int inside(int x) { return 2 * x; }
int defined(int x) { return 3 * x; }
static int (*const table[])(int) = {inside, defined};
int zeros[1000];
int sum(int x) { return outside(x) + inside(x) + defined(x) + strlen_like("four"); }
int pointed(int x) { return table[0](x) + table[1](x) + zeros[x]++; }
int counted(void) { return ++counter; }
"""


def compiled(folder: Path, *options: str) -> bytes:
    (folder / "source.c").write_text(SOURCE)
    subprocess.run([*compiler(), "-c", *options, "source.c", "-o", "object.o"], cwd=folder, check=True)
    return (folder / "object.o").read_bytes()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compiled(tmp_path_factory.mktemp("elf"), "-O0", "-fPIC")


COUNTER = ctypes.c_int(40)
ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
OUTSIDE = ONE(lambda x: 1000 + x)
LENGTH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(lambda text: 50 + len(text))
ADDRESSES = {
    "outside": ctypes.cast(OUTSIDE, ctypes.c_void_p).value,
    "strlen_like": ctypes.cast(LENGTH, ctypes.c_void_p).value,
    "counter": ctypes.addressof(COUNTER),
    "defined": ctypes.cast(OUTSIDE, ctypes.c_void_p).value,  # the object's own comes first
}


@pytest.mark.parametrize("options", [("-O0", "-fPIC"), ("-O2", "-fPIC"), ("-O2", "-fPIC", "-mcmodel=large")])
def test_functions_and_data_are_found_wherever_they_are(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As C says, in the code models that compilers have: calls, tables of functions, zeros, others' variables."""
    linked = Linked(compiled(tmp_path, *options), ADDRESSES.get)
    assert ONE(linked.symbols["sum"])(7) == 1007 + 2 * 7 + 3 * 7 + 54
    pointed = ONE(linked.symbols["pointed"])
    assert [pointed(7), pointed(7), pointed(8)] == [35, 36, 40]
    before = COUNTER.value
    assert ctypes.CFUNCTYPE(ctypes.c_int)(linked.symbols["counted"])() == before + 1 == COUNTER.value


def test_what_nothing_defines_is_named(code: bytes) -> None:
    with pytest.raises(LinkError, match="nothing defines strlen_like"):
        Linked(code, {name: value for name, value in ADDRESSES.items() if name != "strlen_like"}.get)


@pytest.mark.parametrize("text", [b"", b"\x7fELF\x01\x01" + bytes(60), b"!<arch>\n" + bytes(60)])
def test_other_files_are_refused(text: bytes) -> None:
    with pytest.raises(LinkError, match="not a little-endian 64-bit ELF file"):
        Linked(text, {}.get)


def test_other_machines_are_refused(code: bytes) -> None:
    with pytest.raises(LinkError, match=r"machine 243: must be x86-64 \(62\) and aarch64"):
        Linked(code[:0x12] + b"\xf3\0" + code[0x14:], ADDRESSES.get)


def test_files_without_symbols_are_refused(code: bytes) -> None:
    header = bytearray(code[:64])
    header[0x3C:0x3E] = bytes(2)  # e_shnum
    with pytest.raises(LinkError, match="without a symbol table"):
        Linked(bytes(header), {}.get)


def test_an_unknown_relocation_is_refused(code: bytes) -> None:
    (first,) = struct.unpack_from("<Q", code, 0x28)
    (count,) = struct.unpack_from("<H", code, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, first + 64 * index) for index in range(count)]
    place = next(section[4] for section in sections if section[1] == 4)
    changed = bytearray(code)
    struct.pack_into("<I", changed, place + 8, 200)
    with pytest.raises(LinkError, match="relocation 200 of machine 62 is not known"):
        Linked(bytes(changed), ADDRESSES.get)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def aarch64_references(memory: bytes, base: int, code: range) -> Iterator[tuple[str, int]]:
    """What instructions refer to, by their encodings (Arm A64): B and BL; ADRP with the ADD or load behind it."""
    pages: dict[int, int] = {}
    for place in code:
        (word,) = struct.unpack_from("<I", memory, place)
        source = word >> 5 & 31
        if word >> 26 == 0b100101:  # BL
            yield "call", base + place + 4 * signed(word & 0x3FFFFFF, 26)
        elif word & 0x9F000000 == 0x90000000:  # ADRP
            pages[word & 31] = (base + place & ~0xFFF) + 4096 * signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)
        elif word & 0xFFC00000 == 0x91000000 and source in pages:  # ADD
            yield "address", pages[source] + (word >> 10 & 0xFFF)
        elif word & 0xFFC00000 == 0x3DC00000 and source in pages:  # LDR of 16 bytes
            yield "constant", pages[source] + 16 * (word >> 10 & 0xFFF)


def test_an_object_for_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs here; what its instructions refer to has to be what the object has there."""
    import cutlass.cute as cute

    real = cute.compile
    target = " --host-target linux-aarch64"
    monkeypatch.setattr(cute, "compile", lambda *a, options, **k: real(*a, options=options + target, **k))
    monkeypatch.setattr(Linked, "_protect", lambda *_: None)
    kernel = compile.build(make_plan(GemmProblem(64, 64, 64), arch="sm_90a"))
    outside: dict[str, int] = {}
    linked = Linked(kernel.host_object, lambda name: outside.setdefault(name, 0x7000_0000_0000 + 64 * len(outside)))
    memory = bytes(linked.memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(linked.memory))
    jump = bytes.fromhex("5000005800021fd6")  # ldr x16, #8; br x16
    places = [place for place in range(0, len(memory) - 16, 16) if memory.startswith(jump, place)]
    jumps = {base + place: struct.unpack_from("<Q", memory, place + 8)[0] for place in places}
    first = min(jumps) - base
    found: dict[str, set[int]] = {"call": set(), "address": set(), "constant": set()}
    for kind, target in aarch64_references(memory, base, range(0, first, 4)):
        found[kind].add(target)
    own = set(linked.symbols.values())
    assert {jumps[target] for target in found["call"] if target in jumps} == set(outside.values())
    assert found["call"] - set(jumps) <= own and found["call"] - set(jumps)
    assert {linked.symbols["kernels_binary"], linked.symbols["kernels_gemm_sm90a_0"]} <= found["address"]
    assert found["constant"] and all(base <= target < base + len(memory) for target in found["constant"])
    constants = [memory[target - base : target - base + 16] for target in sorted(found["constant"])]
    assert all(any(constant) and constant in kernel.host_object for constant in constants)
    binary = linked.symbols["kernels_binary"] - base
    assert memory[binary : binary + len(kernel.cubin)].find(b"ELF") >= 0
